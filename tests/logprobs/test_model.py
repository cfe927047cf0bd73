"""Log-probs out of a model that makes no logits: those of its logits, and so are the gradients."""

from __future__ import annotations

from typing import Any

import models
import pytest
import torch
from ranks import on_ranks
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_idempotent.logprobs import Sampling, sources, topk_kl, vocab_topk
from megatron_idempotent.proof.cpu import tiny

pytestmark = pytest.mark.full

RECOMPUTED = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def against_logits(options: dict[str, Any]) -> list[bytes]:
    """Runs on a rank: both ways, bare and in DDP; what was found, as bytes."""
    (chunk,) = models.build(**options).chunks
    tokens, arguments = models.case()
    found = []
    for model in (chunk.module, chunk):
        wanted = models.from_logits(model, tokens, arguments)
        stats = models.from_hidden(model, tokens, arguments)
        assert type(stats) is type(wanted)
        models.agree(stats._asdict(), wanted._asdict())
        assert all(each.is_contiguous() for each in stats[:3])
        found += [each.detach().numpy().tobytes() for each in stats[:3]]
    models.agree(
        *(
            models.gradients(chunk, lambda way=way: models.total(way(chunk, tokens, arguments)))
            for way in models.WAYS
        )
    )
    return found


@pytest.mark.parametrize(
    "options",
    [
        {"tp": 1, "tied": False},
        {"tp": 2, "tied": True},
        {"tp": 2, "sequence_parallel": True, "tied": False},
        {"tp": 1, "config_overrides": RECOMPUTED, "tied": True},
        # What the ones above have in other pairs.
        *(
            pytest.param(options, marks=pytest.mark.exhaustive)
            for options in (
                {"tp": 1, "tied": True},
                {"tp": 2, "tied": False},
                {"tp": 2, "sequence_parallel": True, "tied": True},
                {"tp": 1, "config_overrides": RECOMPUTED, "tied": False},
            )
        ),
    ],
    ids=str,
)
def test_stats_and_gradients_are_those_of_the_logits(megatron_ranks, options):
    first, *others = megatron_ranks(options["tp"], against_logits, options)
    assert all(other == first for other in others)


@pytest.mark.parametrize("tied", [False, True])
@on_ranks(1)
def test_the_weight_has_its_gradient_in_main_grad_where_megatron_wants_it(tied: bool) -> None:
    """The layer is to add its weight's gradient to main_grad, and DDP not twice."""
    (chunk,) = models.build(tied=tied).chunks
    tokens, arguments = models.case()

    def run() -> Any:
        return models.total(models.from_hidden(chunk, tokens, arguments))

    wanted = models.gradients(chunk, run)
    chunk.module.output_layer.gradient_accumulation_fusion = True
    models.agree(models.gradients(chunk, run), wanted)
    weight = chunk.module.shared_embedding_or_output_weight() if tied else None
    weight = chunk.module.output_layer.weight if weight is None else weight
    assert weight.grad_added_to_main_grad


def of_a_teacher(options: dict[str, Any]) -> list[bytes]:
    """Runs on a rank: a teacher's tokens at each position, and the divergence from them; and ids
    that a sampler kept, which the hidden states have in another order."""
    (chunk,) = models.build(layers_per_stage=1, **options).chunks
    tokens, arguments = models.case()
    ids = torch.randint(0, models.REAL, (*tokens.shape, 6))
    given = {**arguments, "sampling": Sampling(keep=ids)}
    models.agree(*(way(chunk, tokens, given)._asdict() for way in models.WAYS))
    if options["tp"] == 1:
        with pytest.raises(ValueError, match=r"sampling.keep of shape \(2, 31, 6\), and hidden"):
            models.from_hidden(chunk, tokens, {**given, "sampling": Sampling(keep=ids[:, 1:])})
    mask = arguments["token_mask"]
    teacher = torch.randn(*tokens.shape, models.REAL, dtype=torch.float64)
    topk = vocab_topk(logits=teacher, k=5, token_mask=mask)
    given = {**arguments, "targets": topk.ids.int()}

    def divergence(way: Any) -> Any:
        stats = way(chunk, tokens, given)
        assert stats.logprob.shape == (*tokens.shape, 5)
        return topk_kl(
            stats,
            topk.logprob,
            teacher_rest=topk.rest,
            direction="mixed",
        ).kl

    stats, wanted = (way(chunk, tokens, given)._asdict() for way in models.WAYS)
    models.agree(stats, wanted)
    models.agree(
        *(models.gradients(chunk, lambda way=way: divergence(way).sum()) for way in models.WAYS)
    )
    return [each.detach().numpy().tobytes() for each in stats.values()]


@pytest.mark.parametrize("options", [{"tp": 1}, {"tp": 2, "sequence_parallel": True}], ids=str)
def test_ids_of_each_position_are_those_of_a_teacher_or_a_sampler(megatron_ranks, options):
    first, *others = megatron_ranks(options["tp"], of_a_teacher, options)
    assert all(other == first for other in others)


@on_ranks(1)
def test_the_logits_are_never_there_as_a_whole() -> None:
    """Rows of the largest tensor with a column for each token that a forward
    makes."""

    class Watching(TorchDispatchMode):
        rows = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None):
            result = func(*args, **(kwargs or {}))
            if getattr(result, "shape", (0,))[-1:] == (tiny.VOCABULARY,):
                self.rows = max(self.rows, result.numel() // tiny.VOCABULARY)
            return result

    (chunk,) = models.build(layers_per_stage=1).chunks
    tokens = models.case()[0].repeat(4, 1)
    found = []
    narrowest, sources.NARROWEST = sources.NARROWEST, 4  # of a vocabulary of 128
    try:
        for way in models.WAYS:
            with Watching() as watching, torch.no_grad():
                way(chunk, tokens, {"targets": tokens, "workspace_bytes": 4096})
            found.append(watching.rows)
    finally:
        sources.NARROWEST = narrowest
    from_hidden, from_logits = found
    assert from_logits == 4 * 2 * 32  # [S, B, V]
    assert from_hidden <= 64  # as of the weight, [H, V]


@on_ranks(1)
def test_the_output_layer_is_called_with_its_hooks_and_left_as_it_was() -> None:
    (chunk,) = models.build().chunks
    layer = chunk.module.output_layer
    tokens, arguments = models.case()
    seen = []
    layer.register_forward_pre_hook(lambda module, inputs: seen.append("before"))
    handle = layer.register_forward_hook(lambda module, inputs, output: seen.append("behind"))
    models.from_hidden(chunk, tokens, arguments)
    with pytest.raises(ValueError, match="temperature -1"):
        models.from_hidden(chunk, tokens, {**arguments, "temperature": -1})
    assert "forward" not in vars(layer)
    handle.remove()
    layer.register_forward_hook(lambda module, inputs, output: (output[0].logprob, None))
    with pytest.raises(RuntimeError, match="hook of the output layer made a Tensor of its Tok"):
        models.from_hidden(chunk, tokens, arguments)
    assert seen == ["before", "behind", "before", "before"]


def with_heads(options: dict[str, Any]) -> int:
    """Runs on a rank: MTP losses in the same forward; how often the output layer was called."""
    if options.get("use_mup") and not models.has_mup():
        return 0
    model = models.stage(mtp=2, **options)
    tokens, arguments = models.case()
    more = {"labels": tokens.roll(-1, 1), "loss_mask": (tokens % 3 > 0).double()}
    seen: list[Any] = []
    layer = model.output_layer
    handle = layer.register_forward_hook(lambda module, inputs, output: seen.append(output[0]))

    def of_logits() -> Any:
        model(**models.inputs(tokens), **more)
        logits_BSV = getattr(model, "_scale_logits", torch.clone)(seen[-1]).transpose(0, 1)
        return models.total(models.token_logprobs(logits=logits_BSV, **arguments))

    wanted = models.gradients(model, of_logits)
    of_heads = [value for name, value in wanted.items() if name.startswith("mtp.")]
    assert any(value.norm() > 0 for value in of_heads)
    handle.remove()
    models.agree(
        models.gradients(
            model, lambda: models.total(models.from_hidden(model, tokens, arguments, **more))
        ),
        wanted,
    )
    return len(seen)


@pytest.mark.parametrize(
    "options", [{"tied": True}, {"use_mup": True, "mup_output_mult": 0.3}], ids=str
)
def test_mtp_heads_have_their_loss_in_the_same_forward(megatron_ranks, options):
    (calls,) = megatron_ranks(1, with_heads, options)
    if not calls:
        pytest.skip("this release has no muP")
    assert calls == 3


def scaled() -> float | None:
    """Runs on a rank: muP's factor, and a model that does something else after its output layer."""
    if not models.has_mup():
        return None
    model = models.stage(use_mup=True, mup_output_mult=0.3, mup_base_hidden_size=16)
    tokens, arguments = models.case()
    for temperature in (arguments["temperature"], 0.7):
        given = {**arguments, "temperature": temperature}
        models.agree(*(way(model, tokens, given)._asdict() for way in models.WAYS))
    factor = model.config.mup_output_mult
    model._scale_logits = lambda logits: 30.0 * (logits / 30.0).tanh()
    with pytest.raises(
        ValueError, match=r"scale_logits makes .* not their product with a positive"
    ):
        models.from_hidden(model, tokens, arguments)
    return factor


def test_mup_scales_and_what_is_no_scale_is_refused(megatron_ranks):
    (factor,) = megatron_ranks(1, scaled)
    if factor is None:
        pytest.skip("this release has no muP")
    assert factor == 0.3


@on_ranks(1)
def test_who_calls_the_model_gives_it_the_processor() -> None:
    """The processor, given to a model by its caller, with labels too."""
    from megatron_idempotent.logprobs.model import logprobs_processor

    (chunk,) = models.build().chunks
    tokens, arguments = models.case()
    wanted = models.from_hidden(chunk, tokens, arguments)
    for more in ({}, {"labels": tokens}):
        processor = logprobs_processor(**arguments)
        stats = chunk(**models.inputs(tokens), output_processor=processor, **more)
        assert all(map(torch.equal, stats[:3], wanted[:3]))
