"""Triton's kernels in its interpreter, by the same cases and bounds as torch, and assembled."""

from __future__ import annotations

from typing import Any

import hidden_cases
import pytest
import torch
import torch.distributed as dist
from cases import case, reference, summed, within_bounds
from kernels import SHAPES, in_blocks, launches, with_kernels
from test_against_float64 import alone_and_together, any_magnitude, confident
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_idempotent import token_logprobs

pytestmark = pytest.mark.full

#: Of the cases that torch is held to, by the number of ranks; others with -m exhaustive.
CASES = {1: 6, 2: 4}
#: Of those out of hidden states: small ones of each type, in one part and in many.
OF_HIDDEN = (9, 31, 33, 35, 71)


def against_float64(first: int, last: int) -> list[bytes]:
    """Runs on a rank that shares the vocabulary with all others; in blocks of three shapes in
    turn, and some out of hidden states."""
    size, found, seen = dist.get_world_size(), [], set()
    shapes = list(SHAPES)
    for seed in range(first, last):
        given = case(seed, size)
        with in_blocks(shapes[seed % len(shapes)]):
            values, launched = launches(within_bounds, given, seed)
        found += values
        if given.whole.dtype == torch.float64:
            assert not launched
        seen |= set(launched)
    assert seen == {"launch_statistics", "launch_gradient"}
    seen.clear()
    for seed in OF_HIDDEN:
        with in_blocks():
            values, launched = launches(hidden_cases.within_bounds, "cases", seed)
        found += values
        seen |= set(launched)
    assert seen == {"launch_statistics", "launch_gradient"}
    return found


@pytest.mark.parametrize(
    ("ranks", "first", "last"),
    [
        *((ranks, 0, count) for ranks, count in CASES.items()),
        *(
            pytest.param(ranks, CASES.get(ranks, 9), 400, marks=pytest.mark.exhaustive)
            for ranks in (1, 2, 4)
        ),
    ],
)
def test_within_what_rounding_allows_and_alike_on_all_ranks(kernel_ranks, ranks, first, last):
    found, *others = kernel_ranks(ranks, against_float64, first, last)
    assert all(other == found for other in others)


@with_kernels
def test_certain_tokens_outputs_that_are_changed_and_samplers_are_as_with_torch() -> None:
    """The kernels pass tests that torch is held to elsewhere."""
    from cases import against_float64
    from test_gradients import changed_in_place

    with in_blocks("wide"):
        confident("grad")
    changed_in_place()
    against_float64("sampled", 0, 4)


@pytest.mark.exhaustive
@with_kernels
def test_magnitudes_and_neighbours_are_as_with_torch() -> None:
    """Logits of any magnitude, alone and among others."""
    with in_blocks("wide"):
        any_magnitude()
        alone_and_together("grad")
        confident("none")


@with_kernels
def test_the_weights_gradient_is_added_to_main_grad() -> None:
    """Tokens left out and many parts, whose products Megatron's sum has too."""
    torch.manual_seed(0)
    tokens, features, columns = 12, 8, 40
    hidden, weight = torch.randn(tokens, features), torch.randn(columns, features)
    of_logprob, of_entropy = torch.randn(2, tokens)
    of_logprob[::3] = of_entropy[::3] = 0.0  # of which nothing is differentiated
    found = []
    for fused in (False, True):
        leaves = [each.clone().requires_grad_() for each in (hidden, weight)]
        leaves[1].main_grad = torch.zeros_like(weight)
        leaves[1].grad_added_to_main_grad = False
        stats = token_logprobs(
            hidden=leaves[0],
            weight=leaves[1],
            targets=torch.arange(tokens),
            vocab_size=columns - 3,
            token_mask=torch.arange(tokens) % 4 > 0,
            entropy="grad",
            gradient_accumulation_fusion=fused,
            workspace_bytes=500,  # three tokens at a time
        )
        (stats.logprob * of_logprob + stats.entropy * of_entropy).sum().backward()
        assert leaves[1].grad_added_to_main_grad is fused
        assert not fused or not leaves[1].grad.any()
        found.append((leaves[0].grad, leaves[1].main_grad if fused else leaves[1].grad))
    assert all(map(torch.equal, *found))
    assert found[0][1].any()


@with_kernels
def test_nan_and_infinities_are_where_they_are_with_torch() -> None:
    """They stay in their row."""
    torch.manual_seed(0)
    whole = torch.randn(8, 80)
    whole[1, 70] = torch.nan
    whole[2, 79] = torch.inf
    whole[3] = -torch.inf
    whole[4, :64] = -torch.inf  # a whole segment
    whole[5, 9] = torch.nan  # the target
    whole[6, 9] = -torch.inf
    targets = torch.full((8,), 9)
    for entropy, temperature in (("none", 1.0), ("grad", 0.7), ("grad", 1e-7)):
        found = []
        for triton in (False, True):
            leaf = whole.clone().requires_grad_()
            stats = token_logprobs(
                logits=leaf,
                targets=targets,
                entropy=entropy,
                temperature=temperature,
                triton=triton,
            )
            summed(stats).backward()
            found.append([each.detach() for each in (*stats, leaf.grad) if each is not None])
        for torchs, ours in zip(*found, strict=True):
            name = f"{entropy}, {temperature}"
            assert torch.equal(torchs.isnan(), ours.isnan()), name
            assert torch.equal(torchs.isinf(), ours.isinf()), name
            assert (ours[[0, 7]].isfinite()).all()


@with_kernels
def test_rows_lie_beyond_what_32_bits_address() -> None:
    """The logits' memory is reserved and not filled."""
    columns, stride = 20, 2**30 + 16
    # Row 3 begins beyond 2³¹ elements; pages that nobody touches take no memory.
    memory = torch.empty(3 * stride + columns, dtype=torch.bfloat16)
    logits = memory.as_strided((4, columns), (stride, 1))
    torch.manual_seed(0)
    small = torch.randn(4, columns).bfloat16()
    logits.copy_(small)
    leaf = logits.requires_grad_()
    targets = torch.arange(4)
    small.requires_grad_()
    wanted = token_logprobs(logits=small, targets=targets)
    mask = torch.tensor([True, False, True, True])
    every = token_logprobs(logits=leaf, targets=targets)
    assert torch.equal(every.logprob, wanted.logprob)
    (of_leaf,) = torch.autograd.grad(every.logprob.sum(), leaf)
    (of_small,) = torch.autograd.grad(wanted.logprob.sum(), small, retain_graph=True)
    assert torch.equal(of_leaf, of_small)
    found = token_logprobs(logits=leaf, targets=targets, token_mask=mask).logprob
    assert torch.equal(found, wanted.logprob * mask)


def test_the_argument_comes_before_the_environment_and_that_before_the_device(monkeypatch):
    pytest.importorskip("triton")
    from megatron_idempotent.logprobs.arguments import backend_of

    def found(triton: bool | None) -> str:
        return backend_of(torch.device("cpu"), torch.float32, triton)

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for environment, usual in (("", "eager"), ("0", "eager"), ("1", "triton")):
        monkeypatch.setenv("MEGATRON_IDEMPOTENT_TRITON", environment)
        given = [found(triton) for triton in (None, False, True)]
        assert given == [usual, "eager", "triton"]
    monkeypatch.setenv("MEGATRON_IDEMPOTENT_TRITON", "yes")
    with pytest.raises(ValueError, match="TRITON is 'yes' in the environment; allowed: 1, 0 or un"):
        found(None)
    monkeypatch.delenv("TRITON_INTERPRET")
    with pytest.raises(ValueError, match="cpu is no GPU: set TRITON_INTERPRET=1"):
        found(True)


@pytest.mark.parametrize("ownership", ["borrow", "consume"])
@with_kernels
def test_tokens_without_gradient_and_padding_are_zeros_and_not_read(ownership: str) -> None:
    torch.manual_seed(0)
    columns, real = 160, 80  # padding has whole tiles and segments of its own
    whole = torch.randn(3, 4, columns)
    dead = torch.zeros(3, 4, dtype=torch.bool)
    dead[0] = dead[1, 2] = dead[2, :3] = True
    masked = torch.zeros(3, 4, dtype=torch.bool)
    masked[:, 1] = True
    whole[dead | masked] = torch.nan
    whole[..., real:] = torch.nan
    for mask in (None, ~masked):
        leaf = whole.clone().requires_grad_()
        stats = token_logprobs(
            logits=leaf * 1,
            targets=torch.arange(12).view(3, 4),
            vocab_size=real,
            token_mask=mask,
            entropy="grad",
            ownership=ownership,
        )
        used = ~dead & ~masked
        total = torch.where(used, stats.logprob, 0.0).sum()
        total = total + torch.where(used, stats.entropy, 0.0).sum()
        total.backward()
        assert not leaf.grad[~used].any()
        assert not leaf.grad[..., real:].any()
        exact = whole[used][:, :real].double().requires_grad_()
        logprobs, entropies = reference(exact, torch.arange(12).view(3, 4)[used])
        (logprobs.sum() + entropies.sum()).backward()
        # p of 80 columns times differences below 16, and float32's roundings of both.
        bound = {"rtol": 2.0**-23 * 80, "atol": 2.0**-23 * 16}
        torch.testing.assert_close(leaf.grad[used][:, :real].double(), exact.grad, **bound)


@with_kernels
def test_columns_need_not_follow_each_other() -> None:
    """Columns whose gradients do, or do not either."""
    torch.manual_seed(0)
    plain = torch.randn(5, 80)
    leaf = torch.zeros(80, 5)
    leaf.copy_(plain.t())
    apart = torch.zeros(5, 160)
    apart[:, ::2] = plain
    found = []
    for logits in (plain, leaf.t(), apart[:, ::2]):
        given = logits.detach().requires_grad_()
        stats = token_logprobs(logits=given, targets=torch.arange(5), entropy="grad")
        found.append((*stats[:3], *torch.autograd.grad(summed(stats), given)))
    for others in found[1:]:
        assert all(map(torch.equal, others, found[0]))


@with_kernels
def test_small_probabilities_lose_no_bits_to_a_large_exponent() -> None:
    """Distances of the logits, and their quotients, are whole numbers."""
    z = -torch.arange(0, 81, dtype=torch.float32)
    exact = -torch.softmax(z.double(), 0)
    for temperature in (1.0, 7.0):  # of which some products with 1 / 7 are no whole numbers
        leaf = (z * temperature)[None].clone().requires_grad_()
        stats = token_logprobs(logits=leaf, targets=torch.tensor([0]), temperature=temperature)
        stats.logprob.sum().backward()
        found = leaf.grad[0].double() * temperature
        error = ((found - exact) / exact)[1:].abs()
        # Units of 2⁻²⁴: 2ˣ is off by 2; the multiply-add, sum, factor and product by 1 each; log 2
        # in float32 by 0.05 for each of 80.
        assert error.max() <= 10 * 2.0**-24, float(error.max() * 2**24)


@with_kernels
def test_the_host_reads_from_the_device_once() -> None:
    """The test counts what the host would wait for a GPU for, with and without a mask."""

    class Reads(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.found: list[str] = []

        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            name = func.overloadpacket.__name__
            places = args[1] if name in ("index", "index_put_") else ()
            if name in ("_local_scalar_dense", "nonzero", "masked_select") or any(
                each is not None and each.dtype == torch.bool for each in places
            ):
                self.found.append(name)
            return func(*args, **(kwargs or {}))

    torch.manual_seed(0)
    mask = torch.rand(2, 2) < 0.6
    temperature = torch.rand(2, 2) + 0.5
    found = []
    for of_tokens in ({}, {"token_mask": mask}, {"token_mask": mask, "temperature": temperature}):
        leaf = torch.randn(2, 2, 80, requires_grad=True)
        listed: list[str] = []
        tolist = torch.Tensor.tolist

        def counted(self: torch.Tensor, listed: list[str] = listed, tolist: Any = tolist) -> Any:
            listed.append("tolist")
            return tolist(self)

        torch.Tensor.tolist = counted
        try:
            with Reads() as reads:
                stats = token_logprobs(
                    logits=leaf, targets=torch.arange(4).view(2, 2), entropy="grad", **of_tokens
                )
                summed(stats).backward()
        finally:
            torch.Tensor.tolist = tolist
        found.append(listed + reads.found)
    # The last: the lowest temperature of a tensor of them.
    assert found == [["tolist"], ["tolist"], ["tolist", "_local_scalar_dense"]]


# Triton 3.7 makes nodes of a syntax tree without a field that Python 3.13 asks for.
compiling = pytest.mark.filterwarnings("ignore:AnnAssign:DeprecationWarning")

#: Those that keep the most in registers.
MOST = (
    "statistics, bfloat16, entropy",
    "gradient, bfloat16, entropy",
    "quantize, float32",
    "tokens",
)


def checked(found) -> int:
    """Check what kernels at the speed of memory need; return how many there were."""
    count = 0
    for each in found:
        count += 1
        assert each.spilled_bytes == 0, each
        if each.name.startswith("tokens"):  # a few bytes, of which nothing is kept
            continue
        assert each.widest_load_bits == 128, each
        # Bytes in flight cover the latency of memory: 16 bytes a thread are 6 KiB at the least.
        assert each.threads >= 384, each
        if not each.name.startswith("statistics"):
            assert each.widest_store_bits == 128, each
    return count


@compiling
def test_the_largest_kernels_spill_nothing_and_load_16_bytes_at_a_time():
    pytest.importorskip("triton")
    from benchmarks.compiled_kernels import compile_one, programs

    chosen = [each for each in programs(False) if each.name.startswith(MOST)]
    assert checked(compile_one(each, 90) for each in chosen) == 6


@compiling
@pytest.mark.exhaustive
def test_no_kernel_of_any_shape_spills():
    pytest.importorskip("triton")
    from benchmarks.compiled_kernels import compiled

    assert checked(compiled(every_shape=True)) >= 30
