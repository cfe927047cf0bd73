"""Reaches into Megatron's internals, and keeps the differences between its releases in one place.

No module here knows a patch. Case files, windows and steps are built on them.
"""
