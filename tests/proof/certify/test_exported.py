"""An export has the model's values, in whatever order, names and shapes it comes."""

from __future__ import annotations

import pytest
import torch

from megatron_idempotent.proof.certify.exports import compared
from megatron_idempotent.proof.certify.parameters import ParameterPart

WHOLE = {"a": torch.arange(8.0).view(4, 2) + 0.1, "b": torch.arange(3.0) + 20.3}
OWN = [
    ParameterPart(name="a", dimension=0, rank=1, size=2, value=WHOLE["a"][2:]),
    ParameterPart(name="b", dimension=None, rank=0, size=1, value=WHOLE["b"]),
]
BOTH = {"a", "b"}


@pytest.mark.parametrize(
    ("exported", "names"),
    [
        ([part.value for part in OWN], BOTH),
        ([*WHOLE.values()], BOTH),
        ({"b": WHOLE["b"], "a": WHOLE["a"]}, BOTH),
        (iter(WHOLE.items()), BOTH),
        ({"a": WHOLE["a"][2:]}, {"a"}),
        ({"x": WHOLE["a"].T.flatten(), "y": {"z": WHOLE["b"]}}, BOTH),
        ([each.bfloat16() for each in WHOLE.values()], BOTH),
        ([], set()),
        (None, set()),
        ("a/path", set()),
    ],
)
def test_right_values_are_found(exported, names):
    assert compared(exported, OWN, WHOLE) == (names, None)


@pytest.mark.parametrize(
    ("exported", "said"),
    [
        ([torch.zeros_like(part.value) for part in OWN], "2 tensors differ, the first is a"),
        ({"a": WHOLE["a"], "b": WHOLE["b"] + 1}, "1 tensors differ, the first is b"),
        ({"a": WHOLE["a"][:2]}, "1 tensors differ, the first is a"),
        ([torch.zeros(11)], "the numbers of the model's parameters are not among them"),
    ],
)
def test_other_values_are_told(exported, said):
    assert compared(exported, OWN, WHOLE)[1] == said
