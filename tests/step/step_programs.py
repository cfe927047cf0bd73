"""Programs of a step's calls on two models: one is stepped in pieces, the other one at once.

The one-shot side knows nothing of pieces: it makes a step when the split side finishes one, from
all microbatches at once. Replicas with less data have masked rows there instead. Runs on a rank.
"""

from __future__ import annotations

import math
from typing import Any

import fsdp_bench
import torch
from critic import Task
from lora import Lora
from scenario import ROWS, Bench, cut, data, forward, one_shot, raised_by

import megatron_idempotent

ROWS_OF_A_STREAM = 64 * ROWS

#: A program of all operations: pieces of other sizes on each replica, of none, and no call at all.
PROGRAM: list[Any] = [
    *[("begin",), ("export",), ("microbatch", (1, 2)), ("logprobs",)],
    *[("microbatch", (0, 1)), ("evaluate",), ("microbatch", (2, 0), {"last": True}), ("finish",)],
    *[("export",), ("begin",), ("microbatch", (1, 1)), ("abort",), ("logprobs",)],
    *[("begin",), ("microbatch", (3, 2)), ("finish",), ("evaluate",)],
    *[("begin",), ("microbatch", (1, 1)), ("fail", "loss"), ("abort",)],
    *[("begin",), ("fail", "backward"), ("abort",)],
    *[("begin",), ("microbatch", (2, 2), {"ready": True}), ("microbatch", (None, 2))],
    *[("finish",), ("begin",), ("finish",), ("logprobs",), ("export",)],
]


def fitted(program: list[Any], options: dict[str, Any]) -> list[Any]:
    """The program as a layout can have it.

    Replicas that share experts, or whose experts have losses of their own, get as much data as the
    one with the most: masked rows have auxiliary losses, and rows that are not there have none. An
    interleaved pipeline gets an even number of microbatches. No backward fails where a rank may
    wait for another one in it, which ends the session.
    """
    if options.keys() & {"tp", "pp", "cp", "ep"}:
        program = [("fail", "loss") if each == ("fail", "backward") else each for each in program]
    even, unit = options.get("experts"), 2 if options.get("vpp") else 1

    def size(own: int | None, sizes: Any) -> int | None:
        if even:
            own = max(each or 0 for each in sizes)
        return None if own is None else unit * own

    return [
        (name, tuple(size(each, rest[0]) for each in rest[0]), *rest[1:])
        if name == "microbatch"
        else (name, *rest)
        for name, *rest in program
    ]


class Pair:
    """Two models, of which one is stepped in pieces.

    Args:
        engine: "megatron" or "fsdp".
        options: of `Bench`; "adapted" are arguments of `Lora`, whose adapters alone are trained,
            and "task" is the name of a `Task`.
        split: the one that is stepped in pieces, where it is another than `options` make.
    """

    def __init__(self, engine: str, options: dict[str, Any], split: Any = None) -> None:
        self.fsdp = engine == "fsdp"
        self.layout = options.get("layout", "shard")
        step: dict[str, Any] = {}
        if self.fsdp:
            # torch takes no norm over parameters of several meshes to clip by.
            step["clip_grad"] = None if self.layout == "tensor parallel" else fsdp_bench.CLIP
        options = {**options}
        self.forward, rows_of = forward, data
        if (adapted := options.pop("adapted", None)) is not None:
            options["before_ddp"] = Lora(**adapted)
        self.task = options.pop("task", None)
        if self.task is not None:
            task = getattr(Task, self.task)()
            options |= {"before_ddp": task.before_ddp, "loss": task.loss}
            self.forward, rows_of = task.forward, task.rows
        if not self.fsdp:
            step["forward"] = self.forward
        self.split = split or Bench(engine, step=step, **options)
        # Where FSDP2 is told to add up, the loop to compare with lets it average.
        plain = {"layout": "shard"} if self.layout == "sum" else {}
        self.whole = Bench(engine, **{**options, **plain})
        for bench in (self.split, self.whole) if self.fsdp else ():
            for block in bench.module.blocks:
                block.dropout.p = 0.0  # the two would draw in another order
        self.replicas = replicas_of(engine, self.layout)
        self.batch = rows_of(7, ROWS_OF_A_STREAM, self.split.replica)
        self.taken = 0
        self.given: list[Any] = []
        self.numbers: list[int] = []

    def run(self, program: list[Any]) -> None:
        """Do all of a program; raise where the two sides differ."""
        for name, *arguments in program:
            how = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
            getattr(self, name)(*arguments, **how)

    def piece(self, size: int) -> Any:
        """The next microbatches of this replica's stream, without end."""
        start = self.taken * ROWS % (ROWS_OF_A_STREAM - size * ROWS)
        self.taken += size
        return {n: v[start : start + size * ROWS] for n, v in self.batch.items()}

    def begin(self) -> None:
        self.split.begin()
        self.given, self.numbers = [], [0] * self.replicas

    def microbatch(self, sizes: list[int | None], last: bool = False, ready: bool = False) -> None:
        """Give each replica so many microbatches, as rows or as a list; None has no call."""
        shares = [sizes[replica % len(sizes)] for replica in range(self.replicas)]
        self.numbers = [
            before + (share or 0) for before, share in zip(self.numbers, shares, strict=True)
        ]
        size = shares[self.split.replica]
        if size is None:
            return
        piece = self.piece(size)
        pieces = list(cut(piece, [1] * size))
        given = {"microbatches": pieces} if ready else {"batch": piece}
        self.split.step.microbatch(self.split.step_id, **given, last=last)
        self.given += pieces

    def fail(self, place: str) -> None:
        """A batch that fails on all ranks."""
        self.split.loss.place = place
        assert raised_by(self.split.step.microbatch, self.split.step_id, self.piece(2)) is not None
        self.split.loss.place = None

    def finish(self) -> None:
        result = self.split.step.finish(self.split.step_id)
        number = max(self.numbers)
        assert result.updated is bool(number)
        if not number:
            return
        padding = {name: value[:ROWS] for name, value in self.batch.items()}
        for mask in ("token_mask", "sample_mask"):
            padding[mask] = torch.zeros_like(padding[mask])
        given = self.given + [padding] * (number - len(self.given))
        whole = {name: torch.cat([each[name] for each in given]) for name in padding}
        norm, metrics = self.at_once(whole)
        # Some 6,000 squares are added up in float32, in whatever order: at most a relative error of
        # 6,000 u in the sum, half of that in the root; u = 2**-24.
        bound = 3000 * 2.0**-24 if self.layout == "tensor parallel" else 0.0
        assert norm > 0
        assert math.isclose(result.grad_norm, norm, rel_tol=bound)
        assert {name: result.metrics[name] for name in metrics} == metrics
        assert torch.equal(self.split.gradients(), self.whole.gradients())
        # All ranks are told the same, whatever each has had of the data and of what is trained.
        own = result.grad_norm, result.lr, result.weight_decay, result.metrics, result.rows
        everywhere: list[Any] = [None] * torch.distributed.get_world_size()
        torch.distributed.all_gather_object(everywhere, own)
        assert all(other == own for other in everywhere)

    def at_once(self, batch: Any) -> tuple[float, dict[str, float]]:
        """The norm, and on FSDP2 the metrics that no masked row changes."""
        if not self.fsdp:
            whole = self.whole
            norm = one_shot(whole.model, whole.scheduler, whole.loss, batch, forward=self.forward)
            return float(norm), {}
        clip = self.layout != "tensor parallel"
        norm, metrics = fsdp_bench.one_shot(
            *self.whole.parts, self.whole.loss, batch, clip=clip, replicas=self.replicas
        )
        return norm, {n: metrics[n] for n in ("loss", "nll", "nll_by_sequence") if n in metrics}

    def abort(self) -> None:
        self.split.step.abort(self.split.step_id)

    def logprobs(self) -> None:
        """A direct forward, as of log-probs under the policy that is being trained."""
        piece = self.piece(1)
        if not self.fsdp and self.split.model.config.pipeline_model_parallel_size > 1:
            return  # no stage has all of the model

        def values(model: Any) -> Any:
            return model(piece["input_ids"]) if self.fsdp else self.forward(model, piece)

        with self.split.step.reading() as (model,):
            got = values(model)
        self.whole.parameters()
        with torch.no_grad():
            want = values(self.whole.module.eval())
        self.whole.module.train()
        assert torch.equal(got, want)

    def evaluate(self) -> None:
        """A forward without gradients, in no context of ours."""
        if self.task is not None:
            return  # the tiny model's own loss is of logits

        def values(bench: Bench) -> torch.Tensor:
            if self.fsdp:
                return bench.module.eval()(self.batch["input_ids"][:2])
            losses = bench.model.forward_backward(2, data_seed=5, forward_only=True)
            return torch.tensor([float(each) for each in losses])

        with torch.no_grad():
            assert torch.equal(values(self.split), values(self.whole))

    def export(self) -> None:
        """The weights, read inside of the step's context and outside of it."""
        with self.split.step.reading() as (model, *_):
            # Megatron's without a gather: the step has made it.
            got = fsdp_bench.parameters(model) if self.fsdp else self.split.model.parameters()
        assert torch.equal(got, self.whole.parameters())
        if not self.fsdp:
            assert megatron_idempotent.ensure_params_synced(self.split.model.chunks) == 0


def replicas_of(engine: str, layout: str) -> int:
    """Return the number of ranks, or of groups that share a model, with data of their own."""
    if engine == "fsdp":
        return torch.distributed.get_world_size() // (2 if layout == "tensor parallel" else 1)
    from megatron.core import parallel_state

    number: int = parallel_state.get_data_parallel_world_size()
    return number


def ran(engine: str, options: dict[str, Any], program: list[Any] = PROGRAM) -> None:
    """Run a program on a pair, as its layout can have it."""
    Pair(engine, options).run(fitted(program, options))
