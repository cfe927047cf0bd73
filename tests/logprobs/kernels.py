"""Triton's kernels in small blocks, of which short rows have many. Runs on a rank."""

from __future__ import annotations

import contextlib
import functools
import inspect
from collections.abc import Callable, Iterator
from typing import Any

#: Of every row a first segment, tiles in it, and what is left; few lanes, and more than columns.
SHAPES = {
    "small": (1, 2, 1, 64, 16),
    "one tile": (1, 1, 1, 128, 128),
    "two lanes": (1, 4, 1, 32, 2),
}
#: For rows of some hundreds of columns: two segments, and the second is short.
WIDE = (1, 2, 1, 256, 64)


@contextlib.contextmanager
def in_blocks(shape: str = "small") -> Iterator[None]:
    """Let the kernels compute in blocks of that shape."""
    from megatron_idempotent.logprobs import triton_kernels

    chosen = triton_kernels.Shape(*SHAPES.get(shape, WIDE))
    with triton_kernels.using(statistics=chosen, gradient=chosen):
        yield


def launches(run: Callable[..., Any], *arguments: Any) -> tuple[Any, list[str]]:
    """Return what the function returns, and which kernels it launched."""
    import pytest

    from megatron_idempotent.logprobs import on_gpu

    seen: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        for name in ("launch_statistics", "launch_gradient"):
            real = getattr(on_gpu, name)

            def launch(*given: Any, real: Any = real, name: str = name) -> Any:
                seen.append(name)
                return real(*given)

            patch.setattr(on_gpu, name, launch)
        return run(*arguments), seen


def with_kernels(body: Callable[..., None]) -> Callable[..., None]:
    """Let a test's body run on a rank, by Triton's kernels in small blocks."""

    @functools.wraps(body)
    def test(kernel_ranks: Any, **parameters: Any) -> None:
        kernel_ranks(1, _call, test, parameters)

    mine = inspect.signature(test, follow_wrapped=False).parameters["kernel_ranks"]
    # What pytest asks for the names of fixtures and parameters.
    given = [mine, *inspect.signature(body).parameters.values()]
    test.__signature__ = inspect.Signature(given)  # type: ignore[attr-defined]
    return test


def _call(test: Any, parameters: dict[str, Any]) -> None:
    with in_blocks():
        test.__wrapped__(**parameters)
