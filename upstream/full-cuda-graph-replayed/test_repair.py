import contextlib
from unittest import mock

import pytest
import torch

from megatron.core.full_cuda_graph import FullCudaGraphWrapper, StaticBufferLoader
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from tests.unit_tests.test_utilities import Utils


class TestGraphIsOfModelAndArguments:
    @pytest.fixture(autouse=True)
    def graphs_that_do_nothing(self, monkeypatch):
        Utils.initialize_model_parallel()
        model_parallel_cuda_manual_seed(123)
        monkeypatch.setattr(torch.cuda, "CUDAGraph", mock.MagicMock)
        monkeypatch.setattr(torch.cuda, "graph", lambda *_, **__: contextlib.nullcontext())
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        self.ran, self.fail = [], False
        self.reset()
        yield
        self.reset()
        Utils.destroy_model_parallel()

    def reset(self):
        FullCudaGraphWrapper(None).reset_cuda_graph()
        for buffers in StaticBufferLoader.static_buffers.values():
            buffers.clear()

    def schedule(self, *, model, data_iterator, num_microbatches, **_):
        if self.fail:
            raise ValueError("interrupted")
        self.ran.append(model)
        return [next(data_iterator[0])["tokens"].item() for _ in range(num_microbatches)]

    def window(self, wrapper, model, num_microbatches):
        tokens = ({"tokens": torch.tensor(number)} for number in range(num_microbatches))
        return wrapper(
            model=[model],
            data_iterator=[tokens],
            num_microbatches=num_microbatches,
            seq_length=1,
            micro_batch_size=1,
            forward_only=False,
        )

    def test_other_model_or_number_of_microbatches_is_not_replayed(self):
        wrapper = FullCudaGraphWrapper(self.schedule)
        first, second = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
        for _ in range(3):  # warm-up, capture, replay
            assert self.window(wrapper, first, 2) == [0, 1]
        assert self.ran == [[first]] * 2
        # A new wrapper alone keeps the graph.
        wrapper = FullCudaGraphWrapper(self.schedule)
        self.window(wrapper, first, 2)
        assert self.ran == [[first]] * 2
        assert self.window(wrapper, first, 3) == [0, 1, 2]
        assert self.ran == [[first]] * 3
        for _ in range(3):
            self.window(wrapper, second, 3)
        assert self.ran == [[first]] * 3 + [[second]] * 2

    def test_window_after_a_failed_capture(self):
        wrapper = FullCudaGraphWrapper(self.schedule)
        model = torch.nn.Linear(1, 1)
        self.window(wrapper, model, 2)
        self.fail = True
        with pytest.raises(ValueError):
            self.window(wrapper, model, 2)
        self.fail = False
        assert self.window(wrapper, model, 2) == [0, 1]
