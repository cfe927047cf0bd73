"""Bad arguments and batches of a step: each is refused by name, and changes no bit of the step.

One of two ranks makes the bad call, so that the other one has to be told where it waits. An error
is held to its type and to the name of what is wrong.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from fsdp_bench import same
from ranks import on_ranks
from scenario import ROWS, T, TokenLoss, class_of, cut, mask_of, raised_by
from step_backend import Backend, refused

import megatron_idempotent
from megatron_idempotent import WindowAborted
from megatron_idempotent.fp8 import Pack, TokenAlignment
from megatron_idempotent.step import pack_batches, valid_counts

#: From a right batch to the arguments of a wrong call.
Change = Callable[[dict[str, Any]], dict[str, Any]]
#: What the error names, and the change.
Rows = list[tuple[str, Change]]
#: Of three sequences, which is none of a batch of rows.
PACK = Pack.of([9, 6, 3], TokenAlignment(sequence=1, pack=1))


def _with(**also: Any) -> Change:
    """The batch, with what is given; what a function returns for a value, and without None."""

    def batch(rows: dict[str, Any]) -> dict[str, Any]:
        more = {n: each(rows.get(n)) if callable(each) else each for n, each in also.items()}
        both = {**rows, **more}
        return {"batch": {n: each for n, each in both.items() if n not in more or each is not None}}

    return batch


def _ready(**also: Any) -> Change:
    """The batch as two ready microbatches, the second with what is given."""

    def microbatches(batch: dict[str, Any]) -> dict[str, Any]:
        first, second = cut(batch, [1, 1])
        return {"microbatches": [first, *_with(**also)(second).values()]}

    return microbatches


def _packed(**also: Any) -> Change:
    """Two ready packs of all rows, of which the second is changed."""

    def packs(batch: dict[str, Any]) -> dict[str, Any]:
        rows = {name: value for name, value in batch.items() if name != "attention_mask"}
        first, second = pack_batches({**rows, "lengths": [32, 31, 30, 29]}, 64)
        pack = second["pack"]
        more = {n: each(pack) if callable(each) else each for n, each in also.items()}
        if "pack" not in more and "cu_seqlens" in "".join(more):
            second = {name: value for name, value in second.items() if name != "pack"}
        return {"microbatches": [first, {**second, **more}]}

    return packs


def _put(value: Any) -> Callable[[Any], Any]:
    def put(values: Any) -> Any:
        values = values.clone()
        values[1, 3] = value
        return values

    return put


def _borders(*ends: int | None) -> Callable[[Any], Any]:
    """Borders of a pack; None stands for its end, and -1 for a place less."""
    return lambda pack: torch.tensor(
        [pack.tokens if end is None else pack.tokens - 1 if end == -1 else end for end in ends]
    )


def _params() -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(cu_seqlens_q=torch.tensor([0, 7, 5]))


#: Batches of rows, and ready lists.
BATCHES: Rows = [
    ("'token_mask' has 2.0", _with(token_mask=lambda mask: mask * 2)),
    ("'token_mask' has inf in row 1, position 3", _with(token_mask=_put(float("inf")))),
    ("'token_mask' has nan in row 1, position 3", _with(token_mask=_put(float("nan")))),
    ("'sample_mask' has 1e+308", _with(sample_mask=lambda mask: mask.double() + 1e308)),
    ("'sample_mask' has -1", _with(sample_mask=lambda mask: mask.long() - 1)),
    ("microbatches[1]", _ready(token_mask=lambda mask: mask * 0 + 0.5)),
    ("counts", _ready(counts=(True, True))),
    ("counts", _ready(counts=(1, -3))),
    ("counts", _ready(counts=(1.0, float("nan")))),
    ("counts", _ready(counts=(1.0, 1e300))),
    ("counts", _ready(counts=torch.tensor([True, True]))),
    ("counts", _ready(counts=torch.tensor([1.0, -3.0]))),
    ("microbatch_id", lambda batch: {"batch": batch, "microbatch_id": [1]}),
    ("12345 in 'input_ids' at row 1, position 3", _with(input_ids=_put(12345))),
    ("-1 in 'input_ids' at row 1, position 3", _ready(input_ids=_put(-1))),
    ("'input_ids' of torch.float32", _with(input_ids=lambda ids: ids.float())),
    ("'input_ids' of torch.bool", _ready(input_ids=lambda ids: ids > 3)),
    ("'input_ids'", _with(input_ids=lambda ids: ids.to("meta"))),
    ("'token_mask'", _with(token_mask=lambda mask: mask.to("meta"))),
    ("'token_mask'", _ready(token_mask=lambda mask: mask.to_sparse())),
    ("'token_mask'", _with(token_mask=lambda mask: mask.cfloat())),
    ("'token_mask'", _ready(token_mask=lambda mask: mask.cpu().numpy())),
    ("'sample_mask'", _ready(sample_mask=[1.0, 1.0])),
    ("last", lambda batch: {"batch": batch, "last": "no"}),
]
#: Of a model that looks positions up.
POSITIONS: Rows = [("'position_ids'", _with(position_ids=torch.full((2 * ROWS, T), 40)))]
#: Of a step with `counts=`, which asks a microbatch for what it has not.
COUNTED: Rows = [("missing", _ready(counts="missing"))]
#: Shapes that do not fit, and values without rows.
SHAPES: Rows = [
    ("'input_ids'", lambda _: {"batch": [1, 2]}),
    ("'input_ids'", lambda batch: {"batch": {"tokens": batch["input_ids"]}}),
    ("'input_ids'", lambda _: {"batch": {"input_ids": torch.ones(3)}}),
    ("'token_mask'", _with(token_mask=torch.ones(3, 4))),
    ("'sample_mask'", _with(sample_mask=torch.ones(4, 2))),
    ("'sample_mask'", _with(sample_mask=[1.0] * 4)),
    ("'weight'", _with(weight=torch.tensor(1.0))),
    ("'images'", _with(images=[1] * 3)),
    ("'images'", _with(images=torch.ones(4, 2).numpy())),
    ("'meta'", _with(meta={"a": 1})),
    ("'rows'", _with(rows=range(4))),
    ("'input_ids'", _with(input_ids=lambda ids: ids[..., None].expand(-1, -1, 2))),
    (
        "micro_batch_size",
        _with(input_ids=lambda ids: torch.nested.nested_tensor(list(ids), layout=torch.jagged)),
    ),
    ("'pack'", _with(pack=PACK)),
    ("'rope'", _with(rope=PACK)),
    ("'packs'", _with(packs=[PACK] * 4)),
    (
        "rank_batch_size",
        lambda batch: {"batch": {n: v.repeat(2, *[1] * (v.dim() - 1)) for n, v in batch.items()}},
    ),
]
#: Ready microbatches and packs; the step has a budget, and so do rows that are to be packed.
READY: Rows = [
    ("microbatches", lambda batch: {"microbatches": batch}),
    ("microbatches", lambda batch: {"batch": batch, "microbatches": [batch]}),
    ("[1]", lambda batch: {"microbatches": [batch, {"ids": batch["input_ids"]}]}),
    ("[0]", lambda _: {"microbatches": [object()]}),
    ("'token_mask'", _ready(token_mask=torch.ones(2, 5))),
    ("cu_seqlens", _packed(cu_seqlens=_borders(0, 9, 5, None))),
    ("cu_seqlens", _packed(cu_seqlens=_borders(3, 9, None))),
    ("cu_seqlens", _packed(cu_seqlens=_borders(0, 9, -1))),
    (
        "sequence 0 has 9 tokens and 8 places",
        _packed(cu_seqlens=_borders(0, 9, None), cu_seqlens_padded=_borders(0, 8, None)),
    ),
    (
        "cu_seqlens_padded",
        _packed(cu_seqlens=_borders(0, 9, None), cu_seqlens_padded=_borders(0, None)),
    ),
    (
        "from 7 to 5",
        lambda batch: {"microbatches": [{"input_ids": batch["input_ids"], "p": _params()}]},
    ),
    ("Pack", _packed(pack=PACK)),
    ("'token_mask'", _packed(token_mask=torch.ones(1, 99))),
    ("'sample_mask'", _packed(sample_mask=torch.ones(5))),
    ("how many are real", _with(attention_mask=None)),
    ("sequence 1 has 30 tokens", _with(attention_mask=None, lengths=[4, 30, 3, 4])),
]
UNCUT: Rows = [("micro_batch_size", _with())]

LEARNED = {"model_overrides": {"position_embedding_type": "learned_absolute"}}
BUDGET = {"micro_batch_size": None, "max_tokens_per_microbatch": 24}


def _counted(microbatch: Any) -> Any:
    return microbatch[microbatch["counts"]] if "counts" in microbatch else valid_counts(microbatch)


#: Name → rows, options of the bench, and what a step begins with.
TABLES: dict[str, tuple[Rows, dict[str, Any], dict[str, Any]]] = {
    "batches": (BATCHES, {}, {}),
    "positions": (POSITIONS, LEARNED, {}),
    "counted": (COUNTED, {"step": {"counts": _counted}}, {}),
    "shapes": (SHAPES, {"step": {"shared": ("rope",)}}, {"rank_batch_size": 4}),
    "ready": (READY, {}, BUDGET),
    "uncut": (UNCUT, {}, {"micro_batch_size": None}),
}


class Returning(TokenLoss):
    """Cross entropy of logits on Megatron, of the model's own losses on FSDP2; returns anything."""

    def __init__(
        self, returns: Callable[[Any, Any], Any] | None = None, outputs: tuple[str, ...] = ()
    ) -> None:
        super().__init__()
        self.returns, self.outputs = returns, outputs

    def __call__(self, output: Any, microbatch: Any) -> Any:
        if output.dim() == 3:
            targets_BT = microbatch["input_ids"].roll(-1, 1)
            output = torch.nn.functional.cross_entropy(
                output.mT.float(), targets_BT, reduction="none"
            )
        total = (output * mask_of(microbatch)).sum()
        return self.returns(total, output) if self.returns else (total, {"nll": total.detach()})


#: What the error names → what a loss returns instead of a sum and metrics.
LOSSES: Rows = [
    ("a Tensor", lambda total, _: total),
    ("None", lambda *_: None),
    ("a list", lambda total, _: (total, [1.0])),
    ("None", lambda total, _: (total, None)),
    ("named 3", lambda total, _: (total, {3: 1.0})),
    ("(2, 32) with requires_grad=True", lambda _, each: (each, {})),
    ("() with requires_grad=False", lambda total, _: (total.detach() + 1, {})),
    ("a float with requires_grad=False", lambda total, _: (float(total) + 1, {})),
    ("'lr', 'rank'", lambda total, _: (total, {"lr": 1.0, "rank": 1.0, "kl": 0.0})),
    ("'kl' as a tensor of shape (2, 32)", lambda total, each: (total, {"kl": each})),
    ("'kl' as a str", lambda total, _: (total, {"kl": "0.1"})),
]
#: ... instead of outputs of the name "kl".
OUTPUTS: Rows = [
    ("'kl'", lambda total, _: (total, {"nll": 1})),
    ("'kl' as a tensor of shape (1, 32)", lambda total, each: (total, {"kl": each[:1]})),
    ("'kl' as a list of 3", lambda total, each: (total, {"kl": [each] * 3})),
    ("'kl' as a float", lambda total, _: (total, {"kl": 1.0})),
]


class _Slots:
    """A scheduler without a `__dict__`."""

    __slots__ = ("steps",)

    def step(self, increment: int = 1) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    load_state_dict = None


#: Arguments of a step when it is made. A flag of another type is a TypeError, all else a
#: ValueError; each names its argument.
FLAGS: list[dict[str, Any]] = [{"forward": None}, {"undo": "x"}, {"order_stable": 3}]
ARGUMENTS: list[dict[str, Any]] = [
    *({"deadline_s": each} for each in (float("inf"), float("nan"), 0, "1")),
    *({"shared": each} for each in ("rope", (1,), ("token_mask",))),
    {"scheduler": _Slots()},
    {"nothing_valid": "ignore"},
]
ON_FSDP: list[dict[str, Any]] = [
    *({"clip_grad": each} for each in ("1", float("nan"), torch.ones(2), 0.0, -1.0)),
    *({"grad_scaler": each} for each in ("x", torch.amp.GradScaler)),
    {"scheduler": torch.optim.lr_scheduler.LinearLR},
]
#: Arguments of `begin()`, beside usual ones, of which the error names the last.
BEGUN: list[dict[str, Any]] = [
    *({"divisor": each} for each in (0, -1.0, float("nan"), float("inf"), "2", True)),
    {"global_batch_size": 0},
    {"micro_batch_size": 2.0},
    {"micro_batch_size": None, "max_tokens_per_microbatch": 0},
    {"max_tokens_per_microbatch": 96},  # beside micro_batch_size
    {"step_id": 3},
    {"rank_batch_size": -1},
    *({"loss": each} for each in (3, len, TokenLoss)),
]


def _loss_with(**attributes: Any) -> TokenLoss:
    loss = TokenLoss()
    vars(loss).update(attributes)
    return loss


class Refusals(Backend):
    """Each part of a call is looked at; `tables` are those of TABLES that a backend can have."""

    tables: ClassVar[tuple[str, ...]] = tuple(TABLES)

    def with_logits(self, *, step: dict[str, Any] | None = None, **options: Any) -> Any:
        """A bench whose `forward` is the engine's own, and a batch for it."""
        if not self.fsdp:
            step = {"forward": megatron_idempotent.step.gpt_forward, **(step or {})}
        bench = self.bench(step=step, loss=Returning(), **options)
        causal = torch.ones(T, T, dtype=torch.bool).tril().logical_not()
        mask = causal.expand(2 * ROWS, 1, T, T).cuda()
        return bench, {**bench.batch(2), "attention_mask": mask}

    @pytest.mark.full
    @on_ranks(2, timeout_s=120)
    def test_a_bad_batch_is_refused_by_name_and_the_step_goes_on(self) -> None:
        """A rank that others wait for is beside rank 1 with a batch that is right."""

        def run(name: str, bad: bool) -> Any:
            rows, options, begin = TABLES[name]
            bench, batch = self.with_logits(**options)
            step_id, good = bench.begin(**begin), _ready()(batch)
            for said, change in rows if bad else ():
                if bench.rank == 1 or self.coupled:
                    given = change(batch) if bench.rank == 1 else good
                    own = KeyError if name == "counted" else ValueError
                    error = WindowAborted if self.coupled else own
                    told = refused(error, said, bench.step.microbatch, step_id, **given)
                    assert "rank 1: " in told or not self.coupled, told
            bench.step.microbatch(step_id, **good)
            assert bench.step.finish(step_id).updated
            return bench.state()

        for name in self.tables:
            assert same(run(name, True), run(name, False)), name

    @pytest.mark.full
    @on_ranks(2)
    def test_a_loss_that_returns_something_else_is_refused_by_name(self) -> None:
        def run(bad: bool) -> Any:
            bench, batch = self.with_logits()
            rows = [*((row, ()) for row in LOSSES), *((row, ("kl",)) for row in OUTPUTS)]
            for (said, returns), outputs in rows if bad else ():
                wrong = Returning(returns, outputs) if bench.rank == 1 else Returning()
                told = raised_by(bench.run, [batch], loss=wrong)
                assert said in str(told), (said, told)
                bench.step.abort()
            assert bench.run([batch]).updated
            return bench.state()

        assert same(run(True), run(False))

    @pytest.mark.full
    @on_ranks(2)
    def test_a_bad_argument_is_refused_when_a_step_is_made(self) -> None:
        bench = self.bench()
        model, optimizer, scheduler = bench.parts
        kind = functools.partial(class_of(self.engine), model, optimizer)
        flags = FLAGS[: 2 if self.fsdp else 3]
        others = [*ARGUMENTS, *(ON_FSDP if self.fsdp else ())]
        rows = [*((each, TypeError) for each in flags), *((each, ValueError) for each in others)]
        for arguments, error in rows:
            given = {"scheduler": scheduler, **arguments}
            refused(error, next(iter(arguments)), kind, given.pop("scheduler"), **given)
        narrow = kind(alignment=TokenAlignment(sequence=4, pack=128))
        refused(ValueError, "128", narrow.begin, TokenLoss(), max_tokens_per_microbatch=96)
        assert bench.run([bench.batch(1)]).updated

    @pytest.mark.full
    @on_ranks(2)
    def test_a_bad_argument_is_refused_when_a_step_is_begun_or_goes_on(self) -> None:
        bench = self.bench()
        for arguments in BEGUN:
            name = list(arguments)[-1]
            told = raised_by(bench.begin, **arguments)
            assert isinstance(told, ValueError), (arguments, told)
            assert name in str(told) or arguments[name] is len, (arguments, told)
        for name, loss in (
            ("'mean'", _loss_with(kind="mean")),
            ("'words'", _loss_with(normalizers={"nll": "words"})),
            ("outputs", _loss_with(outputs=None)),
        ):
            refused(ValueError, name, bench.begin, loss=loss)
        bench.begin()
        for call in (bench.step.microbatch, bench.step.finish, bench.step.abort):
            for step_id in ([1], 3, b"step-0"):
                refused(ValueError, "step_id", call, step_id)
        bench.step.abort()
        grouped = _loss_with(kind="group", auxiliary_weight=1.0)
        batch, step_id = bench.batch(1), bench.begin(loss=grouped)
        for more in ({}, {"group_ids": torch.ones(2)}):
            told = raised_by(bench.step.microbatch, step_id, {**batch, **more})
            assert "'group_ids'" in str(told)
        bench.step.microbatch(step_id, {**batch, "group_ids": torch.tensor([1, 2])})
        assert bench.step.finish(step_id).updated
