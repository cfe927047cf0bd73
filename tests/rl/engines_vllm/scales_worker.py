"""A worker that tells which scales its attention layers compute with."""

from __future__ import annotations

from typing import Any

from megatron_idempotent.rl.engines.vllm.worker import StagingExtension


class ScalesWorker(StagingExtension):
    """`--worker-extension-cls scales_worker.ScalesWorker`."""

    def scales_in_use(self) -> dict[str, Any]:
        model = self.weight_transfer_engine.model
        return {
            name: [
                (float(getattr(layer, f"_{which}_scale")), getattr(layer, f"_{which}_scale_float"))
                for which in "kvq"
            ]
            for name, layer in model.named_modules()
            if hasattr(layer, "_k_scale")
        }
