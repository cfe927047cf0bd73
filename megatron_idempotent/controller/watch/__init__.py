"""Watching a run of the controller: its timeline, curves, live table, loggers and metrics."""
