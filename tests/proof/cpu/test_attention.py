"""`ExactAttention` is upstream's attention to the bit, and plain attention in float64 elsewhere.

Legend: S positions of all ranks, B rows, N heads, G query groups, D channels, Q queries, K keys.
"""

import functools

import pytest
import torch
from attention_truth import plain

from megatron_idempotent.megatron.layer_specs import takes

pytestmark = pytest.mark.full

HEADS, CHANNELS, ROWS, POSITIONS = 4, 8, 2, 32
#: Of a pack: real lengths, and with padding, each a multiple of 2 * 4 ranks.
LENGTHS, PADDED = [5, 0, 16, 7, 3], [8, 8, 16, 8, 8]


def config_of(**options):
    from megatron.core.transformer.transformer_config import TransformerConfig

    return TransformerConfig(
        **{
            "num_layers": 2,
            "hidden_size": HEADS * CHANNELS,
            "num_attention_heads": HEADS,
            "attention_dropout": 0.0,
            "masked_softmax_fusion": False,
            "use_cpu_initialization": True,
            **options,
        }
    )


def modules(cp=1, classes=(), kind="causal", **options):
    """Build one attention of each class, after parallelism is up."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.enums import AttnMaskType

    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(context_parallel_size=cp)
    model_parallel_cuda_manual_seed(5)
    layer = options.pop("layer_number", 1)
    config = config_of(context_parallel_size=cp, **options)
    # As `Attention` gives it.
    scale = {"softmax_scale": options["softmax_scale"]} if "softmax_scale" in options else {}
    return [each(config, layer, AttnMaskType[kind], "self", **scale) for each in classes]


def inputs(groups=HEADS, dtype=None, rows=ROWS, positions=POSITIONS, narrow=CHANNELS):
    """Query, key, value and the gradient of what comes out, the same on every rank.

    `narrow` are the channels of value and output.
    """
    generator = torch.Generator().manual_seed(0)
    return [
        torch.randn(positions, rows, heads, channels, generator=generator, dtype=torch.float64)
        .to(dtype or torch.float64)
        .cuda()
        for heads, channels in (
            (HEADS, CHANNELS),
            (groups, CHANNELS),
            (groups, narrow),
            (HEADS, narrow),
        )
    ]


def run(module, tensors, *arguments, **options):
    """(output, gradients of query, key and value)"""
    *leaves, upstream = tensors
    leaves = [each.detach().clone().requires_grad_() for each in leaves]
    output = module(*leaves, *(arguments or (None,)), **options)
    output.backward(upstream.reshape(output.shape))
    return [output.detach(), *(each.grad for each in leaves)]


#: Options, kind of mask, groups, precision; bitwise as upstream.
AS_UPSTREAM = {
    "causal": {},
    "grouped": {"num_query_groups": 2},
    "padding": {"kind": "padding"},
    "scaled": {"softmax_scale": 0.3},
    "by layer": {
        "apply_query_key_layer_scaling": True,
        "attention_softmax_in_fp32": True,
        "fp16": True,
    },
    "bf16": {"bf16": True},
    "bf16, softmax in float32": {"bf16": True, "attention_softmax_in_fp32": True},
    "dropout": {"attention_dropout": 0.3},
    # From 0.15 on.
    "window": {"window_size": (5, 0)},
    "sink": {"softmax_type": "off-by-one"},
}


def compare_with_upstream():
    """The cases in which a bit differs."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_idempotent.proof.cpu.attention import ExactAttention

    found, seen = [], 0
    hidden = torch.zeros(ROWS, 1, 1, POSITIONS, dtype=torch.bool, device="cuda")
    hidden[0, ..., -7:] = True
    for name, case in AS_UPSTREAM.items():
        options = dict(case)
        known = hasattr(TransformerConfig, "softmax_type")
        if not known and name in ("window", "sink"):
            continue
        kind = options.pop("kind", "causal")
        dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}
        [dtype] = [dtype[key] for key in dtype if key in options] or [torch.float32]
        if "softmax_scale" in options and not takes(TransformerConfig, "softmax_scale"):
            continue
        pair = modules(classes=(DotProductAttention, ExactAttention), kind=kind, **options)
        tensors = inputs(options.get("num_query_groups", HEADS), dtype)
        results = []
        for module in pair:
            torch.manual_seed(3)
            modules(kind=kind)  # seeds the tracker
            results.append(run(module, tensors, hidden if kind == "padding" else None))
        seen += 1
        if not all(torch.equal(*pair) for pair in zip(*results, strict=True)):
            found.append(name)
    return found, seen


def test_rows_on_one_context_parallel_rank_give_upstreams_bits(megatron_ranks):
    [(found, seen)] = megatron_ranks(1, compare_with_upstream)
    assert not found
    assert seen >= 7


CASES = {
    "causal": {},
    "grouped": {"groups": 2},
    "not causal": {"kind": "no_mask"},
    "mask": {"kind": "padding", "hide": True},
    "window": {"window": (5, 0)},
    "window without end": {"window": (-1, 0)},
    "window both ways": {"window": (3, 2), "kind": "no_mask"},
    "window, second layer without": {
        "window": (5, 0),
        "layer_number": 2,
        "window_attn_skip_freq": 2,
    },
    "scaled": {"softmax_scale": 0.4},
    "sink": {"softmax_type": "off-by-one"},
    "narrow values": {"narrow": 4},  # as in latent attention
}


def errors(cp, packed, dtype_name):
    """The largest error of each case, as a part of its bound."""
    from megatron.core import parallel_state
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_idempotent.logprobs import context_parallel_part
    from megatron_idempotent.proof.cpu.attention import ExactAttention

    dtype = getattr(torch, dtype_name)
    modules(cp)
    rank = parallel_state.get_context_parallel_rank()
    found = {}
    for name, case in CASES.items():
        options = dict(case)
        kind, groups = options.pop("kind", "causal"), options.pop("groups", HEADS)
        window, hide = options.pop("window", None), options.pop("hide", False)
        narrow = options.pop("narrow", CHANNELS)
        if any(not takes(TransformerConfig, each) for each in options if each != "layer_number"):
            continue
        if hide and packed:
            continue
        more = {"num_query_groups": groups, "window_size": window, **options}
        kinds = functools.partial(ExactAttention, k_channels=CHANNELS, v_channels=narrow)
        [module] = modules(cp, (kinds,), kind, **more)
        limited = window if name != "window, second layer without" else None
        mask = None
        lengths, arguments, ends = [(0, POSITIONS)], {}, None
        tensors = inputs(groups, dtype, narrow=narrow)
        if packed:
            tensors = inputs(groups, dtype, rows=1, positions=sum(PADDED), narrow=narrow)
            packed_inputs = pack_of(LENGTHS, PADDED, max(PADDED))
            ends = packed_inputs.cu_seqlens_q_padded
            lengths = list(zip(ends.tolist(), LENGTHS, strict=False))
            arguments["packed_seq_params"] = packed_inputs
        if hide:
            mask = torch.zeros(ROWS, 1, 1, POSITIONS, dtype=torch.bool, device="cuda")
            mask[0, ..., -7:] = True

        def visible(length, kind=kind, limited=limited, mask=mask):
            place = torch.arange(length, device="cuda")
            ahead = place[None] - place[:, None]
            seen = torch.ones_like(ahead, dtype=torch.bool)
            if kind == "causal":
                seen &= ahead <= 0
            if limited is not None:
                seen &= (ahead >= -limited[0]) | (limited[0] < 0)
                seen &= ahead <= limited[1]
            return seen if mask is None else seen & ~mask.squeeze(1)

        scale = options.get("softmax_scale", CHANNELS**-0.5)
        expected, sizes, terms = plain(tensors, lengths, visible, scale, "softmax_type" in options)
        own = [
            context_parallel_part(each, rank=rank, size=cp, cu_seqlens=ends, dim=0)
            for each in tensors
        ]
        if packed:
            own = [each.squeeze(1) for each in own]
        results = run(module, own, mask, **arguments)
        unit = torch.finfo(dtype).eps / 2
        worst = 0.0
        for result, wanted, size in zip(results, expected, sizes, strict=True):
            wanted, size = (
                context_parallel_part(each, rank=rank, size=cp, cu_seqlens=ends, dim=0)
                for each in (wanted, size)
            )
            off = (result.double().reshape(wanted.shape) - wanted).abs()
            assert bool((off[size == 0] == 0).all()), name  # padding
            worst = max(worst, float((off / (size * terms * unit)).nan_to_num(0.0).max()))
        found[name] = worst
    return found


@pytest.mark.parametrize(
    ("ranks", "packed"),
    [
        *((1, True), (2, False), (4, True)),
        *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in ((1, False), (2, True))),
        pytest.param(4, False, marks=pytest.mark.exhaustive),
    ],
)
def test_every_rank_computes_plain_attention_of_its_queries(megatron_ranks, ranks, packed):
    for dtype in ("float64", "float32"):
        for found in megatron_ranks(ranks, errors, ranks, packed, dtype):
            assert len(found) >= (6 if packed else 7)
            assert not {name: worst for name, worst in found.items() if not worst <= 1.0}
            assert any(worst > 1e-6 for worst in found.values())


def tiny_gradients(cp, lengths, exact=True, **config):
    """Losses and gradients of a tiny GPT."""
    from megatron_idempotent.proof.cpu import tiny

    bench = tiny.build(cp=cp, lengths=lengths, exact_attention=exact, config_overrides=config)
    return bench.forward_backward(2, data_seed=3), bench.gradients()


def equal(found, wanted):
    pairs = zip(found, wanted, strict=True)
    return all(a[0] == b[0] and bool((a[1] == b[1]).all()) for a, b in pairs)


def test_a_model_has_the_bits_of_upstreams_attention(megatron_ranks):
    dropped = {"attention_dropout": 0.3, "hidden_dropout": 0.1}
    for config in ({}, dropped):
        exact, upstreams = (
            megatron_ranks(1, tiny_gradients, 1, None, exact, **config) for exact in (True, False)
        )
        assert equal(exact, upstreams)


@pytest.mark.parametrize("cp", [pytest.param(1, marks=pytest.mark.exhaustive), 2])
def test_recomputation_replays_dropout_in_packs_and_over_ranks(megatron_ranks, cp):
    keep = {"attention_dropout": 0.3, "hidden_dropout": 0.1}
    full = {"recompute_method": "uniform", "recompute_num_layers": 1}
    stored, whole, selected, without = (
        megatron_ranks(cp, tiny_gradients, cp, [8, 24], **config)
        for config in (
            keep,
            {**keep, "recompute_granularity": "full", **full},
            {**keep, "recompute_granularity": "selective"},
            {},
        )
    )
    assert equal(whole, stored)
    assert equal(selected, stored)
    assert stored[0][0] != without[0][0]


def pack_of(real, padded=None, longest=None, qkv_format="thd"):
    from megatron.core.packed_seq_params import PackedSeqParams

    real, padded = (
        each
        and torch.tensor([0, *each], dtype=torch.int32, device="cuda").cumsum(0, dtype=torch.int32)
        for each in (real, padded)
    )
    return PackedSeqParams(
        qkv_format=qkv_format,
        cu_seqlens_q=real,
        cu_seqlens_kv=real,
        cu_seqlens_q_padded=padded,
        cu_seqlens_kv_padded=padded,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
    )


def of_padding():
    """Two sequences of one token each, of which the other three ranks have padding only."""
    from megatron.core import parallel_state

    from megatron_idempotent.proof.cpu.attention import ExactAttention

    [module] = modules(4, (ExactAttention,))
    whole = [each.squeeze(1) for each in inputs(rows=1, positions=4)]
    output, *gradients = run(module, whole, packed_seq_params=pack_of([1, 1], [8, 8]))
    return parallel_state.get_context_parallel_rank(), [
        int((each != 0).flatten(1).any(1).sum()) for each in (output, *gradients)
    ]


def test_a_rank_with_padding_only_meets_the_others_in_the_backward(megatron_ranks):
    for rank, tokens in megatron_ranks(4, of_padding):
        # A token that sees itself alone: its probability is 1, whatever query and key are.
        assert tokens == ([2, 0, 0, 2] if rank == 0 else [0, 0, 0, 0])


def refusals(cp):
    """Return the error of each wrong input."""
    from megatron_idempotent.proof.cpu.attention import ExactAttention, with_exact_attention

    [module] = modules(cp, (ExactAttention,))
    rows = inputs(positions=8)[:3]
    pack = [each[:, 0] for each in rows]
    mask = torch.zeros(1, 1, 3, 8, dtype=torch.bool, device="cuda")
    odd = [each[:7] for each in rows]
    found = []
    for tensors, options in [
        (rows, {"attention_bias": torch.zeros(1, device="cuda")}),
        (rows, {"attention_mask": mask}),
        (rows, {"packed_seq_params": pack_of([8 * cp])}),
        (pack, {"packed_seq_params": pack_of([8 * cp], qkv_format="sbhd")}),
        (pack, {"packed_seq_params": pack_of([9 * cp])}),
        (pack, {"packed_seq_params": pack_of([6, 8], [4, 8 * cp - 4])}),
        (pack, {"packed_seq_params": pack_of([8 * cp], longest=4)}),
        (pack, {"packed_seq_params": pack_of([2, 8 * cp - 2])}),
        (odd, {}),
    ]:
        options = {"attention_mask": None, **options}
        try:
            module(*tensors, **options)
        except ValueError as error:
            found.append(str(error))
        else:
            found.append("")
    for wrong in (
        lambda: modules(cp, (ExactAttention,), qk_clip=True),
        lambda: with_exact_attention(object()),
    ):
        try:
            wrong()
        except (ValueError, TypeError) as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("cp", [1, 2])
def test_what_does_not_fit_is_refused_with_its_values(megatron_ranks, cp):
    wanted = [
        "attention_bias: pass None",
        f"(1, 1, 3, 8): pass [rows, 1, 8 of this rank or all {8 * cp} queries, all {8 * cp} keys]",
        "[T, heads, channels], of one row",
        "qkv_format='sbhd'",
        f"end at {9 * cp}, in a pack of {8 * cp} positions",
        "sequence 0 of 6 positions, and of 4 with padding",
        f"max_seqlen_q=4 and a sequence of {8 * cp}",
        "sequence 0 of 2 positions for 2" if cp > 1 else "",
        "7 queries and 7 keys on one of 2" if cp > 1 else "",
        "qk_clip=True",
        "no core_attention",
    ]
    for found in megatron_ranks(cp, refusals, cp):
        assert len(found) == len(wanted)
        assert all(part in text for part, text in zip(wanted, found, strict=True)), found
        assert [bool(text) for text in found] == [bool(part) for part in wanted]
