"""What a caller with a loop of its own does around a training window of Megatron.

A window is one call of a pipeline schedule, forward and backward over all of its microbatches, up
to the optimizer step that uses its gradients.
"""
