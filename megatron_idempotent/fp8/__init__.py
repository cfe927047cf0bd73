"""Packs batches as FP8 kernels take them, and quantizes weights for engines. See docs/fp8.md."""
