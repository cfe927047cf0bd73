"""Names metrics, hands them to loggers, and shows a run as a live table and a timeline."""
