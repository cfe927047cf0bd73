"""Megatron-FSDP on CPU ranks: windows that are aborted, held back and chained.

The first version, from 0.16 on: that of 0.14 wants an older torch, and that of 0.15 cannot run this
model with every strategy.
"""

from __future__ import annotations

from typing import Any

import pytest
from ranks import RELEASE, abort, built, digest, on_ranks, tiered

import megatron_idempotent
from megatron_idempotent.megatron import optimizers
from megatron_idempotent.patching.source import locate, read_body

STRATEGIES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
_EXPERIMENTAL = "megatron.core.distributed.fsdp.src.megatron_fsdp.experimental.module"
#: Where a window is interrupted: in a forward, or after the gradient of one of the parameters.
SITES = ("forward", "output_layer", "layers.1", "layers.0", "embedding")


pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        RELEASE < (0, 16),
        reason="the Megatron-FSDP of this release cannot run this model on this torch",
    ),
]


second_version = pytest.mark.skipif(
    read_body(locate(_EXPERIMENTAL), "FsdpModule.phase") is None if locate(_EXPERIMENTAL) else True,
    reason="the second version of Megatron-FSDP is of Megatron main",
)


class Interrupted(Exception):
    """The tests raise this."""


def interrupt(model: Any, site: str, *, microbatch: int, seed: int) -> None:
    """A window of two microbatches, that raises in one of them."""
    count = iter(range(99))

    def forward_hook(*_: Any) -> None:
        if next(count) == microbatch:
            raise Interrupted

    if site == "forward":
        inner = getattr(model.chunks[0].module, "module", model.chunks[0].module)
        hook = inner.decoder.layers[1].register_forward_hook(forward_hook)
    else:
        hook = computed_with(model.chunks[0].module, site).register_post_accumulate_grad_hook(
            forward_hook
        )
    with pytest.raises(Interrupted):
        model.forward_backward(2, data_seed=seed)
    hook.remove()


def computed_with(module: Any, site: str) -> Any:
    """The parameter of that name that backward passes run through."""
    raw = getattr(module, "raw_param", None) or {
        f"{owner.name}.{name}": parameter.unsharded
        for owner in module.modules()
        for group in getattr(owner, "parameter_groups", ())
        for parameter in group.fsdp_parameters
        for name in parameter.fqns
    }
    return next(raw[name] for name in raw if site in name)


def differing(strategy: str, overlap: bool, sites: tuple[str, ...], helper: bool) -> list[str]:
    """Runs on a rank: sites at which failures change what comes after them."""
    sound = steps_with_failures(strategy, overlap, site=None, helper=helper)
    return [
        site
        for site in sites
        if steps_with_failures(strategy, overlap, site=site, helper=helper) != sound
    ]


def steps_with_failures(strategy: str, overlap: bool, *, site: str | None, helper: bool) -> Any:
    """Gradients, norms and parameters of three steps, with failures before two."""
    exclude = ("fsdp-backward-aborted",) if helper else ()
    how = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    model = built(exclude=exclude, fsdp=strategy, **how)
    found = []
    for seed in range(3):
        if site is not None and seed != 1:
            interrupt(model, site, microbatch=seed // 2, seed=70 + seed)
            if helper:
                abort(model)
        model.forward_backward(2, data_seed=seed)
        found += [digest(model.gradients()), float(model.step()[1])]
    return [*found, digest(model.parameters())]


def some(*chosen: tuple[Any, ...]) -> list[Any]:
    """Every strategy, with overlap and without, and both of what follows; few of them each time."""
    rest = [
        (strategy, overlap, last)
        for strategy in STRATEGIES
        for overlap in (True, False)
        for last in {each[2] for each in chosen}
        if (strategy, overlap, last) not in chosen
    ]
    return [*chosen, *(pytest.param(*each, marks=pytest.mark.exhaustive) for each in rest)]


@pytest.mark.parametrize(
    ("strategy", "overlap", "helper"),
    some(("optim_grads_params", True, False), ("optim_grads", False, True)),
)
def test_steps_after_failures_equal_those_without(strategy, overlap, helper, megatron_ranks):
    sites = SITES if strategy == "optim_grads_params" and overlap else SITES[2:3]
    assert megatron_ranks(2, differing, strategy, overlap, sites, helper) == [[], []]


@second_version
@pytest.mark.parametrize("overlap", [True, False], ids=["overlap", "plain"])
def test_steps_after_failures_under_the_second_version(overlap, megatron_ranks):
    assert megatron_ranks(2, differing, "v2", overlap, SITES, False) == [[], []]


def output_with_loaded_weights(interrupted: bool) -> Any:
    """Runs on a rank: output with new weights, after a backward that failed between two layers."""
    import torch
    from megatron.core.distributed.fsdp.mcore_fsdp_adapter import FullyShardedDataParallel
    from megatron.core.process_groups_config import ProcessGroupCollection

    (chunk,) = built(fsdp="v2").chunks
    torch.manual_seed(0)
    # The root module has no parameters of its own, so its backward ends before that of a layer.
    layers = torch.nn.Sequential(*(torch.nn.Linear(8, 8) for _ in range(3))).cuda()
    model = FullyShardedDataParallel(
        chunk.config,
        chunk.ddp_config,
        layers,
        fsdp_unit_modules=[torch.nn.Linear],
        pg_collection=ProcessGroupCollection.use_mpu_process_groups(),
    )
    inputs = torch.ones(2, 8).cuda()
    if interrupted:
        (group,) = layers[1].parameter_groups
        count = iter(group.fsdp_parameters)
        next(count)

        def fail_at_last(_: Any) -> None:
            if next(count, None) is None:
                raise Interrupted

        for parameter in group.fsdp_parameters:
            parameter.unsharded.register_post_accumulate_grad_hook(fail_at_last)
        with pytest.raises(Interrupted):
            model(inputs).sum().backward()
    for layer in layers:
        layer.parameter_groups[0].main_weight.local_buffer.mul_(0.5)
    with torch.no_grad():
        return model(inputs).cpu()


@second_version
@on_ranks(2)
def test_weights_loaded_after_a_failure_are_used_under_the_second_version():
    assert output_with_loaded_weights(True).equal(output_with_loaded_weights(False))


@pytest.mark.parametrize(
    ("strategy", "overlap", "total"),
    some(("no_shard", True, None), ("optim", True, None), ("optim", False, 2)),
)
@on_ranks(2)
def test_a_window_in_two_calls_has_the_gradient_of_both(strategy, overlap, total):
    """Two microbatches in an accumulation window, and each alone."""
    import torch

    how = {"overlap_grad_reduce": overlap, "overlap_param_gather": overlap}
    model = built(fsdp=strategy, **how)
    alone = []
    for seed in range(2):
        model.forward_backward(1, data_seed=seed)
        alone.append(model.gradients())
    with megatron_idempotent.window.accumulation_window(model.chunks, total):
        for seed in range(2):
            model.forward_backward(1, data_seed=seed, zero_first=seed == 0)
    # Each element is a sum of four float32 gradients, in another order than alone. Of this
    # model none of the four is above 1, and so no sum of them in between above 4.
    mean = (alone[0].double() + alone[1].double()) / 2
    bound = 4 * torch.finfo(torch.float32).eps
    assert (model.gradients().double() - mean).abs().max() <= bound


@pytest.mark.parametrize("strategy", tiered(STRATEGIES[:3], ["optim"]))
@on_ranks(2)
def test_what_is_frozen_between_windows_keeps_its_bits(strategy):
    """... and its moments, and is in no norm; once it is unfrozen it learns again."""
    import torch

    how = {"overlap_grad_reduce": False, "overlap_param_gather": False}
    model = built(fsdp=strategy, dtype="bf16", **how)
    for seed in range(2):
        model.train_step(1, data_seed=seed)
    named = model.chunks[0].module.named_modules()
    (head,) = (module for name, module in named if name.endswith("output_layer"))
    head.requires_grad_(False)
    (optimizer,) = optimizers.unchained(model.optimizer)
    still = optimizers.frozen(optimizer)
    assert len(still) == 1
    held = [each for each in still for each in (each, *optimizer.optimizer.state[each].values())]
    before = [local(each) for each in held]
    model.forward_backward(1, data_seed=2)
    square, count = torch.zeros((), dtype=torch.float64), 0
    for group in optimizer.optimizer.param_groups:
        for each in group["params"]:
            if each is not still[0] and each.grad is not None:
                square += local(each.grad).double().square().sum()
                count += each.numel()
    if strategy != "no_shard":
        torch.distributed.all_reduce(square)
    norm = float(model.step()[1])
    # The sum of `count` squares in float32, in whatever order.
    assert abs(norm / float(square.sqrt()) - 1) <= count * torch.finfo(torch.float32).eps
    step = optimizer.optimizer.state[still[0]].get("step")
    changed = [
        index
        for index, (each, old) in enumerate(zip(held, before, strict=True))
        if each is not step and not local(each).equal(old)
    ]
    assert changed == []
    head.requires_grad_(True)
    model.train_step(1, data_seed=3)
    assert not local(held[0]).numel() or not local(held[0]).equal(before[0])


def local(tensor: Any) -> Any:
    """A copy of this rank's part of a tensor."""
    return getattr(tensor, "_local_tensor", tensor).detach().clone()


@on_ranks(2)
def test_what_does_not_serve_it_says_so():
    model = built(applied=False, fsdp="optim")
    said = "FullyShardedDataParallel.*DistributedDataParallel|Distributed.*FullySharded"
    with pytest.raises(ValueError, match=said):
        megatron_idempotent.TrainStep(model.chunks, model.optimizer, None)
    with pytest.raises(ValueError, match=said):
        megatron_idempotent.ensure_params_synced(model.chunks)
