"""Loading the distributed optimizer leaves torch's Adam with one step counter for all parameters.

Symptom:
    Without Transformer Engine and Apex, a run that loads a checkpoint trains differently from one
    that continues: with 21 parameters the first step counts 1 → 22, so that Adam corrects the bias
    for the wrong step, and differently per parameter. No error. Building the state dict to load
    into (`sharded_state_dict(is_loading=True)`) is enough.

Cause:
    `load_state_dict` makes one `step` tensor and puts it into the state of every parameter; torch's
    Adam then counts each step once per parameter. Some checkpoint formats also overwrite it with
    the counter from before the load.

Affects:
    Every release, with torch's Adam or AdamW as the fallback. What the patch does: after a load
    every parameter has its own counter, at the step of the checkpoint.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/optimizer/distrib_optimizer.py,
    `load_state_dict`. https://github.com/vllm-project/vime/pull/427 reports it: two parameters that
    share one restored step go from step 4 to step 6 in one update.

Remove when:
    `load_state_dict` gives each parameter its own `step`, after loading the parameter state.
    `upstream/adam-step-shared` has the repair.
"""

from __future__ import annotations

from typing import Any

from megatron_idempotent.megatron import optimizers

from ._case import Fault, Original, Patch, address, bench, target


def load_state_dict(original: Original, self: Any, state_dict: dict[str, Any]) -> None:
    """Run upstream's load, then give each parameter its own step counter, set to the saved step."""
    import torch

    original(self, state_dict)
    if not optimizers.is_torch_adam(self):
        return
    (saved,) = {float(group["step"]) for group in state_dict["optimizer"]["param_groups"]}
    for state in self.optimizer.state.values():
        device = state["step"].device
        state["step"] = torch.full((), saved, dtype=torch.float32, device=device)


def reproduce() -> None:
    """Step, load the optimizer's own state, step again; the step counters must then be at 2.
    On stock Megatron all parameters share one counter after the load, and each advances it.
    """
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
    fixed_by=((address("distributed.load_state_dict"), "s['step'] = step.clone()"),),
)
