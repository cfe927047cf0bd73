"""A main flow passes few files: who follows one through the package opens them, and no more.

The limits are what was counted; they may only fall.
"""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("transformers")
if sys.version_info < (3, 12):
    pytest.skip("sys.monitoring came with Python 3.12", allow_module_level=True)

import flows

#: Flow → files in which a function runs.
LIMITS = {"applied": 12, "sampled": 12, "stepped": 16, "streamed": 12, "published": 14}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A checkpoint that Megatron and the engine both read."""
    sys.path.insert(0, str(flows.TESTS / "rl" / "engines"))
    from tiny import make_checkpoint

    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint"), family="qwen3"))


def the_rest(folder: str) -> dict[str, list[str]]:
    """Runs on a rank: the flows that do without patches, and last one that applies them."""
    return {
        "sampled": flows.sampled(folder),
        "streamed": flows.streamed(),
        "stepped": flows.stepped(),
        "published": flows.published(folder),
    }


def test_a_main_flow_passes_few_files(megatron_ranks, folder):
    (found,) = megatron_ranks(1, the_rest, folder, timeout_s=240)
    (found["applied"],) = megatron_ranks(1, flows.applied)
    for name, limit in LIMITS.items():
        assert len(found[name]) <= limit, f"{name}: {len(found[name])} files: {found[name]}"
