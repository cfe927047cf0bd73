"""Reads and changes Megatron's internals, and hides the differences between its releases.

Case files, windows and steps use these modules, which depend on no patch.
"""
