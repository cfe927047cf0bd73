"""Tests whose body runs on ranks, and what bodies of several files do there."""

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

import megatron_idempotent
from megatron_idempotent.patching.releases import installed

_found = installed("megatron-core")
RELEASE = () if _found is None else _found.release
"""The release of the installed Megatron, such as (0, 19, 2); empty if there is none."""

#: Two virtual stages on each of two stages.
VIRTUAL = {"pp": 2, "vpp": 2, "layers_per_stage": 1}


def needs_release(first: tuple[int, ...], why: str) -> None:
    """Skip the test module that calls it, unless Megatron is of this release or a later one."""
    if first > RELEASE:
        pytest.skip(why, allow_module_level=True)


def on_ranks(
    count: int | str, *, timeout_s: float = 60.0, distributed: bool = True
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Let a test's body run on ranks, with the test's parameters; it passes if each rank does.

    The body of a method gets a copy of its instance there.

    Args:
        count: number of ranks, or the name of the parameter that has it.
        timeout_s: deadline of the ranks.
        distributed: as for `RankPool.run`.
    """

    def decorated(body: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(body)
        def test(*bound: Any, megatron_ranks: Any, **parameters: Any) -> None:
            ranks = parameters.pop(count) if isinstance(count, str) else count
            how = {"timeout_s": timeout_s, "distributed": distributed}
            megatron_ranks(ranks, _call, test, bound, parameters, **how)

        mine = inspect.signature(test, follow_wrapped=False).parameters["megatron_ranks"]
        given = [*inspect.signature(body).parameters.values(), mine]
        if isinstance(count, str):
            given.append(mine.replace(name=count))
        # What pytest asks for the names of fixtures and parameters.
        test.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
        return test

    return decorated


def _call(test: Any, bound: tuple[Any, ...], parameters: dict[str, Any]) -> None:
    assert test.__wrapped__(*bound, **parameters) is None, "a body asserts, and returns nothing"


def tiered(cases: Iterable[Any], always: Iterable[Any], later: str = "exhaustive") -> list[Any]:
    """Return a parameter for each case, marked as `later` unless it is run always."""
    known, mark = list(always), getattr(pytest.mark, later)
    return [
        pytest.param(
            *(each if isinstance(each, tuple) else (each,)), marks=() if each in known else mark
        )
        for each in cases
    ]


def patch() -> None:
    """Apply all patches, unless this rank has them: from its launcher, or by an earlier call.

    A second `apply()` changes nothing, which other tests show, and takes as long as a small step.
    """
    if not _patched():
        megatron_idempotent.apply()


def _patched() -> bool:
    """Tell if all patches are on, or wait for an import: none were left out, or reverted since."""
    from megatron_idempotent.patching.install import state

    selection = state.selection
    everything = selection is not None and selection.only is None and not selection.exclude
    return everything and bool(state.wanted)


def built(
    only: Iterable[str] | None = None,
    *,
    exclude: Iterable[str] = (),
    applied: bool = True,
    **layout: Any,
) -> Any:
    """Return a tiny model, with the patches applied before it is built, or without any."""
    from megatron_idempotent.proof.cpu import tiny

    if applied and only is None and not exclude:
        patch()
    else:
        assert not _patched(), "the rank has all patches: the test is not to be marked `patched`"
        if applied:
            megatron_idempotent.apply(only, exclude)
    return tiny.build(**layout)


def digest(*tensors: Any) -> str:
    """Return a text that is the same for the same bits."""
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().numpy().tobytes())
    return found.hexdigest()


def same(one: Any, other: Any) -> bool:
    """Return whether two models have the same gradients, or two tensors the same bits."""
    import torch

    both = [each.gradients() if hasattr(each, "gradients") else each for each in (one, other)]
    return torch.equal(*both)


@contextmanager
def on_microbatch(model: Any, action: Callable[[int, Any], Any]) -> Iterator[None]:
    """Have the bench call `action` at each microbatch and each loss in the block."""
    model.on_microbatch = action
    try:
        yield
    finally:
        model.on_microbatch = None


def fails(error: BaseException, at: int | None = None, *, in_loss: bool | None = None) -> Any:
    """Return a hook of a bench that raises at one microbatch, by default at the first one.

    Args:
        error: what is raised.
        at: the microbatch; None for any.
        in_loss: True for its loss, False for the time before its forward, None for both.
    """

    def hook(index: int, loss: Any) -> None:
        if at in (None, index) and in_loss in (None, loss is not None):
            raise error

    return hook


def abort(model: Any) -> None:
    """Run `abort_window` on the bench's chunks and optimizer."""
    megatron_idempotent.abort_window(model.chunks, model.optimizer)


def agree(model: Any) -> bool:
    """Return whether the data-parallel ranks hold the same parameters."""
    from megatron_idempotent.patches import _case

    try:
        _case.expect_agreement(model, "in the test")
    except _case.Fault:
        return False
    return True


def groups(model: Any) -> list[Any]:
    """Return the bucket groups of all chunks."""
    from megatron_idempotent.megatron.ddp import bucket_groups

    return [group for chunk in model.chunks for group in bucket_groups(chunk)]


def loss_of(chunk: Any, seed: int) -> Any:
    """Return the mean loss of one microbatch, past the schedules."""
    from megatron_idempotent.proof.cpu import tiny

    tokens_BT, positions_BT, hidden = tiny.inputs(seed)
    return chunk(tokens_BT, positions_BT, hidden, labels=tokens_BT).float().mean()
