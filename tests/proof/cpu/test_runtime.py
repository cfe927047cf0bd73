"""The emulation itself: on, off, without a trace, and refusing what it cannot answer."""

import importlib
import inspect
import sys
import time
from pathlib import Path

import pytest

from megatron_idempotent.proof import cpu
from megatron_idempotent.proof.cpu import device, runtime, table

DOC = Path(__file__).parents[3] / "docs" / "cpu-runtime.md"


@pytest.fixture
def torch():
    """torch, with the runtime on."""
    import torch

    with cpu.enabled():
        yield torch


def snapshot():
    """Every name in the namespaces that the runtime touches, by identity."""
    import torch
    import torch.distributed.device_mesh
    import torch.distributed.distributed_c10d
    import torch.utils._device

    owners = [
        torch,
        torch.Tensor,
        torch.nn.Module,
        torch.cuda,
        torch.cuda.CUDAGraph,
        torch.cuda.ExternalStream,
        torch.accelerator,
        torch.distributed,
        torch.distributed.device_mesh,
        torch.distributed.distributed_c10d,
        torch.autocast,
        torch.utils._device.DeviceContext,
        *(m for n, m in sys.modules.items() if n.startswith(("torch.cuda.", "megatron."))),
    ]
    return {
        (getattr(owner, "__name__", ""), id(owner), name): value
        for owner in owners
        for name, value in vars(owner).items()
        if name != "__warningregistry__"
    } | {("sys.meta_path", 0, str(i)): finder for i, finder in enumerate(sys.meta_path)}


def changed(before, after):
    keys = before.keys() | after.keys()
    missing = object()
    return {key for key in keys if before.get(key, missing) is not after.get(key, missing)}


def differences_with_megatron():
    """Runs on a rank where the runtime was on while Megatron was imported."""
    from torch._dynamo import eval_frame

    stance_on = eval_frame._stance.stance
    cpu.disable()
    off = snapshot()
    cpu.enable()
    on = snapshot()
    cpu.disable()
    again = snapshot()
    return len(changed(off, on)), changed(off, again), stance_on, eval_frame._stance.stance


def test_turning_it_off_leaves_no_trace_in_torch():
    before = snapshot()
    with cpu.enabled():
        assert changed(before, snapshot())
    assert changed(before, snapshot()) == set()


def test_turning_it_off_leaves_no_trace_in_megatron(megatron_ranks):
    [(touched, left, stance_on, stance_off)] = megatron_ranks(1, differences_with_megatron)
    assert touched > 50
    assert left == set()
    assert (stance_on, stance_off) == ("force_eager", "default")


def test_it_stays_on_until_the_last_nested_block_ends_however_that_is(torch):
    replaced = torch.cuda.synchronize
    with pytest.raises(KeyError, match="True"), cpu.enabled():
        raise KeyError(torch.cuda.synchronize is replaced)
    assert cpu.is_enabled()
    assert torch.cuda.synchronize is replaced
    for _ in range(2):  # once more than it was turned on
        cpu.disable()
        assert not cpu.is_enabled()


def test_it_refuses_a_machine_with_a_gpu_and_names_the_remedy(monkeypatch):
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    with pytest.raises(RuntimeError) as refused:
        cpu.enable()
    for told in ("8 CUDA device(s)", "CUDA_VISIBLE_DEVICES is '0,1'", 'CUDA_VISIBLE_DEVICES=""'):
        assert told in str(refused.value)


def test_a_seed_is_not_kept_for_devices_that_are_not_there():
    """torch keeps each with a formatted stack, which takes longer than all else that it does."""
    import torch

    before = list(torch.xpu._lazy_seed_tracker.get_calls())
    with cpu.enabled():
        torch.manual_seed(1)
    assert torch.xpu._lazy_seed_tracker.get_calls() == before


def test_the_table_lists_exactly_what_is_replaced():
    import torch

    with cpu.enabled():
        replaced = runtime.replaced_names()
        missing = {
            name
            for name in table.emulated_names() - replaced
            # A name that this release of torch does not have is not replaced.
            if hasattr(_owner(name), name.rsplit(".", 1)[1])
        }
    assert missing == set()

    with cpu.enabled():
        pass
    refused = set(device.refused_names())
    classes = {f"{_qualified(name)}.{m}" for name in refused for m in ("__new__", "__init__")}
    unlisted = {
        name
        for name in replaced - table.emulated_names() - refused - classes
        # The same objects under the names of the submodules they come from.
        if name.rsplit(".", 1)[0]
        not in {f"torch.cuda.{m}" for m in ("graphs", "memory", "nvtx", "profiler", "random")}
        | {"torch.cuda.streams"}
        | {"torch.distributed.device_mesh", "torch.distributed.distributed_c10d"}
    }
    assert unlisted == set()
    assert torch.cuda.is_available() is False


def _functions():
    """Each function that is replaced, with what it is off and on: {name: (original, now)}."""
    with cpu.enabled():
        places = [entry[:2] for entry in runtime._runtime.active.entries]
        now = [getattr(*place) for place in places]
    pairs = zip(places, now, strict=True)
    found = {f"{o.__name__}.{name}": (getattr(o, name), new) for (o, name), new in pairs}
    return {name: each for name, each in found.items() if inspect.isfunction(each[1])}


def _signature(function, **options):
    try:
        return inspect.signature(function, **options)
    except ValueError:  # one in C
        return None


def _refuses(signature, calls):
    """The calls that a function of this signature does not take, among (args, names) of another."""
    refused = []
    for args, names in calls:
        try:
            signature.bind(*args, **dict.fromkeys(names))
        except TypeError:
            refused.append((args, names))
    return refused


def _calls(signature):
    """A call with each parameter by its place, and one with each that can be by its name."""
    plain = [
        p
        for p in signature.parameters.values()
        if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    named = [p.name for p in plain if p.kind is p.POSITIONAL_OR_KEYWORD]
    only = [p.name for p in signature.parameters.values() if p.kind is p.KEYWORD_ONLY]
    return [((None,) * len(plain), only), ((None,) * (len(plain) - len(named)), named + only)]


def test_what_is_replaced_keeps_all_that_the_original_says_of_itself():
    functions = _functions()
    assert len(functions) > 200
    for name, (original, now) in functions.items():
        for said in ("__module__", "__name__", "__qualname__", "__doc__", "__wrapped__"):
            if hasattr(original, said):
                assert getattr(now, said) == getattr(original, said), f"{name}: {said}"
        assert vars(now).items() >= getattr(original, "__dict__", {}).items(), name
        assert _signature(now) == _signature(original), name


def test_what_is_replaced_takes_each_argument_of_the_original():
    refused = {}
    for name, (original, now) in _functions().items():
        signature = _signature(original)
        own = _signature(now, follow_wrapped=False)
        if signature is not None and _refuses(own, _calls(signature)):
            refused[name] = (str(own), str(signature))
    assert refused == {}


def _owner(name):
    import torch

    owner = torch
    for part in name.split(".")[1:-1]:
        owner = getattr(owner, part)
    return owner


def _qualified(name):
    value = getattr(_owner(name), name.rsplit(".", 1)[1])
    return f"{value.__module__}.{getattr(value, '__qualname__', '')}"


def test_the_doc_and_the_docstring_contain_the_table():
    assert table.as_markdown() in DOC.read_text(encoding="utf-8")
    assert all(names in cpu.__doc__ for names, _ in table.EMULATED)


@pytest.mark.parametrize(
    "call",
    [
        "torch.cuda.CUDAGraph",
        "torch.cuda.MemPool",
        "torch.cuda.mem_get_info",
        "torch.cuda.graph_pool_handle",
        "torch.cuda.cudart",
        "torch.cuda.memory_snapshot",
        "torch.cuda.utilization",
        "torch.cuda.set_per_process_memory_fraction",
        "torch.cuda.memory._record_memory_history",
    ],
)
def test_what_is_not_emulated_raises_by_its_name(call):
    with cpu.enabled(), pytest.raises(cpu.NotEmulatedError, match=f"^{call} is not emulated"):
        getattr(_owner(call), call.rsplit(".", 1)[1])()


def test_enabled_cuda_autocast_and_interprocess_events_are_refused(torch):
    with pytest.raises(cpu.NotEmulatedError, match="autocast"):
        torch.autocast("cuda")
    with torch.autocast("cuda", enabled=False):
        pass
    with pytest.raises(cpu.NotEmulatedError, match="interprocess"):
        torch.cuda.Event(interprocess=True)


@pytest.mark.parametrize("device", ["cuda", "cuda:0", 0])
def test_every_spelling_of_a_cuda_device_means_the_cpu(torch, device):
    made = [
        torch.zeros(2, device=device),
        torch.tensor([1.0], device=device),
        torch.ones(1).to(device),
        torch.ones(1).to(device, torch.float64),
        torch.ones(1).to(device=device),
        torch.ones(1).new_zeros(3, device=device),
        torch.empty(1, device=device, pin_memory=True),
        torch.ones(1).cuda(device).pin_memory(),
        torch.nn.Linear(2, 2, device=device).to(device).cuda().weight,
        torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device())),
    ]
    with torch.device("cuda"):
        made.append(torch.zeros(1))
    assert {tensor.device.type for tensor in made} == {"cpu"}


def test_host_memory_is_apart_from_the_devices(torch):
    host = [
        torch.zeros(2),
        torch.tensor([1.0]),
        torch.empty(2, device="cpu"),
        torch.empty(2, device="cuda").cpu(),
        torch.empty(2, device="cuda").to("cpu", torch.float64),
        torch.full((2,), 1.0, pin_memory=True),
    ]
    host += [host[0].bfloat16(), host[0].to(torch.float16), torch.zeros_like(host[0])]
    host += [host[0].clone(), host[0][:1], host[0].new_ones(3), host[0].pin_memory()]
    device = [each.cuda() for each in host] + [torch.ones(2, device="cuda").float().detach()]
    device += [host[0].to(device[0]), device[0].clone(), torch.ones_like(device[0]) * 2]
    assert not any(each.is_cuda for each in host)
    assert all(each.is_cuda for each in device)
    own = {each.untyped_storage().data_ptr() for each in host}
    assert not any(each.untyped_storage().data_ptr() in own for each in device)
    assert host[0].cpu() is host[0]
    assert device[0].cuda() is device[0]
    assert device[0].to(device[1].device) is device[0], "a tensor's own device moves nothing"
    device[0].data = host[1]
    assert not device[0].is_cuda
    assert not torch.empty(2, device="meta").is_cuda
    cpu.disable()
    assert not torch.ones(2).is_cuda


def test_memory_that_is_freed_is_not_moved(torch):
    freed = torch.ones(2, 3, device="cuda")
    freed.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match=r"shape \[2, 3\] cannot be moved to the host: .* freed"):
        freed.cpu()
    assert torch.empty(0, device="cuda").cpu().shape == (0,)


def devices_of_a_meta_block():
    """Runs on a rank where torch has met the runtime before any block; returns (on, off,
    outside)."""
    import torch

    def devices():
        with torch.device("meta"):
            made = torch.empty(2), torch.nn.Linear(2, 2).weight, torch.arange(2), torch.tensor(1.0)
            return {tensor.device.type for tensor in made} | {torch.get_default_device().type}

    on = devices()
    cpu.disable()
    return on, devices(), torch.empty(2).device.type


def test_a_block_of_another_device_holds_though_torch_meets_it_under_the_runtime_first(
    megatron_ranks,
):
    assert megatron_ranks(1, devices_of_a_meta_block) == [({"meta"}, {"meta"}, "cpu")]


def test_other_devices_and_plain_calls_are_untouched(torch):
    assert torch.zeros(2, device="meta").device.type == "meta"
    assert torch.zeros(2).to(torch.bfloat16).dtype is torch.bfloat16
    assert torch.ones(2).to(torch.zeros(1, dtype=torch.int8)).dtype is torch.int8


def test_a_device_mesh_makes_its_groups_on_gloo_too(torch):
    from torch.distributed import device_mesh

    # Before torch 2.11 it asks for NCCL where a device is available.
    assert device_mesh.new_group is torch.distributed.new_group


def test_types_have_the_names_that_megatron_compares(torch):
    assert torch.zeros(1, dtype=torch.bfloat16).type() == "torch.cuda.BFloat16Tensor"
    assert torch.zeros(1).type("torch.cuda.HalfTensor").dtype is torch.float16
    assert isinstance(torch.zeros(1), torch.cuda.FloatTensor)
    cpu.disable()
    assert torch.zeros(1).type() == "torch.FloatTensor"


def test_streams_nest_and_events_measure_wall_time(torch):
    outer = torch.cuda.current_stream()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        assert torch.cuda.current_stream() is side
        with torch.cuda.stream(None):
            assert torch.cuda.current_stream() is side
    assert torch.cuda.current_stream() is outer
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    time.sleep(0.01)
    side.record_event(end)
    assert 10.0 <= start.elapsed_time(end) < 1000.0
    with pytest.raises(RuntimeError, match="enable_timing"):
        start.elapsed_time(torch.cuda.Event())


def test_the_cpu_generator_stands_in_for_the_cuda_one(torch):
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    first = torch.rand(3, device="cuda")
    torch.cuda.set_rng_state(state, device="cuda:0")
    again = torch.rand(3)
    torch.cuda.default_generators[0].set_state(state)
    assert torch.equal(first, again)
    assert torch.equal(first, torch.rand(3))


def test_memory_counters_are_zero_and_have_the_allocators_keys(torch):
    stats = torch.cuda.memory_stats()
    assert torch.cuda.max_memory_allocated() == 0
    assert stats["allocated_bytes.all.peak"] == stats["num_alloc_retries"] == 0


def compiled_calls():
    """Runs on a rank; returns whether two calls under the runtime, and one after it, ran as plain
    Python."""
    import torch

    # Megatron is imported, and it decorates functions with torch.compile.
    assert "torch._inductor.compile_fx" not in sys.modules

    ran_as_python = []

    def double(x):
        ran_as_python.append(not torch.compiler.is_compiling())
        return x * 2

    compiled = torch.compile(double, backend="eager")
    compiled(torch.ones(1))
    compiled(torch.ones(1))
    under_it = list(ran_as_python)
    cpu.disable()
    code = double.__code__
    compiled(torch.ones(1))
    from torch._dynamo.eval_frame import _debug_get_cache_entry_list

    return under_it, len(_debug_get_cache_entry_list(code))


def test_compiled_functions_run_eagerly_and_are_compiled_again_afterwards(megatron_ranks):
    assert megatron_ranks(1, compiled_calls) == [([True, True], 1)]


def test_every_public_name_resolves():
    assert all(getattr(cpu, name) is not None for name in cpu.__all__)
    with pytest.raises(AttributeError, match="nothing_of_that_name"):
        importlib.import_module("megatron_idempotent.proof.cpu").nothing_of_that_name  # noqa: B018
