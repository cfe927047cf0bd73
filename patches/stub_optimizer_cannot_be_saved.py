"""A model whose experts alone are trained cannot be saved: the optimizer of the rest is a stub.

Symptom:
    With only experts' adapters, or a frozen trunk, steps work, but no checkpoint can be written or
    loaded: `optimizer.state_dict()` raises `AttributeError: 'NoneType' object has no attribute
    'state_dict'`, and `sharded_state_dict()` the same for `param_groups`.

Cause:
    A distributed optimizer without parameters has no inner optimizer (`is_stub_optimizer`). Steps
    and norms check for that; saving and loading do not.

Affects:
    Every release with the distributed optimizer. What the patch does: a stub saves nothing, and
    loads nothing; the other parts keep their index in the chain, and so the names that their
    tensors have in a checkpoint. A checkpoint of a chain without a stub does not change. Not
    covered: `save_parameter_state`, which `--ckpt-format torch` uses; and a completely frozen
    pipeline stage with torch's Adam as the fallback, whose optimizer is not a stub.

Upstream:
    https://github.com/radixark/miles/pull/2516, open, which leaves stubs out of its own files.
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/optimizer/optimizer.py,
    `ChainedOptimizer`.

Remove when:
    `ChainedOptimizer` skips stubs when it saves and loads.
    `upstream/stub-optimizer-cannot-be-saved` has the repair.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from ._case import Fault, Original, Patch, address, bench, shared_folder, target


def state_dict(original: Original, self: Any) -> Any:
    """Return the state of a chain of optimizers, with an empty state for stubs.
    A stub is an optimizer without parameters, on which upstream raises.
    """
    with _nothing_in_stubs(self):
        return original(self)


def sharded_state_dict(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Return the sharded state of a chain of optimizers, with an empty state for stubs."""
    with _nothing_in_stubs(self):
        return original(self, *args, **kwargs)


def load_state_dict(original: Original, self: Any, state_dict: Any) -> None:
    """Load a chain of optimizers; stubs, which have no parameters, load nothing."""
    with _nothing_in_stubs(self) as stubs:
        if stubs and isinstance(state_dict, dict) and len(self.chained_optimizers) > 1:
            state_dict = {**{index: {} for index in stubs}, **state_dict}
        original(self, state_dict)


class _Nothing:
    """Stands in for an optimizer without parameters while its chain is saved or loaded."""

    optimizer = SimpleNamespace(param_groups=[])

    def state_dict(self) -> dict[str, Any]:
        return {}

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state_dict: Any) -> None:
        """Do nothing, because a stub has no state."""


@contextmanager
def _nothing_in_stubs(chain: Any) -> Iterator[list[int]]:
    """Replace a chain's optimizers without parameters in the `with` block, and yield the indices
    that they have in the chain.
    """
    parts = chain.chained_optimizers
    stubs = [index for index, part in enumerate(parts) if _is_stub(part)]
    if not stubs:
        yield []
        return
    chain.chained_optimizers = [_Nothing() if _is_stub(part) else part for part in parts]
    try:
        yield stubs
    finally:
        chain.chained_optimizers = parts


def _is_stub(part: Any) -> bool:
    return getattr(part, "is_stub_optimizer", False) and getattr(part, "optimizer", None) is None


def reproduce() -> None:
    """Save a model whose experts alone are trained, train on, load, and compare the state.
    On stock Megatron the save raises, because the dense optimizer has no parameters.
    """
    from megatron.core import dist_checkpointing

    model = _experts_alone()
    model.train_step(1, data_seed=0)
    model.optimizer.state_dict()
    state, saved = _sharded(model), _state(model)
    if not _writes_files():
        return
    folder = shared_folder()
    dist_checkpointing.save({"optimizer": state}, folder)
    model.train_step(1, data_seed=1)
    loaded = dist_checkpointing.load({"optimizer": _sharded(model, is_loading=True)}, folder)
    model.optimizer.load_state_dict(loaded["optimizer"])
    if not all(a.equal(b) for a, b in zip(saved, _state(model), strict=True)):
        raise Fault("a load did not restore the saved state of the experts")


def _experts_alone() -> Any:
    def freeze(module: Any) -> None:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("experts" in name)

    return bench(ep=2, experts=4, dtype="bf16", overlap_grad_reduce=False, before_ddp=freeze)


def _writes_files() -> bool:
    """Return whether this Megatron's optimizer can write "fully_reshardable" checkpoints."""
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    formats = getattr(DistributedOptimizer, "checkpoint_fully_reshardable_formats", ())
    return "fully_reshardable" in formats


def _sharded(model: Any, *, is_loading: bool = False) -> Any:
    sharding = {"distrib_optim_sharding_type": "fully_reshardable"}
    return model.optimizer.sharded_state_dict(
        model.chunks[0].module.sharded_state_dict(),
        is_loading=is_loading,
        **({"metadata": sharding} if _writes_files() else {}),
    )


def _state(model: Any) -> list[Any]:
    """Return copies of the main parameters and moments of the one optimizer with parameters."""
    (part,) = (part for part in model.optimizer.chained_optimizers if not _is_stub(part))
    inner = part.optimizer
    stepped = [parameter for group in inner.param_groups for parameter in group["params"]]
    return [
        tensor.detach().clone()
        for parameter in stepped
        for tensor in (parameter, *(inner.state[parameter][k] for k in ("exp_avg", "exp_avg_sq")))
    ]


PATCH = Patch(
    "a model whose experts alone are trained cannot be saved, nor loaded",
    target("chained.state_dict", state_dict, "self.chained_optimizers"),
    target("chained.sharded_state_dict", sharded_state_dict, "self.chained_optimizers"),
    target("chained.load_state_dict", load_state_dict, "self.chained_optimizers"),
    stock_error=r"AttributeError: 'NoneType' object has no attribute 'state",
    fixed_by=((address("chained.load_state_dict"), "state_dict = {**state_dict, idx: {}}"),),
)
