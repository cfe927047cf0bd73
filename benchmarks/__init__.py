"""Measures every performance claim, as ratios within one run.

`python -m benchmarks` runs them all, `python -m benchmarks NAME…` some.
"""
