"""Adapters are to be read and pasted, so they stay short."""

import pytest
from adapters import EXAMPLES

pytestmark = pytest.mark.full


@pytest.mark.parametrize("name", ["nemo_rl_step", "skyrl_step", "verl_step"])
def test_an_adapter_is_short(name):
    assert len((EXAMPLES / f"{name}.py").read_text().splitlines()) <= 64
