"""Gives any test suite the fixture `megatron_ranks`, which runs real Megatron on gloo ranks.

Every pytest run loads this where the package is installed, so it imports nothing that takes time.
`--megatron-device cuda` runs the ranks on the GPUs of this machine. The ini file has options:
`megatron_ranks_timeout_s` (60), `megatron_ranks_max` (4) and `megatron_ranks_preload`, modules that
all ranks get without importing them again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import pytest

from .gpu import DEVICES

if TYPE_CHECKING:
    from .pool import RankPool


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.getgroup("megatron").addoption(
        "--megatron-device",
        choices=DEVICES,
        help="device of the ranks of megatron_ranks; default: MEGATRON_IDEMPOTENT_DEVICE, or the "
        "CPU, with CUDA emulated",
    )
    parser.addini(
        "megatron_ranks_timeout_s",
        "deadline in seconds of a call of the megatron_ranks fixture",
        default="60",
    )
    parser.addini(
        "megatron_ranks_max", "largest world size of the megatron_ranks fixture", default="4"
    )
    parser.addini(
        "megatron_ranks_preload",
        "modules that are imported once, before the ranks of megatron_ranks are forked",
        type="args",
        default=[],
    )


@pytest.fixture(scope="session")
def megatron_rank_pool(request: pytest.FixtureRequest) -> Iterator[RankPool]:
    """Yield the test session's `RankPool`; its processes start with the first call of
    `megatron_ranks`.
    """
    from .pool import PROGRAM_PRELOAD, RankPool

    max_world_size = int(request.config.getini("megatron_ranks_max"))
    # Ranks import the test's module, and that imports pytest.
    preload = (*PROGRAM_PRELOAD, "pytest", *request.config.getini("megatron_ranks_preload"))
    device = request.config.getoption("--megatron-device")
    with RankPool(max_world_size, preload=preload, device=device) as pool:
        yield pool


@pytest.fixture
def megatron_ranks(
    request: pytest.FixtureRequest, megatron_rank_pool: RankPool
) -> Callable[..., list[Any]]:
    """Return `RankPool.run` of the session's pool, which has fresh ranks for every call.

    `megatron_ranks(world_size, fn, *args, timeout_s=…, **kwargs)` returns the ranks' results. A
    rank that raises or dies, or a hang, fails the test. An `assert` on a rank shows its values. The
    traceback is that of the rank that failed, with a line for each that failed because it left;
    `--full-trace` has the tracebacks of all.
    """
    from .errors import RankError

    default_timeout_s = float(request.config.getini("megatron_ranks_timeout_s"))

    def run(
        world_size: int,
        fn: Callable[..., Any],
        *args: Any,
        timeout_s: float = default_timeout_s,
        **kwargs: Any,
    ) -> list[Any]:
        __tracebackhide__ = True
        try:
            return megatron_rank_pool.run(world_size, fn, *args, timeout_s=timeout_s, **kwargs)
        except RankError as error:
            if request.config.getoption("fulltrace"):
                error.args = (error.full,)
            elif error.full != str(error):
                error.args = (f"{error}\n(pytest --full-trace shows it)",)
            raise

    return run
