"""Apply, revert and verify on the real Megatron, each in a rank of its own.

In every order with the import; beside somebody else's function at the target; in threads and forks.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import inspect
import os
import pickle
import sys
import threading
import types
from typing import Any

import pytest
import scenarios
from forks import FEW
from ranks import on_ranks
from scenarios import import_megatron, live, stock

import megatron_idempotent
from megatron_idempotent.patching import import_hooks, install, patch_points

SEED = "pipeline-seed-offset"
#: i imports Megatron, a applies, r reverts.
ORDERS = ["iaa", "iar", "iara", "ai", "ari", "arai"]
#: Each imports Megatron again, and is two of the others.
LONGER = ["aai", "air", "ria", "aira", "aria"]


def begin(*, imported: bool = True, among: str = FEW) -> None:
    """Begin a test on a rank with Megatron imported, or with all of it still to be imported.

    Args:
        imported: whether Megatron is there.
        among: ids of patches with commas between them; no others are applied. All if it is empty.
    """
    os.environ["MEGATRON_IDEMPOTENT_ONLY"] = among
    if imported:
        import_megatron()
        return
    for name in [name for name in sys.modules if name.split(".")[0] == "megatron"]:
        del sys.modules[name]


@pytest.mark.parametrize(
    "steps", [*ORDERS, *(pytest.param(each, marks=pytest.mark.exhaustive) for each in LONGER)]
)
@on_ranks(1, distributed=False)
def test_the_last_of_apply_and_revert_decides_whenever_megatron_is_imported(steps):
    # All patches, because they wait for more modules than these tests import.
    begin(imported=steps.startswith("i"), among="")
    actions = {
        "i": import_megatron,
        "a": megatron_idempotent.apply,
        "r": megatron_idempotent.revert,
    }
    seen: dict[str, set[int]] = {}
    for step in steps:
        actions[step]()
        for name, value in live().items() if scenarios.SEED in sys.modules else ():
            if not stock(name):
                seen.setdefault(name, set()).add(id(value))
    patched = steps.replace("i", "").endswith("a")
    assert {stock(name) for name in live()} == {not patched}
    status = megatron_idempotent.report()[SEED].status
    assert status in (("applied", "already_applied") if patched else ("disabled",))
    # Twice applied is once applied, by identity, and also with a revert() in between.
    assert {len(ids) for ids in seen.values()} <= {1}
    # The package has bound the function by name, early or late.
    package = importlib.import_module("megatron.core.tensor_parallel")
    assert package.model_parallel_cuda_manual_seed is live()["seed"]


@pytest.mark.parametrize("rebind", ["", "user_program", "other, user_program"])
@on_ranks(1, distributed=False)
def test_names_bound_early_are_rebound_in_megatron_and_elsewhere_where_that_was_asked_for(rebind):
    def bound(name: str, statement: str) -> dict[str, Any]:
        module = sys.modules[name] = types.ModuleType(name)
        exec(
            f"from megatron.core.optimizer import get_megatron_optimizer {statement}", vars(module)
        )
        return vars(module)

    begin()
    user, inside = bound("user_program", "as build"), bound("megatron.plugin", "as early")
    upstream = live()["optimizer"]
    os.environ["MEGATRON_IDEMPOTENT_REBIND"] = rebind
    reason = megatron_idempotent.apply()["grad-scale-func"].reason
    ours = live()["optimizer"]
    said = "bound before us and left alone: user_program.build" in reason
    assert (user["build"] is ours, said) == (bool(rebind), not rebind)
    assert inside["early"] is ours
    # Bound while patched, which must not keep the patch alive, nor lose it for good.
    exec("from megatron.core.optimizer import get_megatron_optimizer as late", inside)
    megatron_idempotent.revert()
    assert user["build"] is inside["early"] is inside["late"] is upstream
    megatron_idempotent.apply()
    assert inside["late"] is live()["optimizer"] is ours


@on_ranks(1, distributed=False)
def test_a_reloaded_module_is_said_to_be_unpatched_and_patched_again_by_apply():
    begin()
    megatron_idempotent.apply()
    module = sys.modules[scenarios.SEED]
    first = module.model_parallel_cuda_manual_seed
    package = importlib.import_module("megatron.core.tensor_parallel")
    importlib.reload(module)
    assert (megatron_idempotent.report()[SEED].status, stock("seed")) == ("conflict", True)
    assert megatron_idempotent.apply()[SEED].status == "applied"
    assert module.model_parallel_cuda_manual_seed is not first
    assert not stock("seed")
    megatron_idempotent.revert()
    assert stock("seed")
    # The package has bound the function of the module's first life, which must be undone too.
    assert package.model_parallel_cuda_manual_seed is first.__wrapped__


@on_ranks(1, distributed=False)
def test_patched_functions_can_be_copied_pickled_and_inspected_like_upstreams():
    begin()
    import torch
    from megatron.core.transformer import TransformerConfig

    upstream = {name: inspect.signature(value) for name, value in live().items()}
    megatron_idempotent.apply()
    for name, value in live().items():
        assert pickle.loads(pickle.dumps(value)) is copy.deepcopy(value) is value
        if importlib.util.find_spec("cloudpickle"):
            import cloudpickle

            assert pickle.loads(cloudpickle.dumps(value)) is value
        assert inspect.signature(value) == upstream[name]
    # A DDP without the process group that building one takes; its methods are not called here.
    ddp = object.__new__(sys.modules[scenarios.DDP].DistributedDataParallel)
    torch.nn.Module.__init__(ddp)
    config = TransformerConfig(num_layers=1, hidden_size=8, num_attention_heads=1)
    for method in (ddp.no_sync, ddp.disable_forward_pre_hook):
        config.no_sync_func = method
        twin = copy.deepcopy(config).no_sync_func
        assert twin.__func__ is method.__func__
        assert twin.__self__ is not ddp
    bound = pickle.loads(pickle.dumps(ddp.disable_forward_pre_hook))
    assert bound.__func__ is live()["disable"]


# Somebody else at the target.


def put_another() -> Any:
    """Replace `model_parallel_cuda_manual_seed` as others do; return what stands there then."""

    def replacement(seed: int) -> None: ...

    sys.modules[scenarios.SEED].model_parallel_cuda_manual_seed = replacement
    return replacement


@on_ranks(1, distributed=False)
def test_somebody_elses_function_is_a_conflict_and_stays_untouched():
    begin()
    theirs = put_another()
    row = megatron_idempotent.apply()[SEED]
    assert row.status == "conflict"
    assert row.reason.startswith(f"{scenarios.SEED}:model_parallel_cuda_manual_seed is ")
    assert row.reason.endswith(f"undo that or exclude {SEED}")
    assert live()["seed"] is theirs
    # It is no reason to leave the other patches out.
    assert not live()["optimizer"].__code__.co_filename.endswith("optimizer/__init__.py")
    assert not stock("disable")


@pytest.mark.parametrize("arguments", [{"only": [SEED]}, {"strict": True}])
@on_ranks(1, distributed=False)
def test_a_conflict_raises_where_it_was_asked_for_and_nothing_is_installed(arguments):
    begin()
    theirs = put_another()
    with pytest.raises(megatron_idempotent.PatchError, match=SEED):
        megatron_idempotent.apply(**arguments)
    assert live()["seed"] is theirs
    assert [stock(name) for name in live() if name != "seed"] == [True] * 3
    rows = megatron_idempotent.report()
    assert {(row.status, row.reason) for row in rows} == {("disabled", "apply() was not called")}


@pytest.mark.parametrize("named", [False, True])
@on_ranks(1, distributed=False)
def test_a_drifted_copy_that_is_imported_is_left_alone_unless_named(drifted, named):
    begin(imported=False)
    sys.path.insert(0, drifted)
    import_megatron()
    assert str(sys.modules[scenarios.SEED].__file__).startswith(drifted)
    rows = megatron_idempotent.apply(**({"only": [SEED]} if named else {}))
    expected = ("applied", False) if named else ("drifted", True)
    assert (rows[SEED].status, stock("seed")) == expected
    if named:
        assert "accepted by name" in rows[SEED].reason
    else:
        assert rows["grad-scale-func"].status == "applied"


@on_ranks(1, distributed=False)
def test_upstreams_own_refusals_stay_and_leave_nothing_behind():
    begin()
    import torch

    megatron_idempotent.apply()
    ddp = object.__new__(sys.modules[scenarios.DDP].DistributedDataParallel)
    torch.nn.Module.__init__(ddp)
    ddp.module = torch.nn.Linear(1, 1)
    ddp.use_forward_hook = False
    ddp.remove_forward_pre_hook_handles = {}
    for switch in (ddp.disable_forward_pre_hook, ddp.enable_forward_pre_hook):
        with pytest.raises(AssertionError):
            switch()
    assert ddp.remove_forward_pre_hook_handles == {}


# Threads and processes; each has a deadline, after which it counts as hung.


@pytest.mark.parametrize("while_importing", [pytest.param(False, marks=pytest.mark.full), True])
@on_ranks(1, distributed=False)
def test_apply_from_many_threads_installs_once(while_importing):
    begin(imported=not while_importing, among="")
    barrier = threading.Barrier(12)
    failures: list[BaseException] = []

    def work(number: int) -> None:
        barrier.wait()
        try:
            if while_importing and number % 4 == 0:
                import_megatron()
            for _ in range(5):
                megatron_idempotent.apply()
        except Exception as error:  # noqa: BLE001 - a thread's error reaches nobody otherwise
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    for value in live().values():  # one layer of ours around upstream's function
        assert not hasattr(value.__wrapped__, "__wrapped__")
    assert not any(stock(name) for name in live())
    layers = [list(site.layers) for site in install.state.sites.values()]
    assert all(len(each) == len(set(each)) for each in layers)
    assert {row.status for row in megatron_idempotent.report()} <= {
        *("applied", "already_applied", "pending_import", "missing_target"),
        *("unsupported_version", "not_installed", "disabled", "fixed_upstream"),
    }


@on_ranks(1, distributed=False)
def test_a_look_at_all_values_of_modules_asks_for_few_identities():
    """An audit hook, as filelock installs one, would make each `id()` slow."""
    begin(among="")
    asked, done = [], threading.Event()
    # Beside another thread `apply()` looks at all values, for names that were bound just now.
    threading.Thread(target=done.wait, daemon=True).start()
    sys.addaudithook(lambda event, _: event == "builtins.id" and asked.append(event))
    assert megatron_idempotent.apply()[SEED].status == "applied"
    values = sum(len(import_hooks.namespace(module)) for _, module in patch_points.modules())
    assert 0 < len(asked) < values / 20
    done.set()


@pytest.mark.parametrize("hold_the_lock", [False, True])
@on_ranks(1, distributed=False)
def test_a_forked_child_inherits_the_patches_and_can_change_its_own(hold_the_lock):
    """Fork while a thread of the parent may hold the locks."""
    begin()
    megatron_idempotent.apply(only=["grad-scale-func"])
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with install.lock, import_hooks._lock:
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
    assert os.read(receive, 1000).decode() == "True disabled True"
    os.waitpid(child, 0)
    if hold_the_lock:
        done.set()
        thread.join()
    megatron_idempotent.apply()
    assert not any(stock(name) for name in live())


def in_spawned_child() -> tuple[set[str], list[bool], list[bool]]:
    """Return whether patches came along, and whether `apply()` works here."""
    came = {row.reason for row in megatron_idempotent.report()}
    import_megatron()
    without = [stock(name) for name in live()]
    megatron_idempotent.apply()
    return came, without, [stock(name) for name in live()]


# It imports torch and Megatron in two processes.
@pytest.mark.exhaustive
@on_ranks(1, distributed=False, timeout_s=300)
def test_a_spawned_child_has_no_patches_until_it_applies_them():
    import multiprocessing

    begin()
    megatron_idempotent.apply()
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        came, without, patched = pool.apply(in_spawned_child)
    assert came == {"apply() was not called"}
    assert (without, patched) == ([True] * 4, [False] * 4)


@pytest.mark.full  # it imports torch and Megatron: on a rank another torch.compile stands in
def test_a_compiled_function_runs_inside_and_outside_of_ours_and_follows_revert(cold):
    cold.run("scenarios.compiled_around_and_below", timeout_s=240)
