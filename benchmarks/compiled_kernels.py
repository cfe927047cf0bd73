"""Compile Triton's kernels for a GPU that is not there, and say what came of it.

    python -m benchmarks.compiled_kernels [--all] [--capability 90] [--json]

For each kernel, dtype of logits and kind of call, this prints: registers per thread, bytes spilled
per thread, threads that fit on a multiprocessor with these registers, and the widest loads and
stores. `--all` compiles every shape that `--tune` of `benchmarks.token_logprobs` measures, not only
the shapes in use. This needs Triton, whose wheel includes the assembler, but no GPU.
"""

from __future__ import annotations

import dataclasses
import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks._record import options, tell

#: Registers and threads of a multiprocessor, from compute capability 8.0 on.
_REGISTERS, _THREADS = 65536, 2048
_TYPES = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}
#: Arguments that are 1 for adjacent columns; Triton compiles an argument of 1 as a constant.
_ONE = ("column_stride", "into_column_stride")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Compiled:
    """The registers, spilled bytes, threads, and widths of loads and stores of one compiled kernel.

    Example:
        [each] = [each for each in compiled() if each.spilled_bytes]
    """

    name: str
    registers: int
    spilled_bytes: int
    threads: int
    """The most threads on a multiprocessor, as limited by registers alone."""
    widest_load_bits: int
    """Bits of the widest load from global memory, or asynchronous copy to shared memory."""
    widest_store_bits: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A kernel, with the constants and argument types that it is compiled for."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    types: dict[str, str]
    """Triton's types of the arguments that are neither constants nor integers."""
    warps: int


def programs(every_shape: bool) -> Iterator[Program]:
    """Yield a `Program` for each variant of each Triton kernel, of log-probs and of FP8
    quantization. Variants differ in dtype, outputs and shape; without `every_shape` only shapes in
    use are yielded.
    """
    from megatron_idempotent.fp8 import triton_blockwise
    from megatron_idempotent.logprobs.triton_kernels import SHAPES

    for kernel in ("statistics", "gradient"):
        for shape in SHAPES[kernel] if every_shape else SHAPES[kernel][:1]:
            for dtype in ("bfloat16", "float32"):
                for entropy in (True, False):
                    yield _of_logprobs(kernel, shape, dtype, entropy)
    yield from _of_tokens()
    import triton.language as tl

    for warps in triton_blockwise.WARPS if every_shape else triton_blockwise.WARPS[:1]:
        for powers in (False, True):
            constants = {"POWERS": powers, "ADJACENT": True, "EXPORTED": tl.bfloat16, "BLOCK": 128}
            yield Program(
                name=f"quantize, {'powers of two' if powers else 'float32'}, {warps} warps",
                kernel=triton_blockwise.quantize_kernel,
                constants=constants,
                types={
                    "weight": "*bf16",
                    "codes": "*fp8e4nv",
                    "scales": "*fp32",
                    "largest_of": "*fp32",
                },
                warps=warps,
            )


def _of_tokens() -> Iterator[Program]:
    """Yield a `Program` for each of the kernels that compute in float64 per token: two combine
    partial results into statistics, and one computes coefficients of the gradient.
    """
    from megatron_idempotent.logprobs import on_gpu

    common = {"PER_TOKEN": False, "BLOCK": 128}
    combine = {"parts", "into", "temperatures"}
    numbers = dict.fromkeys(combine, "*fp32") | {"temperature": "fp32", "targets": "*i64"}
    for is_global in (False, True):
        yield Program(
            name=f"tokens, {'all ranks' if is_global else 'segments'}",
            kernel=on_gpu.combine_kernel,
            constants={**common, "GLOBAL": is_global},
            types=numbers,
            warps=4,
        )
    floats = "exponentials mean logprob entropy d_logprob d_entropy temperatures into"
    yield Program(
        name="tokens, gradient",
        kernel=on_gpu.coefficients_kernel,
        constants={**common, "HAS_LOGPROB": True, "HAS_ENTROPY": True},
        types=dict.fromkeys(floats.split(), "*fp32") | {"live": "*i64", "temperature": "fp32"},
        warps=4,
    )


def _of_logprobs(kernel: str, shape: Any, name: str, entropy: bool) -> Program:
    import torch

    from megatron_idempotent.logprobs import triton_kernels

    constants = shape.constants(getattr(torch, name))
    warps, _ = constants.pop("num_warps"), constants.pop("enable_fp_fusion")
    constants |= {"PER_TOKEN": False, "UNIT": True, "ADJACENT": True}
    logits = "*" + _TYPES[name]
    types = {"logits": logits, "temperatures": "*fp32", "temperature": "fp32", "local": "*i64"}
    if kernel == "statistics":
        constants |= {"HAS_ROWS": False, "ENTROPY": entropy}
        types |= {"rows": "*i64", "into": "*fp32"}
        compute = triton_kernels.statistics_kernel
    else:
        constants |= {"HAS_TOKENS": False, "HAS_ORIGIN": entropy, "HAS_SLOPE": entropy}
        per_token = ("origins", "factors", "slopes", "of_targets")
        types |= {"into": logits, "tokens": "*i64", **dict.fromkeys(per_token, "*fp32")}
        compute = triton_kernels.gradient_kernel
    told = f"{shape.warps} warps, {shape.unroll} loads, {shape.stages} stages"
    return Program(
        name=f"{kernel}, {name}, {'entropy' if entropy else 'log-prob'}, {told}",
        kernel=compute,
        constants=constants,
        types=types,
        warps=warps,
    )


def compile_one(program: Program, capability: int) -> Compiled:
    """Compile one kernel for a GPU of this compute capability; return its registers, spills and
    widths.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = program.kernel.arg_names
    constants = dict(program.constants) | {name: 1 for name in _ONE if name in names}
    signature = {
        name: "constexpr" if name in constants else program.types.get(name, "i32") for name in names
    }
    # In a call, Triton detects addresses, strides and sizes that are multiples of 16; here it is
    # told so.
    whole = [
        i for i, name in enumerate(names) if signature[name] == "i32" or "*" in signature[name]
    ]
    found = triton.compile(
        ASTSource(
            program.kernel,
            signature,
            constexprs={(names.index(name),): value for name, value in constants.items()},
            attrs={(place,): [["tt.divisibility", 16]] for place in whole},
        ),
        target=GPUTarget("cuda", capability, 32),
        options={"num_warps": program.warps, "enable_fp_fusion": True},
    )
    registers, spilled = _resources(found.asm["cubin"])
    in_warps = program.warps * 32
    fitting = min(_THREADS, _REGISTERS // (registers * in_warps) * in_warps)
    ptx = found.asm["ptx"]
    return Compiled(
        name=program.name,
        registers=registers,
        spilled_bytes=spilled,
        threads=fitting,
        widest_load_bits=max(_widths(ptx, "ld"), _copied(ptx)),
        widest_store_bits=_widths(ptx, "st"),
    )


def _resources(cubin: bytes) -> tuple[int, int]:
    """Return a kernel's registers per thread, and its bytes of local memory and stack.

    The numbers come from CUDA's cuobjdump in Triton's wheel.
    """
    from triton import knobs

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        told = subprocess.run(
            [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", str(path)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    numbers = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", told)}
    return numbers["REG"], numbers["STACK"] + numbers["LOCAL"]


def _widths(ptx: str, kind: str) -> int:
    """Return the width in bits of the widest access to global memory in a kernel's PTX: of a load
    if `kind` is "ld", of a store if it is "st".
    """
    found = re.findall(rf"\b{kind}\.global\S*?(?:\.v(\d))?\.[a-z](\d+)\b", ptx)
    return max((int(vector or 1) * int(bits) for vector, bits in found), default=0)


def _copied(ptx: str) -> int:
    """Return the width in bits of the widest asynchronous copy to shared memory in a kernel's PTX;
    0 if there is none.
    """
    found = re.findall(r"cp\.async\.c[ag]\.shared\.global\S* \[.*?\], \[.*?\], (?:0x)?(\w+)", ptx)
    return max((int(each, 16) * 8 for each in found), default=0)


def compiled(*, every_shape: bool = False, capability: int = 90) -> Iterator[Compiled]:
    """Compile all kernels of `programs`, about a second each, and yield a `Compiled` for each
    kernel.
    """
    for program in programs(every_shape):
        yield compile_one(program, capability)


def main() -> None:
    """Compile the kernels, and print the numbers of each kernel, or with `--json` all as one JSON
    list.
    """
    parser = options(__doc__)
    parser.add_argument("--all", action="store_true")
    parser.add_argument("--capability", type=int, default=90)
    asked = parser.parse_args()
    found = compiled(every_shape=asked.all, capability=asked.capability)
    tell([dataclasses.asdict(each) for each in found], asked.json)


if __name__ == "__main__":
    main()
