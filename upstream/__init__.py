"""Holds upstream's own repairs of hazards; README.md says how they are made and proven."""
