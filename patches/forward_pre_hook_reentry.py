"""Disabling or enabling DDP's forward pre-hooks a second time raises.

Symptom:
    `KeyError: GPTModel(`, and the model's layers below it, from `disable_forward_pre_hook()` in the
    line `assert self.remove_forward_pre_hook_handles[module] is not None`, where the hooks are off
    already, which every `train()` after the first does with overlap_param_gather on, and where a
    module (an adapter, say) was added after DDP was wrapped around the model. A bare
    `AssertionError` from a second `enable_forward_pre_hook()`, in `assert
    len(self.remove_forward_pre_hook_handles) == 0`.

Cause:
    Both methods walk over the module tree as it is now and take for granted that each module holds
    a handle, or that none does.

Affects:
    Every release since hooks can be switched (0.9). What the patch does: a disable removes the
    handles that are held, on however many modules, and then synchronises the parameters exactly as
    upstream's own body does if `param_sync` is True; an enable where hooks are on does nothing.

Upstream:
    https://github.com/THUDM/slime/pull/1857 meets the same KeyError on slime's second `train()`.

Remove when:
    both methods are idempotent upstream.
"""

from __future__ import annotations

from typing import Any

from ._case import Original, Patch, bench, target


class _NoHandle:
    """Stands where a module holds no hook, so that upstream's loop has something to remove."""

    def remove(self) -> None:
        """Do nothing, because nothing was registered."""


def disable(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Make the handles match the module tree, then let upstream remove them and synchronise."""
    handles = self.remove_forward_pre_hook_handles
    modules = list(self.module.modules())
    fits = len(handles) == len(modules) and all(module in handles for module in modules)
    # Without overlap_param_gather upstream's assertion ends the call, and must find no stand-ins.
    if self.use_forward_hook and not fits:
        for module in set(handles) - set(modules):  # left the tree since the hooks were enabled
            handles.pop(module).remove()
        for module in modules:
            handles.setdefault(module, _NoHandle())
    original(self, *args, **kwargs)


def enable(original: Original, self: Any) -> None:
    """Do nothing where the hooks are on."""
    if not self.remove_forward_pre_hook_handles:
        original(self)


def reproduce() -> None:
    """Enable and disable twice; the second disable must still gather what an update left stale."""
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
    stock_error=r"KeyError: ",
)
