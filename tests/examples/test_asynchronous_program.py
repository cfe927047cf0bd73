"""The asynchronous program of examples/ learns, and keeps to its bound on staleness."""

from __future__ import annotations

import asyncio
import importlib
import re
from pathlib import Path

import pytest

from megatron_idempotent.patching.decide import installed

pytest.importorskip("transformers")
pytest.importorskip("pydantic")
if installed("megatron-core") is None:
    pytest.skip("the program runs Megatron", allow_module_level=True)
EXAMPLES = Path(__file__).parents[2] / "examples"
LINE = re.compile(
    r"version (\d+)  train/reward (\S+)  train/staleness_mean (\S+)  train/staleness_max (\S+)  "
    r"rollouts/inflight_mean (\S+)"
)


@pytest.fixture(scope="module")
def rows(megatron_rank_pool):
    """The numbers of each line that the program prints, in the session's ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(EXAMPLES))
        program = importlib.import_module("asynchronous")
        said = []
        patch.setattr("builtins.print", lambda *words, sep: said.append(sep.join(words)))
        asyncio.run(asyncio.wait_for(program.main(megatron_rank_pool), 300))
    found = [LINE.fullmatch(line) for line in said]
    assert all(found), said
    return [tuple(map(float, line.groups())) for line in found]


def test_it_trains_each_version_once(rows):
    assert [version for version, *_ in rows] == list(range(1, 17))


def test_it_learns_to_repeat_its_prompt(rows):
    rewards = [reward for _, reward, *_ in rows]
    # A random token of eight is the prompt's in 1 of 8 cases: the mean of a step's 256 tokens has a
    # standard deviation of 0.02, so that 0.25 is six of them away, from either side.
    assert rewards[0] < 0.25 < rewards[-1], rewards


def test_it_samples_while_it_trains_with_weights_of_one_version_ago_at_most(rows):
    assert max(most for *_, most, _ in rows) == 1, "no group was drawn while an older step trained"
    assert any(generating > 0 for *_, generating in rows[1:])
