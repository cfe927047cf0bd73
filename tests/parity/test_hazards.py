"""Each hazard is seen on stock Megatron, is gone with the patches, and is back without its own."""

import re

import pytest

from megatron_idempotent.patching.catalog import hazards, patches
from megatron_idempotent.patching.record import Limit
from megatron_idempotent.proof.prove import affected, outcome

AFFECTED = affected()
PATCHED = [hazard_id for hazard_id in AFFECTED if hazard_id in patches()]
REPAIRED = [name for name in AFFECTED if not isinstance(hazards()[name], Limit)]


@pytest.mark.parametrize("hazard_id", AFFECTED)
def test_the_hazard_is_on_stock(hazard_id, megatron_ranks):
    stock = outcome(megatron_ranks, hazard_id, applied=())
    assert re.search(hazards()[hazard_id].stock_error, stock), stock


@pytest.mark.parametrize("hazard_id", REPAIRED)
def test_the_hazard_is_gone_with_the_patches(hazard_id, megatron_ranks):
    assert outcome(megatron_ranks, hazard_id, applied=patches(), helped=True) == "ok"


@pytest.mark.exhaustive
@pytest.mark.parametrize("patch_id", PATCHED)
def test_all_the_other_patches_do_not_repair_the_hazard(patch_id, megatron_ranks):
    others = set(patches()) - {patch_id}
    left = outcome(megatron_ranks, patch_id, applied=others)
    assert re.search(patches()[patch_id].stock_error, left), left
