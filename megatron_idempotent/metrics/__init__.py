"""Metrics by name, loggers, the live table, and the timeline of an asynchronous run."""
