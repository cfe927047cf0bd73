"""A split step and a one-shot one side by side, driven by the same list of operations.

Runs on a rank. The one-shot side knows nothing of pieces: it makes a step when the split side
finishes one, from all microbatches at once.
"""

from __future__ import annotations

from typing import Any

import fsdp_bench
import torch
from scenario import ROWS, Bench, TokenLoss, build, cut, data, forward, one_shot, parameters

import megatron_idempotent

Operation = tuple[Any, ...]
_ROWS_OF_A_STREAM = 64


class Pair:
    """Two models on Megatron, of which one is stepped in pieces."""

    def __init__(self, options: dict[str, Any]) -> None:
        self.build(options)
        self.batch = data(7, _ROWS_OF_A_STREAM * ROWS, self.replica)
        self.taken = 0
        self.given: list[Any] = []
        self.step_id = ""

    def build(self, options: dict[str, Any]) -> None:
        split = Bench(**options)
        self.split, self.step, self.replica = split.model, split.step, split.replica
        self.whole, self.whole_scheduler, _ = build(**options)

    def piece(self, size: int) -> Any:
        """The next microbatches of this replica's stream, without end."""
        start = self.taken % (_ROWS_OF_A_STREAM - size) * ROWS
        self.taken += size
        return {n: v[start : start + size * ROWS] for n, v in self.batch.items()}

    def one_shot(self, batch: Any) -> float:
        """The whole model's step; its gradient norm."""
        return float(one_shot(self.whole, self.whole_scheduler, TokenLoss(), batch))

    def logprobs(self, piece: Any) -> None:
        """A direct forward, as of log-probs under the policy that is being trained."""
        if self.split.chunks[0].config.pipeline_model_parallel_size > 1:
            return  # no stage has all of the model
        with self.step.reading() as (chunk,):
            got = forward(chunk, piece)
        parameters(self.whole)
        with torch.no_grad():
            want = forward(self.whole.chunks[0].module.eval(), piece)
        self.whole.chunks[0].train()
        assert torch.equal(got, want)

    def evaluate(self) -> None:
        """A forward without gradients, in no context of ours."""
        got = self.split.forward_backward(2, data_seed=5, forward_only=True)
        want = self.whole.forward_backward(2, data_seed=5, forward_only=True)
        assert got == want

    def export(self) -> None:
        """The weights, read inside of the step's context and outside of it."""
        with self.step.reading():
            got = self.split.parameters()
        assert torch.equal(got, parameters(self.whole))
        assert megatron_idempotent.ensure_params_synced(self.split.chunks) == 0


class FSDPPair(Pair):
    """Two models on FSDP2, of which one is stepped in pieces."""

    def build(self, options: dict[str, Any]) -> None:
        from fsdp_bench import bench

        split, whole = bench(**options), bench(**options)
        for made in (split, whole):
            for block in made.module.blocks:
                block.dropout.p = 0.0  # the two would draw in another order
        self.replica, self.step = split.replica, split.step
        self.split, self.whole = split.module, whole.parts

    def one_shot(self, batch: Any) -> float:
        return fsdp_bench.one_shot(*self.whole, TokenLoss(), batch)[0]

    def logprobs(self, piece: Any) -> None:
        with self.step.reading() as (model,):
            got = model(piece["input_ids"])
        with torch.no_grad():
            want = self.whole[0].eval()(piece["input_ids"])
        self.whole[0].train()
        assert torch.equal(got, want)

    def evaluate(self) -> None:
        tokens_BT = self.batch["input_ids"][:2]
        with torch.no_grad():
            got, want = self.split.eval()(tokens_BT), self.whole[0].eval()(tokens_BT)
        assert torch.equal(got, want)

    def export(self) -> None:
        with self.step.reading() as (model,):
            got = fsdp_bench.parameters(model)
        assert torch.equal(got, fsdp_bench.parameters(self.whole[0]))


def run(engine: str, options: dict[str, Any], program: list[Operation]) -> None:
    """Do it all; raise where the two sides differ."""
    if engine == "fsdp":
        pair: Pair = FSDPPair(options)
    else:
        pair = Pair(options)
    for operation, *arguments in program:
        _OPERATIONS[operation](pair, *arguments)


def _begin(pair: Pair) -> None:
    pair.step_id = pair.step.begin(TokenLoss(), global_batch_size=8, micro_batch_size=ROWS)
    pair.given = []


def _microbatch(pair: Pair, sizes: list[int], last: bool) -> None:
    piece = pair.piece(sizes[pair.replica])
    pair.step.microbatch(pair.step_id, piece, last=last)
    pair.given += list(cut(piece, [1] * sizes[pair.replica]))


def _finish(pair: Pair) -> None:
    result = pair.step.finish(pair.step_id)
    number = torch.tensor([len(pair.given)])
    torch.distributed.all_reduce(number, op=torch.distributed.ReduceOp.MAX)
    assert result.updated is bool(number)
    if not number:
        return
    padding = {n: torch.zeros_like(v[:ROWS]) for n, v in pair.batch.items()}
    given = pair.given + [padding] * (int(number) - len(pair.given))
    whole = {name: torch.cat([each[name] for each in given]) for name in padding}
    grad_norm = pair.one_shot(whole)
    assert result.grad_norm == grad_norm, (result.grad_norm, grad_norm)


def _abort(pair: Pair) -> None:
    pair.step.abort(pair.step_id)


def _logprobs(pair: Pair) -> None:
    pair.logprobs(pair.piece(1))


_OPERATIONS = {
    "begin": _begin,
    "microbatch": _microbatch,
    "finish": _finish,
    "abort": _abort,
    "logprobs": _logprobs,
    "evaluate": lambda pair: pair.evaluate(),
    "export": lambda pair: pair.export(),
}
