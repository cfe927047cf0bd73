"""Agreement between ranks before anything depends on what one of them found."""
