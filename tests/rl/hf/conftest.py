"""Checkpoints that transformers wrote, made once for all tests here."""

import pytest


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory):
    """A folder with a checkpoint per name of `hf_checkpoints.CASES`."""
    pytest.importorskip("transformers")
    pytest.importorskip("safetensors")
    import hf_checkpoints

    root = tmp_path_factory.mktemp("checkpoints")
    for name in hf_checkpoints.CASES:
        hf_checkpoints.make(root / name, name)
    return root


def pytest_itemcollected(item):
    """Spare ranks their `apply()`: all models here are built with the patches."""
    item.add_marker("patched")
