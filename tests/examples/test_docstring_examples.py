"""The examples in docstrings are held against the code, each with its place."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import docstring_examples
import pytest
from docstring_examples import BLOCK, NEEDS_ALL, NEEDS_VLLM, OTHER, PACKAGE, Checked, Short

pytestmark = [pytest.mark.full, NEEDS_ALL]


def examples() -> list[Short]:
    return [
        each for path in sorted(PACKAGE.rglob("*.py")) for each in docstring_examples.read(path)
    ]


def told(of: Iterable[Short]) -> list[tuple[str, Checked | str | None]]:
    """Return what was held of each, or what is wrong with it; None where its module is not
    importable."""
    found: list[tuple[str, Checked | str | None]] = []
    for example in of:
        try:
            found.append((str(example), docstring_examples.check(example)))
        except ModuleNotFoundError as missing:
            if str(missing.name).startswith("megatron_idempotent"):
                raise
            found.append((str(example), None))
        except Exception as error:  # noqa: BLE001 - each is told with its place
            found.append((str(example), f"{example}: {type(error).__name__}: {error}"))
    return found


#: In an example of several lines, and what is told of it.
WRONG_BLOCKS = {
    "with RankPool() as pool:\n    pool.run(2)\n": "TypeError: missing a required argument",
    "with RankPool(2) as pool:\n    pool.walk_on(2)\n": "AttributeError: nothing has a walk_on",
    "RankPond(2)\nRankPool(2)\n": "NameError: RankPond is not there",
}
WRONG = {
    "SyncSettings(bucket_bytes=": "SyntaxError",
    "SyncSettings(bucket_byte=1)": "got an unexpected keyword argument 'bucket_byte'",
    'SyncSettings(pause_mode="later")': "pause_mode",
    "SyncSetting(bucket_bytes=1)": "NameError: SyncSetting is not there",
    "SyncSettings().of_bytes": "AttributeError",
    "report.engines_of_it": "nothing has a engines_of_it",
    "await engine.pause(how=1)": "TypeError: ",
    "SyncSettings().bucket_bytes == 0": "AssertionError: is not so",
}


def check_all(folder: Path) -> list[list[tuple[str, Checked | str | None]]]:
    """Runs on a rank, in a folder for what an example writes: what is told of all examples, and of
    some that are wrong."""
    os.chdir(folder)
    wrong = [Short("rl/sync/records.py", 18, code, None, "SyncSettings") for code in WRONG]
    # `ExpertReplay` has a method of that name too, which takes that much.
    of_its_class = Short(
        "rl/sync/weight_sync.py", 23, "await one.run(buckets, stamp, 3)", None, "UpdateAttempt"
    )
    blocks = [Short("proof/cpu/pool.py", 1, code, BLOCK, "RankPool") for code in WRONG_BLOCKS]
    return [told(examples()), told([*wrong, *blocks, of_its_class])]


def test_examples_fit_what_they_show(megatron_ranks, tmp_path):
    ((found, of_wrong),) = megatron_ranks(1, check_all, tmp_path)
    wrong = [each for _, each in found if isinstance(each, str)]
    assert not wrong, "\n".join(wrong)
    held = {place: each for place, each in found if each is not None}
    out_of_reach = [place.split(":")[0] for place, each in found if each is None]
    assert set(out_of_reach) <= {NEEDS_VLLM}, "it imports vLLM"
    short = {place: each for place, each in held.items() if "\n" not in place.rstrip()}
    nothing = {place.split(": ", 1)[1] for place, each in short.items() if not any(each)}
    # A builtin without a signature, and what is no Python.
    assert {each for each in nothing if not each.startswith(tuple(OTHER))} == {"next(buckets)"}
    assert len(nothing) == 1 + len(OTHER), "all of the table are there"
    assert len(held) - len(short) > 60, "those of several lines are among them"
    *of_wrong, (_, of_its_class) = of_wrong
    assert of_its_class == (
        "rl/sync/weight_sync.py:23: await one.run(buckets, stamp, 3): TypeError: "
        "too many positional arguments"
    )
    for (place, error), message in zip(
        of_wrong, [*WRONG.values(), *WRONG_BLOCKS.values()], strict=True
    ):
        assert isinstance(error, str), place
        assert error.startswith(("rl/sync/records.py:18: ", "proof/cpu/pool.py:1: "))
        assert message in error


def test_all_examples_are_read(tmp_path, monkeypatch):
    monkeypatch.setattr(docstring_examples, "PACKAGE", tmp_path)
    file = tmp_path / "some.py"
    file.write_text(
        '"""Example: `a`."""\nclass C:\n    """Some.\n\n    Example: `C(1)`, and `C(2)` too.\n'
        '    """\n    size: int\n    """Example: `3`."""\n\ndef f():\n    """Example: f()."""\n'
        '\ndef g():\n    """Example: `g()` is 0.75."""\n'
        '\ndef h():\n    """Some.\n\n    Example:\n        h()\n        if h:\n            h()\n\n'
        '    More.\n    """\n'
    )
    assert sorted(docstring_examples.read(file)) == [
        Short("some.py", 1, "a", None, None),
        Short("some.py", 5, "C(1)", None, "C"),
        Short("some.py", 5, "C(2)", None, "C"),
        Short("some.py", 8, "3", None, "C"),
        Short("some.py", 11, None, None, None),
        Short("some.py", 14, "g()", "0.75", None),
        Short("some.py", 19, "h()\nif h:\n    h()\n\n", BLOCK, None),
    ]
