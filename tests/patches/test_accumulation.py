"""A step in any number of schedule calls has the gradient of one call, to the bit."""

import contextlib

import pytest
from abort_sites import Interrupted
from ranks import VIRTUAL, built, fails, on_microbatch, on_ranks, same, tiered

import megatron_idempotent
from megatron_idempotent.patching.needs import Need, check_applied, providers
from megatron_idempotent.proof.cpu import tiny

pytestmark = pytest.mark.full

TOTAL = 4


def _calls(model, sizes, *, window=None, forward_step=None, between=None):
    """Zero the gradients, then call the schedule once per size on one stream of microbatches."""
    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    data = [tiny.microbatches(3) for _ in model.chunks]
    forward_step = forward_step or model._forward_step([])
    with window or contextlib.nullcontext():
        for size in sizes:
            stream = data if len(data) > 1 else data[0]
            model.schedule(stream, size, forward_step=forward_step)
            if between is not None:
                between()
    return model.gradients()


def _moe(**options):
    overrides = {"moe_aux_loss_coeff": 1.0, "moe_z_loss_coeff": 0.5}
    overrides |= options.pop("config_overrides", {})
    return built(experts=4, config_overrides=overrides, **options)


def _compare(splits, how, options):
    """Each split of a step has the gradient of one call; the first one twice."""
    total = sum(splits[0])
    model = _moe(**options)
    want = _calls(model, [total])
    assert want.abs().max() > 0
    for sizes in [*splits, splits[0]]:
        window = megatron_idempotent.window.accumulation_window(
            model.chunks, **{how: total} if how else {}
        )
        assert same(_calls(model, sizes, window=window), want), sizes
    assert same(_calls(model, [total]), want)


# With two stages, an interleaved schedule that batches its messages mixes them up: upstream's
# argument parser refuses it, a TransformerConfig does not.
VPP = {**VIRTUAL, "config_overrides": {"overlap_p2p_comm": True, "batch_p2p_comm": False}}
SPLITS = [[2, 2], [1, 1, 1, 1], [1, 3], [4]]
LAYOUTS = {
    "dp2": (2, SPLITS, {}),
    "dp2, all-reduce": (2, SPLITS, {"distributed_optimizer": False}),
    "dp2, no overlap": (2, SPLITS, {"overlap_grad_reduce": False}),
    "dp2, overlap_param_gather": (2, SPLITS, {"overlap_param_gather": True}),
    "fp16": (2, SPLITS, {"dtype": "fp16", "loss_scale": 256.0}),
    "pp2": (2, SPLITS, {"pp": 2}),
    "pp2 dp2": (4, SPLITS, {"pp": 2}),
    "pp2 vpp2": (2, [[2, 2]], VPP),
    "pp2 vpp2 dp2": (4, [[2, 2]], {**VPP, "align": True}),
    "pp2 vpp2 dp2, gathers": (4, [[2, 2]], {**VPP, "overlap_param_gather": True}),
}
ALWAYS = ("dp2, overlap_param_gather", "fp16", "pp2", "pp2 vpp2 dp2")


@pytest.mark.patched
@pytest.mark.parametrize("layout", tiered(LAYOUTS, ALWAYS))
def test_any_split_of_a_step_has_the_gradient_of_one_call(megatron_ranks, layout):
    ranks, splits, options = LAYOUTS[layout]
    megatron_ranks(ranks, _compare, splits, "total_microbatches", options)


@on_ranks(2)
def test_any_of_the_patches_that_ask_windows_is_enough():
    model = _moe(pp=2)
    want = _calls(model, [4])
    asking = [patch.id for patch in providers("schedules-ask-windows")]
    assert len(asking) > 1, "a window must not stand on one case file, which may be deleted"
    for name in asking:
        megatron_idempotent.revert()
        megatron_idempotent.apply(exclude=[each for each in asking if each != name])
        window = megatron_idempotent.window.accumulation_window(model.chunks, 4)
        assert same(_calls(model, [1, 3], window=window), want), name


@pytest.mark.patched
def test_a_total_that_is_no_power_of_two_is_exact_as_well(megatron_ranks):
    megatron_ranks(2, _compare, [[1, 2, 3], [4, 2]], "total_microbatches", {})


WITHOUT = ("pp2 vpp2 dp2", "dp2", "dp2, all-reduce", "pp2 dp2")


@pytest.mark.patched
@pytest.mark.parametrize("layout", tiered(WITHOUT, WITHOUT[:1]))
def test_without_a_total_the_gradients_are_reduced_at_the_end(megatron_ranks, layout):
    ranks, splits, options = LAYOUTS[layout]
    megatron_ranks(ranks, _compare, splits, None, options)


@on_ranks(2)
def test_the_tokens_of_all_calls_are_the_denominator():
    """Microbatches of unequal token counts, normalised by the tokens of the step."""
    import torch

    model = _moe(config_overrides={"calculate_per_token_loss": True})

    def forward_step():
        count = iter(range(100))
        _, positions_BT, hidden = tiny.inputs(0)

        def step(data_iterator, chunk):
            tokens_BT, kept = next(data_iterator), 5 + 7 * next(count)

            def loss_func(loss_BT):
                loss = loss_BT.float()[:, :kept].sum()
                return loss, torch.tensor(2 * kept, dtype=torch.int), {"loss": loss.detach()}

            return chunk(tokens_BT, positions_BT, hidden, labels=tokens_BT), loss_func

        return step

    want = _calls(model, [TOTAL], forward_step=forward_step())
    for sizes in SPLITS:
        for told in ({"total_microbatches": TOTAL}, {}):
            window = megatron_idempotent.window.accumulation_window(model.chunks, **told)
            got = _calls(model, sizes, window=window, forward_step=forward_step())
            assert same(got, want), (sizes, told)


@on_ranks(1)
def test_mtp_is_weighed_by_the_step_and_its_scale_is_put_back():
    import copy

    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    model = built()
    (chunk,) = model.chunks
    chunk.config = copy.copy(model.config)  # which the schedule reads, and the model does not
    chunk.config.mtp_num_layers = 1
    found, set_loss_scale = [], MTPLossAutoScaler.set_loss_scale

    def watch(scale):
        found.append(float(scale))
        set_loss_scale(scale)

    MTPLossAutoScaler.set_loss_scale = staticmethod(watch)
    window = megatron_idempotent.window.accumulation_window(model.chunks, 4)
    _calls(model, [1, 1, 2], window=window)
    assert [*found, float(MTPLossAutoScaler.main_loss_backward_scale)] == [0.25] * 4 + [1.0]


@on_ranks(2)
def test_log_probabilities_and_other_models_do_not_count():
    model, other = _moe(), _moe(seed=7)
    want, want_other = _calls(model, [TOTAL]), _calls(other, [TOTAL])

    def between():
        gradients = model.gradients()
        model.forward_backward(2, data_seed=9, forward_only=True)
        assert same(_calls(other, [TOTAL]), want_other)
        assert same(gradients, model.gradients())

    window = megatron_idempotent.window.accumulation_window(model.chunks, TOTAL)
    assert same(_calls(model, [1, 3], window=window, between=between), want)


# Errors, and the state after a block that raises.


def _run(model, microbatches):
    model.schedule(tiny.microbatches(0), microbatches)


def _retried(window, model):
    with window(model.chunks, 2):
        with on_microbatch(model, fails(Interrupted())), pytest.raises(Interrupted):
            _run(model, 1)
        _run(model, 1)


def _nested(window, model):
    with window(model.chunks, 3), window(model.chunks, 3):
        pass


def _with(total, *calls, chunks=None):
    """A use of a window that makes these calls."""

    def use(window, model):
        with window(model.chunks if chunks is None else chunks, *total):
            for microbatches in calls:
                _run(model, microbatches)

    return use


#: A use, the error, and what it names; the first one before the patches are applied.
WRONG = {
    "unpatched": (_with([2]), RuntimeError, "timers-left-running"),
    "too many": (_with([3], 2, 2), ValueError, "3 microbatches, 2 have run"),
    "too few": (_with([3], 2), RuntimeError, "2 of 3 microbatches"),
    "empty": (_with([]), RuntimeError, "0 of its microbatches"),
    "no chunk": (_with([3], chunks=[]), ValueError, "no model chunk"),
    "no number": (_with([0]), ValueError, "total_microbatches, got 0"),
    "nested": (_nested, RuntimeError, "already open"),
    "retried": (_retried, RuntimeError, "an earlier schedule call"),
}


@on_ranks(1)
def test_a_wrong_use_is_a_clear_error():
    for case, (use, error, named) in WRONG.items():
        model = built(applied=case != "unpatched")
        with pytest.raises(error, match=named):
            use(megatron_idempotent.window.accumulation_window, model)


@on_ranks(2)
def test_a_window_that_raises_leaves_the_config_as_it_was():
    window = megatron_idempotent.window.accumulation_window
    model = built()
    model.forward_backward(2, data_seed=0)
    want = model.gradients()
    names = ("no_sync_func", "grad_sync_func", "finalize_model_grads_func")
    functions = [getattr(model.config, name) for name in names]
    for total in (2, 4):  # in the last call, and in one that is held back
        with (
            on_microbatch(model, fails(Interrupted(), 1)),
            pytest.raises(Interrupted),
            window(model.chunks, total),
        ):
            _run(model, 2)
    assert [getattr(model.config, name) for name in names] == functions
    megatron_idempotent.abort_window(model.chunks)
    with window(model.chunks, 2):
        model.forward_backward(2, data_seed=0)
    assert same(model.gradients(), want)


@on_ranks(1)
def test_a_patch_is_asked_for_without_its_hazard_only_where_it_is_a_door():
    from megatron_idempotent.patching.catalog import index_entries

    rows = {row.id: row for row in megatron_idempotent.apply()}
    asked = {name for patch in index_entries().values() for name in patch.provides}
    only = [providers(name)[0] for name in sorted(asked) if len(providers(name)) == 1]
    gone = [patch for patch in only if rows[patch.id].status == "unsupported_version"]
    if gone:  # else this release has every hazard that library code asks about
        need = Need(gone[0].provides[0], "it hurts")
        check_applied("f()", [need], [object()])
        with pytest.raises(RuntimeError, match=gone[0].id):
            check_applied("f()", [need._replace(a_door=True)], [object()])
    check_applied("f()", [Need("a-door", "it hurts")], [object()])
    with pytest.raises(RuntimeError, match="a-door"):
        check_applied("f()", [Need("a-door", "it hurts", a_door=True)], [object()])
