"""verl cannot load what it has saved: the model's shards are used up before the optimizer's load.

Symptom:
    `load_checkpoint` raises `ValueError: Model param … not in model_sharded_state_dict` with
    `dist_ckpt_optim_fully_reshardable`, or, without the distributed optimizer, `KeyError: 0` in
    Megatron's `sharded_state_dict`. The save reports no error, and weights are already loaded.

Cause:
    The manager builds the model's shards once, for the weights and for the optimizer. Megatron's
    optimizer finds a parameter's shard by the tensor itself, and a load leaves a detached one in
    each shard (`mcore_to_pyt_state_dict`).

Affects:
    0.9 and main of August 2026, with `use_dist_checkpointing` or adapters, which are loaded from
    Megatron's shards, too. `dp_reshardable`, verl's default, does not use the model's shards. What
    the patch does: it builds them again for the optimizer.

Upstream:
    https://github.com/verl-project/verl/blob/main/verl/utils/checkpoint/megatron_checkpoint_manager.py,
    `MegatronCheckpointManager.load_checkpoint`; no thread found.

Remove when:
    verl builds the optimizer's shards before it loads weights, or builds the model's again.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.patches._case import Fault, Original, Patch, target

from ._verl import MANAGER, saved


def build_optimizer_state_dict(
    original: Original,
    self: Any,
    model_sharded_state_dict: Any,
    metadata: Any,
    is_loading: bool = False,
) -> Any:
    """Wrap verl's building of the optimizer's sharded state.
    For a load, first build the model's sharded state again: the model's own load has consumed the
    shards of the earlier one.
    """
    if is_loading and not self.use_megatron_fsdp:
        model_sharded_state_dict = self._build_model_sharded_state_dict(metadata)
    return original(self, model_sharded_state_dict, metadata, is_loading)


def reproduce() -> None:
    """Save a fully reshardable checkpoint with verl, train on, and load it.
    Without the patch the load raises.
    """
    model, load, _ = saved(fully_reshardable=True)
    weights = model.parameters()
    model.train_step(1, data_seed=1)
    load()
    if not model.parameters().equal(weights):
        raise Fault("the loaded weights are not the saved ones")


PATCH = Patch(
    "verl cannot load its own checkpoints if the optimizer's shards are built from the model's",
    target(
        f"{MANAGER}:MegatronCheckpointManager._build_optimizer_state_dict",
        build_optimizer_state_dict,
        "self.optimizer.sharded_state_dict",
    ),
    since="0.9",
    given=("reshardable-load-wants-step", "reshardable-state-shifted"),
    stock_error="ValueError: Model param Parameter",
)
