"""The command `megatron-idempotent`. Each subcommand is imported when it is called."""

from .main import main

__all__ = ["main"]
