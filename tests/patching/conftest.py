"""Shared by the tests of patching/: processes to fork from, copies of Megatron, a toy to patch."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from forks import Forks
from toys import Toys

from megatron_idempotent.patching.source import locate


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MEGATRON_IDEMPOTENT")]:
        monkeypatch.delenv(name)


@pytest.fixture(scope="session")
def megatron() -> None:
    """Skip where there is no Megatron: patching/ is tested without one on other Pythons."""
    if locate("megatron.core.package_info") is None:
        pytest.skip("there is no Megatron in this environment")


@pytest.fixture
def megatron_ranks(megatron: None, megatron_ranks: Any) -> Any:
    """The plugin's."""
    return megatron_ranks


@pytest.fixture(scope="session")
def cold(megatron: None) -> Iterator[Forks]:
    """Children that have imported nothing."""
    forks = Forks(warm=False)
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def warm(megatron: None) -> Iterator[Forks]:
    """Children that have imported torch, and can import Megatron quickly."""
    forks = Forks(warm=True)
    yield forks
    forks.close()


@pytest.fixture(scope="session")
def megatron_files(megatron: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a copy of the installed Megatron, compiled files included."""
    source = locate("megatron.core.package_info")
    assert source is not None
    folder = tmp_path_factory.mktemp("installed") / "megatron"
    for name in ("core", "training"):
        if (source.parents[1] / name).is_dir():
            shutil.copytree(source.parents[1] / name, folder / name)
    return folder.parent


@pytest.fixture
def megatron_copy(megatron_files: Path, tmp_path: Path) -> Path:
    """The same, to alter: files are hard links, so replace them instead of writing into them."""
    shutil.copytree(megatron_files, tmp_path / "copy", copy_function=os.link)
    return tmp_path / "copy"


@pytest.fixture
def toys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Toys]:
    """An upstream package of our own, with patches of its own, in this process."""
    folder = tmp_path / "upstream"
    folder.mkdir()
    monkeypatch.syspath_prepend(str(folder))
    toys = Toys(folder, monkeypatch)
    yield toys
    toys.close()
    for name in [name for name in sys.modules if name.split(".")[0].startswith("toy")]:
        del sys.modules[name]
