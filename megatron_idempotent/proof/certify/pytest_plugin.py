"""Gives pytest `--certify PACKAGE.MODULE:CLASS`, with a test for each layout and check.

Every pytest run loads this where the package is installed, so it imports nothing that takes time.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .run import Certification


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
    items += [
        CertifyItem.from_parent(
            session,
            name=f"certify[{layout}-{check}]",
            certification=certification,
            layout=layout,
            check=check,
        )
        for layout in LAYOUTS
        for check in CHECKS
    ]


class CertifyItem(pytest.Item):
    """Runs one check on one layout."""

    def __init__(
        self, *, certification: Certification, layout: str, check: str, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self._certification = certification
        self._layout = layout
        self._check = check

    def runtest(self) -> None:
        result = self._certification.judge(self._check, self._layout)
        if result.verdict == "failed":
            pytest.fail(f"{result.fault} (--certify-seed {result.seed})", pytrace=False)
        if result.verdict != "passed":
            pytest.skip(f"{result.verdict}: {result.fault}" if result.fault else result.verdict)

    def reportinfo(self) -> tuple[Any, int | None, str]:
        return self.path, None, self.name
