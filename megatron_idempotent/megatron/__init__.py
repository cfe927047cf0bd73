"""Accessors of Megatron's internals: the differences between its releases, in one place.

No module here knows a patch. Case files, windows and steps are built on them.
"""
