"""The asynchronous trainer: the controller's parts, made of the trainer's own."""
