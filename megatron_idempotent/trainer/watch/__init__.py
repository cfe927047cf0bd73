"""Watching a run: logs, progress bar, curves and the final table."""
