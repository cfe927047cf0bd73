"""Registers the transfer engine with vLLM, which loads this plugin in each of its processes."""

from __future__ import annotations

BACKEND = "megatron_idempotent"
"""The name of the transfer engine, for `--weight-transfer-config '{"backend": …}'`."""
EXTENSION = "megatron_idempotent.rl.engines.vllm_worker.StagingExtension"
"""The value of `--worker-extension-cls`: the class through which workers receive commands."""


def register() -> None:
    """Register this package's weight transfer engine with vLLM, which calls this function as an
    entry point of `vllm.general_plugins` in each of its processes.

    vLLM's CPU kernels use AMX but, with --enforce-eager, do not request it from the system: the
    first step in bfloat16 would kill the worker (SIGILL). So this function requests it.

    vLLM imports the engine on demand. A second call is a no-op, because vLLM loads plugins more
    than once in a process.
    """
    import torch
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory

    # A second registration would raise, and vLLM has no public function to query the registry.
    if BACKEND not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(
            BACKEND, "megatron_idempotent.rl.engines.vllm_worker", "StagedTransfer"
        )
    if torch.cpu._is_amx_tile_supported():
        torch.cpu._init_amx()
