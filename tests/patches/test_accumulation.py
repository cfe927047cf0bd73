"""A step in any number of schedule calls has the gradient of one call, to the bit."""

from __future__ import annotations

import contextlib

import pytest
from layouts import some_of

TOTAL = 4


def _calls(model, sizes, *, window=None, forward_step=None, between=None):
    """Zero the gradients, then call the schedule once per size on one stream of microbatches."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from megatron_idempotent.proof.cpu import tiny

    for chunk in model.chunks:
        chunk.zero_grad_buffer()
    data = [tiny.microbatches(3) for _ in model.chunks]
    forward_step = forward_step or model._forward_step([])
    with window or contextlib.nullcontext() as opened:
        for size in sizes:
            get_forward_backward_func()(
                forward_step_func=forward_step,
                data_iterator=data if len(data) > 1 else data[0],
                model=model.chunks,
                num_microbatches=size,
                seq_length=tiny.SEQUENCE,
                micro_batch_size=tiny.BATCH,
                forward_only=False,
            )
            if between is not None:
                between(opened)
    return model.gradients()


def _moe(**options):
    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny

    megatron_idempotent.apply()
    overrides = {"moe_aux_loss_coeff": 1.0, "moe_z_loss_coeff": 0.5}
    overrides |= options.pop("config_overrides", {})
    return tiny.build(experts=4, config_overrides=overrides, **options)


def compared(splits, how, options) -> list[bool]:
    """Runs on a rank: per split, whether its gradient is that of one call; the first one twice."""
    import torch

    from megatron_idempotent.window import accumulation_window

    total = sum(splits[0])
    model = _moe(**options)
    want = _calls(model, [total])
    assert want.abs().max() > 0
    equal = []
    for sizes in [*splits, splits[0]]:
        window = accumulation_window(model.chunks, **{how: total} if how else {})
        equal.append(torch.equal(_calls(model, sizes, window=window), want))
    equal.append(torch.equal(_calls(model, [total]), want))
    return equal


# With two stages, an interleaved schedule that batches its messages mixes them up: upstream's
# argument parser refuses it, a TransformerConfig does not.
VPP = {
    "pp": 2,
    "vpp": 2,
    "layers_per_stage": 1,
    "config_overrides": {"overlap_p2p_comm": True, "batch_p2p_comm": False},
}
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


@pytest.mark.parametrize("layout", some_of(LAYOUTS, *ALWAYS))
def test_any_split_of_a_step_has_the_gradient_of_one_call(megatron_ranks, layout):
    ranks, splits, options = LAYOUTS[layout]
    for equal in megatron_ranks(ranks, compared, splits, "total_microbatches", options):
        assert all(equal), equal


def through_each(options) -> list[bool]:
    """Runs on a rank: per patch that lets schedules ask windows, whether it does so alone."""
    import torch

    import megatron_idempotent
    from megatron_idempotent.patching.needs import providers
    from megatron_idempotent.window import accumulation_window

    model = _moe(**options)
    want = _calls(model, [4])
    asking = [patch.id for patch in providers("schedules-ask-windows")]
    assert len(asking) > 1, "a window must not stand on one case file, which may be deleted"
    equal = []
    for name in asking:
        megatron_idempotent.revert()
        megatron_idempotent.apply(exclude=[each for each in asking if each != name])
        window = accumulation_window(model.chunks, 4)
        equal.append(torch.equal(_calls(model, [1, 3], window=window), want))
    return equal


def test_any_of_the_patches_that_ask_windows_is_enough(megatron_ranks):
    for equal in megatron_ranks(2, through_each, {"pp": 2}):
        assert all(equal), equal


def test_a_total_that_is_no_power_of_two_is_exact_as_well(megatron_ranks):
    for equal in megatron_ranks(2, compared, [[1, 2, 3], [4, 2]], "total_microbatches", {}):
        assert all(equal), equal


@pytest.mark.parametrize(
    "layout",
    [
        "pp2 vpp2 dp2",
        *(
            pytest.param(layout, marks=pytest.mark.exhaustive)
            for layout in ("dp2", "dp2, all-reduce", "pp2 dp2")
        ),
    ],
)
def test_without_a_total_the_gradients_are_reduced_at_the_end(megatron_ranks, layout):
    ranks, splits, options = LAYOUTS[layout]
    for equal in megatron_ranks(ranks, compared, splits, None, options):
        assert all(equal), equal


def per_token() -> list[bool]:
    """Runs on a rank: microbatches of unequal token counts, normalised by the tokens of the
    step."""
    import torch

    from megatron_idempotent.proof.cpu import tiny
    from megatron_idempotent.window import accumulation_window

    model = _moe(config_overrides={"calculate_per_token_loss": True})

    def forward_step():
        count = iter(range(100))
        positions_BT = torch.arange(tiny.SEQUENCE).expand(tiny.BATCH, -1)
        hidden = torch.ones(1, 1, tiny.SEQUENCE, tiny.SEQUENCE).tril() < 0.5

        def step(data_iterator, chunk):
            tokens_BT, kept = next(data_iterator), 5 + 7 * next(count)

            def loss_func(loss_BT):
                loss = loss_BT.float()[:, :kept].sum()
                return loss, torch.tensor(2 * kept, dtype=torch.int), {"loss": loss.detach()}

            return chunk(tokens_BT, positions_BT, hidden, labels=tokens_BT), loss_func

        return step

    want = _calls(model, [TOTAL], forward_step=forward_step())
    equal = []
    for sizes in SPLITS:
        for told in ({"total_microbatches": TOTAL}, {}):
            window = accumulation_window(model.chunks, **told)
            got = _calls(model, sizes, window=window, forward_step=forward_step())
            equal.append(torch.equal(got, want))
    return equal


def test_the_tokens_of_all_calls_are_the_denominator(megatron_ranks):
    for equal in megatron_ranks(2, per_token):
        assert all(equal), equal


def mtp_scales() -> list[float]:
    """Runs on a rank: the weights that MTP is given in three calls, and the one left over."""
    import copy

    from megatron.core.transformer.multi_token_prediction import MTPLossAutoScaler

    import megatron_idempotent
    from megatron_idempotent.proof.cpu import tiny
    from megatron_idempotent.window import accumulation_window

    megatron_idempotent.apply()
    model = tiny.build()
    (chunk,) = model.chunks
    chunk.config = copy.copy(model.config)  # which the schedule reads, and the model does not
    chunk.config.mtp_num_layers = 1
    found, set_loss_scale = [], MTPLossAutoScaler.set_loss_scale

    def watch(scale):
        found.append(float(scale))
        set_loss_scale(scale)

    MTPLossAutoScaler.set_loss_scale = staticmethod(watch)
    _calls(model, [1, 1, 2], window=accumulation_window(model.chunks, 4))
    found.append(float(MTPLossAutoScaler.main_loss_backward_scale))
    return found


def test_mtp_is_weighed_by_the_step_and_its_scale_is_put_back(megatron_ranks):
    assert megatron_ranks(1, mtp_scales) == [[0.25] * 4 + [1.0]]


def passed_through() -> tuple[bool, bool]:
    """Runs on a rank: forward-only calls and another model's calls in the middle of a step."""
    import torch

    from megatron_idempotent.window import accumulation_window

    model, other = _moe(), _moe(seed=7)
    want, want_other = _calls(model, [TOTAL]), _calls(other, [TOTAL])
    found = []

    def between(_):
        gradients = model.gradients()
        model.forward_backward(2, data_seed=9, forward_only=True)
        found.append(torch.equal(_calls(other, [TOTAL]), want_other))
        assert torch.equal(gradients, model.gradients())

    window = accumulation_window(model.chunks, TOTAL)
    got = _calls(model, [1, 3], window=window, between=between)
    return torch.equal(got, want), all(found)


def test_log_probabilities_and_other_models_do_not_count(megatron_ranks):
    assert megatron_ranks(2, passed_through) == [(True, True)] * 2
