"""Main parameters are put together from what ranks have, and what does not fit is said."""

from __future__ import annotations

import pytest
import torch

from megatron_idempotent.proof.certify.half import Main, joined
from megatron_idempotent.proof.certify.protocol import Wrong

WHOLE = torch.tensor([[1.0009765625, 2.0], [3.0, 4.0]])


def part(start, end, changed=0.0):
    return Main(start=start, values=WHOLE.flatten()[start:end] + changed)


def test_parts_are_joined_in_the_shape_of_the_models_parameter():
    found = joined("w", WHOLE.bfloat16(), [part(2, 4), part(0, 3)])
    assert torch.equal(found, WHOLE)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ([part(0, 2)], "no rank has 2 elements of the main parameter of w"),
        ([part(0, 3), part(2, 4, 0.5)], "ranks have other bits in the main parameter of w"),
        ([part(0, 4, 1.0)], "w is not its main parameter, rounded"),
    ],
)
def test_parts_that_do_not_fit_are_said(parts, said):
    with pytest.raises(Wrong, match=said):
        joined("w", WHOLE.bfloat16(), parts)
