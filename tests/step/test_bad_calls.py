"""Bad calls of a step: each is refused by name, and the next step has the bits of an untouched one.

One of two ranks makes the bad call, so that the other one has to be told where it waits.
"""

from __future__ import annotations

import functools
import re
import threading
import time
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch
from fsdp_bench import same
from ranks import on_ranks
from scenario import ROWS, Bench, T, TokenLoss, build, class_of, cut, mask_of, raised_by

import megatron_idempotent
from megatron_idempotent.fp8 import Pack, TokenAlignment
from megatron_idempotent.step import microbatches, pack_batches, valid_counts

pytestmark = pytest.mark.full

#: From a right batch to the arguments of a wrong call.
Change = Callable[[dict[str, Any]], dict[str, Any]]
Table = dict[str, tuple[Change, str]]


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


def _tensor(*values: Any) -> Any:
    return torch.tensor(values)


def _ones(*shape: int) -> Callable[[Any], Any]:
    def ones(_: Any) -> Any:
        return torch.ones(shape)

    return ones


def _put(value: Any) -> Callable[[Any], Any]:
    def put(values: Any) -> Any:
        values = values.clone()
        values[1, 3] = value
        return values

    return put


def _deeper(ids: Any) -> Any:
    return ids[..., None].expand(-1, -1, 2)


def _nested(ids: Any) -> Any:
    return torch.nested.nested_tensor(list(ids), layout=torch.jagged)


def _borders(*ends: int | None) -> Callable[[Any], Any]:
    """Borders of a pack; None stands for its end, and -1 for a place less."""
    return lambda pack: _tensor(
        *(pack.tokens if end is None else pack.tokens - 1 if end == -1 else end for end in ends)
    )


def _pack_of_rows(_: Any = None) -> Any:
    return Pack.of([9, 6, 3], TokenAlignment(sequence=1, pack=1))


def _params(_: Any) -> Any:
    from megatron.core.packed_seq_params import PackedSeqParams

    return PackedSeqParams(cu_seqlens_q=_tensor(0, 7, 5))


def _rows(*rows: tuple[Change, str]) -> Table:
    """A table of changes that need no name: each is known by what the error says."""
    table = {said: (change, said) for change, said in rows}
    assert len(table) == len(rows), "two would have one name"
    return table


#: What is wrong with a batch: the call with it, and what the error says.
BATCHES: Table = {
    "a token mask of 2s": (
        _with(token_mask=lambda mask: mask * 2),
        r"'token_mask' has 2.0 in row \d, position \d+: give 1",
    ),
    "a token mask with inf": (
        _with(token_mask=_put(float("inf"))),
        "'token_mask' has inf in row 1, position 3",
    ),
    "a token mask with NaN": (
        _with(token_mask=_put(float("nan"))),
        "'token_mask' has nan in row 1, position 3",
    ),
    "a sample mask of 1e308": (
        _with(sample_mask=lambda mask: mask.double() + 1e308),
        r"'sample_mask' has 1e\+308 in row 0",
    ),
    "a sample mask of integers": (
        _with(sample_mask=lambda mask: mask.long() - 1),
        r"'sample_mask' has -1 in row \d",
    ),
    "a mask of a ready microbatch": (
        _ready(token_mask=lambda mask: mask * 0 + 0.5),
        r"microbatches\[1\], whose 'token_mask' has 0.5 in row 0, position 0",
    ),
    "counts of bools": (_ready(counts=(True, True)), r"counts are \(True, True\)"),
    "negative counts": (_ready(counts=(1, -3)), r"counts are \(1, -3\)"),
    "counts with NaN": (_ready(counts=(1.0, float("nan"))), r"counts are \(1.0, nan\)"),
    "counts without end": (_ready(counts=(1.0, 1e300)), r"counts are \(1.0, 1e\+300\)"),
    "a tensor of bools as counts": (
        _ready(counts=lambda _: _tensor(True, True)),
        "counts are of torch.bool",
    ),
    "a negative tensor as counts": (
        _ready(counts=lambda _: _tensor(1.0, -3.0)),
        r"counts are \[1.0, -3.0\]",
    ),
    "an id that has no hash": (
        lambda batch: {"batch": batch, "microbatch_id": [1]},
        r"a str as microbatch_id, got \[1\]",
    ),
    "a token outside of the vocabulary": (
        _with(input_ids=_put(12345)),
        r"has 12345 in 'input_ids' at row 1, position 3, .* has 128 entries, 0 to 127",
    ),
    "a negative token": (
        _ready(input_ids=_put(-1)),
        "microbatch 1 has -1 in 'input_ids' at row 1, position 3",
    ),
    "tokens as floats": (
        _with(input_ids=lambda ids: ids.float()),
        "has 'input_ids' of torch.float32 with 2 dimensions, .* 128 entries: give torch.int64",
    ),
    "tokens as bools": (
        _ready(input_ids=lambda ids: ids > 3),
        "microbatch 1 has 'input_ids' of torch.bool",
    ),
    "tokens on the meta device": (
        _with(input_ids=lambda ids: ids.to("meta")),
        "whose 'input_ids' is a tensor on the meta device, which has no values",
    ),
    "a mask on the meta device": (
        _with(token_mask=lambda mask: mask.to("meta")),
        "whose 'token_mask' is a tensor on the meta device",
    ),
    "a sparse mask": (
        _ready(token_mask=lambda mask: mask.to_sparse()),
        r"microbatches\[1\], whose 'token_mask' is a tensor of layout torch.sparse_coo",
    ),
    "a mask of complex numbers": (
        _with(token_mask=lambda mask: mask.cfloat()),
        "whose 'token_mask' is torch.complex64",
    ),
    "a mask of NumPy's": (
        _ready(token_mask=lambda mask: mask.cpu().numpy()),
        r"microbatches\[1\], whose 'token_mask' is a ndarray",
    ),
    "a sample mask that is a list": (
        _ready(sample_mask=[1.0, 1.0]),
        r"microbatches\[1\], whose 'sample_mask' is a list",
    ),
    "last='no'": (
        lambda batch: {"batch": batch, "last": "no"},
        r"microbatch\(\) takes a bool as last, got 'no'",
    ),
}
#: Of a model that looks positions up.
POSITIONS: Table = {
    "a position that the model has not": (
        lambda batch: {"batch": {**batch, "position_ids": batch["input_ids"] * 0 + 40}},
        "has 40 in 'position_ids' at row 0, position 0, .* has 32 entries, 0 to 31",
    ),
}
#: Of a step with `counts=`, which asks a microbatch for what it has not.
COUNTED: Table = {
    "counts= that raises": (_ready(counts="missing"), "KeyError: 'missing'"),
}
#: Shapes that do not fit, and values without rows.
SHAPES = _rows(
    (lambda _: {"batch": [1, 2]}, "got a list whose 'input_ids' is a NoneType"),
    (lambda batch: {"batch": {"tokens": batch["input_ids"]}}, "NoneType"),
    (lambda _: {"batch": {"input_ids": _ones(3)(None)}}, r"\(3,\)"),
    (_with(token_mask=_ones(3, 4)), r"'token_mask', a tensor of shape \(3, 4\), for 4 rows"),
    (_with(sample_mask=_ones(4, 2)), r"'sample_mask' has shape \(4, 2\): give it \(4,\)"),
    (_with(sample_mask=[1.0] * 4), "'sample_mask' is a list: give a dense tensor"),
    (_with(weight=lambda _: _tensor(1.0).sum()), r"'weight', a tensor of shape \(\), for 4 rows"),
    (_with(images=[1] * 3), r"a list of 3 items, for 4 rows .*shared=\("),
    (_with(images=lambda _: _ones(4, 2)(None).numpy()), r"a ndarray.*shared=\("),
    (_with(meta={"a": 1}), r"a dict, for 4 rows.*shared=\("),
    (_with(rows=range(4)), r"a range, for 4 rows.*shared=\("),
    (_with(input_ids=_deeper), "'input_ids' of torch.int64 with 3 dimensions"),
    (_with(input_ids=_nested), r"4 nested rows, and begin\(\) micro_batch_size=2"),
    (_with(pack=_pack_of_rows), "a Pack of 3 sequences and 18 tokens"),
    (_with(rope=_pack_of_rows), "'rope' with a Pack of 3"),
    (_with(packs=lambda _: [_pack_of_rows()] * 4), "'packs' with a Pack of 3"),
    (
        lambda batch: {"batch": {n: v.repeat(2, *[1] * (v.dim() - 1)) for n, v in batch.items()}},
        "rank_batch_size=",
    ),
)
#: Ready microbatches and packs; the step has a budget, and so do rows that are to be packed.
READY = _rows(
    (lambda batch: {"microbatches": batch}, "got a dict as microbatches: pass a"),
    (lambda batch: {"batch": batch, "microbatches": [batch]}, "a batch and microbatches"),
    (
        lambda batch: {"microbatches": [batch, {"ids": batch["input_ids"]}]},
        r"microbatches\[1\], a dict whose 'input_ids' is not there",
    ),
    (
        lambda _: {"microbatches": [object()]},
        r"microbatches\[0\], a object whose 'input_ids' is not there",
    ),
    (_ready(token_mask=_ones(2, 5)), r"whose 'token_mask' has shape \(2, 5\): give it \(2, 32\)"),
    (
        _packed(cu_seqlens=_borders(0, 9, 5, None)),
        r"microbatches\[1\], whose cu_seqlens fall from 9 to 5 in sequence 1",
    ),
    (_packed(cu_seqlens=_borders(3, 9, None)), r"whose cu_seqlens begin with \[3\]"),
    (
        _packed(cu_seqlens=_borders(0, 9, -1)),
        r"whose cu_seqlens end at (\d+), and which has (\d+) tokens",
    ),
    (
        _packed(cu_seqlens=_borders(0, 9, None), cu_seqlens_padded=_borders(0, 8, None)),
        "whose sequence 0 has 9 tokens and 8 places",
    ),
    (
        _packed(cu_seqlens=_borders(0, 9, None), cu_seqlens_padded=_borders(0, None)),
        "whose cu_seqlens have 2 sequences, and cu_seqlens_padded 1",
    ),
    (
        lambda batch: {"microbatches": [{"input_ids": batch["input_ids"], "p": _params(None)}]},
        "fall from 7 to 5 in sequence 1",
    ),
    (_packed(pack=_pack_of_rows), r"whose Pack has (\d+) tokens, and whose 'input_ids' has (\d+)"),
    (
        _packed(token_mask=_ones(1, 99)),
        r"whose 'token_mask' has (\d+) entries, and which has (\d+) tokens",
    ),
    (_packed(sample_mask=_ones(5)), r"whose 'sample_mask' has (\d+) entries for (\d+) sequences"),
    (_with(attention_mask=None), "not how many are real"),
    (
        _with(attention_mask=None, lengths=[4, 30, 3, 4]),
        "4 rows, of which sequence 1 has 30 tokens and a bin at most 24",
    ),
)
UNCUT = _rows((_with(), r"got 4 rows, and begin\(\) no micro_batch_size"))

LEARNED = {"model_overrides": {"position_embedding_type": "learned_absolute"}}
BUDGET = {"micro_batch_size": None, "max_tokens_per_microbatch": 24}
#: Name → the table, options of the step, and what a step begins with.
TABLES: dict[str, tuple[Table, dict[str, Any], dict[str, Any]]] = {
    "batches": (BATCHES, {}, {}),
    "positions": (POSITIONS, {}, {}),
    "counted": (COUNTED, {"counts": lambda microbatch: _counted(microbatch)}, {}),
    "shapes": (SHAPES, {"shared": ("rope",)}, {"rank_batch_size": 4}),
    "ready": (READY, {}, BUDGET),
    "uncut": (UNCUT, {}, {"micro_batch_size": None}),
}


def _counted(microbatch: Any) -> Any:
    return microbatch[microbatch["counts"]] if "counts" in microbatch else valid_counts(microbatch)


def _loss(returns: Callable[[Any, Any], Any] | None = None, outputs: tuple[str, ...] = ()) -> Any:
    """Cross entropy of logits on Megatron, of the model's own losses on FSDP2."""

    class Loss(TokenLoss):
        def __call__(self, output: Any, microbatch: Any) -> Any:
            if output.dim() == 3:
                targets_BT = microbatch["input_ids"].roll(-1, 1)
                output = torch.nn.functional.cross_entropy(
                    output.mT.float(), targets_BT, reduction="none"
                )
            total = (output * mask_of(microbatch)).sum()
            return returns(total, output) if returns else (total, {"nll": total.detach()})

    Loss.outputs = outputs
    return Loss()


def _bench(engine: str, layout: dict[str, Any], **options: Any) -> Any:
    """A bench whose `forward` is the engine's own, and a batch for it."""

    if engine == "megatron":
        options["forward"] = megatron_idempotent.step.gpt_forward
    bench = Bench(engine, step=options, loss=_loss(), **layout)
    causal = torch.ones(T, T, dtype=torch.bool).tril().logical_not()
    mask = causal.expand(2 * ROWS, 1, T, T).cuda()
    return bench, {**bench.batch(2), "attention_mask": mask}


def in_a_batch(engine: str, layout: dict[str, Any], name: str) -> tuple[list[Any], bool]:
    """Runs on a rank: what is told of each bad batch, and whether the step has the right bits.

    A rank that others wait for is beside rank 1 with a batch that is right.
    """
    table, options, begin = TABLES[name]

    def run(bad: bool) -> Any:
        bench, batch = _bench(engine, layout, **options)
        waits = engine == "fsdp" or layout.keys() & {"pp", "ep"}
        step_id, told = bench.begin(**begin), []
        good = _ready()(batch)
        for change, _ in table.values() if bad else ():
            if bench.rank == 1 or waits:
                wrong = bench.rank == 1
                error = raised_by(
                    bench.step.microbatch, step_id, **(change(batch) if wrong else good)
                )
                told.append((type(error).__name__, str(error)))
        bench.step.microbatch(step_id, **good)
        assert bench.step.finish(step_id).updated
        return told, bench.state()

    told, got = run(True)
    return told, same(got, run(False)[1])


@pytest.mark.parametrize(
    ("engine", "layout", "name"),
    [
        ("megatron", {}, "batches"),
        ("megatron", {"pp": 2}, "batches"),
        ("fsdp", {}, "batches"),
        ("megatron", {"pp": 2, **LEARNED}, "positions"),
        ("megatron", {"pp": 2}, "counted"),
        ("fsdp", {}, "counted"),
        ("megatron", {}, "shapes"),
        ("megatron", {"pp": 2}, "ready"),
        ("megatron", {"ep": 2, "experts": 4}, "ready"),
        ("megatron", {"pp": 2}, "uncut"),
    ],
    ids=lambda each: each if isinstance(each, str) else "+".join(each) or "dp",
)
def test_a_bad_batch_is_refused_by_name_and_the_step_goes_on(megatron_ranks, engine, layout, name):
    (other, _), (failing, right) = megatron_ranks(2, in_a_batch, engine, layout, name)
    table, *_ = TABLES[name]
    assert len(failing) == len(table)
    for index, (row, (_, text)) in enumerate(table.items()):
        kind, message = failing[index]
        found = re.search(text, message, re.DOTALL)
        assert found, (row, message)
        # Both numbers are there, and they differ.
        assert len(set(found.groups())) == len(found.groups()), (row, message)
        assert kind == ("WindowAborted" if other else "ValueError"), row
        if other:
            assert "the step is as it was" in message
            assert other[index][0] == kind
            assert re.search(rf"rank 1: .*{text}", other[index][1], re.DOTALL), row
    assert right


#: What a loss returns instead of a sum and metrics, and what the error says.
LOSSES: dict[str, tuple[Callable[[Any, Any], Any], str]] = {
    "a loss that returns one value": (
        lambda total, _: total,
        "the loss returned a Tensor: return two",
    ),
    "a loss that returns None": (lambda *_: None, "the loss returned None: return two"),
    "a loss that returns a list as metrics": (
        lambda total, _: (total, [1.0]),
        r"the loss returned \(a Tensor, a list\): return two",
    ),
    "a loss that returns None as metrics": (
        lambda total, _: (total, None),
        r"the loss returned \(a Tensor, None\): return two",
    ),
    "a metric that is named by a number": (
        lambda total, _: (total, {3: 1.0}),
        "the loss reported metrics named 3: names are str",
    ),
}
#: What the error says → values that are no sum, no metrics, or no outputs of the name "kl".
VALUES: dict[str, Callable[[Any, Any], Any]] = {
    r"a tensor of shape \(2, 32\) with requires_grad=True": lambda _, each: (each, {}),
    r"\(\) with requires_grad=False, the constant": lambda total, _: (total.detach() + 1, {}),
    "a float with requires_grad=False": lambda total, _: (float(total) + 1, {}),
    "named 'lr', 'rank'": lambda total, _: (total, {"lr": 1.0, "rank": 1.0, "kl": 0.0}),
    r"reported 'kl' as a tensor of shape \(2, 32\): metr": lambda total, each: (
        total,
        {"kl": each},
    ),
    "reported 'kl' as a str: metrics are numbers": lambda total, _: (total, {"kl": "0.1"}),
    "names 'kl' in its `outputs`, and has returned 'nll'": lambda total, _: (total, {"nll": 1}),
    r"output 'kl' as a tensor of shape \(1, 32\) for 2": lambda total, each: (
        total,
        {"kl": each[:1]},
    ),
    "output 'kl' as a list of 3 items for 2": lambda total, each: (total, {"kl": [each] * 3}),
    "output 'kl' as a float for 2 sequences": lambda total, _: (total, {"kl": 1.0}),
}
RETURNED = [*LOSSES.values(), *((returns, text) for text, returns in VALUES.items())]


@pytest.mark.parametrize(
    ("engine", "layout"),
    [("megatron", {}), ("megatron", {"pp": 2}), ("fsdp", {})],
    ids=["dp", "pp", "fsdp"],
)
@on_ranks(2)
def test_a_loss_that_returns_something_else_is_refused_by_name(
    engine: str, layout: dict[str, Any]
) -> None:

    def run(bad: bool) -> Any:
        bench, batch = _bench(engine, layout)
        told = []
        for returns, text in RETURNED if bad else ():
            outputs = ("kl",) if "output" in text else ()
            loss = _loss(returns, outputs) if bench.rank == 1 else _loss()
            error = raised_by(bench.run, [batch], loss=loss)
            told.append(str(error))
            bench.step.abort()
        assert bench.run([batch]).updated
        return told, bench.state()

    told, got = run(True)
    for (_, text), message in zip(RETURNED, told, strict=True):
        assert re.search(text, message), (text, message)
    assert same(got, run(False)[1])


class _Slots:
    """A scheduler without a `__dict__`."""

    __slots__ = ("steps",)

    def step(self, increment: int = 1) -> None:
        """Do nothing."""

    def state_dict(self) -> dict[str, Any]:
        return {}

    load_state_dict = None


#: Arguments of a step when it is made: what is raised, and what it says.
ARGUMENTS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "forward=None": ({"forward": None}, TypeError, "as forward, got None"),
    "undo='x'": ({"undo": "x"}, TypeError, "True or False as undo, got 'x'"),
    "order_stable=3": ({"order_stable": 3}, TypeError, "True or False as order_stable, got 3"),
    "deadline_s=inf": ({"deadline_s": float("inf")}, ValueError, "deadline_s is inf, and the"),
    "deadline_s=nan": ({"deadline_s": float("nan")}, ValueError, "must be positive, got nan"),
    "a scheduler with slots": ({"scheduler": _Slots()}, ValueError, "_Slots .*as scheduler"),
}
#: Others, each a `ValueError`: what it says → the arguments.
OTHERS: dict[str, dict[str, Any]] = {
    "positive, got 0": {"deadline_s": 0},
    "'1'": {"deadline_s": "1"},
    "'rope'": {"shared": "rope"},
    r"\(1,\)": {"shared": (1,)},
    r"token_mask\), as shared, got \('token_mask',\)": {"shared": ("token_mask",)},
    "one of 'skip', 'update' as nothing_valid, got 'ig": {"nothing_valid": "ignore"},
}
ON_FSDP: dict[str, dict[str, Any]] = {
    "a positive number or None as clip_grad, got '1'": {"clip_grad": "1"},
    "as clip_grad, got nan": {"clip_grad": float("nan")},
    r"as clip_grad, got tensor\(\[1": {"clip_grad": torch.ones(2)},
    "as clip_grad, got 0.0": {"clip_grad": 0.0},
    "as clip_grad, got -1.0": {"clip_grad": -1.0},
    "GradScaler as grad_scaler, got 'x'": {"grad_scaler": "x"},
    "as grad_scaler, got <class": {"grad_scaler": torch.amp.GradScaler},
    "LinearLR.* as scheduler, without step": {"scheduler": torch.optim.lr_scheduler.LinearLR},
}
_SIZES = ("micro_batch_size", "max_tokens_per_microbatch")
#: Arguments of `begin()`, beside usual ones, by what it says.
BEGUN: dict[str, dict[str, Any]] = {
    **{
        f"as divisor, got {each!r}": {"divisor": each}
        for each in (0, -1.0, float("nan"), float("inf"), "2", True)
    },
    "global_batch_size, got 0": {"global_batch_size": 0},
    "micro_batch_size, got 2.0": {"micro_batch_size": 2.0},
    "max_tokens_per_microbatch, got 0": {**BUDGET, _SIZES[1]: 0},
    "micro_batch_size=2, max_tokens_per_microbatch=96": {_SIZES[1]: 96},
    "step_id, got 3": {"step_id": 3},
    "rank_batch_size, got -1": {"rank_batch_size": -1},
    "a callable object as loss, got 3": {"loss": 3},
    "len": {"loss": len},
}


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
@on_ranks(1)
def test_a_bad_argument_is_refused_when_a_step_is_made_or_begun(engine: str) -> None:
    bench = Bench(engine)
    model, optimizer, scheduler = bench.parts
    kind = functools.partial(class_of(engine), model, optimizer)
    others = {**OTHERS, **(ON_FSDP if engine == "fsdp" else {})}
    rows = [*ARGUMENTS.values(), *((row, ValueError, text) for text, row in others.items())]
    for arguments, error, text in rows:
        if engine == "fsdp" and "order_stable" in arguments:
            continue
        given = {"scheduler": scheduler, **arguments}
        told = raised_by(kind, given.pop("scheduler"), **given)
        assert type(told) is error, (text, told)
        assert re.search(text, str(told)), (text, told)

    class Kindless(TokenLoss):
        kind = "mean"

    class Wrong(TokenLoss):
        normalizers: ClassVar = {"nll": "words"}

    class Nameless(TokenLoss):
        outputs = None

    losses = {
        "the class TokenLoss as loss": TokenLoss,
        "'mean'": Kindless(),
        "'words'": Wrong(),
        "`outputs` is None": Nameless(),
    }
    for text, arguments in {**BEGUN, **{t: {"loss": loss} for t, loss in losses.items()}}.items():
        told = raised_by(bench.begin, **arguments)
        assert isinstance(told, ValueError), (arguments, told)
        assert text in str(told), (arguments, told)
    bench.begin()
    for call in (bench.step.microbatch, bench.step.finish, bench.step.abort):
        for step_id in ([1], 3, b"step-0"):
            told = raised_by(call, step_id)
            assert isinstance(told, ValueError), told
            assert str(told) == f"{call.__name__}() takes a str as step_id, got {step_id!r}"
    bench.step.abort()
    narrow = kind(alignment=TokenAlignment(sequence=4, pack=128))
    told = raised_by(narrow.begin, TokenLoss(), max_tokens_per_microbatch=96)
    assert re.search(r"begin\(\) got a budget of 96 tokens, .* 128", str(told))
    assert bench.run([bench.batch(1)]).updated
    for call in (megatron_idempotent.window.agree, megatron_idempotent.window.guarded_window):
        told = raised_by(call, None, deadline_s=float("inf"))
        assert isinstance(told, ValueError), told
        assert "deadline_s is inf" in str(told)


@on_ranks(1)
def test_a_model_that_a_step_cannot_have_is_refused() -> None:
    """Chunks, optimizers and settings of Megatron's that a step cannot have."""

    bench = Bench()
    chunks, optimizer, _ = bench.parts
    for given, text in (
        ((chunks[0], optimizer), "pass the list"),
        (([], optimizer), "no model chunk"),
        ((chunks, torch.optim.SGD([torch.ones(1)])), "SGD"),
    ):
        assert text in str(raised_by(megatron_idempotent.TrainStep, *given))
    for owner, name, value in (
        (bench.model.config, "overlap_moe_expert_parallel_comm", True),
        (bench.model.config, "gtp_weight_remat_size", 2),
        (bench.model.config, "expert_gtp_weight_remat_size", 2),
        (chunks[0].ddp_config, "reuse_grad_buf_for_mxfp8_param_ag", True),
    ):
        before = getattr(owner, name, None)
        setattr(owner, name, value)
        told = raised_by(megatron_idempotent.TrainStep, chunks, optimizer)
        assert isinstance(told, ValueError), told
        assert name in str(told)
        setattr(owner, name, before)
    assert bench.run([bench.batch(1)]).updated


@pytest.mark.parametrize(
    ("options", "frozen"),
    [
        ({}, ""),
        pytest.param({"distributed_optimizer": False}, "", marks=pytest.mark.exhaustive),
        ({"distributed_optimizer": False, "dtype": "bf16"}, "embedding"),
        pytest.param({"dtype": "bf16"}, "embedding", marks=pytest.mark.exhaustive),
        ({"experts": 4}, ""),
    ],
    ids=str,
)
@on_ranks(1)
def test_an_optimizer_of_another_model_is_refused(options: dict[str, Any], frozen: str) -> None:
    """An optimizer is for the model that it was made of, and for no other."""

    def freeze(module: Any) -> None:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not (frozen and name.startswith(frozen)))

    own, _, _ = build(before_ddp=freeze, **options)
    other, _, _ = build(before_ddp=freeze, **options)
    megatron_idempotent.TrainStep(own.chunks, own.optimizer)
    megatron_idempotent.TrainStep(other.chunks, other.optimizer)
    told = raised_by(megatron_idempotent.TrainStep, own.chunks, other.optimizer)
    assert isinstance(told, ValueError), told
    assert "parameters are not the chunks', such as one of shape (" in str(told)


@on_ranks(1)
def test_an_optimizer_of_another_ddp_is_refused() -> None:
    """Two DDPs over the same modules, one of matrices and one of vectors."""

    def train(module: Any, *, vectors: bool) -> None:
        for parameter in module.parameters():
            parameter.requires_grad_((parameter.dim() == 1) is vectors)

    model, _, _ = build(before_ddp=lambda module: train(module, vectors=False))
    chunk = model.chunks[0]
    train(chunk.module, vectors=True)
    again = type(chunk)(chunk.config, chunk.ddp_config, chunk.module)
    told = raised_by(megatron_idempotent.TrainStep, [again], model.optimizer)
    assert isinstance(told, ValueError), told
    assert "parameters none of the chunks' DDP reduces" in str(told)


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
@on_ranks(2)
def test_an_id_that_comes_again_with_another_batch_is_refused(engine: str) -> None:
    """The same batch under one id is run once, and another one is refused."""

    def steps(again: bool) -> Any:
        bench, batch = _bench(engine, {})
        for form in (_with(), _ready()):
            step_id = bench.begin()
            send = functools.partial(bench.step.microbatch, step_id, microbatch_id="a")
            receipt = send(**form(batch))
            if again:
                copy = {name: value.clone() for name, value in batch.items()}
                assert send(**form(copy)) is receipt
                for name in batch:
                    other = {**batch, name: batch[name].clone()}
                    other[name].view(-1)[-1] = 1 - other[name].view(-1)[-1].long()
                    told = raised_by(send, **form(other))
                    assert isinstance(told, ValueError), (name, told)
                    assert "microbatch_id='a' again, and another batch: its batch" in str(told)
                    assert f"[{name!r}] is torch." in str(told)
                less = {name: value for name, value in batch.items() if name != "token_mask"}
                told = raised_by(send, **form(less))
                assert "is not there, and was torch.float32 of (" in str(told)
            bench.step.finish(step_id)
        return bench.state()

    assert same(steps(True), steps(False))


@pytest.mark.parametrize(
    ("engine", "layout", "rule"),
    [
        ("megatron", {}, "refuse"),
        pytest.param(
            *("megatron", {"distributed_optimizer": False}, "skip"), marks=pytest.mark.exhaustive
        ),
        ("megatron", {"dtype": "bf16"}, "skip"),
        ("fsdp", {}, "refuse"),
    ],
    ids=str,
)
@on_ranks(2)
def test_a_parameter_that_is_nan_on_one_replica_stops_all_of_them(
    engine: str, layout: dict[str, Any], rule: str
) -> None:
    """Rank 1's embedding of a token that no batch has is NaN."""

    def steps(bad: bool) -> Any:
        bench, rows = _bench(engine, layout, non_finite=rule)
        rows["input_ids"] = rows["input_ids"] % 8 + 8
        named = bench.module.named_parameters()
        [table] = [p.detach() for n, p in named if "word_emb" in n or n == "embedding.weight"]
        table = table.to_local() if engine == "fsdp" else table
        told: Any = None
        if bad:
            kept = table[3, 5].clone()
            step_id = bench.begin()
            if bench.rank == 1:
                table[3, 5] = float("nan")
            bench.step.microbatch(step_id, rows)
            error = raised_by(bench.step.finish, step_id)
            told = str(error) if error else bench.step.finish(step_id).skipped
            bench.step.abort() if error else None
            table[3, 5] = kept
        assert bench.run([rows]).updated
        return told, bench.state()

    told, got = steps(True)
    assert re.search(r"rank 1: its parameter '\S*embedding\S*' is nan at \[3, 5\]", told), told
    assert same(got, steps(False)[1])


def surroundings(layout: dict[str, Any]) -> list[str]:
    """Runs on a rank: rank 1 is in autocast, then freezes all parameters after DDP was built."""
    bench, batch = _bench("megatron", layout)
    here, told = bench.rank == 1, []
    step_id = bench.begin()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=here):
        told.append(raised_by(bench.step.microbatch, step_id, batch))
    if told[0] is not None:
        bench.step.microbatch(step_id, batch)
    assert bench.step.finish(step_id).updated

    parameters = list(bench.module.parameters())
    step_id = bench.begin()
    for parameter in parameters:
        parameter.requires_grad_(not here)
    error = raised_by(bench.step.microbatch, step_id, batch)
    told.append(error or raised_by(bench.step.finish, step_id))
    bench.step.abort()
    for parameter in parameters:
        parameter.requires_grad_(True)
    assert bench.run([batch]).updated
    return [f"{type(each).__name__}: {each}" for each in told]


@pytest.mark.parametrize("layout", [{}, {"pp": 2}], ids=str)
def test_autocast_and_parameters_that_are_frozen_after_ddp_are_named(megatron_ranks, layout):
    other, failing = megatron_ranks(2, surroundings, layout)
    assert "a model in float32 inside of torch.autocast('cpu')" in failing[0]
    assert other[0].startswith("WindowAborted: rank 1: RuntimeError" if layout else "NoneType")
    assert "parameters that DDP was built with are frozen now" in failing[1]
    assert other[1].startswith("WindowAborted: rank 1: ")


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
@on_ranks(2)
def test_a_second_thread_is_refused_and_the_first_one_finishes(engine: str) -> None:
    """A second thread comes while the first one waits in `finish()`."""

    def steps(second: bool) -> Any:
        bench, batch = _bench(engine, {})
        step_id = bench.begin()
        bench.step.microbatch(step_id, batch)
        torch.distributed.barrier()
        if not second or bench.rank == 1:
            if second:
                torch.distributed.barrier()  # the other one has been refused by then
            assert bench.step.finish(step_id).updated
            return bench.state()
        results: list[Any] = []
        first = threading.Thread(target=lambda: results.append(bench.step.finish(step_id)))
        first.start()
        while not bench.step._caller:
            time.sleep(0.01)
        for call, arguments in (
            (bench.step.finish, (step_id,)),
            (bench.step.abort, ()),
            (bench.step.microbatch, (step_id, batch)),
        ):
            told = raised_by(call, *arguments)
            assert isinstance(told, RuntimeError), told
            assert "another thread is in finish() of this step" in str(told)
        torch.distributed.barrier()
        first.join()
        assert results[0].updated
        assert bench.step.finish(step_id) is results[0]
        return bench.state()

    assert same(steps(True), steps(False))


@on_ranks(2)
def test_masks_on_a_device_are_judged_at_the_end() -> None:
    """Nothing may be read before the end of the step, as on a GPU.

    Counts with a fraction on one rank and without on the other are added up all the same.
    """
    bench, batch = _bench("megatron", {})
    [first] = cut(batch, [1])
    counts = 2, 7.5 if bench.rank == 1 else 8
    result = bench.run([[{**first, "counts": counts}]])
    assert (result.updated, result.global_valid_tokens) == (True, 15.5)

    microbatches.on_host = lambda values: False
    mask = batch["token_mask"] * (2 if bench.rank == 1 else 1)
    told = raised_by(bench.run, [{**batch, "token_mask": mask}])
    bench.step.abort()
    assert bench.run([batch]).updated
    told = str(told)
    assert "rank 1: ValueError: count 0 of 1" in told
    assert "another value than 0 and 1" in told
