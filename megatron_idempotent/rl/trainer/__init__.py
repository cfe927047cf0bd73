"""A reference trainer: GRPO on a verifiable task, with an unmodified `megatron.training`.

`megatron-idempotent train` runs it. `loop` has the synchronous algorithm on one page, and
`async_run` samples and trains concurrently; both use the same components. The package uses only the
library's public API, and the library does not import it.
"""

from __future__ import annotations


class TrainerError(ValueError):
    """Raised for a user's error: the command prints the message and exits with code 2."""


class ConfigError(TrainerError):
    """Raised if a setting is unknown, or has an invalid value."""


class DataError(TrainerError):
    """Raised if a prompt file is unusable; the message starts with the path and the line."""


class OutputError(TrainerError):
    """Raised if an output directory cannot be written, or belongs to another run."""


class CheckpointError(TrainerError):
    """Raised if a checkpoint is missing or damaged, or has other settings than the run; the message
    names the file.
    """
