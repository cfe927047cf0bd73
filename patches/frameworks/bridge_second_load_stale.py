"""A second load by Megatron-Bridge in one process uses counters that the first load cached.

Symptom:
    A rollback in the same process restores weights, optimizer and scheduler, but leaves
    `train_state`, with its step and samples, at the run's latest values: data and `train_iters`
    continue from there. And a load after a save to the same folder loads the checkpoint that was
    the latest at the first load. No error.

Cause:
    `read_train_state` is cached by the file's name. Its result becomes the run's own state, so that
    training counts in the cached object; and each save overwrites the file that names the latest
    checkpoint.

Affects:
    Every release, read from 0.3.0 to 0.6.0, and main of August 2026. On main Bridge's in-process
    restart clears the cache (#4758); a load without a restart does not. What the patch does: each
    load reads the files again. All ranks must load, as upstream requires.

Upstream:
    https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/src/megatron/bridge/training/utils/checkpoint_utils.py,
    `read_train_state`. https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/4758.

Remove when:
    `read_train_state` is not cached, or `load_checkpoint` clears it.
    `upstream/bridge-second-load-stale` has the repair.
"""

from __future__ import annotations

import sys
from typing import Any

from megatron_idempotent.patches._case import Fault, Original, Patch, address, target


def load(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run Bridge's `_load_checkpoint_from_path`, but first clear the caches of earlier loads."""
    module = sys.modules[original.__module__]
    for name in ("read_train_state", "read_run_config"):
        getattr(getattr(module, name), "cache_clear", lambda: None)()
    return original(*args, **kwargs)


def reproduce() -> None:
    """Load the checkpoint of step 1 twice, with training between; save step 3, and load the latest.
    Without the patch Bridge returns the step number that it cached at an earlier load.
    """
    import tempfile

    from ._bridge import Checkpoints

    run = Checkpoints.after_a_step()
    with tempfile.TemporaryDirectory() as folder:
        run.state.train_state.step = 1
        run.save(folder)
        run.load(folder)
        run.state.train_state.step += 2
        run.load(folder)
        _expect(run, 1, "it was rolled back to step 1")
        run.state.train_state.step += 2
        run.save(folder)
        run.load(folder)
        _expect(run, 3, "step 3 was saved last")


def _expect(run: Any, step: int, reason: str) -> None:
    if run.state.train_state.step != step:
        raise Fault(f"the run is at step {run.state.train_state.step}, and {reason}")


PATCH = Patch(
    "a second load by Megatron-Bridge in one process takes counters of the first one",
    target(
        "bridge.training.checkpointing:_load_checkpoint_from_path",
        load,
        "state.train_state = read_train_state(train_state_filename)",
    ),
    since="0.3",
    fixed_by=(
        (
            address("bridge.training.checkpointing:_load_checkpoint_from_path"),
            "read_train_state.cache_clear()",
        ),
    ),
    ranks=1,
)
