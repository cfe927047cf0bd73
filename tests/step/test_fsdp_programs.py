"""A step of `FSDPTrainStep` in any pieces is the step at once of plain torch, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
from random_programs import run_many
from ranks import tiered
from scenario import SequenceLoss
from step_programs import ran

#: Layout → ranks, options of the bench.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "shard": (2, {}),
    "by sequence": (2, {"loss": SequenceLoss()}),
    "sum": (2, {"layout": "sum"}),
    "half precision": (2, {"layout": "half precision"}),
    "whole after forward": (2, {"layout": "whole after forward"}),
    "replicate and shard": (4, {"layout": "replicate and shard"}),
    "tensor parallel": (4, {"layout": "tensor parallel"}),
}
#: These alone gather, reduce, scale or divide otherwise than the others.
ALWAYS = ("shard", "by sequence", "tensor parallel", "half precision")


@pytest.mark.parametrize("layout", tiered(LAYOUTS, ALWAYS))
def test_a_program_of_all_operations(megatron_ranks, layout):
    ranks, options = LAYOUTS[layout]
    megatron_ranks(ranks, ran, "fsdp", options, timeout_s=120)


@pytest.mark.exhaustive
def test_any_program_of_many(megatron_ranks):
    run_many(megatron_ranks, 2, "fsdp", {})
