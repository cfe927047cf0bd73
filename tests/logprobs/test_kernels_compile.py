"""Triton's kernels, assembled for a GPU that is not there."""

from __future__ import annotations

import pytest

# Triton 3.7 makes nodes of a syntax tree without a field that Python 3.13 asks for.
pytestmark = pytest.mark.filterwarnings("ignore:AnnAssign:DeprecationWarning")

#: Those that keep the most in registers.
MOST = (
    "statistics, bfloat16, entropy",
    "gradient, bfloat16, entropy",
    "quantize, float32",
    "tokens",
)


def checked(found) -> int:
    """Check what kernels at the speed of memory need; return how many there were."""
    count = 0
    for each in found:
        count += 1
        assert each.spilled_bytes == 0, each
        if each.name.startswith("tokens"):  # a few bytes, of which nothing is kept
            continue
        assert each.widest_load_bits == 128, each
        # Bytes in flight cover the latency of memory: 16 bytes a thread are 6 KiB at the least.
        assert each.threads >= 384, each
        if not each.name.startswith("statistics"):
            assert each.widest_store_bits == 128, each
    return count


def test_the_largest_kernels_spill_nothing_and_load_16_bytes_at_a_time():
    pytest.importorskip("triton")
    from benchmarks.compiled_kernels import compile_one, programs

    chosen = [each for each in programs(False) if each.name.startswith(MOST)]
    assert checked(compile_one(each, 90) for each in chosen) == 6


@pytest.mark.exhaustive
def test_no_kernel_of_any_shape_spills():
    pytest.importorskip("triton")
    from benchmarks.compiled_kernels import compiled

    assert checked(compiled(every_shape=True)) >= 30
