"""A full-iteration CUDA graph is replayed only for what it was captured from."""

from upstream.edits import Repair, after

_WRAPPER = "megatron.core.full_cuda_graph:FullCudaGraphWrapper"
_CHECK = """
training_str = 'training' if training else 'validation'
# A graph has its model's parameters, and one static buffer per microbatch.
source = [weakref.ref(chunk) for chunk in (model if isinstance(model, list) else [model])]
source += [self.forward_backward_func, kwargs.get('forward_step_func'), num_microbatches]
source += [kwargs['seq_length'], kwargs.get('micro_batch_size')]
if source != FullCudaGraphWrapper.captured_from[training_str]:
    torch.cuda.synchronize()  # the last replay may still read the static buffers
    self.reset_cuda_graph(training_str)
    StaticBufferLoader.static_buffers[training_str].clear()
    FullCudaGraphWrapper.captured_from[training_str] = source
"""

REPAIR = Repair(
    edits=(
        after("megatron.core.full_cuda_graph", "import logging", "import weakref"),
        after(_WRAPPER, "result = {", "captured_from = {'training': None, 'validation': None}"),
        after(f"{_WRAPPER}.__call__", "data_iterator = kwargs['data_iterator']", _CHECK),
        # An exception in the capture leaves None, so that the next call begins again.
        after(
            f"{_WRAPPER}.__call__",
            "= torch.cuda.CUDAGraph()",
            "FullCudaGraphWrapper.captured_from[training_str] = None  # if the capture fails",
        ),
        after(
            f"{_WRAPPER}.__call__",
            "with torch.cuda.graph(",
            "FullCudaGraphWrapper.captured_from[training_str] = source",
        ),
    ),
    unit_tests=("transformer/test_full_cuda_graph.py",),
)
