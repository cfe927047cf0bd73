"""With overlap a parameter that is frozen after DDP was built ends each window in an assertion.

Symptom:
    A parameter is frozen between two windows. With overlap_grad_reduce: `AssertionError:
    Communication call has not been issued for this bucket (4/5 params have grad available)`. With
    num_distributed_optimizer_instances above one there is no assertion, and the gradients of that
    bucket stay local. With overlap_param_gather the next forward raises an `AssertionError` without
    a text, `assert param.requires_grad`.

Cause:
    A bucket is reduced once all of its parameters have had their gradient, and a frozen one never
    has. The hook that waits for gathered parameters takes a parameter in a bucket for a trained
    one.

Affects:
    Every release. What the patch does: `finish_grad_sync` reduces a bucket whose trained parameters
    have all had their gradients. Reductions of such buckets are not overlapped. The hook waits for
    frozen parameters as for others: they are gathered with their bucket. All ranks have to freeze
    the same parameters.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/distributed/param_and_grad_buffer.py,
    `_ParamAndGradBucketGroup.register_grad_ready`. https://github.com/NVIDIA/Megatron-LM/issues/1150
    and https://github.com/NVIDIA-BioNeMo/bionemo-recipes/pull/620 meet the assertion, and turn the
    overlap off.

Remove when:
    `register_grad_ready` does not wait for frozen parameters, and the forward's hook does not
    assert.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import ddp

from ._case import Fault, Original, Patch, bench, target


def finish_grad_sync(original: Original, self: Any, *args: Any, **kwargs: Any) -> None:
    """Dispatch first what waits for the gradients of frozen parameters alone."""
    if (
        self.ddp_config.overlap_grad_reduce
        and not getattr(self, "is_first_batch", False)  # which dispatches by itself
        and not getattr(self, "grad_reduce_finished", False)
        and not ddp.dispatched(self)
    ):
        frozen = {each for each in self.params if not each.requires_grad}
        if frozen and self.params == frozen | ddp.registered(self).keys():
            self.start_grad_sync(*args, **kwargs)
    original(self, *args, **kwargs)


def zero_grad_buffer(original: Original, self: Any) -> None:
    """Start a window in which nothing was dispatched."""
    original(self)
    ddp.ended(self)


def make_hook(original: Original, self: Any) -> Any:
    """Return upstream's hook, which takes frozen parameters in a bucket for trained ones."""
    wait = original(self)

    def hook(module: Any, *inputs: Any) -> None:
        frozen = [
            each
            for each in module.parameters(recurse=False)
            if not each.requires_grad and each in self.param_to_bucket_group
        ]
        for each in frozen:
            each.requires_grad_(True)
        try:
            wait(module, *inputs)
        finally:
            for each in frozen:
                each.requires_grad_(False)

    return hook


def reproduce() -> None:
    """Freeze a norm after two steps, and train the rest, with and without overlap."""
    found = []
    for overlap in True, False:
        model = bench(
            overlap_grad_reduce=overlap,
            overlap_param_gather=overlap,
            optimizer_overrides={"clip_grad": 0.0},  # whose norm depends on how it is sharded
        )
        for seed in range(4):
            norm = model.chunks[0].module.decoder.final_layernorm
            norm.requires_grad_(seed < 2)
            model.train_step(2, data_seed=seed)
        model.chunks[0].start_param_sync(force_sync=True)
        found.append(model.parameters())
    if not found[0].equal(found[1]):
        raise Fault("with overlap, what is trained beside a frozen parameter learns otherwise")


PATCH = Patch(
    "with overlap, what is frozen after DDP was built ends each window in an AssertionError",
    target("group.finish_grad_sync", finish_grad_sync),
    target("group.start_grad_sync", ddp.dispatching),
    target("ddp.zero_grad_buffer", zero_grad_buffer),
    target("ddp._make_forward_pre_hook", make_hook),
    groups=("overlap",),
    stock_error=r"AssertionError",
)
