"""Runs a list of actions on a small model, with faults at some of them: `scenario`.

It returns the bits that each step left and what each action raised. An action is a tuple: the name
of a function in `ACTIONS`, then its arguments. A fault is a place where some ranks raise during one
action. Data, losses, models and the one-shot step, which knows nothing of pieces, are those of all
tests of steps.

Legend: B rows, T positions. Runs on a rank.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import ranks
import torch

import megatron_idempotent
from megatron_idempotent.proof.cpu import tiny
from megatron_idempotent.step import own_positions
from megatron_idempotent.step.pack_layout import context_parallel_ranks

ROWS, T = tiny.BATCH, tiny.SEQUENCE
DEADLINE_S = 20.0
IS_0_12 = ranks.RELEASE < (0, 13)


class TokenLoss:
    """Cross entropy, summed over valid tokens; times a factor, which no metric has."""

    kind = "token"
    normalizers: ClassVar = {"nll_by_sequence": "sequences", "rows": "none"}

    def __init__(self, factor: float = 1.0) -> None:
        self.factor = factor

    def __call__(self, output, microbatch):
        mask_BT = own_positions(mask_of(microbatch))
        nll = (output.float() * mask_BT).sum()
        return nll * self.factor, {
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
    ranks.patch()
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


def documented(page):
    """The programs of a page in docs/train-step/, in their order."""
    text = (Path(__file__).parents[1] / "docs" / "train-step" / f"{page}.md").read_text("utf-8")
    return re.findall(r"```python\n(.*?)```", text, re.DOTALL)


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


class Broken(Exception):
    """A fault raises this."""


@dataclasses.dataclass(frozen=True)
class Fault:
    """Has ranks raise `Broken` at a place while one action runs, which is the `at`-th."""

    place: str
    """"loss", "backward" of the loss, "layer", or "optimizer", after its update."""
    at: int
    ranks: tuple[int, ...] | None = None
    """None for all of them."""


class Bench:
    """A small model of an engine, and its step; what the next step depends on is its state."""

    def __init__(
        self,
        engine: str = "megatron",
        kind: Any = None,
        *,
        step: dict[str, Any] | None = None,
        loss: Any = None,
        **options: Any,
    ) -> None:
        """`step` goes to the step, `options` to the model, where it is Megatron's.

        `kind` is a class other than the engine's. "built" among the options is what `build` has
        returned, for a model that is built already.
        """
        given = {"deadline_s": DEADLINE_S, **(step or {})}
        kind, self.engine, self.loss = (
            kind or class_of(engine),
            engine,
            FailingLoss(loss or TokenLoss()),
        )
        self.rank = torch.distributed.get_rank()
        self.step_id = ""
        if engine == "fsdp":
            # Where a test of another folder asks for it too.
            sys.path.append(str(Path(__file__).parent / "step"))
            import fsdp_bench

            self._fsdp = fsdp_bench
            layout = options.get("layout", "shard")
            self.parts = fsdp_bench.build(layout)
            self.module, self.optimizer, self.scheduler = self.parts
            self.replica = fsdp_bench.replica_of(layout)
            self.step = kind(*self.parts, **given)
            return
        model, self.scheduler, self.replica = options.pop("built", None) or build(**options)
        self.model, self.optimizer = model, model.optimizer
        self.module = model.chunks[0].module
        self.parts = model.chunks, model.optimizer, self.scheduler
        self.step = kind(*self.parts, **{"forward": forward, **given})

    def batch(self, microbatches: int, *, seed: int = 1, full: bool = False) -> dict[str, Any]:
        """This replica's rows of a step."""
        return data(seed, microbatches * ROWS, self.replica, full=full)

    def begin(self, **more: Any) -> str:
        """Begin a step as most do."""
        given = {"global_batch_size": 8, "micro_batch_size": ROWS, **more}
        self.step_id = self.step.begin(given.pop("loss", self.loss), **given)
        return self.step_id

    def run(
        self,
        pieces: Sequence[Any],
        *,
        last: bool = False,
        finish: dict[str, Any] | None = None,
        **begin: Any,
    ) -> Any:
        """A whole step: a call for each batch, or for each list of microbatches; its result."""
        step_id = self.begin(**begin)
        for number, piece in enumerate(pieces, start=1):
            given = {"microbatches": piece} if isinstance(piece, list) else {"batch": piece}
            self.step.microbatch(step_id, **given, last=last and number == len(pieces))
        return self.step.finish(step_id, **(finish or {}))

    def bits(self, result: Any) -> list[torch.Tensor]:
        """Return what a step has left: norm, gradients and parameters."""
        norm = getattr(result, "grad_norm", result)
        return [torch.tensor(float(norm or 0.0)), self.gradients(), self.parameters()]

    def gradients(self) -> torch.Tensor:
        """This rank's gradients, in one vector."""
        if self.engine == "fsdp":
            return self._fsdp.gradients(self.module)
        buffers = [
            buffer.grad_data.flatten().cpu()
            for chunk in self.model.chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
        return torch.cat(buffers) if buffers else torch.zeros(0)  # of a stage that trains nothing

    def parameters(self) -> torch.Tensor:
        """All parameters, gathered first, in one vector."""
        if self.engine == "fsdp":
            return self._fsdp.parameters(self.module)
        return parameters(self.model)

    def state(self) -> list[torch.Tensor]:
        """Tensors that the next step depends on, those of the parameters among them."""
        if self.engine == "fsdp":
            return self._fsdp.state(*self.parts)
        return state(self.model, self.scheduler)

    def digest(self) -> str:
        """Names of the state."""
        return ranks.digest(*(tensor.cpu().contiguous() for tensor in self.state()))

    @property
    def rebuild(self) -> Any:
        """Goes on after a poisoned session; None where only new processes do."""
        if self.engine == "fsdp":
            return None
        return lambda: megatron_idempotent.window.rebuild_process_groups(*self.parts[:2])


def class_of(engine: str) -> Any:
    """The class of an engine's step."""
    name = {"megatron": "TrainStep", "fsdp": "FSDPTrainStep"}[engine]
    return getattr(megatron_idempotent, name)


def _steps(bench: Bench, sizes: list[int], *, seed: int = 1, full: bool = False, **how: Any) -> Any:
    """A whole step in pieces of so many microbatches."""
    batch = bench.batch(sum(sizes), seed=seed, full=full)
    return split_step(bench.step, bench.loss, batch, sizes, **how)


def _batch(bench: Bench, sizes: list[int], *, seed: int = 1, last: bool = False) -> Any:
    """The batches of a step that is open, one call each; the last one of all, if it says so."""
    pieces = list(cut(bench.batch(sum(sizes), seed=seed), sizes))
    for number, piece in enumerate(pieces, start=1):
        bench.step.microbatch(bench.step_id, piece, last=last and number == len(pieces))


def _abort(bench: Bench) -> None:
    """Go on with new process groups where the session has ended."""
    from megatron_idempotent.window.agreement import is_poisoned

    bench.step.abort()
    if is_poisoned():
        bench.rebuild()


ACTIONS: dict[str, Any] = {
    "step": _steps,
    "begin": lambda bench, **more: bench.begin(**more),
    "batch": _batch,
    "finish": lambda bench, **more: bench.step.finish(bench.step_id, **more),
    "abort": _abort,
}


@dataclasses.dataclass
class Outcome:
    """Holds what a scenario came to on this rank."""

    bench: Bench
    told: list[Exception | None] = dataclasses.field(default_factory=list)
    """The error of each action; None where it returned."""
    results: list[Any] = dataclasses.field(default_factory=list)
    """The value of each action; None where it raised."""
    bits: list[list[torch.Tensor]] = dataclasses.field(default_factory=list)
    """Norm, gradients and parameters after each whole step."""


def scenario(
    layout: dict[str, Any], actions: Sequence[tuple[Any, ...]], faults: Sequence[Fault] = ()
) -> Outcome:
    """Run actions on a new model one after the other, whatever they raise.

    `layout` are options of `Bench`. An action ends in a dict where it has options. An error that no
    fault explains is found in `told`, and in the bits that are missing.
    """
    bench = Bench(**layout)
    outcome = Outcome(bench)
    for number, (name, *arguments) in enumerate(actions):
        options = arguments.pop() if arguments and isinstance(arguments[-1], dict) else {}
        here = [
            fault.place
            for fault in faults
            if fault.at == number and (fault.ranks is None or bench.rank in fault.ranks)
        ]
        result, raised = None, None
        with _armed(bench, here):
            try:
                result = ACTIONS[name](bench, *arguments, **options)
            except Exception as error:  # noqa: BLE001  it is what is asked for
                raised = error
        outcome.told.append(raised)
        outcome.results.append(result)
        if raised is None and name in ("step", "finish"):
            outcome.bits.append(bench.bits(result))
    return outcome


@contextlib.contextmanager
def _armed(bench: Bench, places: list[str]) -> Iterator[None]:
    """Let the model, the loss and the optimizer raise at these places inside."""

    def broken(*_: Any) -> None:
        raise Broken("out of memory")

    with contextlib.ExitStack() as stack:
        for place in places:
            if place == "layer":
                mlp = bench.module.decoder.layers[0].mlp
                stack.callback(mlp.register_forward_pre_hook(broken).remove)
            elif place == "optimizer":
                one = getattr(bench.optimizer, "chained_optimizers", [bench.optimizer])[0]
                inner = getattr(one, "optimizer", one)
                stack.callback(inner.register_step_post_hook(broken).remove)
            else:
                stack.callback(setattr, bench.loss, "place", None)
                bench.loss.place = place
        yield


class FailingLoss:
    """Another loss, which raises as it is called or in its backward once it is told to."""

    def __init__(self, loss: Any) -> None:
        self._loss = loss
        self.place: str | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loss, name)

    def __call__(self, output: Any, microbatch: Any) -> Any:
        if self.place == "loss":
            raise Broken("no reward")
        total, metrics = self._loss(output, microbatch)
        if self.place == "backward":
            total.register_hook(self._fail)
        return total, metrics

    def _fail(self, _: Any) -> None:
        raise Broken("interrupted")
