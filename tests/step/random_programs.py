"""Programs of a step's calls that hypothesis draws, and runs on ranks once they are complete."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    precondition,
    rule,
    run_state_machine_as_test,
)
from step_programs import ran

MANY = settings(
    max_examples=100,
    stateful_step_count=24,
    deadline=None,
    derandomize=True,
    database=None,
    suppress_health_check=list(HealthCheck),
)
SIZES = st.one_of(st.none(), st.integers(0, 3))


def run_many(megatron_ranks: Any, ranks: int, engine: str, options: dict[str, Any]) -> None:
    """Run many programs, and find the shortest one that fails."""

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
        @rule(sizes=st.tuples(SIZES, SIZES), last=st.booleans(), ready=st.booleans())
        def microbatch(self, sizes: Any, last: bool, ready: bool) -> None:
            # A rank without a call has not heard of a last one.
            self.last = last and None not in sizes
            self.program.append(("microbatch", sizes, {"last": self.last, "ready": ready}))

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

    run_state_machine_as_test(Program, settings=MANY)
