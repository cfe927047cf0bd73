"""Shared by the tests of patching/: processes to fork from, a copy of Megatron, a toy to patch."""

from __future__ import annotations

import gc
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ad_hoc import contracts_of_tests  # noqa: F401  # a fixture for all tests here
from forks import Forks
from toys import Toys

import megatron_idempotent
from megatron_idempotent.patching.base import PACKAGE
from megatron_idempotent.patching.source import locate

RANDOM = "megatron/core/tensor_parallel/random.py"


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("MEGATRON_IDEMPOTENT")]:
        monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _not_frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hide the freeze of tests/conftest.py: in a frozen process a search reads all modules, too.

    What is frozen was made before the test, and refers to nothing of it.
    """
    monkeypatch.setattr(gc, "get_freeze_count", lambda: 0)


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
    forks = Forks()
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


class Copy:
    """The copy of Megatron, in which a test changes files; afterwards they are as they were."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder)
        self._folder = folder
        self._changed: set[Path] = set()

    def change(self, file: str, *, to: str | None) -> None:
        """Put another text into a file, or take it away."""
        path = self._folder / file
        if path not in self._changed:
            path.rename(path.with_suffix(".kept"))
            self._changed.add(path)
        path.unlink(missing_ok=True)
        if to is not None:
            path.write_text(to)

    def alter(self, file: str, old: str, new: str) -> None:
        """Replace a part of a file."""
        text = (self._folder / file).read_text()
        assert old in text
        self.change(file, to=text.replace(old, new))

    def drift(self) -> None:
        """Change the body of `model_parallel_cuda_manual_seed`, on which a patch relies."""
        self.alter(RANDOM, "offset = seed + 2718", "offset = seed + 2719")

    def put_back(self) -> None:
        """Undo all changes."""
        for path in self._changed:
            path.unlink(missing_ok=True)
            path.with_suffix(".kept").rename(path)
        self._changed.clear()


@pytest.fixture
def megatron_copy(megatron_files: Path) -> Iterator[Copy]:
    """A copy of Megatron to change."""
    copy = Copy(megatron_files)
    yield copy
    copy.put_back()


@pytest.fixture
def drifted(megatron_copy: Copy) -> str:
    """The path of a copy of Megatron with a body that has drifted."""
    megatron_copy.drift()
    return megatron_copy.path


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """The folder of a copy of the package, with the case files in it, as a wheel has them."""
    folder = tmp_path / "site"
    leave = shutil.ignore_patterns("__pycache__", "patches")
    library = Path(megatron_idempotent.__file__).parent
    shutil.copytree(library, folder / "megatron_idempotent", ignore=leave)
    cases = Path(sys.modules[PACKAGE].__file__ or "").parent
    shutil.copytree(cases, folder / "megatron_idempotent" / "patches", ignore=leave)
    return folder


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
