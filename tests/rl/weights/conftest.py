from __future__ import annotations

from collections.abc import Iterator

import host_gpu
import pytest
from weight_peers import Peers


@pytest.fixture(scope="session")
def peers() -> Iterator[Peers]:
    """Two other processes, to receive or to send."""
    host_gpu.build()
    started = Peers()
    yield started
    started.end()
