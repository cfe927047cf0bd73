"""The launcher leaves out filelock's audit hook, which would slow down its ranks, and no other."""

from __future__ import annotations

import importlib

from megatron_idempotent.proof.cpu.pool import RankPool

HOOK = """
import sys
seen = []
def hook(event, arguments):
    seen.append(event)
sys.addaudithook(hook)
"""


def events_of(*modules: str) -> list[bool]:
    """Tell for each module's hook whether it sees that `id()` is called."""
    id(modules)
    return ["builtins.id" in importlib.import_module(name).seen for name in modules]


def test_ranks_do_without_filelocks_hook_and_keep_others(tmp_path, monkeypatch):
    names = ("filelock_here", "policy_here")
    for name in names:
        (tmp_path / f"{name}.py").write_text(HOOK)
    monkeypatch.syspath_prepend(tmp_path)
    with RankPool(1, preload=names) as pool:
        assert pool.run(1, events_of, *names, distributed=False) == [[False, True]]
