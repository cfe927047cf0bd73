"""A split step and a one-shot one side by side, driven by the same list of operations.

Runs on a rank. The one-shot side knows nothing of pieces: it makes a step when the split side
finishes one, from all microbatches at once.
"""

from __future__ import annotations

from typing import Any

import torch
from split_bench import ROWS, TokenLoss, build, cut, data, forward, one_shot, parameters

import megatron_idempotent
from megatron_idempotent import TrainStep

Operation = tuple[Any, ...]
_ROWS_OF_A_STREAM = 64


class _Pair:
    def __init__(self, options: dict[str, Any]) -> None:
        self.split, scheduler, self.replica = build(**options)
        self.whole, self.whole_scheduler, _ = build(**options)
        self.step = TrainStep(
            self.split.chunks, self.split.optimizer, scheduler, forward=forward, deadline_s=20
        )
        self.batch = data(7, _ROWS_OF_A_STREAM * ROWS, self.replica)
        self.taken = 0
        self.given: list[Any] = []
        self.step_id = ""

    def pieces(self, sizes: tuple[int, ...]) -> list[Any]:
        """The next microbatches of this replica's stream, without end."""
        found = []
        for size in sizes:
            start = self.taken % (_ROWS_OF_A_STREAM - size) * ROWS
            found.append({n: v[start : start + size * ROWS] for n, v in self.batch.items()})
            self.taken += size
        return found


def run(options: dict[str, Any], program: list[Operation]) -> None:
    """Do it all; raises where the two sides differ."""
    pair = _Pair(options)
    for operation, *arguments in program:
        _OPERATIONS[operation](pair, *arguments)


def _begin(pair: _Pair) -> None:
    pair.step_id = pair.step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=ROWS)
    pair.given = []


def _microbatch(pair: _Pair, sizes: list[int], last: bool) -> None:
    (piece,) = pair.pieces((sizes[pair.replica],))
    pair.step.microbatch(pair.step_id, piece, last=last)
    pair.given += list(cut(piece, [1] * sizes[pair.replica]))


def _finish(pair: _Pair) -> None:
    result = pair.step.finish(pair.step_id)
    number = torch.tensor([len(pair.given)])
    torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX)
    assert result.updated is bool(number)
    if not number:
        return
    padding = {n: torch.zeros_like(v[:ROWS]) for n, v in pair.batch.items()}
    given = pair.given + [padding] * (int(number) - len(pair.given))
    whole = {name: torch.cat([each[name] for each in given]) for name in padding}
    grad_norm = one_shot(pair.whole, pair.whole_scheduler, TokenLoss(), whole)
    assert result.grad_norm == float(grad_norm), (result.grad_norm, grad_norm)


def _abort(pair: _Pair) -> None:
    pair.step.abort(pair.step_id)


def _logprobs(pair: _Pair) -> None:
    """A direct forward, as of log-probs under the policy that is being trained."""
    (piece,) = pair.pieces((1,))
    if len(pair.split.chunks) > 1 or torch.distributed.get_world_size() > 2:
        return
    with pair.step.reading() as (chunk,):
        got = forward(chunk, piece)
    parameters(pair.whole)
    with torch.no_grad():
        want = forward(pair.whole.chunks[0].module.eval(), piece)
    pair.whole.chunks[0].train()
    assert torch.equal(got, want)


def _evaluate(pair: _Pair) -> None:
    """A forward-only schedule, in no context of ours."""
    got = pair.split.forward_backward(2, data_seed=5, forward_only=True)
    want = pair.whole.forward_backward(2, data_seed=5, forward_only=True)
    assert got == want


def _export(pair: _Pair) -> None:
    """The weights, read inside of the step's context and outside of it."""
    with pair.step.reading():
        got = pair.split.parameters()
    assert torch.equal(got, parameters(pair.whole))
    assert megatron_idempotent.ensure_params_synced(pair.split.chunks) == 0


_OPERATIONS = {
    "begin": _begin,
    "microbatch": _microbatch,
    "finish": _finish,
    "abort": _abort,
    "logprobs": _logprobs,
    "evaluate": _evaluate,
    "export": _export,
}
