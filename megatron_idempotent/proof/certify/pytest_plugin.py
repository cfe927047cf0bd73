"""Gives pytest `--certify PACKAGE.MODULE:CLASS`, with a test for each layout and check.

Every pytest run loads this where the package is installed, so it imports nothing that takes time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .run import Result


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("megatron")
    group.addoption(
        "--certify",
        metavar="PACKAGE.MODULE:CLASS",
        help="also run the checks of megatron_idempotent.proof.certify on this adapter",
    )
    group.addoption(
        "--certify-seed",
        type=int,
        metavar="N",
        help="draw the sizes of --certify from this number; a run's report has the one it drew",
    )


def pytest_collection_modifyitems(
    session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
) -> None:
    adapter = config.getoption("--certify")
    if adapter is None:
        return
    import secrets

    from .checks import CHECKS
    from .layouts import LAYOUTS
    from .run import Certification, Options, pool_of

    pool = pool_of(max(layout.ranks for layout in LAYOUTS.values()))
    config.add_cleanup(pool.close)
    seed = config.getoption("--certify-seed")
    if seed is None:
        seed = secrets.randbelow(10**6)
    certification = Certification(adapter, pool, options=Options(seed=seed))
    for layout, check in itertools.product(LAYOUTS, CHECKS):
        item = CertifyItem.from_parent(session, name=f"certify[{layout}-{check}]")
        item.judge = functools.partial(certification.judge, check, layout)
        items.append(item)


class CertifyItem(pytest.Item):
    """Runs one certification check on one layout, as a pytest test."""

    judge: Callable[[], Result]

    def runtest(self) -> None:
        result = self.judge()
        if result.verdict == "failed":
            pytest.fail(f"{result.fault} (--certify-seed {result.seed})", pytrace=False)
        if result.verdict != "passed":
            pytest.skip(f"{result.verdict}: {result.fault}" if result.fault else result.verdict)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, self.name
