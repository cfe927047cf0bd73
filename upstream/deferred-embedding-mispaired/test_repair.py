from types import SimpleNamespace
from unittest import mock

import pytest

from megatron.core.pipeline_parallel import schedules


class TestDeferredEmbeddingWgradWithMTP:
    def _finish(self, inputs, mtp_num_layers, limit=0, output_weight="output weight"):
        """Run `finish_embedding_wgrad_compute`; return the inputs and the weight that it uses."""
        config = SimpleNamespace(
            defer_embedding_wgrad_compute=True,
            mtp_num_layers=mtp_num_layers,
            wgrad_deferral_limit=limit,
        )
        module = SimpleNamespace(
            embedding_activation_buffer=list(inputs),
            grad_output_buffer=[f"gradient of {name}" for name in inputs],
            share_embeddings_and_output_weights=False,
            output_layer=SimpleNamespace(weight=output_weight),
            shared_embedding_or_output_weight=lambda: "embedding weight",
        )
        with mock.patch.object(schedules, "drain_embedding_wgrad_compute") as drain:
            schedules.finish_embedding_wgrad_compute(config, module, True, None)
        _, drained, _, weight, _ = drain.call_args.args
        return drained, weight

    def test_inputs_are_in_the_order_of_the_backward(self):
        drained, weight = self._finish(["main 0", "mtp 0", "main 1", "mtp 1"], 1)
        assert drained == ["mtp 0", "main 0", "mtp 1", "main 1"]
        assert weight == "output weight"

    def test_output_layer_without_a_weight_uses_the_shared_one(self):
        _, weight = self._finish(["main 0", "main 1"], None, output_weight=None)
        assert weight == "embedding weight"

    def test_order_without_mtp(self):
        drained, _ = self._finish(["main 0", "main 1", "main 2"], None)
        assert drained == ["main 0", "main 1", "main 2"]

    def test_limit_inside_of_a_microbatch(self):
        with pytest.raises(ValueError, match="multiple of 2"):
            self._finish(["main 0", "mtp 0", "main 1"], 1, limit=3)
