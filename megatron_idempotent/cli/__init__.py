"""Implements the command `megatron-idempotent`; each subcommand is imported when it is called."""
