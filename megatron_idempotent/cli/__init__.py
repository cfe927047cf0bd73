"""The command `megatron-idempotent`. Each subcommand is imported when it is called."""
