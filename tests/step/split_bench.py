"""Data, losses and the one-shot step that split steps are compared with.

Legend: B rows, T positions. Runs on a rank.
"""

from __future__ import annotations

from importlib.metadata import version
from typing import Any, ClassVar

import torch
from packaging.version import Version

import megatron_idempotent
from megatron_idempotent.proof.cpu import tiny
from megatron_idempotent.step import own_positions
from megatron_idempotent.step.packs import context_parallel_ranks

ROWS, T = tiny.BATCH, tiny.SEQUENCE
DEADLINE_S = 20.0
IS_0_12 = Version(version("megatron-core")) < Version("0.13")


class TokenLoss:
    """Cross entropy, summed over valid tokens."""

    kind = "token"
    normalizers: ClassVar = {"nll_by_sequence": "sequences", "rows": "none"}

    def __call__(self, output, microbatch):
        mask_BT = own_positions(mask_of(microbatch))
        nll = (output.float() * mask_BT).sum()
        return nll, {
            "nll": nll,
            "nll_by_sequence": nll,
            "rows": output.shape[0] if context_parallel_ranks()[0] == 0 else 0,
            "nll_max": output.max(),
            "nll_min": output.min(),
        }


class SequenceLoss(TokenLoss):
    """Cross entropy, a mean over each sequence's tokens, summed over valid sequences."""

    kind = "sequence"
    normalizers: ClassVar = {}

    def __call__(self, output, microbatch):
        mask_BT = mask_of(microbatch)
        means_B = (output.float() * mask_BT).sum(1) / mask_BT.sum(1).clamp(min=1)
        return means_B.sum(), {}


def mask_of(microbatch):
    """1 where position t predicts a valid token, [B, T]; the last position predicts none."""
    valid_BT = microbatch["token_mask"] * microbatch["sample_mask"][:, None]
    return torch.cat((valid_BT[:, 1:], valid_BT.new_zeros(len(valid_BT), 1)), 1)


def forward(model, microbatch):
    """The tiny GPT's loss of each position [B, T] on the last stage, or of this rank's."""
    tokens_BT = microbatch["input_ids"]
    length = tokens_BT.shape[1]
    positions_BT = torch.arange(length, device="cuda").expand_as(tokens_BT)
    hidden = torch.ones(1, 1, length, length, device="cuda").tril() < 0.5
    tokens_BT, positions_BT, labels_BT = (
        own_positions(each) for each in (tokens_BT, positions_BT, tokens_BT.roll(-1, 1))
    )
    return model(tokens_BT, positions_BT, hidden, labels=labels_BT)


def data(seed: int, rows: int, replica: int, *, full: bool = False) -> dict[str, Any]:
    """A replica's rows of a step: about half of the tokens and most rows valid, or all of them."""
    generator = torch.Generator().manual_seed(1000 * seed + replica)
    tokens_BT = torch.randint(0, tiny.VOCABULARY, (rows, T), generator=generator)
    token_mask_BT = (torch.rand(rows, T, generator=generator) < 0.5).float()
    sample_mask_B = (torch.rand(rows, generator=generator) < 0.8).float()
    if full:
        token_mask_BT, sample_mask_B = torch.ones(rows, T), torch.ones(rows)
    # Drawn on the host: the same on every device.
    return {
        "input_ids": tokens_BT.cuda(),
        "token_mask": token_mask_BT.cuda(),
        "sample_mask": sample_mask_B.cuda(),
    }


def cut(batch, sizes):
    """The batch in pieces of so many microbatches each."""
    start = 0
    for size in sizes:
        yield {name: value[start : start + size * ROWS] for name, value in batch.items()}
        start += size * ROWS


def build(**options):
    """A tiny model with all patches applied, its scheduler, and its replica's number."""
    megatron_idempotent.apply()
    overrides = {"calculate_per_token_loss": True, **options.pop("config_overrides", {})}
    rates = {"min_lr": 1e-4, **options.pop("optimizer_overrides", {})}
    model = tiny.build(config_overrides=overrides, optimizer_overrides=rates, **options)
    from megatron.core import parallel_state

    scheduler = scheduler_of(model.optimizer)
    return model, scheduler, parallel_state.get_data_parallel_rank()


def scheduler_of(optimizer):
    """A learning rate that warms up from 0, and a weight decay that grows."""
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=1e-3,
        min_lr=1e-4,
        lr_warmup_steps=100,
        lr_decay_steps=1000,
        lr_decay_style="linear",
        start_wd=0.0,
        end_wd=0.1,
        wd_incr_steps=1000,
        wd_incr_style="linear",
    )


def split_step(step, loss, batch, sizes, *, last=False, between=None, **begin):
    """A whole step in pieces of `sizes` microbatches; its result."""
    step_id = step.begin(loss, **{"global_batch_size": 8, "micro_batch_size": ROWS, **begin})
    pieces = list(cut(batch, sizes))
    for index, piece in enumerate(pieces):
        step.microbatch(step_id, piece, last=last and index == len(pieces) - 1)
        if between is not None:
            between(step_id)
    return step.finish(step_id)


def one_shot(model, scheduler, loss, batch, *, forward=forward):
    """The same step as a program writes it with nothing but Megatron; its gradient norm.

    A group of a loss is all of a microbatch's rows.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    for chunk in model.chunks:
        chunk.train()
        chunk.zero_grad_buffer()
    model.optimizer.zero_grad()

    def forward_step(data_iterator, chunk):
        microbatch = next(data_iterator)

        def loss_func(output):
            total, _ = loss(output, microbatch)
            if loss.kind == "token":
                mask_BT = mask_of(microbatch)
                # 0.12 adds up tokens over data-parallel ranks alone, so that each context-parallel
                # rank has to tell those of all of them.
                count = (mask_BT if IS_0_12 else own_positions(mask_BT)).sum()
            elif loss.kind == "group":
                count = microbatch["sample_mask"].any()
            else:
                count = microbatch["sample_mask"].sum()
            return total, count.to(torch.int), {"loss": total.detach().clone()}

        return forward(chunk, microbatch), loss_func

    number = len(batch["input_ids"]) // ROWS
    iterators = [cut(batch, [1] * number) for _ in model.chunks]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(iterators) > 1 else iterators[0],
        model=model.chunks,
        num_microbatches=number,
        seq_length=T,
        micro_batch_size=ROWS,
        forward_only=False,
    )
    _, grad_norm, _ = model.step()
    scheduler.step(increment=8)
    return grad_norm


def raised_by(call, *args, **kwargs):
    """The exception that a call ends in; None if it returns."""
    try:
        call(*args, **kwargs)
    except Exception as raised:  # noqa: BLE001  it is what is asked for
        return raised
    return None


def parameters(model):
    """All parameters of this rank, gathered first."""
    megatron_idempotent.ensure_params_synced(model.chunks)
    return model.parameters()


def state(model, scheduler):
    """Return what the next step depends on: parameters, moments, rates, schedule, random state.

    Parameters are as they are, so that the next forward still has to gather them.
    """
    chained = getattr(model.optimizer, "chained_optimizers", [model.optimizer])
    return [
        model.parameters(),
        torch.get_rng_state(),
        torch.tensor([float(scheduler.num_steps)]),
        torch.tensor([float(group["lr"]) for group in model.optimizer.param_groups]),
        *(
            value
            for one in chained
            for state in one.optimizer.state.values()
            for value in state.values()
            if isinstance(value, torch.Tensor)
        ),
    ]
