"""Log-probs out of models in wrappers, pipelines and steps."""

from __future__ import annotations

from typing import Any, ClassVar

import models
import pytest
import torch
import torch.distributed as dist
from ranks import on_ranks
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import megatron_idempotent
from megatron_idempotent import TokenStats, WindowAborted
from megatron_idempotent.proof.cpu import tiny


def gathered(align: bool) -> bytes:
    """Runs on a rank: a forward after a step whose update is still to be gathered."""
    megatron_idempotent.apply(strict=True)
    # The output layer has a bucket of its own, which nobody else waits for.
    own = {"bucket_size": tiny.VOCABULARY * 64}
    model = tiny.build(overlap_param_gather=True, align=align, ddp_overrides=own)
    (chunk,) = model.chunks
    model.forward_backward(2, data_seed=0)
    before = chunk.module.output_layer.weight.detach().clone()
    model.step()
    tokens, arguments = models.case()
    with torch.no_grad():
        stats = models.from_hidden(chunk, tokens, arguments)
        group = chunk.param_to_bucket_group[chunk.module.output_layer.weight]
        assert len(group.params) == 1
        assert group.param_gather_dispatched
        assert group.param_gather_handle is None
        assert megatron_idempotent.ensure_params_synced([chunk]) == 0
        again = models.from_hidden(chunk.module, tokens, arguments)
        wanted = models.from_logits(chunk, tokens, arguments)
    assert not torch.equal(before, chunk.module.output_layer.weight)
    assert all(map(torch.equal, stats[:3], again[:3]))
    torch.testing.assert_close(stats.logprob, wanted.logprob)
    return stats.logprob.numpy().tobytes()


@pytest.mark.parametrize("align", [True, pytest.param(False, marks=pytest.mark.exhaustive)])
def test_the_weight_is_waited_for_before_it_is_read(megatron_ranks, align):
    first, second = megatron_ranks(2, gathered, align)
    assert first == second


@on_ranks(2)
def test_a_sharded_weight_is_whole_for_the_call() -> None:
    """FSDP2, by layer; its gradients are those of whole parameters."""
    model = models.stage()
    tokens, arguments = models.case()
    wanted = models.gradients(
        model, lambda: models.total(models.from_logits(model, tokens, arguments))
    )
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for module in (*model.decoder.layers, model.embedding, model.output_layer, model):
        fully_shard(module, mesh=mesh)
    models.total(models.from_hidden(model, tokens, arguments)).backward()
    found = {name: value.grad.full_tensor() for name, value in model.named_parameters()}
    models.agree(found, wanted)


@on_ranks(1)
def test_wrappers_that_make_tuples_of_it_return_stats() -> None:
    """A bfloat16 model in Float16Module and DDP, and frozen weights."""
    megatron_idempotent.apply(strict=True)
    (chunk,) = tiny.build(dtype="bf16", with_optimizer=False, overlap_grad_reduce=False).chunks
    tokens, arguments = models.case()
    wanted = models.from_logits(chunk, tokens, arguments)
    stats = models.from_hidden(chunk, tokens, arguments)
    assert type(stats) is TokenStats
    assert {each.dtype for each in stats[:3]} == {torch.float32}
    # On both ways logits are rounded, of which a log-prob has two; the temperature is 0.5 or more.
    largest = float(chunk(**models.inputs(tokens)).abs().max())
    bound = 4 * torch.finfo(torch.bfloat16).eps / 2 * largest / 0.5
    torch.testing.assert_close(stats.logprob, wanted.logprob, rtol=0, atol=bound)
    without = models.from_hidden(chunk, tokens, {**arguments, "entropy": "none"})
    assert without.entropy is None
    assert torch.equal(without.logprob, stats.logprob)
    chunk.module.module.output_layer.weight.requires_grad_(False)
    frozen = models.from_hidden(chunk, tokens, arguments)
    assert torch.equal(frozen.logprob, stats.logprob)


class _Loss:
    """Sums log-probs and entropies over valid tokens."""

    kind = "token"
    normalizers: ClassVar = {"entropy": "tokens"}

    def __call__(self, output: Any, microbatch: Any) -> Any:
        mask_BS = microbatch["token_mask"] * microbatch["sample_mask"][:, None]
        entropy = (output.entropy * mask_BS).sum()
        return -(output.logprob * mask_BS).sum() - 0.1 * entropy, {"entropy": entropy}


@pytest.mark.parametrize(
    ("ranks", "options"),
    [
        (1, {}),
        (2, {"pp": 2, "tied": True}),
        (2, {"ep": 2, "experts": 2}),
        (4, {"pp": 2, "tp": 2, "sequence_parallel": True}),
        pytest.param(2, {"pp": 2}, marks=pytest.mark.exhaustive),
        pytest.param(2, {"pp": 2, "vpp": 2}, marks=pytest.mark.exhaustive),
    ],
    ids=str,
)
@on_ranks("ranks")
def test_a_step_of_stats_is_the_step_of_logits(options: dict[str, Any]) -> None:
    """A step in two pieces, out of hidden states and out of logits.

    Where ranks share experts the second piece is the first rank's alone.
    """
    from megatron.core import parallel_state

    from megatron_idempotent import TrainStep

    model = models.build(
        with_optimizer=True, optimizer_overrides={"clip_grad": 0.0}, layers_per_stage=1, **options
    )
    parameters = [p for chunk in model.chunks for p in chunk.parameters()]
    start = [p.detach().clone() for p in parameters]

    def of_hidden(chunk: Any, microbatch: Any) -> Any:
        tokens = microbatch["input_ids"]
        arguments = {"targets": tokens.roll(-1, 1), "entropy": "grad"}
        return models.from_hidden(chunk, tokens, arguments)

    def of_logits(chunk: Any, microbatch: Any) -> Any:
        tokens = microbatch["input_ids"]
        output = chunk(**models.inputs(tokens))
        if output.shape[:2] != tokens.shape:  # [S, B, H] for the next stage
            return output
        group = parallel_state.get_tensor_model_parallel_group()
        return models.token_logprobs(
            logits=output, targets=tokens.roll(-1, 1), tp_group=group, entropy="grad"
        )

    tokens, _ = models.case()
    batch = {
        "input_ids": torch.cat([tokens, tokens.flip(1)]),
        "token_mask": (torch.arange(128).view(4, 32) % 3 > 0).double(),
        "sample_mask": torch.ones(4),
    }
    found = []
    for forward in (of_hidden, of_logits):
        for parameter, value in zip(parameters, start, strict=True):
            parameter.data.copy_(value)
        step = TrainStep(model.chunks, model.optimizer, forward=forward)
        step_id = step.begin(_Loss(), global_batch_size=8, micro_batch_size=2)
        for piece in (batch, None if "ep" in options and dist.get_rank() else batch):
            step.microbatch(step_id, piece)
        metrics = step.finish(step_id).metrics
        gradients = {
            f"{number}.{name}": parameter.main_grad.clone()
            for number, chunk in enumerate(model.chunks)
            for name, parameter in chunk.named_parameters()
        }
        found.append(({n: torch.tensor(v) for n, v in metrics.items()}, gradients))
    for ours, wanted in zip(*found, strict=True):
        models.agree(ours, wanted)


@on_ranks(2)
def test_a_loss_of_stats_that_raises_aborts_the_step_on_all_ranks() -> None:
    """The first one's loss raises, then
    none."""
    from megatron_idempotent import TrainStep

    class Loss(_Loss):
        def __call__(self, output: Any, microbatch: Any) -> Any:
            if dist.get_rank() == 0 and not told:
                raise ArithmeticError("no loss")
            return super().__call__(output, microbatch)

    def forward(chunk: Any, microbatch: Any) -> Any:
        tokens = microbatch["input_ids"]
        return models.from_hidden(chunk, tokens, {"targets": tokens, "entropy": "metric"})

    told: list[str] = []
    model = models.build(with_optimizer=True, optimizer_overrides={"clip_grad": 0.0}, tp=2)
    tokens = models.case()[0]
    masks = {"token_mask": torch.ones(tokens.shape), "sample_mask": torch.ones(len(tokens))}
    batch = {"input_ids": tokens, **masks}
    step = TrainStep(model.chunks, model.optimizer, forward=forward, deadline_s=20)
    for _ in range(2):
        step_id = step.begin(Loss(), global_batch_size=2, micro_batch_size=2)
        try:
            step.microbatch(step_id, batch)
            told.append(str(step.finish(step_id).updated))
        except WindowAborted as aborted:
            told.append(str(aborted))
            step.abort(step_id)
    aborted, then = told
    assert "rank 0: loss: ArithmeticError: no loss" in aborted
    assert then == "True"
