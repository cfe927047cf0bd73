"""Codes and scales against float64 and against themselves."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_idempotent.fp8 import blockwise
from megatron_idempotent.fp8.blockwise import (
    BLOCK,
    check_cuts,
    dequantize_blockwise,
    quantize_blockwise,
)
from megatron_idempotent.proof.cpu.probes import peak_bytes

pytestmark = pytest.mark.full

SCALES = ["float32", "ue8m0"]
#: All finite numbers of E4M3.
NUMBERS = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).double()
NUMBERS = NUMBERS[NUMBERS.isfinite()]


def changed(one: torch.Tensor, other: torch.Tensor) -> float:
    """Share of codes that differ in a bit."""
    differ = int((one.view(torch.uint8) != other.view(torch.uint8)).sum())
    return differ / max(1, one.numel())


def normal(*shape: int, std: float = 0.02) -> torch.Tensor:
    torch.manual_seed(sum(shape))
    return torch.randn(*shape) * std


def scales_by_block(weight: torch.Tensor, scales: str) -> torch.Tensor:
    """One block at a time, as it is defined."""
    rows, columns = weight.shape
    found = torch.ones(-(-rows // BLOCK), -(-columns // BLOCK), dtype=torch.float64)
    for r, c in found.nonzero().tolist():
        block = weight[r * BLOCK :, c * BLOCK :][:BLOCK, :BLOCK]
        largest = float(block.abs().max())
        if scales == "float32":
            found[r, c] = float(torch.tensor(largest) / 448)
        else:
            # The least power that lets the largest be rounded to what E4M3 has.
            found[r, c] = min(2.0**n for n in range(-126, 128) if largest / 2.0**n <= 464)
    return found


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("shape", [(128, 128), (130, 40), (1, 300)])
def test_scales_are_as_defined_and_codes_the_nearest_numbers(scales, shape):
    weight = (normal(*shape) * torch.rand(shape[0], 1).exp2()).bfloat16()
    codes, scale_inv = quantize_blockwise(weight, scales=scales)
    expected = scales_by_block(weight, scales)
    assert torch.equal(scale_inv.double(), expected)
    assert scale_inv.dtype == torch.float32
    of = expected.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    exact = weight.double() / of[: shape[0], : shape[1]]
    nearest = (exact[..., None] - NUMBERS).abs().amin(-1)
    # The quotient is rounded to float32 first: it may be moved past the middle by half a unit, and
    # then it is as far from the other number as it was from this one, and that much again.
    assert ((exact - codes.double()).abs() <= nearest + exact.abs() * 2.0**-23).all()


@pytest.mark.parametrize("scales", SCALES)
def test_errors_are_those_of_the_rounding(scales):
    weight = normal(1024, 1024).bfloat16()
    codes, scale_inv = quantize_blockwise(weight, scales=scales)
    found = dequantize_blockwise(codes, scale_inv, dtype=torch.float32).double()
    error = (found - weight.double()).abs()
    step = scale_inv.double().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    # Half a step of three bits of mantissa, or of the subnormal numbers below 2⁻⁶.
    assert (error <= torch.maximum(weight.double().abs() / 16, step * 2.0**-10) * (1 + 1e-6)).all()
    # Of a normal weight: the root of the mean square of roundings in steps of 2⁻³ of a binade.
    relative = float(error.norm() / weight.double().norm())
    assert 0.0260 < relative < 0.0270


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_quantizing_what_was_quantized_changes_no_code(scales, dtype):
    # Largest magnitudes all over a binade, as those of 1.75 to 1.8125 are where a scale may halve.
    weight = normal(16, BLOCK, 16, BLOCK) * torch.rand(16, 1, 16, 1).mul(4).exp2()
    weight = weight.view(16 * BLOCK, 16 * BLOCK)
    first = quantize_blockwise(weight, scales=scales)
    again = dequantize_blockwise(*first, dtype=dtype)
    second = quantize_blockwise(again, scales=scales, dtype=dtype)
    assert changed(first.codes, second.codes) == 0
    if scales == "ue8m0":
        assert torch.equal(first.scale_inv, second.scale_inv)
        assert torch.equal(dequantize_blockwise(*second, dtype=dtype), again)


@given(st.data(), st.sampled_from(SCALES))
@settings(max_examples=60, deadline=None)
def test_any_weight_is_quantized_once_and_the_same_in_any_slabs(data, scales):
    experts, rows, columns = (data.draw(st.sampled_from(sizes)) for sizes in SIZES)
    exponents = st.integers(-132, 126)
    torch.manual_seed(data.draw(st.integers(0, 99)))
    weight = torch.randn(experts, rows, columns) * 2.0 ** data.draw(exponents)
    weight = weight.clamp(-3e38, 3e38)  # first: infinity times 0 is not a number
    weight[:, : rows // 2] *= data.draw(st.sampled_from([0.0, 1.0, 2.0**-9]))
    weight = weight.bfloat16()
    codes, scale_inv = quantize_blockwise(weight, scales=scales)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blockwise, "_SLAB_BYTES", data.draw(st.sampled_from([1, 1 << 18])))
        small = quantize_blockwise(
            weight.transpose(1, 2).contiguous().transpose(1, 2), scales=scales
        )
    assert changed(codes, small.codes) == 0
    assert torch.equal(scale_inv, small.scale_inv)
    for expert in range(experts):
        alone = quantize_blockwise(weight[expert], scales=scales)
        assert changed(codes[expert], alone.codes) == 0
        assert torch.equal(scale_inv[expert], alone.scale_inv)
    assert scale_inv.shape == (experts, -(-rows // BLOCK), -(-columns // BLOCK))
    assert (scale_inv >= 2.0**-126).all()
    if scales == "ue8m0":
        assert (scale_inv.frexp().mantissa == 0.5).all()
    again = quantize_blockwise(
        dequantize_blockwise(codes, scale_inv, dtype=torch.float32),
        scales=scales,
        dtype=torch.float32,
    )
    assert changed(codes, again.codes) == 0


SIZES = ([1, 3], [0, 1, 127, 128, 300], [1, 64, 257])


def test_the_largest_that_is_rounded_to_448_does_not_double_the_scale():
    for largest, of, code in ((464.0, 1.0, 448.0), (466.0, 2.0, 240.0), (232.0, 0.5, 448.0)):
        weight = torch.full((BLOCK, BLOCK), largest, dtype=torch.bfloat16)
        codes, scale_inv = quantize_blockwise(-weight, scales="ue8m0")
        assert scale_inv.tolist() == [[of]]
        assert (codes.float() == -code).all()


def test_a_block_of_zeros_has_scale_1_and_its_signs():
    weight = torch.zeros(BLOCK, 2 * BLOCK, dtype=torch.bfloat16)
    weight[0, 0] = -0.0
    weight[5, BLOCK] = 2.0
    for scales, of in (("float32", 2 / 448), ("ue8m0", 2.0**-7)):
        codes, scale_inv = quantize_blockwise(weight, scales=scales)
        torch.testing.assert_close(scale_inv, torch.tensor([[1.0, of]]), rtol=0, atol=0)
        assert torch.equal(dequantize_blockwise(codes, scale_inv)[:, :BLOCK], weight[:, :BLOCK])


@pytest.mark.parametrize("scales", SCALES)
def test_codes_of_a_float32_master_differ_and_it_is_rounded_first(scales):
    master = normal(1024, 1024)
    exported = quantize_blockwise(master.bfloat16(), scales=scales)
    assert changed(quantize_blockwise(master, scales=scales).codes, exported.codes) == 0
    unrounded = quantize_blockwise(master, scales=scales, dtype=torch.float32)
    assert 0.01 < changed(unrounded.codes, exported.codes) < 0.06


@pytest.mark.parametrize("scales", SCALES)
def test_pieces_cut_within_a_block_have_other_codes_and_are_refused(scales):
    for pieces, same in (((176, 176, 176), False), ((256, 128, 40), True)):
        weight = normal(sum(pieces), 256).bfloat16() * torch.linspace(1, 4, sum(pieces))[:, None]
        apart = [quantize_blockwise(each, scales=scales).codes for each in weight.split(pieces)]
        whole = quantize_blockwise(weight, scales=scales).codes
        assert (changed(torch.cat(apart), whole) == 0) is same
        if same:
            check_cuts("w", sum(pieces), pieces)
        else:
            with pytest.raises(ValueError, match="w is cut at row 176, within a block of 128"):
                check_cuts("w", sum(pieces), pieces)
    with pytest.raises(ValueError, match=r"w has 300 rows, and its pieces \(128, 128\) have 256"):
        check_cuts("w", 300, (128, 128))


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_named_with_their_place(value):
    weight = torch.ones(2, 300, 200)
    weight[1, 290, 131] = value
    with pytest.raises(ValueError, match=rf"up is {value} at \[1, 290, 131\]"):
        quantize_blockwise(weight, name="up")
    with pytest.raises(ValueError, match=rf"up is {value} at \[290, 131\]"):
        quantize_blockwise(weight[1], name="up")
    weight[1, 290, 131] = 1e30
    with pytest.raises(ValueError, match=r"1.0\d+e\+30 at \[1, 290, 131\], inf as torch.float16"):
        quantize_blockwise(weight, dtype=torch.float16)


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (lambda w, q: quantize_blockwise(w[0]), "shape (200,)"),
        (lambda w, q: quantize_blockwise(w.int()), "torch.int32"),
        (lambda w, q: quantize_blockwise(q.codes), "float8_e4m3fn"),
        (lambda w, q: quantize_blockwise(w, scales="e8m0"), "scales='e8m0'"),
        (lambda w, q: quantize_blockwise(w, dtype=torch.float8_e5m2), "dtype=torch.float8_e5m2"),
        (lambda w, q: dequantize_blockwise(w, q.scale_inv), "float32"),
        (lambda w, q: dequantize_blockwise(q.codes, q.scale_inv.t()), "(2, 3) for codes of shape"),
    ],
)
def test_shapes_and_types_that_have_no_blocks_are_refused(call, text):
    weight = torch.ones(300, 200)
    with pytest.raises(ValueError) as told:  # noqa: PT011  the text is looked at
        call(weight, quantize_blockwise(weight))
    assert text in str(told.value)


def test_besides_the_codes_it_takes_a_few_slabs(monkeypatch):
    weight = torch.ones(4096, 2048, dtype=torch.bfloat16)
    slab = 1 << 20
    monkeypatch.setattr(blockwise, "_SLAB_BYTES", slab)
    codes = weight.numel()
    peak = peak_bytes(lambda: quantize_blockwise(weight))
    assert codes < peak <= codes + 2.5 * slab
