"""With overlap a parameter that is frozen after DDP was built ends each window in an assertion.

Symptom:
    A parameter is frozen between two windows. With overlap_grad_reduce: `AssertionError:
    Communication call has not been issued for this bucket (4/5 params have grad available)`. With
    num_distributed_optimizer_instances above one there is no assertion, and the gradients of that
    bucket stay local. With overlap_param_gather the next forward raises an `AssertionError` without
    a text, `assert param.requires_grad`.

Cause:
    A bucket is reduced once all of its parameters have a gradient, and a frozen one never gets one.
    The hook that waits for gathered parameters assumes that a parameter in a bucket is trained.

Affects:
    Every release. What the patch does: `finish_grad_sync` reduces a bucket once all of its trained
    parameters have gradients. Reductions of such buckets are not overlapped. The hook waits for
    frozen parameters as for others: they are gathered with their bucket. All ranks have to freeze
    the same parameters.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/param_and_grad_buffer.py,
    `_ParamAndGradBucketGroup.register_grad_ready`.
    https://github.com/NVIDIA/Megatron-LM/issues/1150 and
    https://github.com/NVIDIA-BioNeMo/bionemo-recipes/pull/620 report the assertion, and turn the
    overlap off.

Remove when:
    `register_grad_ready` does not wait for frozen parameters, and the forward's hook does not
    assert. `upstream/frozen-parameters-refused` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import ddp

from ._case import Fault, Original, Patch, address, bench, target


def finish_grad_sync(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Wrap `finish_grad_sync`: first start a reduction that only frozen parameters hold up.
    Upstream's hooks start it when all parameters have a gradient; frozen ones never get one.
    """
    if (
        self.ddp_config.overlap_grad_reduce
        and not getattr(self, "is_first_batch", False)  # which dispatches by itself
        and not getattr(self, "grad_reduce_finished", False)
        and not ddp.dispatched(self)
    ):
        frozen = {param for param in self.params if not param.requires_grad}
        if frozen and self.params == frozen | ddp.registered(self).keys():
            self.start_grad_sync(*args, **kwargs)
    original(self, *args, **kwargs)


def zero_grad_buffer(original: Original, self: Any) -> None:
    """Wrap `zero_grad_buffer`: also forget which reductions of the chunk have started."""
    original(self)
    ddp.ended(self)


def make_hook(original: Original, self: Any) -> Any:
    """Return DDP's forward pre-hook, wrapped: while it runs, frozen parameters require gradients.
    Upstream's hook asserts that all parameters do.
    """
    wait = original(self)

    def hook(module: Any, *inputs: Any) -> None:
        frozen = [
            param
            for param in module.parameters(recurse=False)
            if not param.requires_grad and param in self.param_to_bucket_group
        ]
        for param in frozen:
            param.requires_grad_(True)
        try:
            wait(module, *inputs)
        finally:
            for param in frozen:
                param.requires_grad_(False)

    return hook


def reproduce() -> None:
    """Freeze a norm after two steps and train on, with and without overlap.
    On stock Megatron a window with overlap asserts.
    """
    parameters = []
    for overlap in True, False:
        model = bench(
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
            optimizer_overrides={"clip_grad": 0.0},  # because the norm depends on the sharding
        )
        for seed in range(4):
            norm = model.chunks[0].module.decoder.final_layernorm
            norm.requires_grad_(seed < 2)
            model.train_step(2, data_seed=seed)
        model.chunks[0].start_param_sync(force_sync=True)
        parameters.append(model.parameters())
    if not parameters[0].equal(parameters[1]):
        raise Fault("with overlap, parameters beside a frozen one are trained differently")


PATCH = Patch(
    "with overlap, what is frozen after DDP was built ends each window in an AssertionError",
    target("group.finish_grad_sync", finish_grad_sync),
    target("group.start_grad_sync", ddp.dispatching),
    target("ddp.zero_grad_buffer", zero_grad_buffer),
    target("ddp._make_forward_pre_hook", make_hook),
    groups=("overlap",),
    fixed_by=((address("group.finish_grad_sync"), "self.is_first_batch or waits_for_frozen"),),
    stock_error=r"AssertionError",
)
