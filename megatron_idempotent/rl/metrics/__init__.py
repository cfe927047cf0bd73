"""Metrics: their names and values, loggers, a live table and a timeline."""
