"""Loading the distributed optimizer leaves torch's Adam with one step counter for all parameters.

Symptom:
    Without Transformer Engine and Apex, a run that loads a checkpoint learns something else than
    one that goes on: with 21 parameters the first step counts 1 → 22, so that Adam's bias
    correction is that of another step, and differs per parameter. No error. Building the state
    dict to load into (`sharded_state_dict(is_loading=True)`) is enough.

Cause:
    `load_state_dict` makes one `step` tensor and puts it into the state of every parameter; torch's
    Adam then counts each step once per parameter. Some checkpoint formats overwrite it with the
    counter from before the load besides.

Affects:
    Every release, with torch's Adam or AdamW as the fallback. What the patch does: after a load
    every parameter has a counter of its own, at the step that its checkpoint was written with.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/optimizer/distrib_optimizer.py,
    `load_state_dict`. https://github.com/vllm-project/vime/pull/427 meets it: two parameters that
    share one restored step go from step 4 to step 6 in one update.

Remove when:
    `load_state_dict` gives each parameter a `step` of its own, after loading the parameter state.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import optimizers

from ._case import Fault, Original, Patch, bench, target


def load_state_dict(original: Original, self: Any, state_dict: dict[str, Any]) -> None:
    """Run upstream's load, then give each parameter a counter of its own, at the saved step."""
    import torch

    original(self, state_dict)
    if not optimizers.is_torch_adam(self):
        return
    (saved,) = {float(group["step"]) for group in state_dict["optimizer"]["param_groups"]}
    for state in self.optimizer.state.values():
        held = state["step"]
        state["step"] = torch.full((), saved, dtype=torch.float32, device=held.device)


def reproduce() -> None:
    """Run one step, a load of its own state, another step: all counters must be at 2."""
    model = bench()
    model.train_step(1, data_seed=0)
    parts = getattr(model.optimizer, "chained_optimizers", [model.optimizer])
    for part in parts:
        part.load_state_dict(part.state_dict())
    model.train_step(1, data_seed=1)
    counters = [float(state["step"]) for part in parts for state in part.optimizer.state.values()]
    if set(counters) != {2.0}:
        raise Fault(f"step counters at {sorted(set(counters))} after the second step")


PATCH = Patch(
    "a load leaves torch's Adam with one step counter that all parameters advance",
    target("distributed.load_state_dict", load_state_dict),
)
