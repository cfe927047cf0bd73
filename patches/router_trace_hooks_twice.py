"""A second `train()` with a router trace records every routing decision twice.

Symptom:
    With `--moe-routing-trace-path` each call of `train()` adds one more hook to each router: the
    trace has each record of the second call twice, of the third three times.

Cause:
    `train()` calls `RouterTracer.register_hooks`, which registers a hook on every router, even if
    this tracer already has one there. `train()` does not remove the hooks when it leaves.

Affects:
    0.19, the first release with the trace. What the patch does: `register_hooks` first removes the
    hooks that this tracer has on the same modules.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/transformer/moe/router_trace.py

Remove when:
    `register_hooks` skips routers that have its hook, or `train()` removes the hooks at its end.
    `upstream/router-trace-hooks-twice` has the repair.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Original, Patch, address, bench, target


def register(original: Original, self: Any, model: Any) -> None:
    """Wrap `RouterTracer.register_hooks`: first remove the tracer's old hooks on these modules."""
    chunks = model if isinstance(model, (list, tuple)) else [model]
    hook_tables = {id(module._forward_hooks) for chunk in chunks for module in chunk.modules()}
    for handle in list(self._hook_handles):
        hooks = handle.hooks_dict_ref()
        if hooks is None or id(hooks) in hook_tables:
            handle.remove()
            self._hook_handles.remove(handle)
    original(self, model)


def reproduce() -> None:
    """Register a router tracer's hooks twice, as two calls of `train()` do.
    On stock Megatron each router then has two hooks.
    """
    import tempfile

    from megatron.core.transformer.moe import router_trace

    model = bench(experts=4, with_optimizer=False)
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(2):
            router_trace.init_moe_router_tracer(folder, max_steps=10, rank=0, training_mode=True)
            tracer = router_trace.get_moe_router_tracer()
            tracer.register_hooks(model.chunks)
    hooks = [len(module._forward_hooks) for module in model.chunks[0].modules()]
    if max(hooks) > 1:
        raise Fault(f"a router has {max(hooks)} hooks of one tracer")


PATCH = Patch(
    "each train() adds another hook per router: the trace has every record twice",
    target("moe.router_trace:RouterTracer.register_hooks", register),
    since="0.19",
    groups=("train-again",),
    fixed_by=(
        (
            address("moe.router_trace:RouterTracer.register_hooks"),
            "handle.id in module._forward_hooks",
        ),
    ),
    ranks=1,
)
