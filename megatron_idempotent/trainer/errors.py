"""Errors of a run: mistakes outside the program. Free of torch."""

from __future__ import annotations


class TrainerError(ValueError):
    """A mistake outside the program: the command prints the message alone, with exit code 2."""


class ConfigError(TrainerError):
    """A setting that does not exist, or that cannot be what it is."""


class DataError(TrainerError):
    """A prompt file that cannot be used; the message starts with the path and the line."""


class OutputError(TrainerError):
    """An output directory that cannot be written, or that belongs to another run."""


class CheckpointError(TrainerError):
    """A checkpoint that is incomplete or damaged; the message names the file."""
