"""What happens in processes of their own; see `forks`. Each returns something JSON can carry."""

from __future__ import annotations

import importlib
import os
import sys
from pathlib import Path
from typing import Any

SEED = "megatron.core.tensor_parallel.random"
OPTIMIZER = "megatron.core.optimizer"
DDP = "megatron.core.distributed.distributed_data_parallel"


def live() -> dict[str, Any]:
    """Raw objects at the targets outside of megatron.training, by a short name."""
    ddp = vars(sys.modules[DDP].DistributedDataParallel)
    return {
        "seed": sys.modules[SEED].model_parallel_cuda_manual_seed,
        "optimizer": sys.modules[OPTIMIZER].get_megatron_optimizer,
        "disable": ddp["disable_forward_pre_hook"],
        "enable": ddp["enable_forward_pre_hook"],
    }


def stock(name: str) -> bool:
    """Whether upstream's own function stands there."""
    return live()[name].__code__.co_filename.endswith(
        ("random.py", "optimizer/__init__.py", "distributed_data_parallel.py")
    )


def import_megatron() -> None:
    """Import what the patches outside of megatron.training need."""
    for name in (SEED, OPTIMIZER, DDP):
        importlib.import_module(name)


def outcomes(
    path: str | None = None,
    environ: dict[str, str] | None = None,
    bare: bool = False,
    first: list[dict[str, Any]] | None = None,
    **arguments: Any,
) -> dict[str, Any]:
    """Rows of `apply(**arguments)`, with Megatron taken from `path`; imports nothing of it."""
    os.environ |= environ or {}
    if bare:
        sys.path[:] = [entry for entry in sys.path if "site-packages" not in entry]
    if path:
        sys.path.insert(0, path)
    import megatron_idempotent

    for earlier in first or ():
        megatron_idempotent.apply(**earlier)
    try:
        report = megatron_idempotent.apply(**arguments)
    except (ValueError, TypeError, megatron_idempotent.PatchError) as error:
        left = {row.id: row.status for row in megatron_idempotent.report()}
        return {"raised": type(error).__name__, "message": str(error), "left": left}
    assert not any(name.split(".")[0] in ("megatron", "torch") for name in sys.modules)
    return {row.id: row.as_dict() for row in report}


def order(steps: str) -> dict[str, Any]:
    """Do `steps` in this order: i import, a apply, r revert; then say what stands there."""
    import megatron_idempotent

    actions = {
        "i": import_megatron,
        "a": megatron_idempotent.apply,
        "r": megatron_idempotent.revert,
    }
    seen: dict[str, set[int]] = {}
    for step in steps:
        actions[step]()
        if SEED in sys.modules:
            for name, value in live().items():
                if not stock(name):
                    seen.setdefault(name, set()).add(id(value))
    return {
        "stock": [stock(name) for name in live()],
        "objects": [len(ids) for ids in seen.values()],
        "statuses": {row.id: row.status for row in megatron_idempotent.report()},
        "bound early": _bound_early_is(live()["seed"]),
    }


def _bound_early_is(function: Any) -> bool:
    import megatron.core.tensor_parallel

    return megatron.core.tensor_parallel.model_parallel_cuda_manual_seed is function


def copy_is_imported(path: str, **arguments: Any) -> dict[str, Any]:
    """Import Megatron from `path`, then apply."""
    sys.path.insert(0, path)
    import_megatron()
    assert str(Path(sys.modules[SEED].__file__ or "")).startswith(path)
    import megatron_idempotent

    report = megatron_idempotent.apply(**arguments)
    return {row.id: row.as_dict() | {"stock": stock("seed")} for row in report}


def live_outcome(prepare: str, **arguments: Any) -> dict[str, Any]:
    """Import Megatron, do something to it, apply, and tell everything."""
    import_megatron()
    import alterations

    expected = getattr(alterations, prepare)(sys.modules[SEED])
    import megatron_idempotent

    raised = None
    try:
        megatron_idempotent.apply(**arguments)
    except megatron_idempotent.PatchError as error:
        raised = str(error)
    return {
        "raised": raised,
        "rows": {row.id: row.as_dict() for row in megatron_idempotent.report()},
        "untouched": [stock(name) for name in live() if name != "seed"],
        "seed untouched": expected is live()["seed"],
    }


def wrapped_on_top() -> dict[str, Any]:
    """Apply, let someone wrap, verify, revert, apply again."""
    import_megatron()
    import alterations

    import megatron_idempotent
    from megatron_idempotent.engine import landing

    module = sys.modules[SEED]
    upstream = module.model_parallel_cuda_manual_seed
    megatron_idempotent.apply()
    ours = module.model_parallel_cuda_manual_seed
    alterations.polite(module)
    theirs = module.model_parallel_cuda_manual_seed
    megatron_idempotent.verify()
    result: dict[str, Any] = {
        "status": megatron_idempotent.report()["pipeline-seed-offset"].status,
        "again": megatron_idempotent.apply()["pipeline-seed-offset"].status,
        "reverted": megatron_idempotent.revert()["pipeline-seed-offset"].as_dict(),
        "theirs stays": module.model_parallel_cuda_manual_seed is theirs,
    }
    site = landing.state.sites[f"{SEED}:model_parallel_cuda_manual_seed"]
    result["inert"] = site.layers == {} and site._call is upstream
    result["applied again"] = megatron_idempotent.apply()["pipeline-seed-offset"].status
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

    megatron_idempotent.apply()
    module = sys.modules[SEED]
    ours = module.model_parallel_cuda_manual_seed
    alterations.replacement(module)
    theirs = module.model_parallel_cuda_manual_seed
    try:
        megatron_idempotent.verify()
        message = ""
    except megatron_idempotent.VerificationError as error:
        message = str(error)
    again = megatron_idempotent.apply()["pipeline-seed-offset"].as_dict()
    untouched = module.model_parallel_cuda_manual_seed is theirs
    module.model_parallel_cuda_manual_seed = ours.__wrapped__
    fixed = megatron_idempotent.apply()["pipeline-seed-offset"].status
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
        "patched anew": second is not first and not stock("seed"),
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


def fresh_modules() -> dict[str, Any]:
    """What importing the package and `apply()` pull in."""
    before = set(sys.modules)
    import megatron_idempotent

    imported = sorted(set(sys.modules) - before)
    finders = list(sys.meta_path)
    megatron_idempotent.apply()
    return {
        "imported": imported,
        "applied": sorted(set(sys.modules) - before),
        "finders added": [type(f).__name__ for f in sys.meta_path if f not in finders],
    }


def many_threads(while_importing: bool) -> dict[str, Any]:
    """Apply from many threads at once, also while others import the targets."""
    import threading

    import megatron_idempotent

    if not while_importing:
        import_megatron()
    barrier = threading.Barrier(12)
    failures: list[str] = []

    def work(number: int) -> None:
        barrier.wait()
        try:
            if while_importing and number % 4 == 0:
                import_megatron()
            for _ in range(5):
                megatron_idempotent.apply()
        except Exception as error:  # noqa: BLE001 - a thread's error reaches nobody otherwise
            failures.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    from megatron_idempotent.engine import landing

    depth = {}
    for name, value in live().items():
        depth[name] = 0
        while hasattr(value, "__wrapped__"):
            value, depth[name] = value.__wrapped__, depth[name] + 1
    return {
        "failures": failures,
        "stock": [stock(name) for name in live()],
        "wrapped": depth,
        "layers": [list(site.layers) for site in landing.state.sites.values()],
        "statuses": sorted({row.status for row in megatron_idempotent.report()}),
    }


def forked(hold_the_lock: bool) -> dict[str, Any]:
    """Apply, fork while a thread of the parent may hold the locks, apply in the child."""
    import threading

    import_megatron()
    import megatron_idempotent
    from megatron_idempotent.engine import landing, late

    megatron_idempotent.apply(only=["grad-scale-func"])
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with landing.lock, late._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    if hold_the_lock:
        thread.start()
        held.wait()
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        inherited = not stock("optimizer")
        megatron_idempotent.apply()
        reverted = megatron_idempotent.revert()["grad-scale-func"].status
        os.write(send, f"{inherited} {reverted} {stock('seed')}".encode())
        os._exit(0)
    answer = os.read(receive, 1000).decode()
    os.waitpid(child, 0)
    if hold_the_lock:
        done.set()
        thread.join()
    megatron_idempotent.apply()
    return {"child": answer, "parent": [stock(name) for name in live()]}


def spawned() -> list[Any]:
    """Apply, and let a spawned child say what it finds."""
    import multiprocessing

    import_megatron()
    import megatron_idempotent

    megatron_idempotent.apply()
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(order_in_spawned_child)


def order_in_spawned_child() -> list[Any]:
    """Whether patches came along, and whether `apply()` works here."""
    import megatron_idempotent

    came = {row.reason for row in megatron_idempotent.report()}
    import_megatron()
    without = [stock(name) for name in live()]
    megatron_idempotent.apply()
    return [sorted(came), without, [stock(name) for name in live()]]


def loss_scale() -> dict[str, Any]:
    """Copy and pickle a config that `get_megatron_optimizer` was patched into."""
    import copy
    import pickle

    import_megatron()
    from megatron.core.transformer import TransformerConfig
    from megatron_idempotent.patches.grad_scale_func import LossScale

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
    try:
        copied.grad_scale_func(2.0)
        message = ""
    except ReferenceError as error:
        message = str(error)
    return {"scaled": scaled, "pickled": pickled, "message": message}


def source_properties() -> dict[str, Any]:
    """Cut every top-level function and class out of every file of Megatron, and compare."""
    import ast

    from megatron_idempotent.engine import source

    info = source.locate("megatron.core.package_info")
    assert info is not None
    checked, wrong, cut = 0, [], 0
    for path in sorted(info.parents[1].rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        tree = ast.parse(text)
        whole = {n.name for n in tree.body if isinstance(n, source._Definition)}
        for name in sorted(whole):
            expected = source._definition(tree.body, name)
            found = source._parse_definition(text, name)
            checked += 1
            cut += found is not None and found.lineno != expected.lineno  # type: ignore[union-attr]
            if _extent(found) != _extent(expected):
                wrong.append(f"{path}: {name}")
    return {"checked": checked, "wrong": wrong, "cut": cut}


def _extent(node: Any) -> tuple[Any, ...]:
    # Both come from the same text and have the same name, so the same extent is the same code.
    return (
        type(node).__name__,
        len(node.decorator_list),
        node.end_lineno - node.lineno,
        node.end_col_offset,
        len(node.body),
    )
