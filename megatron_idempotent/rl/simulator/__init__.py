"""Runs the controller on a virtual clock, to show on one core what a cluster would do."""
