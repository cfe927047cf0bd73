"""Scenarios on an imported Megatron, each in a process of its own; see `forks`."""

from __future__ import annotations

import importlib
import os
import sys
from typing import Any

from scenarios import DDP, SEED, import_megatron, live, stock


def neighbours() -> list[str]:
    """Ids of the other patches around the function that `pipeline-seed-offset` wraps."""
    from megatron_idempotent.patching.catalog import patches

    address = f"{SEED}:model_parallel_cuda_manual_seed"
    around = [p.id for p in patches().values() if address in [t.address for t in p.targets]]
    return [patch_id for patch_id in around if patch_id != "pipeline-seed-offset"]


def wrapped_on_top() -> dict[str, Any]:
    """Apply, let someone wrap, verify, revert, apply again."""
    import_megatron()
    import alterations

    import megatron_idempotent
    from megatron_idempotent.patching import install

    module = sys.modules[SEED]
    upstream = module.model_parallel_cuda_manual_seed
    megatron_idempotent.apply(exclude=neighbours())
    ours = module.model_parallel_cuda_manual_seed
    alterations.polite(module)
    theirs = module.model_parallel_cuda_manual_seed
    megatron_idempotent.verify()
    result: dict[str, Any] = {
        "status": megatron_idempotent.report()["pipeline-seed-offset"].status,
        "again": megatron_idempotent.apply(exclude=neighbours())["pipeline-seed-offset"].status,
        "reverted": megatron_idempotent.revert()["pipeline-seed-offset"].as_dict(),
        "theirs stays": module.model_parallel_cuda_manual_seed is theirs,
    }
    site = install.state.sites[f"{SEED}:model_parallel_cuda_manual_seed"]
    result["inert"] = site.layers == {} and site._call is upstream
    result["applied again"] = megatron_idempotent.apply(exclude=neighbours())[
        "pipeline-seed-offset"
    ].status
    result["same object"] = theirs.__wrapped__ is ours
    result["live again"] = list(site.layers)
    module.model_parallel_cuda_manual_seed = ours
    result["undone"] = megatron_idempotent.revert()["pipeline-seed-offset"].status
    result["upstream back"] = module.model_parallel_cuda_manual_seed is upstream
    return result


def replaced_after() -> dict[str, Any]:
    """Apply, let someone replace the function, verify, apply again, put it back."""
    import_megatron()
    import alterations

    import megatron_idempotent

    megatron_idempotent.apply(exclude=neighbours())
    module = sys.modules[SEED]
    ours = module.model_parallel_cuda_manual_seed
    alterations.replacement(module)
    theirs = module.model_parallel_cuda_manual_seed
    try:
        megatron_idempotent.verify()
        message = ""
    except megatron_idempotent.VerificationError as error:
        message = str(error)
    again = megatron_idempotent.apply(exclude=neighbours())["pipeline-seed-offset"].as_dict()
    untouched = module.model_parallel_cuda_manual_seed is theirs
    module.model_parallel_cuda_manual_seed = ours.__wrapped__
    fixed = megatron_idempotent.apply(exclude=neighbours())["pipeline-seed-offset"].status
    megatron_idempotent.verify()
    same = module.model_parallel_cuda_manual_seed is ours
    return {
        "message": message,
        "again": again,
        "untouched": untouched,
        "fixed": fixed,
        "same": same,
    }


def early_bound(rebind: str | None) -> dict[str, Any]:
    """A program that has bound a function by name before `apply()`."""
    import types

    import_megatron()
    user = types.ModuleType("user_program")
    exec("from megatron.core.optimizer import get_megatron_optimizer as build", vars(user))
    sys.modules["user_program"] = user
    inside = types.ModuleType("megatron.plugin")
    exec("from megatron.core.optimizer import get_megatron_optimizer", vars(inside))
    sys.modules["megatron.plugin"] = inside
    upstream = live()["optimizer"]
    if rebind:
        os.environ["MEGATRON_IDEMPOTENT_REBIND"] = rebind
    import megatron_idempotent

    reason = megatron_idempotent.apply()["grad-scale-func"].reason
    ours = live()["optimizer"]
    # Bound while patched, which must not keep the patch alive, nor lose it for good.
    exec("from megatron.core.optimizer import get_megatron_optimizer as late", vars(inside))
    result = {
        "reason": reason,
        "user": vars(user)["build"] is ours,
        "inside": vars(inside)["get_megatron_optimizer"] is ours,
    }
    megatron_idempotent.revert()
    result["user after"] = vars(user)["build"] is upstream
    result["inside after"] = vars(inside)["get_megatron_optimizer"] is upstream
    result["late after"] = vars(inside)["late"] is upstream
    megatron_idempotent.apply()
    result["inside again"] = vars(inside)["late"] is live()["optimizer"] is ours
    return result


def reloaded() -> dict[str, Any]:
    """Apply, reload the module, apply, revert."""
    import_megatron()
    import megatron_idempotent

    megatron_idempotent.apply()
    module = sys.modules[SEED]
    first = module.model_parallel_cuda_manual_seed
    import megatron.core.tensor_parallel as package

    importlib.reload(module)
    status = megatron_idempotent.report()["pipeline-seed-offset"].status
    reloaded_is_stock = stock("seed")
    again = megatron_idempotent.apply()["pipeline-seed-offset"].status
    second = module.model_parallel_cuda_manual_seed
    result = {
        "after reload": status,
        "reloaded is stock": reloaded_is_stock,
        "again": again,
        "patched again": second is not first and not stock("seed"),
    }
    megatron_idempotent.revert()
    result["stock again"] = stock("seed")
    # The package has bound the function of the module's first life, which must be undone too.
    result["early bound is stock"] = package.model_parallel_cuda_manual_seed is first.__wrapped__
    return result


def copies() -> dict[str, Any]:
    """Copy, pickle and inspect what is patched."""
    import copy
    import inspect
    import pickle

    import_megatron()
    upstream = {name: inspect.signature(value) for name, value in live().items()}
    import megatron_idempotent

    megatron_idempotent.apply()
    pickled = [pickle.loads(pickle.dumps(value)) is value for value in live().values()]
    copied = [copy.deepcopy(value) is value for value in live().values()]
    try:
        import cloudpickle
    except ModuleNotFoundError:
        clouds = None
    else:
        clouds = [pickle.loads(cloudpickle.dumps(v)) is v for v in live().values()]
    import torch
    from megatron.core.transformer import TransformerConfig

    # A DDP without the process group that building one takes; its methods are not called here.
    ddp = object.__new__(sys.modules[DDP].DistributedDataParallel)
    torch.nn.Module.__init__(ddp)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    for method in (ddp.no_sync, ddp.disable_forward_pre_hook):
        config.no_sync_func = method
        twin = copy.deepcopy(config).no_sync_func
        assert twin.__func__ is method.__func__
        assert twin.__self__ is not ddp
    bound = pickle.loads(pickle.dumps(ddp.disable_forward_pre_hook))
    return {
        "pickled": pickled,
        "copied": copied,
        "clouds": clouds,
        "signatures": {n: inspect.signature(v) == upstream[n] for n, v in live().items()},
        "bound": bound.__func__ is live()["disable"],
    }


def hooks_without_overlap() -> dict[str, Any]:
    """Disable, then enable, the hooks of a DDP that has none to switch."""
    import_megatron()
    import torch

    import megatron_idempotent

    megatron_idempotent.apply()
    ddp = object.__new__(sys.modules[DDP].DistributedDataParallel)
    torch.nn.Module.__init__(ddp)
    ddp.module = torch.nn.Linear(1, 1)
    ddp.use_forward_hook = False
    ddp.remove_forward_pre_hook_handles = {}
    raised = []
    for switch in (ddp.disable_forward_pre_hook, ddp.enable_forward_pre_hook):
        try:
            switch()
        except AssertionError:
            raised.append(switch.__name__)
    return {"raised": raised, "handles": len(ddp.remove_forward_pre_hook_handles)}


def loss_scale() -> dict[str, Any]:
    """Copy and pickle a config that `get_megatron_optimizer` was patched into."""
    import copy
    import pickle

    import_megatron()
    from megatron.core.transformer import TransformerConfig

    from megatron_idempotent.megatron.optimizers import LossScale

    class Optimizer:
        def scale_loss(self, loss: float) -> float:
            return 8 * loss

        def __deepcopy__(self, memo: Any) -> Any:
            raise AssertionError("the optimizer was copied")

        def __reduce__(self) -> Any:
            raise AssertionError("the optimizer was pickled")

    optimizer = Optimizer()
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    config.grad_scale_func = LossScale(optimizer)
    copied = copy.deepcopy(config)
    scaled = copied.grad_scale_func(2.0)
    pickled = pickle.loads(pickle.dumps(config)).grad_scale_func
    del optimizer
    return {"scaled": scaled, "pickled": pickled, "left": copied.grad_scale_func(2.0)}
