"""Makes Triton's interpreter round as a GPU does.

With TRITON_INTERPRET=1 in the environment before Triton is imported, kernels run on a CPU, in
NumPy. That truncates where a GPU rounds to the nearest number, loses subnormal numbers, keeps NaN
where a GPU's maximum does not, and rounds twice where a GPU's multiply-add rounds once. A kernel's
results would then say nothing of a GPU's last bits.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any


def round_as_a_gpu() -> None:
    """Correct the interpreter of this process, until its end. Twice: no-op.

    Raises:
        RuntimeError: Triton was imported without its interpreter.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        raise RuntimeError("set TRITON_INTERPRET=1 before Triton is imported")
    import numpy as np
    import torch
    import triton.language as tl
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle
    from triton.runtime.jit import JITFunction

    if isinstance(tl.sum, JITFunction):
        raise RuntimeError("Triton was imported before TRITON_INTERPRET=1 was set")
    types = {tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}
    if getattr(InterpreterBuilder.create_fma, "rounds_once", False):
        return
    cast, convert = InterpreterBuilder.cast_impl, InterpreterBuilder.create_fp_to_fp

    def rounded(source: Any, wanted: Any) -> Any:
        """Round to the nearest number, ties to even, as torch converts; None for other types."""
        given, wanted = source.dtype.scalar, wanted.scalar
        if given == tl.bfloat16 and wanted == tl.float32:  # of which it has other subnormals
            bits = source.data.astype(np.uint32) << 16
            return TensorHandle(bits.view(np.float32), wanted)
        if given != tl.float32 or wanted not in types:
            return None
        values = torch.from_numpy(np.ascontiguousarray(source.data)).to(types[wanted])
        integers = torch.uint16 if values.dtype.itemsize == 2 else torch.uint8
        return TensorHandle(values.view(integers).numpy(), wanted)

    def cast_impl(self: Any, source: Any, wanted: Any) -> Any:
        found = rounded(source, wanted)  # which is false where a number is 0
        return cast(self, source, wanted) if found is None else found

    def create_fp_to_fp(self: Any, source: Any, wanted: Any, rounding: Any) -> Any:
        found = rounded(source, wanted)
        return convert(self, source, wanted, rounding) if found is None else found

    def create_fma(_: Any, x: Any, y: Any, z: Any) -> Any:
        """Add to a product that is exact in float64; the sum is rounded twice at worst."""
        exact = x.data.astype(np.float64) * y.data + z.data
        return TensorHandle(exact.astype(z.data.dtype), z.dtype.scalar)

    create_fma.rounds_once = True  # type: ignore[attr-defined]
    InterpreterBuilder.cast_impl = cast_impl
    InterpreterBuilder.create_fp_to_fp = create_fp_to_fp
    InterpreterBuilder.create_fma = create_fma
    # A GPU's maximum of NaN and a number is the number, unless NaN is asked for.
    InterpreterBuilder.create_maxnumf = lambda self, x, y: self.binary_op(x, y, np.fmax)
    InterpreterBuilder.create_minnumf = lambda self, x, y: self.binary_op(x, y, np.fmin)


def interpreted(function: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function on a rank that has the interpreter, with its roundings corrected."""
    round_as_a_gpu()
    return function(*arguments)
