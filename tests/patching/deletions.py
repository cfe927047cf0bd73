"""Deletes case files, one child process each, and tells what the others do without it.

Runs in a child of `forks`. It imports Megatron, and reads upstream's bodies once and no case file,
so that each of its own children has nothing left to do but what depends on case files.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from forks import forked, value_of

Seen = dict[str, Any]


def in_turn(folder: str, groups: list[list[str]]) -> list[Seen]:
    """Delete the files of each group in turn, then two at once, then all case files.

    Args:
        folder: of a copy of the package with `patches/` inside, which is changed.
        groups: of case files, such as `patches/gc_stays_off.py`.

    Returns:
        What the package says with all files, then without those of each group; last, under
        "window", what `accumulation_window()` says without the two that it stands on, and, under
        "imports", modules of the library that cannot be imported without any.
    """
    _warm(folder)
    root = Path(folder, "megatron_idempotent")
    found = [value_of(forked(lambda: _without([])))]
    for names in groups:
        with _deleted([root / name for name in names]):
            found.append(value_of(forked(lambda names=names: _without(names))))
    for name in WINDOW_STANDS_ON:
        (root / name).unlink()
    window = value_of(forked(_open_a_window))
    for path in (root / "patches").rglob("*.py"):
        if path.name != "__init__.py":
            path.unlink()
    return [*found, {"window": window, "imports": value_of(forked(_import_everything))}]


WINDOW_STANDS_ON = ("patches/aux_loss_scale_left_set.py", "patches/timers_left_running.py")


def _open_a_window() -> str:
    import megatron_idempotent

    megatron_idempotent.apply()
    try:
        with megatron_idempotent.window.accumulation_window([object()], 1):
            return ""
    except RuntimeError as error:
        return str(error)


def _warm(folder: str) -> None:
    """Import and read what case files stand on: the functions that they patch, and their bodies."""
    sys.path.insert(0, folder)
    from megatron_idempotent.patching import catalog, patch_points, source
    from megatron_idempotent.patching.base import PACKAGE

    assert (catalog.__file__ or "").startswith(folder)
    for entry in _indexed().values():
        for target in entry.targets:
            path = source.locate(target.module)
            if path is None:
                continue
            try:
                importlib.import_module(target.module)
            except ImportError:  # some files want packages that are not installed
                continue
            body = source.read_body(path, target.qualname)
            if body is not None:
                assert body.hash
                body.contains("fragment")
                patch_points.check_patch_point(target, body)
    assert not [name for name in sys.modules if name.startswith(f"{PACKAGE}.")]
    gc.freeze()  # children share these pages
    gc.disable()


@contextlib.contextmanager
def _deleted(paths: list[Path]) -> Iterator[None]:
    for path in paths:
        path.rename(f"{path}.kept")
    try:
        yield
    finally:
        for path in paths:
            Path(f"{path}.kept").rename(path)


def _without(deleted: list[str]) -> Seen:
    """Run `doctor --json`, apply, take off again; the index still lists what was deleted."""
    before = _standing()
    import megatron_idempotent
    from megatron_idempotent.cli.doctor import doctor
    from megatron_idempotent.patching import catalog, needs

    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        code = doctor(as_json=True)
    applied = {row.id: row.status for row in megatron_idempotent.apply()}
    changed = sum(before[key] is not value for key, value in _standing().items())
    megatron_idempotent.revert()
    entries = [_indexed().get(Path(name).stem.replace("_", "-")) for name in deleted]
    provided = {key for entry in entries if entry is not None for key in entry.provides}
    return {
        "decided": {row["id"]: row for row in json.loads(printed.getvalue())},
        "code": code,
        "applied": applied,
        "changed": changed,
        "left": [key for key, value in _standing().items() if value is not before[key]],
        "index": catalog.index_of(catalog.hazards().values()),
        "absent": {key: needs.absent(key, a_door=True) for key in provided},
    }


def _indexed() -> dict[str, Any]:
    from megatron_idempotent.patching.base import INDEX, generated, read_index

    return read_index(generated(INDEX))[1]


def _standing() -> dict[str, Any]:
    """Return what stands at each target whose module is imported, by address."""
    found = {}
    for entry in _indexed().values():
        for target in entry.targets:
            place: Any = sys.modules.get(target.module)
            *outer, name = target.qualname.split(".")
            for step in outer:
                place = getattr(place, step, None)
            if place is not None and name in vars(place):
                found[target.address] = vars(place)[name]
    return found


def _import_everything() -> list[str]:
    import pkgutil

    import megatron_idempotent

    failed = []
    for room in ("megatron", "window", "step", "logprobs", "fp8", "patching"):
        package = importlib.import_module(f"megatron_idempotent.{room}")
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            try:
                importlib.import_module(module.name)
            except Exception as error:  # noqa: BLE001 - the test shows it
                failed.append(f"{module.name}: {error!r}")
    for name in megatron_idempotent.__all__:
        getattr(megatron_idempotent, name)
    return failed
