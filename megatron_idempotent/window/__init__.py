"""Functions for callers with a loop of their own around a training window of Megatron.

A window is one call of a pipeline schedule, forward and backward over all of its microbatches, up
to the optimizer step that uses its gradients.
"""
