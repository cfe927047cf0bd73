"""Lets ranks agree before anything depends on what one of them found."""
