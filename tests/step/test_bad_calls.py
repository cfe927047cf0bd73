"""Bad calls of a step: each is refused by name, and the next step has the bits of an untouched one.

One of two ranks makes the bad call, so that the other one has to be told where it waits.
"""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Change = Callable[[dict[str, Any]], dict[str, Any]]


def _changed(name: str, change: Callable[[Any], Any]) -> Change:
    return lambda batch: {"batch": {**batch, name: change(batch[name])}}


def _ready(**also: Any) -> Change:
    """The batch as two ready microbatches, the second with what is given."""

    def microbatches(batch: dict[str, Any]) -> dict[str, Any]:
        from scenario import cut

        first, second = cut(batch, [1, 1])
        more = {n: each(second.get(n)) if callable(each) else each for n, each in also.items()}
        return {"microbatches": [first, {**second, **more}]}

    return microbatches


def _tensor(*values: Any) -> Any:
    import torch

    return torch.tensor(values)


def _put(value: Any) -> Callable[[Any], Any]:
    def put(values: Any) -> Any:
        values = values.clone()
        values[1, 3] = value
        return values

    return put


#: What is wrong with a batch: the call with it, and what the error says.
BATCHES: dict[str, tuple[Change, str]] = {
    "a token mask of 2s": (
        _changed("token_mask", lambda mask: mask * 2),
        r"'token_mask' has 2.0 in row \d, position \d+: give 1",
    ),
    "a token mask with inf": (
        _changed("token_mask", _put(float("inf"))),
        "'token_mask' has inf in row 1, position 3",
    ),
    "a token mask with NaN": (
        _changed("token_mask", _put(float("nan"))),
        "'token_mask' has nan in row 1, position 3",
    ),
    "a sample mask of 1e308": (
        _changed("sample_mask", lambda mask: mask.double() + 1e308),
        r"'sample_mask' has 1e\+308 in row 0",
    ),
    "a sample mask of integers": (
        _changed("sample_mask", lambda mask: mask.long() - 1),
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
        _changed("input_ids", _put(12345)),
        r"has 12345 in 'input_ids' at row 1, position 3, .* has 128 entries, 0 to 127",
    ),
    "a negative token": (
        _ready(input_ids=_put(-1)),
        "microbatch 1 has -1 in 'input_ids' at row 1, position 3",
    ),
}
#: Of a model that looks positions up.
POSITIONS: dict[str, tuple[Change, str]] = {
    "a position that the model has not": (
        lambda batch: {"batch": {**batch, "position_ids": batch["input_ids"] * 0 + 40}},
        "has 40 in 'position_ids' at row 0, position 0, .* has 32 entries, 0 to 31",
    ),
}
#: Of a step with `counts=`, which asks a microbatch for what it has not.
COUNTED: dict[str, tuple[Change, str]] = {
    "counts= that raises": (_ready(counts="missing"), "KeyError: 'missing'"),
}
#: What a loss returns instead of a sum and metrics, and what the error says.
LOSSES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a loss that returns one value": (
        lambda total: total,
        "the loss returned a Tensor: return two",
    ),
    "a loss that returns None": (lambda total: None, "the loss returned None: return two"),
    "a loss that returns a list as metrics": (
        lambda total: (total, [1.0]),
        r"the loss returned \(a Tensor, a list\): return two",
    ),
    "a loss that returns None as metrics": (
        lambda total: (total, None),
        r"the loss returned \(a Tensor, None\): return two",
    ),
    "a metric that is named by a number": (
        lambda total: (total, {3: 1.0}),
        "the loss reported metrics named 3: names are str",
    ),
}


def _counted(microbatch: Any) -> Any:
    """`counts=` of the step."""
    from megatron_idempotent.step import valid_counts

    return microbatch[microbatch["counts"]] if "counts" in microbatch else valid_counts(microbatch)


def _loss(returns: Callable[[Any], Any] | None = None) -> Any:
    """Cross entropy of logits on Megatron, of the model's own losses on FSDP2."""
    import torch
    from scenario import TokenLoss, mask_of

    class Loss(TokenLoss):
        def __call__(self, output: Any, microbatch: Any) -> Any:
            if output.dim() == 3:
                targets_BT = microbatch["input_ids"].roll(-1, 1)
                output = torch.nn.functional.cross_entropy(
                    output.mT.float(), targets_BT, reduction="none"
                )
            total = (output * mask_of(microbatch)).sum()
            return (total, {"nll": total.detach()}) if returns is None else returns(total)

    return Loss()


class _Bench:
    """A step on a small model whose `forward` is the engine's own."""

    def __init__(self, engine: str, layout: dict[str, Any], **options: Any) -> None:
        from scenario import Bench

        if engine == "fsdp":
            of = Bench(engine, step=options)
            self.step, self.replica, self.state = of.step, of.replica, of.state
            return
        import scenario

        from megatron_idempotent import TrainStep

        model, scheduler, self.replica = scenario.build(**layout)
        self.step = TrainStep(
            model.chunks, model.optimizer, scheduler, **{"deadline_s": 20.0, **options}
        )
        self.state = lambda: scenario.state(model, scheduler)

    def batch(self) -> dict[str, Any]:
        import torch
        from scenario import ROWS, T, data

        causal = torch.ones(T, T, dtype=torch.bool).tril().logical_not()
        rows = data(1, 2 * ROWS, self.replica)
        return {**rows, "attention_mask": causal.expand(2 * ROWS, 1, T, T).cuda()}

    def begin(self, loss: Any = None) -> str:
        from scenario import ROWS

        sizes = {"global_batch_size": 8, "micro_batch_size": ROWS}
        return str(self.step.begin(loss or _loss(), **sizes))


def _steps(engine: str, layout: dict[str, Any], table: dict[str, Any], bad: bool) -> Any:
    """A step for each row of the table, with the bad call in it; states, and what was told."""
    import torch
    from scenario import raised_by

    bench = _Bench(engine, layout, counts=_counted if table is COUNTED else None)
    here = torch.distributed.get_rank() == 1
    states, told = [], []
    for change, _ in table.values():
        step_id, batch = bench.begin(), bench.batch()
        error: Any = None
        if bad:
            # The other one has the same batch in the same form.
            good = _ready()(batch) if "microbatches" in change(batch) else {"batch": batch}
            error = raised_by(bench.step.microbatch, step_id, **(change(batch) if here else good))
            told.append((type(error).__name__, str(error)))
        if not bad or error is not None:
            bench.step.microbatch(step_id, batch)
        assert bench.step.finish(step_id).updated
        states.append(bench.state())
    return states, told


def in_a_batch(engine: str, layout: dict[str, Any], table: dict[str, Any]) -> Any:
    """Runs on a rank: what is told of each bad batch, and whether the steps have the right bits."""
    from fsdp_bench import same

    got, told = _steps(engine, layout, table, True)
    want, _ = _steps(engine, layout, table, False)
    return told, [same(one, other) for one, other in zip(got, want, strict=True)]


def batches(engine: str, layout: dict[str, Any]) -> Any:
    """Runs on a rank."""
    return in_a_batch(engine, layout, BATCHES)


def positions(engine: str, layout: dict[str, Any]) -> Any:
    """Runs on a rank."""
    return in_a_batch(engine, layout, POSITIONS)


def counted(engine: str, layout: dict[str, Any]) -> Any:
    """Runs on a rank."""
    return in_a_batch(engine, layout, COUNTED)


LEARNED = {"model_overrides": {"position_embedding_type": "learned_absolute"}}


@pytest.mark.parametrize(
    ("engine", "layout", "function", "table"),
    [
        ("megatron", {}, batches, BATCHES),
        ("megatron", {"pp": 2}, batches, BATCHES),
        ("fsdp", {}, batches, BATCHES),
        ("megatron", {"pp": 2, **LEARNED}, positions, POSITIONS),
        ("megatron", {"pp": 2}, counted, COUNTED),
        ("fsdp", {}, counted, COUNTED),
    ],
    ids=["dp", "pp", "fsdp", "positions", "counts-pp", "counts-fsdp"],
)
def test_a_bad_batch_is_refused_by_name_and_the_step_goes_on(
    megatron_ranks, engine, layout, function, table
):
    (other, _), (failing, right) = megatron_ranks(2, function, engine, layout)
    waits = engine == "fsdp" or "pp" in layout
    for index, (name, (_, text)) in enumerate(table.items()):
        kind, message = failing[index]
        assert re.search(text, message), (name, message)
        if waits:
            assert kind == other[index][0] == "WindowAborted", name
            assert "the step is as it was" in message
            assert re.search(text, other[index][1]), name
        else:
            assert kind == "ValueError", name
            assert other[index] == ("NoneType", "None"), name
        assert right[index], f"the step after {name!r} is right"


def in_a_loss(engine: str, layout: dict[str, Any]) -> Any:
    """Runs on a rank: what each loss of rank 1 ends in, and whether the next steps are right."""
    import torch
    from fsdp_bench import same
    from scenario import raised_by

    here = torch.distributed.get_rank() == 1

    def steps(bad: bool) -> Any:
        bench = _Bench(engine, layout)
        states, told = [], []
        for returns, _ in LOSSES.values():
            if bad:
                step_id = bench.begin(_loss(returns if here else None))
                error = raised_by(bench.step.microbatch, step_id, bench.batch())
                error = error or raised_by(bench.step.finish, step_id)
                told.append(str(error))
                bench.step.abort()
            step_id = bench.begin()
            bench.step.microbatch(step_id, bench.batch())
            assert bench.step.finish(step_id).updated
            states.append(bench.state())
        return states, told

    got, told = steps(True)
    want, _ = steps(False)
    return told, [same(one, other) for one, other in zip(got, want, strict=True)]


@pytest.mark.parametrize(
    ("engine", "layout"),
    [("megatron", {}), ("megatron", {"pp": 2}), ("fsdp", {})],
    ids=["dp", "pp", "fsdp"],
)
def test_a_loss_that_returns_something_else_is_refused_by_name(megatron_ranks, engine, layout):
    for told, right in megatron_ranks(2, in_a_loss, engine, layout):
        for (name, (_, text)), message in zip(LOSSES.items(), told, strict=True):
            assert re.search(text, message), (name, message)
        assert all(right)


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


def made_with(engine: str) -> None:
    """Runs on a rank: what each is told when a step is made, and a loss's class by `begin`."""
    from scenario import TokenLoss, build, class_of, raised_by

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    if engine == "fsdp":
        import fsdp_bench

        model, optimizer, scheduler = fsdp_bench.build()
    else:
        built, scheduler, _ = build()
        model, optimizer = built.chunks, built.optimizer
    kind = class_of(engine)
    for name, (arguments, error, text) in ARGUMENTS.items():
        if engine == "fsdp" and "order_stable" in arguments:
            continue
        given = {"scheduler": scheduler, **arguments}
        told = raised_by(kind, model, optimizer, given.pop("scheduler"), **given)
        assert type(told) is error, (name, told)
        assert re.search(text, str(told)), (name, told)
    told = raised_by(kind(model, optimizer).begin, TokenLoss, global_batch_size=8)
    assert "got the class TokenLoss as loss" in str(told)
    for call in (megatron_idempotent.window.agree, megatron_idempotent.window.guarded_window):
        told = raised_by(call, None, deadline_s=float("inf"))
        assert isinstance(told, ValueError), told
        assert "deadline_s is inf" in str(told)
    assert tiny.BATCH


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_a_bad_argument_is_refused_when_a_step_is_made(megatron_ranks, engine):
    megatron_ranks(1, made_with, engine)


def of_another_model(options: dict[str, Any], frozen: str) -> None:
    """Runs on a rank: an optimizer is for the model that it was made of, and for no other."""
    from scenario import build, raised_by

    from megatron_idempotent import TrainStep

    def freeze(module: Any) -> None:
        for name, parameter in module.named_parameters():
            parameter.requires_grad_(not (frozen and name.startswith(frozen)))

    own, _, _ = build(before_ddp=freeze, **options)
    other, _, _ = build(before_ddp=freeze, **options)
    TrainStep(own.chunks, own.optimizer)
    TrainStep(other.chunks, other.optimizer)
    told = raised_by(TrainStep, own.chunks, other.optimizer)
    assert isinstance(told, ValueError), told
    assert "parameters are not the chunks', such as one of shape (" in str(told)


def of_another_ddp() -> None:
    """Runs on a rank: two DDPs over the same modules, one of matrices and one of vectors."""
    from scenario import build, raised_by

    from megatron_idempotent import TrainStep

    def train(module: Any, *, vectors: bool) -> None:
        for parameter in module.parameters():
            parameter.requires_grad_((parameter.dim() == 1) is vectors)

    model, _, _ = build(before_ddp=lambda module: train(module, vectors=False))
    chunk = model.chunks[0]
    train(chunk.module, vectors=True)
    again = type(chunk)(chunk.config, chunk.ddp_config, chunk.module)
    told = raised_by(TrainStep, [again], model.optimizer)
    assert isinstance(told, ValueError), told
    assert "parameters none of the chunks' DDP reduces" in str(told)


def test_an_optimizer_of_another_ddp_is_refused(megatron_ranks):
    megatron_ranks(1, of_another_ddp)


@pytest.mark.parametrize(
    ("options", "frozen"),
    [
        ({}, ""),
        ({"distributed_optimizer": False}, ""),
        ({"distributed_optimizer": False, "dtype": "bf16"}, "embedding"),
        ({"dtype": "bf16"}, "embedding"),
        ({"experts": 4}, ""),
    ],
    ids=str,
)
def test_an_optimizer_of_another_model_is_refused(megatron_ranks, options, frozen):
    megatron_ranks(1, of_another_model, options, frozen)


def sent_again(engine: str) -> None:
    """Runs on a rank: the same batch under one id is run once, and another one is refused."""
    from fsdp_bench import same
    from scenario import raised_by

    def steps(again: bool) -> Any:
        bench = _Bench(engine, {})
        for form in (lambda batch: {"batch": batch}, _ready()):
            step_id, batch = bench.begin(), bench.batch()
            receipt = bench.step.microbatch(step_id, **form(batch), microbatch_id="a")
            if again:
                copy = {name: value.clone() for name, value in batch.items()}
                repeated = bench.step.microbatch(step_id, **form(copy), microbatch_id="a")
                assert repeated is receipt
                for name in batch:
                    other = {**batch, name: batch[name].clone()}
                    other[name].view(-1)[-1] = 1 - other[name].view(-1)[-1].long()
                    told = raised_by(
                        bench.step.microbatch, step_id, **form(other), microbatch_id="a"
                    )
                    assert isinstance(told, ValueError), (name, told)
                    assert "microbatch_id='a' again, and another batch: its batch" in str(told)
                    assert f"[{name!r}] is torch." in str(told)
                less = {name: value for name, value in batch.items() if name != "token_mask"}
                told = raised_by(bench.step.microbatch, step_id, **form(less), microbatch_id="a")
                assert "is not there, and was torch.float32 of (" in str(told)
            bench.step.finish(step_id)
        return bench.state()

    assert same(steps(True), steps(False))


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_an_id_that_comes_again_with_another_batch_is_refused(megatron_ranks, engine):
    megatron_ranks(2, sent_again, engine)


_TABLE = "embedding.weight"


def not_a_number(engine: str, layout: dict[str, Any], rule: str) -> Any:
    """Runs on a rank: rank 1's embedding of a token that no batch has is NaN."""
    import torch
    from fsdp_bench import same
    from scenario import raised_by

    here = torch.distributed.get_rank() == 1

    def steps(bad: bool) -> Any:
        bench = _Bench(engine, layout, non_finite=rule)
        backend = bench.step._backend
        model = backend._model if engine == "fsdp" else backend.chunks[0]
        [table] = [
            p.detach() for n, p in model.named_parameters() if "word_emb" in n or n == _TABLE
        ]
        table = table.to_local() if engine == "fsdp" else table
        told: Any = None
        rows = {**bench.batch()}
        rows["input_ids"] = rows["input_ids"] % 8 + 8
        if bad:
            kept = table[3, 5].clone()
            step_id = bench.begin()
            if here:
                table[3, 5] = float("nan")
            bench.step.microbatch(step_id, rows)
            error = raised_by(bench.step.finish, step_id)
            told = str(error) if error else bench.step.finish(step_id).skipped
            bench.step.abort() if error else None
            table[3, 5] = kept
        step_id = bench.begin()
        bench.step.microbatch(step_id, rows)
        assert bench.step.finish(step_id).updated
        return told, bench.state()

    told, got = steps(True)
    return told, same(got, steps(False)[1])


@pytest.mark.parametrize(
    ("engine", "layout", "rule"),
    [
        ("megatron", {}, "refuse"),
        ("megatron", {"distributed_optimizer": False}, "skip"),
        ("megatron", {"dtype": "bf16"}, "skip"),
        ("fsdp", {}, "refuse"),
    ],
    ids=str,
)
def test_a_parameter_that_is_nan_on_one_replica_stops_all_of_them(
    megatron_ranks, engine, layout, rule
):
    for told, right in megatron_ranks(2, not_a_number, engine, layout, rule):
        assert re.search(r"rank 1: its parameter '\S*embedding\S*' is nan at \[3, 5\]", told), told
        assert right


def frozen_after_ddp(layout: dict[str, Any]) -> str:
    """Runs on a rank: rank 1 freezes all of its parameters after DDP was built."""
    import torch
    from scenario import raised_by

    bench = _Bench("megatron", layout)
    parameters = list(bench.step._chunks[0].parameters())
    step_id = bench.begin()
    for parameter in parameters:
        parameter.requires_grad_(torch.distributed.get_rank() == 0)
    told = raised_by(bench.step.microbatch, step_id, bench.batch())
    told = told or raised_by(bench.step.finish, step_id)
    bench.step.abort()
    for parameter in parameters:
        parameter.requires_grad_(True)
    step_id = bench.begin()
    bench.step.microbatch(step_id, bench.batch())
    assert bench.step.finish(step_id).updated
    return f"{type(told).__name__}: {told}"


@pytest.mark.parametrize("layout", [{}, {"pp": 2}], ids=str)
def test_parameters_that_are_all_frozen_after_ddp_are_named(megatron_ranks, layout):
    other, failing = megatron_ranks(2, frozen_after_ddp, layout)
    assert "parameters that DDP was built with are frozen now" in failing
    assert other.startswith("WindowAborted: rank 1: ")


def in_autocast(layout: dict[str, Any]) -> str:
    """Runs on a rank: rank 1 runs a batch of a float32 model under autocast, and then without."""
    import torch
    from scenario import raised_by

    bench = _Bench("megatron", layout)
    here = torch.distributed.get_rank() == 1
    step_id = bench.begin()
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=here):
        told = raised_by(bench.step.microbatch, step_id, bench.batch())
    if told is not None:
        bench.step.microbatch(step_id, bench.batch())
    assert bench.step.finish(step_id).updated
    return f"{type(told).__name__}: {told}"


@pytest.mark.parametrize("layout", [{}, {"pp": 2}], ids=str)
def test_autocast_around_a_float32_model_is_refused(megatron_ranks, layout):
    other, failing = megatron_ranks(2, in_autocast, layout)
    assert "a model in float32 inside of torch.autocast('cpu')" in failing
    assert other.startswith("WindowAborted: rank 1: RuntimeError" if layout else "NoneType")


def two_threads(engine: str) -> None:
    """Runs on a rank: a second thread comes while the first one waits in `finish()`."""
    import torch
    from fsdp_bench import same
    from scenario import raised_by

    def steps(second: bool) -> Any:
        bench = _Bench(engine, {})
        step_id = bench.begin()
        bench.step.microbatch(step_id, bench.batch())
        torch.distributed.barrier()
        if not second or torch.distributed.get_rank() == 1:
            if second:
                time.sleep(1.5)  # the other one waits here in the meantime
            assert bench.step.finish(step_id).updated
            return bench.state()
        results: list[Any] = []
        first = threading.Thread(target=lambda: results.append(bench.step.finish(step_id)))
        first.start()
        time.sleep(0.5)
        for call, arguments in (
            (bench.step.finish, (step_id,)),
            (bench.step.abort, ()),
            (bench.step.microbatch, (step_id, bench.batch())),
        ):
            told = raised_by(call, *arguments)
            assert isinstance(told, RuntimeError), told
            assert "another thread is in finish() of this step" in str(told)
        first.join()
        assert results[0].updated
        assert bench.step.finish(step_id) is results[0]
        return bench.state()

    assert same(steps(True), steps(False))


@pytest.mark.parametrize("engine", ["megatron", "fsdp"])
def test_a_second_thread_is_refused_and_the_first_one_finishes(megatron_ranks, engine):
    megatron_ranks(2, two_threads, engine)


def on_a_device() -> str:
    """Runs on a rank: nothing may be read before the end of the step, as on a GPU."""
    import torch
    from scenario import raised_by

    from megatron_idempotent.step import microbatches

    microbatches.on_host = lambda values: False
    bench = _Bench("megatron", {})
    step_id, batch = bench.begin(), bench.batch()
    mask = batch["token_mask"] * (2 if torch.distributed.get_rank() == 1 else 1)
    bench.step.microbatch(step_id, {**batch, "token_mask": mask})
    told = raised_by(bench.step.finish, step_id)
    bench.step.abort()
    step_id = bench.begin()
    bench.step.microbatch(step_id, batch)
    assert bench.step.finish(step_id).updated
    return str(told)


def test_masks_on_a_device_are_judged_at_the_end(megatron_ranks):
    for told in megatron_ranks(2, on_a_device):
        assert "rank 1: ValueError: count 0 of 1" in told
        assert "another value than 0 and 1" in told


def test_the_page_has_a_row_for_each():
    page = (Path(__file__).parents[2] / "docs" / "train-step.md").read_text(encoding="utf-8")
    section = page.partition("### Bad input\n")[2].partition("\n### ")[0]
    for name in (*BATCHES, *POSITIONS, *COUNTED, *LOSSES, *ARGUMENTS):
        assert f"| {name} |" in section, name


def fractions() -> None:
    """Runs on a rank: counts with a fraction on one rank and without on the other are added up."""
    import torch
    from scenario import cut

    bench = _Bench("megatron", {})
    step_id = bench.begin()
    tokens = 7.5 if torch.distributed.get_rank() == 1 else 8
    [first] = cut(bench.batch(), [1])
    bench.step.microbatch(step_id, microbatches=[{**first, "counts": (2, tokens)}])
    result = bench.step.finish(step_id)
    assert (result.updated, result.global_valid_tokens) == (True, 15.5)


def test_a_fraction_on_one_rank_is_summed_in_one_type(megatron_ranks):
    megatron_ranks(2, fractions)
