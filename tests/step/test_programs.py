"""Any order of begin, microbatch, finish, abort, log-probs, evaluation and export.

A split step and a one-shot one are driven side by side by the same list of operations. The one-shot
side knows nothing of pieces: it makes a step when the split side finishes one, from all
microbatches at once.
"""

from __future__ import annotations

from typing import Any

import fsdp_bench
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)
from scenario import ROWS, Bench, at_once, cut, data, forward

import megatron_idempotent

OPTIONS: dict[str, Any] = {"overlap_param_gather": True, "layers_per_stage": 1}
LAYOUTS = {
    "dp2": (2, "megatron", OPTIONS),
    "dp2, all-reduce": (
        2,
        "megatron",
        {**OPTIONS, "overlap_param_gather": False, "distributed_optimizer": False},
    ),
    "pp2": (2, "megatron", {**OPTIONS, "pp": 2}),
    "pp2 dp2": (4, "megatron", {**OPTIONS, "pp": 2}),
    "fsdp2": (2, "fsdp", {}),
}


ROWS_OF_A_STREAM = 64 * ROWS


class Pair:
    """Two models of an engine, of which one is stepped in pieces."""

    def __init__(self, engine: str, options: dict[str, Any]) -> None:
        self.fsdp = engine == "fsdp"
        step = {"clip_grad": fsdp_bench.CLIP} if self.fsdp else {}
        self.split, self.whole = (Bench(engine, step=step, **options) for _ in range(2))
        for made in (self.split, self.whole) if self.fsdp else ():
            for block in made.module.blocks:
                block.dropout.p = 0.0  # the two would draw in another order
        self.batch = data(7, ROWS_OF_A_STREAM, self.split.replica)
        self.taken = 0
        self.given: list[Any] = []

    def piece(self, size: int) -> Any:
        """The next microbatches of this replica's stream, without end."""
        start = self.taken * ROWS % (ROWS_OF_A_STREAM - size * ROWS)
        self.taken += size
        return {n: v[start : start + size * ROWS] for n, v in self.batch.items()}

    def begin(self) -> None:
        self.split.begin()
        self.given = []

    def microbatch(self, sizes: list[int], last: bool) -> None:
        size = sizes[self.split.replica]
        piece = self.piece(size)
        self.split.step.microbatch(self.split.step_id, piece, last=last)
        self.given += list(cut(piece, [1] * size))

    def finish(self) -> None:
        result = self.split.step.finish(self.split.step_id)
        number = torch.tensor([len(self.given)])
        torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX)
        assert result.updated is bool(number)
        if not number:
            return
        padding = {n: torch.zeros_like(v[:ROWS]) for n, v in self.batch.items()}
        given = self.given + [padding] * (int(number) - len(self.given))
        whole = {name: torch.cat([each[name] for each in given]) for name in padding}
        assert result.grad_norm == float(at_once(self.whole, whole))

    def abort(self) -> None:
        self.split.step.abort(self.split.step_id)

    def logprobs(self) -> None:
        """A direct forward, as of log-probs under the policy that is being trained."""
        piece = self.piece(1)
        if not self.fsdp and self.split.model.config.pipeline_model_parallel_size > 1:
            return  # no stage has all of the model

        def values(model: Any) -> Any:
            return model(piece["input_ids"]) if self.fsdp else forward(model, piece)

        with self.split.step.reading() as (model,):
            got = values(model)
        self.whole.parameters()
        with torch.no_grad():
            want = values(self.whole.module.eval())
        self.whole.module.train()
        assert torch.equal(got, want)

    def evaluate(self) -> None:
        """A forward without gradients, in no context of ours."""

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


def ran(engine: str, options: dict[str, Any], program: list[Any]) -> None:
    """Runs on a rank: do it all; raise where the two sides differ."""
    pair = Pair(engine, options)
    for operation, *arguments in program:
        getattr(pair, operation)(*arguments)


def machine(megatron_ranks: Any, ranks: int, engine: str, options: dict[str, Any]) -> type:
    """A state machine whose programs run on ranks once they are complete."""

    class Program(RuleBasedStateMachine):
        def __init__(self) -> None:
            super().__init__()
            self.program: list[Any] = []
            self.open = False
            self.last = False

        @precondition(lambda self: not self.open)
        @rule()
        def begin(self) -> None:
            self.open, self.last = True, False
            self.program.append(("begin",))

        @precondition(lambda self: self.open and not self.last)
        @rule(sizes=st.tuples(st.integers(0, 3), st.integers(0, 3)), last=st.booleans())
        def microbatch(self, sizes: tuple[int, int], last: bool) -> None:
            self.last = last
            self.program.append(("microbatch", sizes, last))

        @precondition(lambda self: self.open)
        @rule(how=st.sampled_from(["finish", "finish", "abort"]))
        def end(self, how: str) -> None:
            self.open = False
            self.program.append((how,))

        @rule(what=st.sampled_from(["logprobs", "evaluate", "export"]))
        def read(self, what: str) -> None:
            self.program.append((what,))

        def teardown(self) -> None:
            if self.open:  # or a rank without data leaves one that waits for its parameters
                self.program.append(("abort",))
            if self.program:
                megatron_ranks(ranks, ran, engine, options, self.program)

    return Program


#: A program of all operations, with pieces of other sizes on each replica, and of none.
PROGRAM: list[Any] = [
    *[("begin",), ("export",), ("microbatch", (1, 2), False), ("logprobs",)],
    *[("microbatch", (0, 1), False), ("evaluate",), ("microbatch", (2, 0), True), ("finish",)],
    *[("export",), ("begin",), ("microbatch", (1, 1), False), ("abort",), ("logprobs",)],
    *[("begin",), ("microbatch", (3, 2), False), ("finish",), ("evaluate",)],
    *[("begin",), ("finish",), ("logprobs",), ("export",)],
]


@pytest.mark.parametrize("layout", ["dp2", "dp2, all-reduce", "pp2", "fsdp2"])
def test_a_program_of_all_operations(megatron_ranks, layout):
    ranks, engine, options = LAYOUTS[layout]
    megatron_ranks(ranks, ran, engine, options, PROGRAM)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_any_program_of_many(megatron_ranks, layout):
    many = settings(
        max_examples=100,
        stateful_step_count=24,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(machine(megatron_ranks, *LAYOUTS[layout]), settings=many)
