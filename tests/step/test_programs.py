"""Any order of begin, microbatch, finish, abort, log-probs, evaluation and export."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)

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


def ran(engine: str, options: dict[str, Any], program: list[Any]) -> None:
    """Runs on a rank: see `programs.run`."""
    import programs

    programs.run(engine, options, program)


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


def _settings(examples: int) -> settings:
    return settings(
        max_examples=examples,
        stateful_step_count=24,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


#: Programs of a few, by layout.
FEW = {"dp2": 3, "dp2, all-reduce": 1, "pp2": 3, "fsdp2": 2}


@pytest.mark.parametrize("layout", list(FEW))
def test_any_program_of_a_few(megatron_ranks, layout):
    few = _settings(FEW[layout])
    run_state_machine_as_test(machine(megatron_ranks, *LAYOUTS[layout]), settings=few)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", list(LAYOUTS))
def test_any_program_of_many(megatron_ranks, layout):
    run_state_machine_as_test(machine(megatron_ranks, *LAYOUTS[layout]), settings=_settings(100))
