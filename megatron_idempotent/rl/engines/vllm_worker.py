"""Extends vLLM's workers by the client's commands, and by an engine that commits updates."""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.lora.request import LoRARequest
from vllm.model_executor.model_loader.reload.layerwise import (
    finalize_layerwise_reload,
    initialize_layerwise_reload,
)
from vllm.platforms import current_platform

from megatron_idempotent.rl.weights import TensorInfo
from megatron_idempotent.rl.weights.safetensors_io import Checkpoint, expected_tensors
from megatron_idempotent.rl.weights.transports.bucket import VARIABLE as BUCKET_URL

from .vllm_in_place import NotInPlace, Patched, Places
from .vllm_inbox import CacheScales, Inbox, LayerScales, Weights

_log = logging.getLogger(__name__)


class StagingExtension:
    """Adds the client's commands to vLLM's worker, which `--worker-extension-cls` mixes it into."""

    weight_transfer_engine: Any

    def megatron_idempotent(self, command: str) -> dict[str, Any]:
        """Run one command of the client, given as JSON; return the worker's state after it.

        vLLM runs it between two steps of the model, so it does not wait for anything: a thread
        receives buckets. It never raises, because vLLM would log that as an error of the engine:
        errors come back under "error", as in `Inbox.answer`.
        """
        asked = json.loads(command)
        inbox: Inbox | None = getattr(self.weight_transfer_engine, "inbox", None)
        if inbox is None:
            return {
                "error": {
                    "kind": "EngineUnsupported",
                    "message": "the engine was started with another weight transfer backend; "
                    'start it with --weight-transfer-config \'{"backend": "megatron_idempotent"}\'',
                }
            }
        if asked.get("adapter"):
            self.weight_transfer_engine.serve_adapter(self, asked["adapter"])
        if asked["do"] == "sleeps":
            config = self.vllm_config.model_config  # type: ignore[attr-defined]
            return {"sleeps": bool(config.enable_sleep_mode)}
        if asked["do"] != "settle":
            return inbox.answer(asked)
        # End an update that an error, here or in another worker, or a lost client has left open.
        if inbox.answer({"do": "state"})["updating"]:
            inbox.failed(RuntimeError("it did not end on all workers"))
        if self._weight_update_active:  # type: ignore[attr-defined]
            try:
                self.finish_weight_update()  # type: ignore[attr-defined]
            except Exception as error:  # noqa: BLE001 (it is raised by the client)
                found = {"kind": "EngineError", "message": f"finish_weight_update failed: {error}"}
                return {**inbox.answer({"do": "state"}), "error": found}
        return inbox.answer({"do": "state"})


@dataclasses.dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """Holds nothing: every update opens its own transport."""


@dataclasses.dataclass
class CommitInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Names the weights to load. Example: `{"update_id": "run-7/12"}`, or `{"restore": true}`."""

    update_id: str = ""
    restore: bool = False
    """True to load the weights before a commit that failed half-way, instead of an update."""


class StagedTransfer(WeightTransferEngine):  # type: ignore[misc]
    """Loads staged weights through the model's own loader, layer by layer, as vLLM's engines do.

    Deltas are written in place where the model computes with a checkpoint's elements as they are.

    `inbox` takes them in while the model serves. vLLM calls three methods while it is paused:
    `start_weight_update`, `update_weights` with a CommitInfo, `finish_weight_update`. If loading
    fails the layers are put together again, so that all three may be called once more; until then
    `inbox` says that the worker is dirty.
    """

    init_info_cls = InitInfo
    update_info_cls = CommitInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._apart = False
        self._scales = CacheScales(
            model,
            whole=vllm_config.parallel_config.pipeline_parallel_size == 1,
            doubled=current_platform.is_fp8_fnuz(),
        )
        # Those of the weights that were served last; None once an update is served.
        self._scales_before: Mapping[str, LayerScales] | None = None
        self._places: Places | None = None
        self._load_adapter: Callable[[Any], Any] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.whole_because = ""
        """The reason why deltas are not written in place; empty as long as none is known."""
        self.inbox = Inbox(
            rank=vllm_config.parallel_config.rank,
            expected=self._expected,
            checkpoint=lambda: Checkpoint(self._directory),
            check_scales=self._scales.check,
            bucket=os.environ.get(BUCKET_URL, ""),
        )

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Do nothing: each update sets up its own transport."""

    def start_weight_update(self) -> None:
        """Note that weights are to change: until `finish_weight_update` they are not served."""
        self._together()  # an earlier attempt may have left layers apart
        self.inbox.began()
        if self._scales_before is None:
            self._scales_before = self._scales.read()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the staged weights; what fails is noted in `inbox`, and the client asks for it.

        It raises nothing: vLLM 0.32 stops at the first worker that does, and takes the answers of
        the workers after it for those of its next call.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: CommitInfo) -> None:
        """See `update_weights`."""
        try:
            self._load(self.inbox.to_load(update_info.update_id, restore=update_info.restore))
        except Exception as error:  # noqa: BLE001 (the client raises it)
            _log.exception("update %s was not loaded", update_info.update_id)
            self.inbox.failed(error)
            self._together()

    def finish_weight_update(self) -> None:
        """Put the layers together; from here on the update is what is served."""
        loaded = self._apart
        self._together(self.inbox.loaded_scales)
        if loaded and current_platform.is_cpu():
            # vLLM 0.32 packs experts when they are first loaded, and not when they are again.
            for layer in self.model.modules():
                kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
                if kernel is not None:
                    kernel.fused_experts.process_weights_after_loading(layer)
        self.inbox.finished()
        if not self.inbox.dirty:
            self._scales_before = None

    def shutdown(self) -> None:
        """Forget what is staged: vLLM ends, or releases the trainer's connection."""
        self.inbox.forget()

    def serve_adapter(self, worker: Any, card: Mapping[str, str]) -> None:
        """Take updates of the factors of an adapter, by its name and folder. Twice: no-op."""
        if self._load_adapter is not None:
            return
        self._directory, self._adapter = Path(card["root"]), card["id"]
        self._adapters = worker.model_runner.lora_manager
        load = self._load_adapter = self._adapters._load_adapter

        def newest(request: Any) -> Any:
            if request.lora_name != self._adapter or self._folder is None:
                return load(request)
            return load(LoRARequest(self._adapter, request.lora_int_id, self._folder.name))

        # vLLM forgets adapters after an update, and otherwise loads them from the request's folder.
        self._adapters._load_adapter = newest

    def _load(self, weights: Weights) -> None:
        if self._load_adapter is not None:
            before, folder = self._folder, tempfile.TemporaryDirectory()
            shutil.copy(self._directory / "adapter_config.json", folder.name)
            save_file(dict(weights), Path(folder.name, "adapter_model.safetensors"))
            self._load_adapter(LoRARequest(self._adapter, 1, folder.name))  # raises, or it can
            self._folder = folder
            self._adapters.remove_all_adapters()
            if before is not None:
                before.cleanup()
            return
        if isinstance(weights, Patched) and not self.inbox.torn:
            places = self._find_places(weights.served)
            if places is not None:
                places.write(weights)
                return
        self._apart = True
        initialize_layerwise_reload(self.model)
        # One by one: what is read from disk is not to be in memory all at once.
        self.model.load_weights((name, weights[name]) for name in weights)

    def _find_places(self, served: Weights) -> Places | None:
        """Return the model's places, found once; None if it cannot be written in place."""
        if self._places is None and not self.whole_because:
            # On CPUs a layer's function may hold packed weights.
            computing = (getattr(layer, "cpu_linear", None) for layer in self.model.modules())
            try:
                if self.model_config.use_mla or any(
                    getattr(each, "__closure__", None) for each in computing
                ):
                    raise NotInPlace("it computes with what it makes of its weights")
                self._places = Places(self.model, served)
            except NotInPlace as error:
                self.whole_because = str(error)
                _log.info("deltas are loaded as whole layers: %s", error)
        return self._places

    def _together(self, scales: Mapping[str, float] | None = None) -> None:
        if self._apart:
            finalize_layerwise_reload(self.model, self.model_config)
            self._apart = False
        # After it: where the checkpoint is not quantised it has set all of them to 1.
        self._scales.write(self._scales_before or {}, scales)

    def _expected(self) -> tuple[TensorInfo, ...]:
        config = self.model_config.hf_text_config
        return expected_tensors(
            self._directory,
            dtype=self.model_config.dtype,
            tied=bool(getattr(config, "tie_word_embeddings", False)),
        )

    @functools.cached_property
    def _directory(self) -> Path:
        """The folder of the checkpoint, which vLLM has downloaded if it was given a name."""
        named = Path(self.model_config.model)
        if named.is_dir():
            return named
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                self.model_config.model, revision=self.model_config.revision, local_files_only=True
            )
        )
