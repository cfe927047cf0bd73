"""Defines the errors of a run that are mistakes outside the program."""

from __future__ import annotations


class TrainerError(ValueError):
    """Something outside the program is wrong: the command prints the message, with exit code 2."""


class ConfigError(TrainerError):
    """A setting does not exist, or has a value that it cannot have."""


class DataError(TrainerError):
    """A prompt file cannot be used; the message starts with the path and the line."""


class OutputError(TrainerError):
    """An output directory cannot be written, or belongs to another run."""


class CheckpointError(TrainerError):
    """A checkpoint is missing, damaged or of other settings; the message names the file."""
