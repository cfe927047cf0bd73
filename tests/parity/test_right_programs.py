"""Programs that are right beside a hazard keep their bits with the patches."""

import pytest

from megatron_idempotent.patching.catalog import hazards
from megatron_idempotent.proof.prove import affected, control_outcome

pytestmark = pytest.mark.full
BESIDE = [name for name in affected() if hazards()[name].control is not None]


@pytest.mark.parametrize("hazard_id", BESIDE)
def test_the_right_program_beside_the_hazard_keeps_its_bits(hazard_id, megatron_ranks):
    assert control_outcome(megatron_ranks, hazard_id) == "ok"
