"""Measures all implementations in the `token_logprobs` benchmark on a rank, alternately."""

from __future__ import annotations

import dataclasses
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from benchmarks import _logprob_peers, _logprob_sides
from benchmarks._logprob_cases import Case, Given, Inputs, Side

WARM_UP = 1
#: The number of tokens whose outputs are compared with float64.
_COMPARED = 64


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """The seconds, peak memory, number of collectives, and errors against float64 of one
    implementation on one rank.
    """

    seconds: list[float]
    """Seconds of forward and backward in each round."""
    memory: float
    """Peak memory ÷ the size of this rank's logits, without the inputs, and without the gradients
    of hidden states and weight."""
    collectives: int
    logprob_error: float
    """The largest absolute difference from float64."""
    entropy_error: float | None
    gradient_error: float
    """The 2-norm of the difference from float64 ÷ the 2-norm in float64; the largest of all
    gradients."""


#: For each implementation its results, or the reason why it was not measured.
Found = dict[str, "Measured | str"]


def measured(case: Case, rounds: int, peers: Sequence[str]) -> Found:
    """Measure all implementations of one case on this rank, alternately; return the results by
    name.

    Call it on a new rank per case: torch.compile stops compiling a function after a number of
    recompilations, which earlier cases would use up.
    """
    import torch
    from megatron.core import parallel_state

    from megatron_idempotent.proof import cpu

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=case.ranks)
    group = parallel_state.get_tensor_model_parallel_group() if case.ranks > 1 else None
    # Other libraries ask torch for a GPU: without the CPU runtime it reports that there is none.
    cpu.disable()
    found: Found = {}
    sides, of_peers = _logprob_sides.sides(case), []
    for peer in peers:
        try:
            of_peers += _logprob_peers.SIDES[peer](case)
        except ModuleNotFoundError as missing:
            found[peer] = f"not installed: {missing}"
    sides, of_peers = (
        [side for side in each if case.entropy in side.entropies] for each in (sides, of_peers)
    )
    few = Inputs(case, group, min(_COMPARED, case.tokens))
    truth = few.truth()
    errors = {side.name: _errors(side, few, truth) for side in sides}
    for side in of_peers:
        try:
            errors[side.name] = _errors(side, few, truth)
        except Exception as refusal:  # noqa: BLE001  # its own words are the result
            found[side.name] = _words(refusal)
    del few, truth
    # Else torch.compile would compile for dynamic shapes after the few tokens above.
    torch.compiler.reset()
    sides += [side for side in of_peers if side.name in errors]
    inputs = Inputs(case, group, case.tokens)
    seconds: dict[str, list[float]] = {side.name: [] for side in sides}
    for number in range(rounds + WARM_UP):
        for side in sides if number % 2 else sides[::-1]:
            given = inputs.fresh()
            torch.distributed.barrier()
            start = time.perf_counter()
            _step(side, inputs, given)
            if number >= WARM_UP:
                seconds[side.name].append(time.perf_counter() - start)
            del given
    size = case.tokens * case.vocabulary // case.ranks * getattr(torch, case.dtype).itemsize
    measured = {}
    for side in sides:
        measured[side.name] = Measured(
            seconds=seconds[side.name],
            memory=_memory(side, inputs) / size,
            collectives=_collectives(lambda side=side: _step(side, inputs, inputs.fresh())),
            **errors[side.name],
        )
    return {**measured, **found}


def _words(refusal: Exception) -> str:
    """Return an error's type and the first line of its message; without a message, the line of code
    that raised it.
    """
    lines = str(refusal).strip().splitlines()
    said = lines[0] if lines else traceback.extract_tb(refusal.__traceback__)[-1].line
    return f"{type(refusal).__name__}: {said}"


def _step(side: Side, inputs: Inputs, given: Given) -> tuple[Any, Any, list[Any]]:
    """Run an implementation's forward and backward. Return log-probs, entropies, and the gradients
    of hidden states and weight, which are [] if the inputs are logits.
    """
    import torch

    logprob_N, entropy_N = side.run(given)
    total = inputs.total(logprob_N, entropy_N)
    if inputs.case.form == "logits":
        total.backward()
        return logprob_N, entropy_N, []
    return logprob_N, entropy_N, list(torch.autograd.grad(total, given.inputs))


def _memory(side: Side, inputs: Inputs) -> int:
    from megatron_idempotent.proof.cpu.probes import peak_bytes

    given = [inputs.fresh() for _ in range(2)]
    held = peak_bytes(lambda: _step(side, inputs, given.pop()), runs=2)
    if inputs.case.form == "logits":
        return held
    return held - sum(each.nbytes for each in inputs.part)


def _errors(side: Side, inputs: Inputs, truth: tuple[Any, Any, list[Any]]) -> dict[str, Any]:
    given = inputs.fresh()
    gradients: list[Any] = []
    if inputs.case.form == "logits":
        given.inputs[0].register_hook(lambda gradient: gradients.append(gradient.double()))
    logprob_N, entropy_N, of_leaves = _step(side, inputs, given)
    kept = slice(None) if inputs.kept_N is None else inputs.kept_N

    def largest(found_N: Any, true_N: Any) -> float:
        return float((found_N.detach().double() - true_N)[kept].abs().max())

    return {
        "logprob_error": largest(logprob_N, truth[0]),
        "entropy_error": None if entropy_N is None else largest(entropy_N, truth[1]),
        "gradient_error": max(
            float((found.double() - true).norm() / true.norm())
            for found, true in zip(gradients + of_leaves, truth[2], strict=True)
        ),
    }


def _collectives(step: Callable[[], Any]) -> int:
    from megatron_idempotent.proof.cpu.probes import watching_collectives

    seen: list[str] = []
    with watching_collectives(lambda name, _: seen.append(name)):
        step()
    return len(seen)
