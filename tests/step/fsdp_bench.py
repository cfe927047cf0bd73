"""A small model on FSDP2, and the one-shot loop of plain torch that split steps are compared with.

Legend: B rows, T positions, H features, V vocabulary. Runs on a rank.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from scenario import ROWS, Bench, cut, mask_of
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_collectives, _fsdp_param_group
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)

from megatron_idempotent.proof.cpu import tiny

H, V = 16, tiny.VOCABULARY
CLIP = 0.1


class Block(nn.Module):
    """Mixes positions and features; drops some out, and counts its forwards in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(H)
        self.up, self.down = nn.Linear(H, 3 * H), nn.Linear(3 * H, H)
        self.dropout = nn.Dropout(0.1)
        self.register_buffer("forwards", torch.zeros(()))

    def forward(self, hidden_BTH):
        if self.training:
            self.forwards += 1
        before_BTH = hidden_BTH.cumsum(1) / hidden_BTH.shape[1]
        return hidden_BTH + self.dropout(self.down(torch.relu(self.up(self.norm(before_BTH)))))


class Model(nn.Module):
    """The negative log-likelihood of each next token, [B, T]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, H)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(H, V)

    def forward(self, tokens_BT):
        hidden_BTH = self.embedding(tokens_BT)
        for block in self.blocks:
            hidden_BTH = block(hidden_BTH)
        logits_BTV = self.head(hidden_BTH)
        targets_BT = tokens_BT.roll(-1, 1)
        return nn.functional.cross_entropy(logits_BTV.mT.float(), targets_BT, reduction="none")


class Counting:
    """Counts how often the collectives that FSDP2 makes have been called, by name."""

    def __init__(self, model: Model) -> None:
        self.counts = {"gather": 0, "scatter": 0}
        watch_collectives(model, self.called)

    def called(self, name):
        self.counts[name] += 1


class Tripped(RuntimeError):
    """A `Trip` raises this."""


class Trip:
    """Raises at one of the places that a step passes: in each layer, collective, and the update.

    Place `at` counts from 1, from when it was set; the names of all passed are in `passed`.
    """

    def __init__(self, model, optimizer, scheduler) -> None:
        self.at, self.passed, self.error = 0, [], Tripped
        watch_collectives(model, lambda name: self.passing(name))
        for name, module in model.named_modules():
            if not list(module.children()):
                module.register_forward_hook(functools.partial(self._in_layer, name))
        optimizer.register_step_pre_hook(lambda *_: self.passing("before the update"))
        optimizer.register_step_post_hook(lambda *_: self.passing("after the update"))
        original = scheduler.step

        def step():
            original()
            self.passing("after the schedule")

        scheduler.step = step

    def set(self, at, error=None):
        self.at, self.passed, self.error = at, [], error or Tripped

    def raise_at(self, name, error=Tripped):
        """Raise at the first place of that name; None for nowhere."""
        self.set(name, error)

    def passing(self, name):
        self.passed.append(name)
        if self.at in (len(self.passed), name):
            raise self.error(name)

    def _in_layer(self, name, module, args, output):
        self.passing(f"forward of {name}")
        if output.requires_grad:
            output.register_hook(lambda grad: self.passing(f"backward of {name}"))


def watch_collectives(model, called):
    """Have `called` get "gather" or "scatter" before each."""
    if not hasattr(FSDPModule, "set_custom_all_gather"):  # before torch 2.9
        for function, name in (("foreach_all_gather", "gather"), ("foreach_reduce", "scatter")):
            _watch_function(model, function, functools.partial(called, name))
        return

    def watched(kind, name):
        class Watched(kind):
            def __call__(self, *args, **kwargs):
                called(name)
                return super().__call__(*args, **kwargs)

        return Watched()

    for module in (*model.blocks, model):
        module.set_custom_all_gather(watched(_fsdp_collectives.DefaultAllGather, "gather"))
        module.set_custom_reduce_scatter(watched(_fsdp_collectives.DefaultReduceScatter, "scatter"))


def _watch_function(model, name, called):
    original = getattr(_fsdp_param_group, name)

    def watched(params, *args, **kwargs):
        if any(params[0]._module_info.module is module for module in model.modules()):
            called()
        return original(params, *args, **kwargs)

    setattr(_fsdp_param_group, name, watched)


def build(layout="shard", seed=7):
    """A sharded model with AdamW and a schedule of two parts; layouts as `LAYOUTS` has them."""
    torch.manual_seed(seed)
    model = Model()
    ranks = torch.distributed.get_world_size()
    options: dict[str, Any] = {"mesh": init_device_mesh("cpu", (ranks,))}
    if layout == "replicate and shard":
        options = {"mesh": init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))}
    elif layout == "tensor parallel":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for block in model.blocks:
            parallelize_module(block, mesh["tensor"], plan)
        options = {"mesh": mesh["data"]}
    elif layout == "half precision":
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        options["mp_policy"] = policy
    elif layout == "whole after forward":
        options["reshard_after_forward"] = False
    for block in model.blocks:
        fully_shard(block, **options)
    fully_shard(model, **options)
    if layout == "sum":
        model.blocks[0].set_gradient_divide_factor(float(ranks))
        model.set_force_sum_reduction_for_comms(True)
        model.set_gradient_divide_factor(1.0)
        # Has a group reduce zeros whenever it is asked to.
        model.set_reduce_scatter_unused_params(True)
    return (model, *optimizer_of(model))


def replica_of(layout):
    """This rank's data-parallel rank, by hand."""
    rank = torch.distributed.get_rank()
    return rank // 2 if layout == "tensor parallel" else rank


def optimizer_of(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler
    scheduler = schedule.SequentialLR(
        optimizer,
        [schedule.LinearLR(optimizer, 0.1, total_iters=4), schedule.ExponentialLR(optimizer, 0.9)],
        milestones=[2],
    )
    return optimizer, scheduler


def bench(layout="shard", loss=None, **options):
    """A bench whose step clips as `one_shot` does."""
    return Bench("fsdp", step={"clip_grad": CLIP, **options}, loss=loss, layout=layout)


def one_shot(model, optimizer, scheduler, loss, batch, *, clip=True, replicas=None):
    """The same step as a program writes it with nothing but torch; its norm and metrics."""
    model.train()
    optimizer.zero_grad()
    microbatches = list(cut(batch, [1] * (len(batch["input_ids"]) // ROWS)))
    rows = []
    for microbatch in microbatches:
        model.set_requires_gradient_sync(microbatch is microbatches[-1])
        total, metrics = loss(model(microbatch["input_ids"]), microbatch)
        total.backward()
        rows.append({"loss": float(total), **{n: float(v) for n, v in metrics.items()}})
    counts = torch.stack((batch["sample_mask"].sum(), mask_of(batch).sum()))
    torch.distributed.all_reduce(counts)
    ranks = torch.distributed.get_world_size()
    replicas = replicas or ranks
    counts *= replicas / ranks
    for parameter in model.parameters():
        parameter.grad.mul_(replicas / float(counts[int(loss.kind == "token")]))
    # torch takes no norm over parameters of several meshes; without clipping, in float64.
    if clip:
        # Not clip_grad_norm_: before torch 2.10 each rank adds its epsilon to its part of the norm.
        norm = nn.utils.get_total_norm([p.grad for p in model.parameters()]).full_tensor()
        nn.utils.clip_grads_with_norm_(model.parameters(), CLIP, norm)
    else:
        whole = [parameter.grad.full_tensor().double() for parameter in model.parameters()]
        norm = nn.utils.get_total_norm(whole)
    optimizer.step()
    scheduler.step()
    return float(norm), everywhere(rows, ranks // replicas, counts.tolist(), loss)


def everywhere(rows, stride, counts, loss):
    """Metrics of every `stride`-th rank, by hand."""
    told: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(told, rows)
    rows = [row for each in told[::stride] for row in each]
    sequences, tokens = counts
    found = {}
    for name in rows[0]:
        values = [row[name] for row in rows]
        kind = loss.normalizers.get(name, "tokens" if loss.kind == "token" else "sequences")
        if "_max" in name or "_min" in name:
            found[name] = (max if "_max" in name else min)(values)
        else:
            by = {"tokens": tokens, "sequences": sequences, "none": 1.0}[kind]
            found[name] = sum(values) * (1.0 / by)
    return found


def gradients(model):
    """This rank's shards of all gradients, in one vector."""
    return torch.cat([p.grad.to_local().flatten() for p in model.parameters()])


def parameters(model):
    """All parameters, whole."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return torch.cat([p.full_tensor().detach().flatten() for p in model.parameters()])


def state(model, optimizer, scheduler):
    """Return what the next step depends on: parameters, moments, rates, buffers, random state."""
    moments = [
        value.to_local() if hasattr(value, "to_local") else value
        for state in optimizer.state.values()
        for value in state.values()
    ]
    return [
        parameters(model),
        *(moment.clone().flatten() for moment in moments),
        torch.tensor([optimizer.param_groups[0]["lr"], scheduler.last_epoch]),
        *(buffer.clone() for buffer in model.buffers()),
        torch.get_rng_state(),
    ]


def same(got, want):
    """Return whether two states have the same bits."""
    return len(got) == len(want) and all(map(torch.equal, got, want))
