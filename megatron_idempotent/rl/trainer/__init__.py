"""Trains a model by GRPO on a verifiable task, through stock `megatron.training`, as a reference.

`megatron-idempotent train` runs it. `loop` has the algorithm on one page, and `async_run` has it
with sampling and training at the same time; both use the same parts. The package uses the public
API alone, and the library does not import it.
"""

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
