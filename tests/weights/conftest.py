from __future__ import annotations

from collections.abc import Iterator

import pytest
from weight_peers import Peers


@pytest.fixture(scope="session")
def peers() -> Iterator[Peers]:
    """Two other processes, to receive or to send."""
    started = Peers()
    yield started
    started.end()
