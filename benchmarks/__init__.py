"""Measures every performance claim as a ratio of two programs in the same run.

`python -m benchmarks` runs all benchmarks, `python -m benchmarks NAME…` those named.
"""
