"""Batches that FP8 kernels take, and weights in FP8 for an engine. See docs/fp8.md."""
