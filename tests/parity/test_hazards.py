"""Each hazard is seen on stock Megatron, is gone with the patches, and is back without its own."""

from __future__ import annotations

import re

import pytest

from megatron_idempotent import apply
from megatron_idempotent.engine.catalogue import patches
from megatron_idempotent.engine.report import COVERED
from megatron_idempotent.proof import outcome

AFFECTED = [row.id for row in apply(dry_run=True) if row.status in COVERED]


@pytest.mark.parametrize("patch_id", AFFECTED)
def test_the_hazard_is_on_stock_and_gone_with_the_patches(patch_id, megatron_ranks):
    stock = outcome(megatron_ranks, patch_id, applied=())
    assert re.search(patches()[patch_id].reproduction.stock_error, stock), stock
    assert outcome(megatron_ranks, patch_id, applied=patches()) == "ok"


@pytest.mark.parametrize("patch_id", AFFECTED)
def test_all_the_other_patches_do_not_repair_the_hazard(patch_id, megatron_ranks):
    others = set(patches()) - {patch_id}
    left = outcome(megatron_ranks, patch_id, applied=others)
    assert re.search(patches()[patch_id].reproduction.stock_error, left), left
