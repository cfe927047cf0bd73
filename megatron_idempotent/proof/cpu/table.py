"""Lists what is emulated, in words, for the docs, the docstring and a test.

`enable()` replaces exactly the names in EMULATED (a test compares them with what it replaced),
and refuses every other public name of `torch.cuda`. Importing this does not import torch.
"""

from __future__ import annotations

#: Names that are all emulated, or all wrapped, in the same way.
TRUE = "torch.cuda.is_available torch.cuda.is_initialized torch.cuda.is_bf16_supported"
FALSE = "torch.cuda.is_tf32_supported torch.cuda.is_current_stream_capturing"
NOTHING = (
    "torch.cuda.init torch.cuda._lazy_init torch.cuda.synchronize torch.cuda.empty_cache "
    "torch.cuda.reset_peak_memory_stats torch.cuda.reset_accumulated_memory_stats "
    "torch.cuda.reset_max_memory_allocated torch.cuda.reset_max_memory_cached"
)
ZERO = (
    "torch.cuda.memory_allocated torch.cuda.max_memory_allocated torch.cuda.memory_reserved "
    "torch.cuda.max_memory_reserved torch.cuda.memory_cached torch.cuda.max_memory_cached "
    "torch.cuda.device_memory_used torch.cuda.memory_stats"
)
OTHER_SEEDS = "torch.mtia.manual_seed_all torch.xpu.manual_seed_all"
ACCELERATOR = (
    "torch.accelerator.is_available torch.accelerator.device_count "
    "torch.accelerator.current_device_index torch.accelerator.set_device_index "
    "torch.accelerator.current_stream torch.accelerator.set_stream "
    "torch.accelerator.synchronize"
)
TENSOR_TYPES = (
    "torch.cuda.BFloat16Tensor torch.cuda.BoolTensor torch.cuda.ByteTensor "
    "torch.cuda.CharTensor torch.cuda.DoubleTensor torch.cuda.FloatTensor "
    "torch.cuda.HalfTensor torch.cuda.IntTensor torch.cuda.LongTensor "
    "torch.cuda.ShortTensor"
)
#: Functions of torch that take a device.
FACTORIES = (
    "torch.arange torch.as_tensor torch.asarray torch.empty torch.empty_like "
    "torch.empty_permuted torch.empty_strided torch.eye torch.full torch.full_like "
    "torch.linspace torch.logspace torch.normal torch.ones torch.ones_like torch.rand "
    "torch.rand_like torch.randint torch.randint_like torch.randn torch.randn_like "
    "torch.randperm torch.scalar_tensor torch.sparse_coo_tensor torch.tensor "
    "torch.tril_indices torch.triu_indices torch.zeros torch.zeros_like "
    "torch.bartlett_window torch.blackman_window torch.hamming_window torch.hann_window "
    "torch.kaiser_window"
)
#: Methods of tensors that take one.
NEW_METHODS = (
    "torch.Tensor.new_empty torch.Tensor.new_empty_strided torch.Tensor.new_full "
    "torch.Tensor.new_ones torch.Tensor.new_tensor torch.Tensor.new_zeros"
)
#: Methods that copy or cast a tensor.
COPIES = (
    "torch.Tensor.bfloat16 torch.Tensor.clone torch.Tensor.contiguous torch.Tensor.double "
    "torch.Tensor.float torch.Tensor.half"
)

#: (names separated by spaces, their emulated behaviour)
EMULATED: tuple[tuple[str, str], ...] = (
    (TRUE, "True"),
    (FALSE, "False"),
    (
        NOTHING,
        "nothing to do: every call has finished when it returns, and no device memory exists",
    ),
    ("torch.cuda.device_count", "LOCAL_WORLD_SIZE, or 1"),
    (
        "torch.cuda.current_device torch.cuda.set_device torch.cuda._exchange_device "
        "torch.cuda._maybe_exchange_device",
        "a number that is kept and has no other effect",
    ),
    (
        "torch.cuda.get_device_properties torch.cuda.get_device_name "
        "torch.cuda.get_device_capability torch.cuda.get_arch_list",
        "the host's memory and cores, capability (0, 0), no architectures, so that whatever "
        "upstream gates on a GPU generation stays off",
    ),
    (
        "torch.cuda.Stream torch.cuda.stream torch.cuda.StreamContext torch.cuda.current_stream "
        "torch.cuda.default_stream torch.cuda.set_stream",
        "synchronous streams; the current stream is tracked per thread",
    ),
    ("torch.cuda.Event", "always complete; elapsed_time is measured wall time in milliseconds"),
    (ZERO, "0 everywhere: no byte of device memory is in use"),
    (ACCELERATOR, "as torch.cuda's function of that name"),
    (
        "torch.cuda.nvtx.range_push torch.cuda.nvtx.range_pop torch.cuda.nvtx.range "
        "torch.cuda.nvtx.mark",
        "the nesting depth, no profiler",
    ),
    (
        "torch.cuda.get_rng_state torch.cuda.set_rng_state torch.cuda.get_rng_state_all "
        "torch.cuda.set_rng_state_all torch.cuda.manual_seed torch.cuda.manual_seed_all "
        "torch.cuda.seed torch.cuda.seed_all torch.cuda.initial_seed "
        "torch.cuda.default_generators",
        "the CPU generator, which is the one that fills these tensors",
    ),
    (
        OTHER_SEEDS,
        "nothing to do: there are no such devices, and to queue a seed for them torch formats the "
        "stack in each torch.manual_seed",
    ),
    (TENSOR_TYPES, "the CPU class of the same name"),
    (
        f"{FACTORIES} {NEW_METHODS} torch.Tensor.to torch.load "
        "torch.utils._device.DeviceContext.__init__",
        'a CUDA device ("cuda", "cuda:0", 0, torch.device) means the CPU; pin_memory is ignored',
    ),
    (
        "torch.Tensor.cuda torch.Tensor.cpu",
        "a copy, if the tensor is in the other memory. On the host is what is made without a "
        'device, for "cpu" or pinned, and what `cpu` returns; all else is on the device. Memory '
        "that is freed, a storage of 0 bytes, is refused",
    ),
    ("torch.Tensor.is_cuda", "False for a tensor in host memory"),
    (COPIES, "itself, in the same memory"),
    (
        "multiprocessing.reduction.ForkingPickler._extra_reducers",
        "a tensor that goes to another process is in the same memory there",
    ),
    ("torch.Tensor.pin_memory", "the tensor itself"),
    ("torch.Tensor.record_stream", "nothing to do"),
    (
        "torch.Tensor.type",
        "'torch.cuda.FloatTensor' for a float tensor, and so on: Megatron's optimizers sort "
        "parameters by that name",
    ),
    (
        "torch.amp.autocast_mode.autocast.__init__",
        '"cuda" with enabled=False as "cpu"; enabled, it is refused',
    ),
    (
        "torch.distributed.init_process_group torch.distributed.new_group "
        "torch.distributed.new_subgroups torch.distributed.new_subgroups_by_enumeration",
        'gloo for "nccl" and for no backend; device_id and NCCL options are dropped',
    ),
    (
        "torch.distributed.distributed_c10d.ProcessGroupGloo.__init__",
        "itself, on one gloo device for all groups of a process: each device has a thread that "
        "wakes up a hundred times a second",
    ),
    (
        "torch.distributed.all_to_all_single",
        "itself, with split sizes that are tensors turned into lists",
    ),
    (
        "torch.distributed.all_gather",
        "itself; outputs of unequal sizes, which NCCL takes and gloo refuses, are padded to the "
        "largest and cut again",
    ),
    (
        "torch.compile torch.compiler.disable",
        "for a function, one that runs it as it is, and is decorated in the first call after the "
        "runtime",
    ),
    (
        "torch.distributed.isend",
        "itself, with the memory kept until the message has left, as NCCL keeps it",
    ),
)


def short(names: str) -> tuple[str, ...]:
    """Split a string of names at its spaces; return each name without its module or class:
    `"torch.zeros"` becomes `"zeros"`.
    """
    return tuple(name.rpartition(".")[2] for name in names.split())


def emulated_names() -> set[str]:
    """Return all names that the CPU runtime emulates: `"torch.cuda.Stream" in emulated_names()`."""
    return {name for names, _ in EMULATED for name in names.split()}


def as_markdown() -> str:
    """Return EMULATED, the emulated names and their behaviour, as the Markdown table of
    docs/cpu-runtime.md.
    """
    rows = [
        f"| {', '.join(f'`{name}`' for name in names.split())} | {answer} |"
        for names, answer in EMULATED
    ]
    return "\n".join(["| call | answer |", "| --- | --- |", *rows])
