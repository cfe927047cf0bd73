"""Errors of accumulation_window(), and the state after a block that raises."""

from __future__ import annotations

import pytest

FUNCTIONS = ("no_sync_func", "grad_sync_func", "finalize_model_grads_func")


def _run(model, num_microbatches):
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_idempotent.proof.cpu import tiny

    get_forward_backward_func()(
        forward_step_func=model._forward_step([]),
        data_iterator=tiny.microbatches(0),
        model=model.chunks,
        num_microbatches=num_microbatches,
        seq_length=tiny.SEQUENCE,
        micro_batch_size=tiny.BATCH,
        forward_only=False,
    )


def said(case: str) -> str:
    """Runs on a rank: the error of one wrong use."""
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    if case != "unpatched":
        megatron_idempotent.apply()
    model = tiny.build()
    try:
        WRONG[case](megatron_idempotent.window.accumulation_window, model)
    except (RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def _too_many(window, model):
    with window(model.chunks, 3):
        _run(model, 2)
        _run(model, 2)


def _too_few(window, model):
    with window(model.chunks, 3):
        _run(model, 2)


def _empty(window, model):
    with window(model.chunks):
        pass


def _no_chunk(window, model):
    with window([], 3):
        pass


def _no_number(window, model):
    with window(model.chunks, 0):
        pass


def _nested(window, model):
    with window(model.chunks, 3), window(model.chunks, 3):
        pass


def _retried(window, model):
    def fail(index, loss):
        raise OSError("no data")

    with window(model.chunks, 2):
        model.on_microbatch = fail
        with pytest.raises(OSError, match="no data"):
            _run(model, 1)
        model.on_microbatch = None
        _run(model, 1)


def _unpatched(window, model):
    with window(model.chunks, 2):
        pass


WRONG = {
    "too many": _too_many,
    "too few": _too_few,
    "empty": _empty,
    "no chunk": _no_chunk,
    "no number": _no_number,
    "nested": _nested,
    "retried": _retried,
    "unpatched": _unpatched,
}
MESSAGES = {
    "too many": r"^ValueError: .* has 3 microbatches, 2 have run, and this call brings 2",
    "too few": r"^RuntimeError: .* ends after 2 of 3 microbatches: .* Run the rest",
    "empty": r"^RuntimeError: .* ends after 0 of its microbatches",
    "no chunk": r"^ValueError: .* no model chunk",
    "no number": r"^ValueError: .* takes a positive int as total_microbatches, got 0",
    "nested": r"^RuntimeError: .* is open for these chunks already",
    "retried": r"^RuntimeError: an earlier schedule call .* raised, so the gradients are partial",
    "unpatched": r"^RuntimeError: accumulation_window\(\) stands on patches that are not applied: "
    r"aux-loss-scale-left-set \(disabled: .*\) or timers-left-running \(disabled: .*\), "
    r"without which each schedule call averages, reduces and finalizes its own microbatches as a "
    r"whole step. Call megatron_idempotent.apply\(\)",
}


@pytest.mark.parametrize("case", WRONG)
def test_a_wrong_use_is_a_clear_error(megatron_ranks, case):
    import re

    (message,) = megatron_ranks(1, said, case)
    assert re.search(MESSAGES[case], message), message


def left_behind() -> list[bool]:
    """Runs on a rank: what is as before, after a call that raises, and whether the next step is."""
    import torch

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny
    from megatron_idempotent.window import accumulation_window

    megatron_idempotent.apply()
    model = tiny.build()
    model.forward_backward(2, data_seed=0)
    want = model.gradients()
    functions = [getattr(model.config, name) for name in FUNCTIONS]

    def fail(index, loss):
        if index == 1:
            raise OSError("no data")

    for total in (2, 4):  # in the last call, and in one that is held back
        model.on_microbatch = fail
        with pytest.raises(OSError, match="no data"), accumulation_window(model.chunks, total):
            _run(model, 2)
    model.on_microbatch = None
    same = [now == was for now, was in zip(_functions(model), functions, strict=True)]
    megatron_idempotent.abort_window(model.chunks)
    with accumulation_window(model.chunks, 2):
        model.forward_backward(2, data_seed=0)
    return [*same, torch.equal(model.gradients(), want)]


def _functions(model):
    return [getattr(model.config, name) for name in FUNCTIONS]


def test_a_window_that_raises_leaves_the_config_as_it_was(megatron_ranks):
    for same in megatron_ranks(2, left_behind):
        assert all(same), same


def told_of_an_absent_hazard() -> tuple[str, str, str] | None:
    """Runs on a rank: a patch whose hazard is not here, why, and what is said where it is a
    door."""
    import megatron_idempotent
    from megatron_idempotent.patching.catalog import outlines
    from megatron_idempotent.patching.needs import Need, check_applied, providers

    rows = {row.id: row for row in megatron_idempotent.apply()}
    asked = {name for patch in outlines().values() for name in patch.provides}
    only = [providers(name)[0] for name in sorted(asked) if len(providers(name)) == 1]
    gone = [patch for patch in only if rows[patch.id].status == "unsupported_version"]
    if not gone:
        return None
    absent = rows[gone[0].id]
    need = Need(gone[0].provides[0], "it hurts")
    check_applied("f()", [need], [object()])
    with pytest.raises(RuntimeError) as raised:
        check_applied("f()", [need._replace(a_door=True)], [object()])
    return absent.id, absent.reason, str(raised.value)


def test_a_patch_is_asked_for_without_its_hazard_only_where_it_is_a_door(megatron_ranks):
    (found,) = megatron_ranks(1, told_of_an_absent_hazard)
    if found is None:
        pytest.skip("this release has every hazard that library code asks about")
    patch_id, reason, told = found
    assert told == (
        f"f() stands on patches that are not applied: {patch_id} (unsupported_version: {reason}), "
        "without which it hurts. Call megatron_idempotent.apply(), and exclude none of them"
    )


def told_without_a_door() -> str:
    """Runs on a rank: what is said of a door that no patch provides."""
    from megatron_idempotent.patching.needs import Need, check_applied

    check_applied("f()", [Need("a-door", "it hurts")], [object()])
    with pytest.raises(RuntimeError) as raised:
        check_applied("f()", [Need("a-door", "it hurts", a_door=True)], [object()])
    return str(raised.value)


def test_a_door_that_no_case_file_provides_is_told(megatron_ranks):
    (told,) = megatron_ranks(1, told_without_a_door)
    assert "a-door, which no patch provides, without which it hurts" in told
