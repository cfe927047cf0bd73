"""Holds the case files about frameworks' own loops and wiring, with stand-ins for the frameworks.

A hazard is here if its `distribution` is not megatron-core.
"""
