"""A vLLM worker that fails when it is told to, and tells of its scales."""

from __future__ import annotations

import json
import os
import signal
import time
from typing import Any

from megatron_idempotent.rl.engines.vllm_worker import StagingExtension
from megatron_idempotent.rl.weights import checksum

if os.environ.get("TEST_PLAIN_WEIGHTS"):
    # As on GPUs: vLLM computes with the weights themselves, and packs none.
    import vllm._custom_ops
    import vllm.model_executor.layers.utils

    vllm._custom_ops._supports_onednn = False
    vllm.model_executor.layers.utils.check_cpu_sgl_kernel = lambda *_: False


class FaultyWorker(StagingExtension):
    """`{"do": "fault", "at": "load", "after": 7}`: the next commit breaks off at its 8th tensor.

    At "kill" the worker dies there; at "step" every step of the model takes `sleep_s` longer.
    """

    def megatron_idempotent(self, command: str) -> dict[str, Any]:
        asked = json.loads(command)
        if asked["do"] != "fault":
            return super().megatron_idempotent(command)
        if asked["at"] == "step":
            self._slow(asked["sleep_s"])
        else:
            self._break(asked)
        return super().megatron_idempotent('{"do": "state"}')

    def _slow(self, sleep_s: float) -> None:
        runner = self.model_runner
        original = type(runner).execute_model.__get__(runner)

        def slow(*args, **kwargs):
            time.sleep(sleep_s)
            return original(*args, **kwargs)

        runner.execute_model = slow

    def _break(self, asked: dict[str, Any]) -> None:
        transfer = self.weight_transfer_engine
        original = transfer._load
        if transfer._places is not None:
            return self._break_in_place(transfer, asked["after"])

        def broken(weights):
            transfer._load = original

            class Broken(dict):
                def __getitem__(self, name):
                    if list(weights).index(name) == asked["after"]:
                        if asked["at"] == "kill":
                            os.kill(os.getpid(), signal.SIGKILL)
                        raise RuntimeError("a fault for a test")
                    return weights[name]

            original(Broken(weights))

        transfer._load = broken

    def _break_in_place(self, transfer: Any, after: int) -> None:
        places, original = transfer._places, transfer._places.write

        def broken(update):
            places.write = original
            some = dict(list(update.came.items())[:after])
            original(type(update)(update.served, some))
            raise RuntimeError("a fault for a test")

        places.write = broken

    def bits(self) -> dict[str, Any]:
        """Checksums of all parameters, and why deltas are not written in place."""
        transfer = self.weight_transfer_engine
        found = {name: f"{checksum(each):x}" for name, each in transfer.model.named_parameters()}
        return {"parameters": found, "whole_because": transfer.whole_because}

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
