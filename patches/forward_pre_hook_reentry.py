"""Disabling or enabling DDP's forward pre-hooks a second time raises.

Symptom:
    `KeyError: GPTModel(`, and the model's layers below it, from `disable_forward_pre_hook()` in the
    line `assert self.remove_forward_pre_hook_handles[module] is not None`, if the hooks are already
    off, as in every `train()` after the first with overlap_param_gather, or if a module (such as an
    adapter) was added after DDP wrapped the model. A bare `AssertionError` from a second
    `enable_forward_pre_hook()`, in `assert len(self.remove_forward_pre_hook_handles) == 0`.

Cause:
    Both methods walk over the current module tree and assume that each module has a handle, or that
    none has.

Affects:
    Every release since hooks can be switched (0.9). What the patch does: disabling removes all
    existing handles, and then synchronises the parameters exactly as upstream's own body does if
    `param_sync` is True; enabling does nothing if hooks are already on.

Upstream:
    https://github.com/THUDM/slime/pull/1857 reports the same KeyError in slime's second `train()`.

Remove when:
    both methods are idempotent upstream. `upstream/forward-pre-hook-reentry` has the repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Original, Patch, address, bench, target


class _NoHandle:
    """Stands in for the hook handle of a module without a hook, so that upstream can remove it."""

    def remove(self) -> None:
        """Do nothing, because no hook was registered."""


def disable(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap `disable_forward_pre_hook`: first give modules without a hook a stand-in for its handle.
    Upstream's loop asserts otherwise, for example if the hooks are off already.
    """
    handles = self.remove_forward_pre_hook_handles
    modules = list(self.module.modules())
    fits = len(handles) == len(modules) and all(module in handles for module in modules)
    # Without overlap_param_gather upstream's assertion must fail, so add no stand-ins.
    if self.use_forward_hook and not fits:
        for module in set(handles) - set(
            modules
        ):  # removed from the model since the hooks were enabled
            handles.pop(module).remove()
        for module in modules:
            handles.setdefault(module, _NoHandle())
    original(self, *args, **kwargs)


def enable(original: Original, self: Any) -> None:
    """Wrap `enable_forward_pre_hook`: do nothing if the hooks are on already."""
    if not self.remove_forward_pre_hook_handles:
        original(self)


def reproduce() -> None:
    """Disable DDP's forward pre-hooks twice, then enable them twice.
    On stock Megatron the second call of each raises.
    """
    model = bench(overlap_param_gather=True)
    (chunk,) = model.chunks
    chunk.disable_forward_pre_hook()
    chunk.disable_forward_pre_hook()
    chunk.enable_forward_pre_hook()
    chunk.enable_forward_pre_hook()


PATCH = Patch(
    "disable_forward_pre_hook() raises KeyError where they are off, as in a second train()",
    target("ddp.disable_forward_pre_hook", disable),
    target("ddp.enable_forward_pre_hook", enable),
    groups=("train-again", "overlap"),
    fixed_by=(
        (address("ddp.disable_forward_pre_hook"), "self.remove_forward_pre_hook_handles.clear()"),
    ),
    stock_error=r"KeyError: ",
)
