"""Wraps access to Megatron's internals, and keeps differences between its releases in one place.

Case files, windows and steps use these modules, which know no patch.
"""
