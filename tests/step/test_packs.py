"""The same sequences as rows, as packs, in other bins and in any number of calls."""

from __future__ import annotations

import re
from typing import Any, ClassVar

import pytest
import torch
from packs import PackLoss, PackSequenceLoss, double, exact_gradients, make, one_by_one, rows
from ranks import RELEASE, on_ranks
from scenario import DEADLINE_S, raised_by

import megatron_idempotent
from megatron_idempotent.fp8 import TokenAlignment
from megatron_idempotent.logprobs import shift_targets
from megatron_idempotent.proof.cpu import tiny
from megatron_idempotent.step import pack_batches

pytestmark = pytest.mark.full

#: Neither routers nor MTP layers know padding masks, or packs.
BEFORE_PADDING_MASKS = RELEASE < (0, 16)
MTP_SUMS = RELEASE < (0, 17)
#: A rounding of float64, in which gradients are compared.
U = 2.0**-53
#: Upstream computes the softmax of routers and of MTP's heads in float32, over no more words than
#: there are: as in tests/proof/cpu/test_against_one_rank.py.
SOFTMAX_IN_FP32 = (128 + 32) * 2.0**-24


def gradients(ways: list[str], kind: str, options: dict[str, Any]) -> dict[str, Any]:
    """Runs on a rank in float64: the gradient of the same sequences, made in several ways."""
    loss = PackLoss() if kind == "token" else PackSequenceLoss()
    model = double(**options)
    padded = TokenAlignment(sequence=4, pack=16)
    found: dict[str, Any] = {}
    for way in ways:
        step = megatron_idempotent.TrainStep(
            model.chunks, alignment=padded if "padded" in way else None, deadline_s=DEADLINE_S
        )
        batch = rows(dtype=torch.float64)
        budget = {"packs of 32": 32, "padded packs of 64": 64, "packs of 96": 96}.get(way)
        cut = {"micro_batch_size": 5} if way == "rows" else {"max_tokens_per_microbatch": budget}
        step_id = step.begin(loss, global_batch_size=12, **cut)
        if budget is not None or way == "rows":
            step.microbatch(step_id, batch)
        elif way == "one by one":
            step.microbatch(step_id, microbatches=one_by_one(batch))
        elif way == "ready":
            step.microbatch(step_id, microbatches=pack_batches(batch, 96))
        elif way == "a call each":
            for each in pack_batches(batch, 96):
                step.microbatch(step_id, microbatches=[each])
        else:
            assert way == "in two calls"
            for part in (slice(0, 5), slice(5, None)):
                piece = {name: value[part] for name, value in batch.items()}
                step.microbatch(step_id, microbatches=pack_batches(piece, 96, alignment=padded))
        found[way] = exact_gradients(model)
        step.abort(step_id)
    return found


def differences(found: dict[str, Any]) -> dict[str, float]:
    """Runs on a rank: how far each way is from the first, as a part of its norm."""
    first = next(iter(found.values()))
    assert first.norm() > 0
    return {way: float((each - first).norm() / first.norm()) for way, each in found.items()}


WAYS = ["one by one", "packs of 32", "padded packs of 64", "packs of 96", "in two calls"]


def compared(kind: str, options: dict[str, Any], ways: list[str] = WAYS) -> dict[str, float]:
    return differences(gradients(ways, kind, options))


def against_rows(kind: str) -> tuple[dict[str, float], float]:
    """Runs on a rank: what differs in each way, and what may."""
    import packs

    return compared(kind, {}), packs.allowed(kind, {}) * U


@pytest.mark.parametrize("kind", ["token", "sequence"])
def test_packs_have_the_gradient_of_their_sequences_as_rows(megatron_ranks, kind):
    ((found, bound),) = megatron_ranks(1, against_rows, kind)
    print(f"{max(found.values()) / bound:.1e} of {bound / U:.1e} roundings")
    # Far below a rounding of float32 or bfloat16.
    assert max(found.values()) < bound < 2.0**-30, found


@on_ranks(1)
def test_losses_that_are_means_over_tokens_do_not_depend_on_packing() -> None:
    """Losses of routers too, each with calculate_per_token_loss and without."""
    found = []
    for per_token in (True, False):
        overrides = {
            "moe_aux_loss_coeff": 0.0,
            "moe_z_loss_coeff": 1.0,
            "calculate_per_token_loss": per_token,
        }
        options = {"experts": 4, "config_overrides": overrides}
        found.append(compared("token", options, ["one by one", "rows", *WAYS[1:4]]))
    if BEFORE_PADDING_MASKS:
        # Routers cannot be told of padding there, and count it, as docs/train-step/packs.md says.
        for way in ("rows", "padded packs of 64"):
            assert all(each.pop(way) > SOFTMAX_IN_FP32 for each in found)
    assert max(max(each.values()) for each in found) < SOFTMAX_IN_FP32, found


@on_ranks(1)
def test_an_expert_bias_counts_no_padding() -> None:
    """A router with an expert bias counts the same tokens of sequences that are padded."""
    bias = {"moe_router_enable_expert_bias": True, "moe_router_score_function": "sigmoid"}
    model = double(experts=4, config_overrides={**bias, "moe_router_load_balancing_type": "none"})
    router = model.chunks[0].module.decoder.layers[0].mlp.router
    found = []
    for alignment in (None, TokenAlignment(sequence=4, pack=16), "rows"):
        rows_of = alignment == "rows"
        step = megatron_idempotent.TrainStep(
            model.chunks, alignment=None if rows_of else alignment, deadline_s=DEADLINE_S
        )
        cut = {"micro_batch_size" if rows_of else "max_tokens_per_microbatch": 4 if rows_of else 64}
        step_id = step.begin(PackLoss(), global_batch_size=12, **cut)
        step.microbatch(step_id, rows(dtype=torch.float64))
        found.append(router.local_tokens_per_expert.tolist())
        step.abort(step_id)
    without, *padded = found
    # Routers cannot be told of padding before 0.16.
    assert all((each == without) != BEFORE_PADDING_MASKS for each in padded)


ROUTED = {"experts": 4, "ep": 2, "config_overrides": {"moe_aux_loss_coeff": 0.0}}


def shared_experts() -> tuple[list[int], float, int]:
    """Runs on a rank that shares experts: replicas with other numbers of rows, or none."""
    bench = make(**ROUTED)
    batch, step_id = rows(bench.replica), bench.begin(**budget(32))
    made = []
    # As many packs on both, though one has less; fewer sequences than packs; and nothing.
    for number in ((12, 6), (12, 2), (12, 0)):
        piece = {name: value[: number[bench.replica]] for name, value in batch.items()}
        given = piece if number[bench.replica] else None
        made.append(bench.step.microbatch(step_id, given).microbatches)
    result = bench.step.finish(step_id)
    assert torch.isfinite(bench.gradients()).all()
    return made, float(result.grad_norm), result.microbatches


def budget(tokens: int | None) -> dict[str, Any]:
    return {"micro_batch_size": None, "max_tokens_per_microbatch": tokens}


def test_ranks_that_share_experts_make_as_many_packs(megatron_ranks):
    first, second = megatron_ranks(2, shared_experts)
    assert first[1:] == second[1:]
    assert first[0] == [5, 5, 5]
    assert second[0] == [5, 2, 0]
    assert first[2] == sum(first[0]) + sum(second[0])


@on_ranks(2)
def test_an_interleaved_pipeline_takes_a_multiple_of_its_stages_as_packs() -> None:
    bench = make(pp=2, vpp=2, layers_per_stage=1)
    step_id = bench.begin(**budget(64))
    assert bench.step.microbatch(step_id, rows()).microbatches == 4  # 144 tokens take 3
    bench.step.finish(step_id)


@on_ranks(1)
def test_the_same_packs_have_the_same_bits_whoever_made_them() -> None:
    """A budget, and the packs that it would make as a list, and one by one."""
    from megatron_idempotent.step import gpt_forward

    def named(model: Any, microbatch: Any) -> Any:
        """The same pack as other callers have it, with nothing but names that Megatron knows."""
        from megatron.core.packed_seq_params import PackedSeqParams

        pack = microbatch["pack"]
        tokens = microbatch["input_ids"]
        if style == "PackedSeqParams":
            lengths = {"max_seqlen_q": pack.max_seqlen, "max_seqlen_kv": pack.max_seqlen}
            borders = {"cu_seqlens_q": pack.cu_seqlens, "cu_seqlens_kv": pack.cu_seqlens}
            params = PackedSeqParams(qkv_format="thd", **borders, **lengths)
            return gpt_forward(model, {"input_ids": tokens[0], "params": params})
        if style == "cu_seqlens":
            real = torch.tensor([0, *pack.lengths]).cumsum(0)
            padded = pack.cu_seqlens[: len(real)]
            if int(padded[-1]) < pack.tokens:
                real, padded = torch.cat([real, real[-1:]]), pack.cu_seqlens
            borders = {"cu_seqlens": real, "cu_seqlens_padded": padded}
            return gpt_forward(model, {"input_ids": tokens, **borders})
        return gpt_forward(model, microbatch)

    found = []
    for style in ("budget", "list", "a call each", "PackedSeqParams", "cu_seqlens"):
        bench = make(forward=named)
        batch = rows(bench.replica)
        packs = pack_batches(batch, 64, attention=1 / (6 * 64))
        pieces = {"budget": [batch], "a call each": [[each] for each in packs]}
        tokens = 64 if style == "budget" else None
        found.append(bench.bits(bench.run(pieces.get(style, [packs]), **budget(tokens))))
    same = [torch.equal(a, b) for each in found for a, b in zip(each, found[0], strict=True)]
    assert all(same)


def shared_by_ranks(options: dict[str, Any], sequence: int, pack: int) -> str:
    """Runs on ranks that share positions, of which a pack has other multiples."""
    bench = make(**options)
    wrong, right = (
        pack_batches(rows(bench.replica), 96, alignment=TokenAlignment(sequence=each, pack=most))
        for each, most in ((sequence, pack), (4, 4))
    )
    step_id = bench.begin()
    told = str(raised_by(bench.step.microbatch, step_id, microbatches=wrong))
    bench.step.microbatch(step_id, microbatches=right)
    bench.step.finish(step_id)
    return told


@pytest.mark.parametrize(
    ("options", "alignment", "words"),
    [
        (
            {"tp": 2, "sequence_parallel": True},
            (3, 3),
            r"has \d+ positions for 2 ranks that share them by sequence",
        ),
        ({"cp": 2}, (2, 4), r"sequence \d+ begins at \d+, for 2 context-parallel ranks"),
    ],
    ids=["tp2", "cp2"],
)
def test_packs_that_ranks_cannot_share_are_refused(megatron_ranks, options, alignment, words):
    for told in megatron_ranks(2, shared_by_ranks, options, *alignment):
        assert re.search(words, told), told


@on_ranks(2)
def test_ranks_that_were_given_other_sequences_are_told() -> None:
    """Two stages are given other sequences, as many tokens in packs as large."""
    bench = make(pp=2)
    batch, step_id = rows(bench.replica), bench.begin(**budget(96))
    moved = {**batch, "lengths": batch["lengths"].clone()}
    if bench.rank:
        moved["lengths"][0] += 1
        moved["lengths"][3] -= 1
    told = str(raised_by(bench.step.microbatch, step_id, moved))
    bench.step.microbatch(step_id, batch)
    assert bench.step.finish(step_id).updated
    assert re.search(
        r"was given batch\(2 microbatches of up to 1 x \d+ \(shapes and lengths \w{8}\)\) on "
        r"one of its model parallel ranks and batch\(2 microbatches",
        told,
    ), told
    assert "the step is as it was" in told


@pytest.mark.full
@on_ranks(4)
def test_the_error_is_that_of_a_rank_whose_replica_was_given_other_sequences() -> None:
    """Ranks 1 and 3 are the second replica's two stages; rank 0 is not among them."""
    bench = make(pp=2)
    batch, step_id = rows(bench.replica), bench.begin(**budget(96))
    if bench.replica == 1:
        moved = {**batch, "lengths": batch["lengths"].clone()}
        if bench.rank == 3:
            moved["lengths"][0] += 1
            moved["lengths"][3] -= 1
        error: Any = raised_by(bench.step.microbatch, step_id, moved)
        assert list(error.failures) == [1]
    bench.step.microbatch(step_id, batch)
    assert bench.step.finish(step_id).updated


@pytest.mark.skipif(BEFORE_PADDING_MASKS, reason="MTP layers refuse packs before 0.16")
@on_ranks(1)
def test_mtp_heads_learn_nothing_of_padding() -> None:
    """MTP heads of a pack, with padding in it and without."""
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )

    from megatron_idempotent.megatron.layer_specs import gpt_stage
    from megatron_idempotent.proof.cpu.attention import with_exact_attention
    from megatron_idempotent.step import gpt_inputs

    config = double(config_overrides={"mtp_num_layers": 2}).config
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(5)
        model = gpt_stage(
            config,
            vp_stage=None,
            change_spec=with_exact_attention,
            vocab_size=tiny.VOCABULARY,
            max_sequence_length=64,
            mtp_block_spec=with_exact_attention(
                get_gpt_mtp_block_spec(config, spec, use_transformer_engine=False)
            ),
        )
    finally:
        torch.set_default_dtype(torch.float32)
    batch = rows(dtype=torch.float64)
    found: dict[str, Any] = {}
    for name, alignment in {
        "without": TokenAlignment(sequence=1, pack=1),
        "padded": TokenAlignment(sequence=4, pack=64),
    }.items():
        (microbatch,) = pack_batches(batch, 192, alignment=alignment)
        model.zero_grad(set_to_none=True)
        pack = microbatch["pack"]
        # 0.17 and 0.18 leave the heads' loss out where there are no labels.
        labels_BT = shift_targets(
            microbatch["input_ids"], mask=pack.mask[None], cu_seqlens=pack.cu_seqlens
        ).clamp(min=0)
        # Nothing of the tokens' loss: what is left is the heads' own.
        (model(**gpt_inputs(model, microbatch), labels=labels_BT) * 0.0).sum().backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        found[name] = torch.cat([each.flatten() for each in gradients])
    found = differences(found)
    assert max(found.values()) < SOFTMAX_IN_FP32, found


class Nothing:
    """A loss of 0, beside which heads have their own."""

    kind = "token"
    normalizers: ClassVar[dict[str, Any]] = {}

    def __call__(self, output: Any, microbatch: Any) -> Any:
        return (output * 0.0).sum(), {}


@pytest.mark.skipif(MTP_SUMS, reason="before 0.17 an MTP loss per token is another one")
@on_ranks(1)
def test_an_mtp_loss_weighs_as_many_tokens_however_gradients_are_divided() -> None:
    """MTP losses with calculate_per_token_loss against those without."""
    from megatron_idempotent.step import gpt_inputs

    def labelled(chunk: Any, microbatch: Any) -> Any:
        return chunk(**gpt_inputs(chunk, microbatch), labels=microbatch["input_ids"].roll(-1, 1))

    def gradient(cut: dict[str, int], *, per_token: bool) -> Any:
        config = {"mtp_num_layers": 1, "calculate_per_token_loss": per_token}
        none = {"position_embedding_type": "none"}
        model = double(config_overrides=config, model_overrides=none)
        padded = TokenAlignment(sequence=4, pack=16)
        step = megatron_idempotent.TrainStep(
            model.chunks, forward=labelled, alignment=padded, deadline_s=DEADLINE_S
        )
        step.microbatch(step.begin(Nothing(), global_batch_size=12, **cut), rows())
        return exact_gradients(model)

    found = []
    for cut in ({"micro_batch_size": 5}, {"max_tokens_per_microbatch": 64}):
        one, other = (gradient(cut, per_token=each) for each in (True, False))
        found.append(float(torch.dist(one, other) / one.norm()))
    assert max(found) < SOFTMAX_IN_FP32, found
