"""Small upstream packages with patches of their own, for what the real ones cannot show quickly."""

from __future__ import annotations

import importlib
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatron_idempotent import Report, apply, report
from megatron_idempotent.patching import Patch, Target, install
from megatron_idempotent.patching.base import read_index
from megatron_idempotent.patching.catalog import index_entries, index_of, patches

REAL = tuple(patches())
GREET = "def greet(name):\n    return f'hello {name}'\n"


def shout(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A wrapper that one can hear."""
    return f"{original(*args, **kwargs)}!"


def ask(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Another one."""
    return f"{original(*args, **kwargs)}?"


class Toys:
    """Writes upstream files, declares patches for them, applies these and no others."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder = folder
        self._monkeypatch = monkeypatch
        self._ids: list[str] = []
        info = folder / "toy_upstream-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: toy-upstream\nVersion: 1.2\n")

    def write(self, module: str, source: str) -> Path:
        """A module of the upstream package; parents are made where missing."""
        *parents, name = module.split(".")
        folder = self.folder
        for parent in parents:
            folder = folder / parent
            folder.mkdir(exist_ok=True)
            (folder / "__init__.py").touch()
        path = folder / f"{name}.py"
        path.write_text(textwrap.dedent(source))
        importlib.invalidate_caches()
        return path

    def patch(
        self,
        patch_id: str,
        *addresses: str,
        wrapper: Callable[..., Any] = shout,
        relies_on: str = "return",
        early_users: tuple[str, ...] = (),
        **fields: Any,
    ) -> None:
        """Declare a patch of these addresses."""
        fragment = ("name",) if relies_on == "return" else (relies_on,)
        record = Patch(
            id=patch_id,
            summary="too quiet",
            targets=tuple(
                Target(address, wrapper, *fragment, early_users=early_users)
                for address in addresses
            ),
            **{"distribution": "toy-upstream", "since": "1", "before": "2"} | fields,
        )
        self._monkeypatch.setitem(patches(), patch_id, record)
        _, declared = read_index(index_of([record]))
        self._monkeypatch.setitem(index_entries(), patch_id, declared[patch_id])
        self._ids.append(patch_id)

    def greet(self, source: str = GREET, **fields: Any) -> Path:
        """Write `toy_up.greet`, and declare the patch toy-a of its `greet`."""
        self.patch("toy-a", "toy_up.greet:greet", **fields)
        return self.write("toy_up.greet", source)

    def apply(self, *ids: str, **arguments: Any) -> Report:
        """Apply these, by default all toys, as patches that nobody named."""
        others = {*REAL, *(self._ids if ids else ())} - set(ids)
        return apply(exclude=others, **arguments)

    def status(self, patch_id: str) -> str:
        """Return the status of one patch."""
        return report()[patch_id].status

    def close(self) -> None:
        """Take the toys off again and forget the sites."""
        install.drop({*self._ids} & {*patches()})
        for address in [a for a in install.state.sites if a.startswith("toy")]:
            del install.state.sites[address]
        for patch_id in self._ids:
            install.state.rows.pop(patch_id, None)
        install.state.selection = None
