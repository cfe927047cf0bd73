"""Others who patch Megatron, by their own code, before us and after us, on CPU ranks.

Each neighbour's patches are installed as its users do it. MindSpeed needs `torch_npu` for most of
what it replaces, and Primus a ROCm device: what is run of theirs are the files that patch, which
need neither. mcore-bridge's patcher asks for Transformer Engine; it gets empty stand-ins for that,
and for two helpers that it takes from data sets' and model hubs' packages.
"""

from __future__ import annotations

import importlib
import os
import sys
import types
from collections.abc import Callable
from datetime import timedelta
from typing import Any, NamedTuple

import pytest
import torch

import megatron_idempotent
from megatron_idempotent.patching.catalog import hazards, patches
from megatron_idempotent.proof.cpu import tiny

pytestmark = pytest.mark.full


def mindspeed() -> None:
    """Register what `MegatronBasicFeature` does for optimizers, and apply it as `repatch` does."""
    sys.path.insert(0, os.environ["MINDSPEED_SOURCE"])
    import megatron.core.distributed.distributed_data_parallel_config as ddp_config
    from mindspeed.core.optimizer import fix_duplicate_allgather as theirs
    from mindspeed.patch_utils import MindSpeedPatchesManager

    # They read this option of the Megatron that they are for, which was renamed since.
    ddp_config.DistributedDataParallelConfig.use_custom_fsdp = False

    # Twice, as `repatch` does.
    for _ in range(2):
        MindSpeedPatchesManager.remove_patches()
        wrap = MindSpeedPatchesManager.register_patch
        wrap(
            "megatron.core.optimizer.get_megatron_optimizer", theirs.get_megatron_optimizer_wrapper
        )
        wrap(
            "megatron.core.optimizer.distrib_optimizer.DistributedOptimizer.step_with_ready_grads",
            theirs.step_with_ready_grads_distrib_opti_wrapper,
        )
        wrap(
            "megatron.core.distributed.distributed_data_parallel.DistributedDataParallel"
            ".start_param_sync",
            theirs.start_param_sync,
        )
        MindSpeedPatchesManager.apply_patches()


def mindspeed_replacement() -> None:
    """Put MindSpeed's own `ChainedOptimizer.step` in the place of Megatron's."""
    sys.path.insert(0, os.environ["MINDSPEED_SOURCE"])
    from mindspeed.core.megatron_basic.count_zero_fix import step
    from mindspeed.patch_utils import MindSpeedPatchesManager

    MindSpeedPatchesManager.register_patch(
        "megatron.core.optimizer.optimizer.ChainedOptimizer.step", step
    )
    MindSpeedPatchesManager.apply_patches()


def primus() -> None:
    """Run its patches of `train` and `train_step` through its own registry, twice."""
    sys.path.insert(0, os.environ["PRIMUS_SOURCE"])
    from primus.core.patches import PatchContext, PatchRegistry
    from primus.core.utils import logger

    logger.info_with_caller = logger.debug_with_caller = lambda *_: None  # it wants a log folder
    patches = "primus.backends.megatron.patches"
    package = types.ModuleType(patches)  # the package itself imports all of them, and ROCm's
    package.__path__ = [os.path.join(os.environ["PRIMUS_SOURCE"], *patches.split("."))]
    for name in ("primus.backends.megatron", patches):
        made = types.ModuleType(name)
        made.__path__ = [os.path.join(os.environ["PRIMUS_SOURCE"], *name.split("."))]
        sys.modules[name] = made
    for name in ("empty_cache_interval_patches", "pp_warmup_patches"):
        importlib.import_module(f"{patches}.{name}")
    context = PatchContext(backend="megatron", phase="before_train", extra={})
    for _ in range(2):
        for patch in PatchRegistry.iter_patches(backend="megatron", phase="before_train"):
            patch.apply(context)


def resiliency() -> None:
    """Wrap `train` for in-process restarts."""
    import megatron.training.training as training

    training.train = _restarting()(training.train)


def _restarting() -> Any:
    from nvidia_resiliency_ext import inprocess

    return inprocess.Wrapper(
        store_kwargs={"host_name": "localhost", "timeout": timedelta(seconds=60)},
        monitor_process_interval=timedelta(seconds=0.1),
        last_call_wait=timedelta(seconds=0.1),
    )


def slime() -> None:
    """Load the file that replaces a reduction of `finalize_model_grads`."""
    file = "slime/backends/megatron_utils/megatron_patch/megatron_chunked_grad_coalesce_patch.py"
    path = os.path.join(os.environ["SLIME_SOURCE"], file)
    spec = importlib.util.spec_from_file_location("slime_patch", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader.exec_module(importlib.util.module_from_spec(spec))
    import megatron.core.distributed.finalize_model_grads as theirs  # the package has a function

    module = sys.modules[theirs.__module__]
    where = module._allreduce_non_tensor_model_parallel_grads.__code__.co_filename
    assert where == path


def mcore_bridge() -> None:
    """Run its patcher's functions for Megatron's own classes."""
    import megatron.core.extensions.transformer_engine as engine

    package = importlib.util.find_spec("mcore_bridge")
    assert package is not None
    made = types.ModuleType("mcore_bridge")
    made.__path__ = list(package.submodule_search_locations or ())
    made.__file__ = package.origin  # by which `apply()` tells that it is installed
    sys.modules["mcore_bridge"] = made
    for name, member in (
        ("datasets.utils.filelock", "FileLock"),
        ("modelscope.hub.utils.utils", "get_cache_dir"),
    ):
        for part in [name.rsplit(".", n)[0] for n in range(name.count("."), 0, -1)]:
            sys.modules.setdefault(part, types.ModuleType(part))
        sys.modules[name] = types.ModuleType(name)
        setattr(sys.modules[name], member, None)
    for name in ("TEGroupedLinear", "TELinear"):
        if getattr(engine, name, None) is None:
            setattr(engine, name, type(name, (), {}))
    patcher = importlib.import_module("mcore_bridge.patcher")
    patcher._patch_TEGroupedLinear()
    patcher._patch_TELinear()
    patcher._patch_mrope()
    patcher._patch_mtp()
    patcher._patch_moe_expert_bias_padding_mask()


class Neighbour(NamedTuple):
    """Somebody else's patches, and what is said of ours at the same functions."""

    install: Callable[[], None]
    source: str | None
    """The variable with its source; None for a package of that name that is installed."""
    package: str
    at: dict[str, str]
    """Ours at the same functions → what stands there of theirs."""
    shown: tuple[str, ...] = ()
    """Hazards whose reproduction goes through what both have patched."""


NEIGHBOURS = {
    "mindspeed": Neighbour(
        mindspeed,
        "MINDSPEED_SOURCE",
        "mindspeed",
        {
            "grad-scale-func": "wraps",
            "params-stale-after-step": "wraps",
            "pending-gather-dropped": "wraps",
            "checkpoint-before-gather": "wraps",
        },
        ("grad-scale-func", "params-stale-after-step"),
    ),
    "mindspeed's ChainedOptimizer.step": Neighbour(
        mindspeed_replacement,
        "MINDSPEED_SOURCE",
        "mindspeed",
        dict.fromkeys(
            ("grad-scale-func", "offload-drops-gradients", "timers-left-running"), "replaces"
        ),
    ),
    "primus": Neighbour(
        primus,
        "PRIMUS_SOURCE",
        "primus",
        dict.fromkeys(("no-sync-func-reentry", "train-interval-timer", "gc-stays-off"), "wraps"),
        ("no-sync-func-reentry", "train-interval-timer"),
    ),
    "nvidia-resiliency-ext": Neighbour(
        resiliency,
        "RESILIENCY_SOURCE",
        "nvidia_resiliency_ext",
        dict.fromkeys(("no-sync-func-reentry", "gc-stays-off"), "wraps"),
    ),
    "slime": Neighbour(slime, "SLIME_SOURCE", "slime", {}),
    "mcore-bridge": Neighbour(
        mcore_bridge, None, "mcore_bridge", {"expert-bias-refuses-padding": "wraps"}
    ),
}


def standing() -> dict[str, int]:
    from megatron_idempotent.patching.patch_points import find_owner, namespace

    found = {}
    for patch in patches().values():
        for target in patch.targets:
            module = sys.modules.get(target.module)
            if module is not None:
                owner = find_owner(module, target.qualname)
                found[target.address] = id(namespace(owner).get(target.qualname.rpartition(".")[2]))
    return found


def told(name: str, order: str) -> dict[str, tuple[str, str]]:
    """Install both in this order on a rank, apply twice, revert; return the rows in between."""
    importlib.import_module("megatron.training.training")

    neighbour = NEIGHBOURS[name]
    if neighbour.install is resiliency:
        # We patch the extension too: `apply()` looks for it on the path, before it is imported.
        sys.path.insert(0, os.environ["RESILIENCY_SOURCE"])
    if order == "theirs first":
        neighbour.install()
        left = standing()
        megatron_idempotent.apply()
    else:
        megatron_idempotent.apply()
        neighbour.install()
    both = standing()
    rows = {row.id: (row.status, row.reason) for row in megatron_idempotent.report()}
    megatron_idempotent.apply()
    # Where they have replaced a function, a patch leaves its other functions, too.
    assert standing() == both or "replaces" in neighbour.at.values()
    reverted = {row.id: row.reason for row in megatron_idempotent.revert()}
    if order == "theirs first":
        assert standing() == left
    else:  # what was wrapped is left there, and says by whom
        for each in neighbour.at:
            assert rows[each][0] == "conflict" or (
                f"{neighbour.package} wrapped megatron." in reverted[each]
            )
    megatron_idempotent.apply()
    changed = {
        row.id: (rows[row.id], row)
        for row in megatron_idempotent.report()
        if row.status != rows[row.id][0]
    }
    assert not changed, changed
    return rows


def taken(name: str, order: str) -> bytes:
    """Take three steps beside the neighbour on a rank; return the parameters' bits."""
    importlib.import_module("megatron.training.training")

    actions = {"theirs": NEIGHBOURS[name].install, "ours": megatron_idempotent.apply}
    for each in order.split():
        actions[each]()
    model = tiny.build(dtype="bf16", overlap_param_gather=True)
    for seed in range(3):
        model.train_step(2, data_seed=seed)
    return model.bits()


def reproduced(name: str, hazard: str, order: str) -> None:
    """Run a hazard's reproduction on a rank beside the neighbour."""
    importlib.import_module("megatron.training.training")

    actions = {"theirs": NEIGHBOURS[name].install, "ours": megatron_idempotent.apply}
    for each in order.split():
        actions[each]()
    hazards()[hazard].reproduce()


@pytest.fixture
def there(request):
    neighbour = NEIGHBOURS[request.getfixturevalue("name")]
    if neighbour.source is not None and neighbour.source not in os.environ:
        pytest.skip(f"{neighbour.source} names no checkout")
    if neighbour.source is None:
        pytest.importorskip(neighbour.package.replace("mcore_bridge", "peft"))
        if importlib.util.find_spec(neighbour.package) is None:
            pytest.skip(f"{neighbour.package} is not installed")


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("order", ["theirs first", "ours first"])
@pytest.mark.parametrize("name", NEIGHBOURS)
def test_a_neighbour_is_named_and_left_in_place(megatron_ranks, name, order):
    (rows,) = megatron_ranks(1, told, name, order)
    neighbour = NEIGHBOURS[name]
    side = "before us: runs inside" if order == "theirs first" else ": runs outside"
    said = f"wrapped by {neighbour.package}{' ' * side.startswith('b')}{side} of ours"
    for patch_id, kind in neighbour.at.items():
        status, reason = rows[patch_id]
        if kind == "wraps":
            assert (status, said in reason) == ("applied", True), (patch_id, status, reason)
        else:
            assert (status, neighbour.package in reason) == ("conflict", True), reason
    others = {
        patch_id for patch_id, (_, reason) in rows.items() if f"by {neighbour.package}" in reason
    }
    if not neighbour.at:
        assert others == set()
    refused = {each for each, (status, _) in rows.items() if status in ("conflict", "failed")}
    replaced = {each for each, kind in neighbour.at.items() if kind == "replaces"}
    assert refused == replaced


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize("name", [name for name in NEIGHBOURS if name != "nvidia-resiliency-ext"])
def test_steps_beside_a_neighbour_have_the_bits_of_steps_with_it_alone(megatron_ranks, name):
    alone = megatron_ranks(2, taken, name, "theirs")
    for order in ("theirs ours", "ours theirs"):
        assert megatron_ranks(2, taken, name, order) == alone


@pytest.mark.usefixtures("there")
@pytest.mark.parametrize(
    ("name", "hazard"), [(name, each) for name in NEIGHBOURS for each in NEIGHBOURS[name].shown]
)
def test_a_hazard_is_gone_in_both_orders(megatron_ranks, name, hazard):
    ranks = hazards()[hazard].ranks
    with pytest.raises(Exception, match=hazards()[hazard].stock_error):
        megatron_ranks(ranks, reproduced, name, hazard, "theirs")
    for order in ("theirs ours", "ours theirs"):
        megatron_ranks(ranks, reproduced, name, hazard, order)


def patched_again(order: str) -> tuple[bool, str, bool]:
    """Let MindSpeed patch again after both; return if ours stays, what is said, what helps."""
    from megatron_idempotent import VerificationError

    importlib.import_module("megatron.training.training")
    actions = {"theirs": mindspeed, "ours": megatron_idempotent.apply}
    for each in order.split():
        actions[each]()
    mindspeed()
    try:
        megatron_idempotent.verify()
        said = ""
    except VerificationError as error:
        said = str(error)
    megatron_idempotent.apply()
    helped = megatron_idempotent.verify()["params-stale-after-step"].reason
    return not said, said, "mindspeed" in helped


@pytest.mark.skipif("MINDSPEED_SOURCE" not in os.environ, reason="MINDSPEED_SOURCE names none")
def test_mindspeed_s_repatch_keeps_ours_below_and_is_named_where_it_drops_ours(megatron_ranks):
    assert megatron_ranks(1, patched_again, "ours theirs") == [(True, "", True)]
    ((kept, said, helped),) = megatron_ranks(1, patched_again, "theirs ours")
    assert not kept
    assert "megatron.core.optimizer:get_megatron_optimizer by mindspeed" in said
    assert "call apply() after whatever replaced them" in said
    assert helped


def liger() -> None:
    """Apply all of its kernels to Megatron."""
    from liger_kernel.megatron import apply_liger_kernel_to_megatron

    apply_liger_kernel_to_megatron(rms_norm=True, cross_entropy=True, swiglu=True)


def with_kernels(order: str) -> tuple[tuple[list[float], bytes], dict[str, str]]:
    """Take a step with Liger's kernels on a rank, in Triton's interpreter."""
    actions = {"theirs": liger, "ours": megatron_idempotent.apply}
    for each in order.split():
        actions[each]()
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    assert vocab_parallel_cross_entropy.__module__ == "liger_kernel.megatron.monkey_patch"
    # With layer norms, as the interpreter cannot run their RMSNorm.
    model = tiny.build()
    losses = model.forward_backward(2, data_seed=0)
    model.step()
    reasons = {row.id: row.reason for row in megatron_idempotent.report()}
    return (losses, model.bits()), reasons


def test_liger_s_kernels_run_with_the_same_bits_in_both_orders(kernel_ranks):
    pytest.importorskip("liger_kernel")
    ((alone, _),) = kernel_ranks(1, with_kernels, "theirs")
    for order in ("theirs ours", "ours theirs"):
        ((outcome, reasons),) = kernel_ranks(1, with_kernels, order)
        assert outcome == alone
        # It replaces cross entropies and norms, and we patch none of these.
        assert not [reason for reason in reasons.values() if "liger" in reason]


def restarted() -> tuple[list[int], bytes, bytes]:
    """Fail in the middle of a window inside of an in-process restart; return both runs' bits."""
    standing_at, attempts = [], []
    sys.path.insert(0, os.environ["RESILIENCY_SOURCE"])
    for module in ("megatron.training.training", "nvidia_resiliency_ext.inprocess"):
        importlib.import_module(module)  # now: what is imported later gets its patches then

    def steps(fail: bool) -> bytes:
        megatron_idempotent.apply()
        standing_at.append(hash(tuple(standing().items())))
        if not torch.distributed.is_initialized():
            torch.distributed.init_process_group(
                "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
            )
        model = tiny.build(dtype="bf16", overlap_param_gather=True)
        for seed in range(2):
            if fail and seed == 1:
                model.on_microbatch = stop
            model.train_step(2, data_seed=seed)
        return model.bits()

    def stop(index: int, loss: Any) -> None:
        if index == 1:
            raise RuntimeError("a rank fails")

    def leave() -> None:
        from megatron.core import parallel_state

        parallel_state.destroy_model_parallel()
        torch.distributed.destroy_process_group()

    def train() -> bytes:
        attempts.append(len(attempts))
        try:
            return steps(fail=len(attempts) == 1)
        finally:
            leave()

    uninterrupted = steps(fail=False)
    leave()
    os.environ.pop("LOCAL_RANK", None)  # with which it asks the GPU for its health
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    result = _restarting()(train)()
    assert len(set(standing_at)) == 1
    return attempts, result, uninterrupted


@pytest.mark.skipif("RESILIENCY_SOURCE" not in os.environ, reason="RESILIENCY_SOURCE names none")
def test_a_restart_within_the_process_finds_the_patches_and_the_bits(megatron_ranks):
    ((attempts, restarted_bits, uninterrupted),) = megatron_ranks(1, restarted)
    assert attempts == [0, 1]
    assert restarted_bits == uninterrupted
