"""`register_hooks` skips routers that have a hook of this tracer."""

from upstream.edits import Repair, substitute

REPAIR = Repair(
    edits=(
        substitute(
            "megatron.core.transformer.moe.router_trace:RouterTracer.register_hooks",
            "if isinstance(module, TopKRouter)",
            """if isinstance(module, TopKRouter) and not any(
                    handle.id in module._forward_hooks for handle in self._hook_handles
                )""",
        ),
    ),
    unit_tests=("transformer/moe/test_router_trace.py",),
)
