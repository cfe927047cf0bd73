"""Adds the client's commands and a weight transfer engine to vLLM's workers."""

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

from .protocol import EngineError, EngineUnsupported
from .vllm_inbox import (
    CacheScales,
    Inbox,
    LayerScales,
    NotInPlace,
    Patched,
    Places,
    Weights,
    described,
)

_log = logging.getLogger(__name__)


class StagingExtension:
    """Adds a method to vLLM's worker class, through `--worker-extension-cls`, that executes the
    commands of the `VllmEngine` client.
    """

    weight_transfer_engine: Any

    def megatron_idempotent(self, command: str) -> dict[str, Any]:
        """Execute a command of the `VllmEngine` client, given as JSON, on this worker; return the
        worker's state after the command.

        vLLM calls this between two steps of the model, so it must not block: a thread receives the
        buckets. It never raises, because vLLM would log an error of the engine; errors are returned
        under "error", as in `Inbox.answer`.
        """
        request = json.loads(command)
        inbox: Inbox | None = getattr(self.weight_transfer_engine, "inbox", None)
        if inbox is None:
            message = (
                "the engine was started with another weight transfer backend; "
                'start it with --weight-transfer-config \'{"backend": "megatron_idempotent"}\''
            )
            return {"error": described(EngineUnsupported(message))}
        if request.get("adapter"):
            self.weight_transfer_engine.serve_adapter(self, request["adapter"])
        if request["do"] == "sleeps":
            config = self.vllm_config.model_config  # type: ignore[attr-defined]
            return {"sleeps": bool(config.enable_sleep_mode)}
        if request["do"] != "settle":
            return inbox.answer(request)
        # Close an update that an error in any worker, or a lost client, left open.
        if inbox.answer({"do": "state"})["updating"]:
            inbox.failed(RuntimeError("the update did not end on all workers"))
        if self._weight_update_active:  # type: ignore[attr-defined]
            try:
                self.finish_weight_update()  # type: ignore[attr-defined]
            except Exception as error:  # noqa: BLE001 (the client raises it)
                failure = described(EngineError(f"finish_weight_update failed: {error}"))
                return {**inbox.answer({"do": "state"}), "error": failure}
        return inbox.answer({"do": "state"})


@dataclasses.dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """An empty record that vLLM's interface for transfer engines requires: every update opens its
    own transport.
    """


@dataclasses.dataclass
class CommitInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """Selects the weights that workers load at a commit or a rollback.
    Example: `{"update_id": "run-7/12"}`, or `{"restore": true}`.
    """

    update_id: str = ""
    restore: bool = False
    """True to restore the weights from before a failed commit, instead of loading an update."""


class StagedTransfer(WeightTransferEngine):  # type: ignore[misc]
    """A vLLM weight transfer engine that loads weights which the worker has staged before: layer by
    layer with the model's loader, or only the changed elements in place where this is possible.

    Deltas are written in place if the model stores a checkpoint's elements unchanged.

    `inbox` receives updates while the model serves. During a pause vLLM calls
    `start_weight_update`, `update_weights` with a CommitInfo, and `finish_weight_update`. If
    loading fails, the layers are reassembled, so that all three can be called again; until then
    `inbox` reports the worker as dirty.
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
        # The scales of the last served weights; None once an update is served.
        self._scales_before: Mapping[str, LayerScales] | None = None
        self._places: Places | None = None
        self._load_adapter: Callable[[Any], Any] | None = None
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self.whole_because = ""
        """The reason why deltas cannot be written in place; empty if they can, or before the
        first."""
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
        """Begin a weight update: record in `inbox` that the worker must not serve until
        `finish_weight_update`, and keep a copy of the cache scales, which a load may reset. First,
        reassemble the model's layers if a failed update left them disassembled. No weights are
        loaded yet.
        """
        self._together()  # an earlier attempt may have left layers apart
        self.inbox.began()
        if self._scales_before is None:
            self._scales_before = self._scales.read()

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Load the weights that `update_info` selects into the model. A failure is recorded in
        `inbox`, from which the client reads it, and not raised.

        This never raises: vLLM 0.32 stops at the first worker that raises, and mistakes the other
        workers' responses for those of its next call.
        """
        self.receive_weights(self.parse_update_info(update_info))
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()

    def receive_weights(self, update_info: CommitInfo) -> None:
        """Load the weights that `update_info` selects into the model. If this fails, record the
        error in `inbox`, and end vLLM's layerwise reload, which has taken the model's layers apart.
        """
        try:
            self._load(self.inbox.to_load(update_info.update_id, restore=update_info.restore))
        except Exception as error:  # noqa: BLE001 (the client raises it)
            _log.exception("update %s was not loaded", update_info.update_id)
            self.inbox.failed(error)
            self._together()

    def finish_weight_update(self) -> None:
        """Reassemble the model's layers after a load, set the cache scales, and record in `inbox`
        that the new version is served.
        """
        loaded = self._apart
        self._together(self.inbox.loaded_scales)
        if loaded and current_platform.is_cpu():
            # vLLM 0.32 packs experts at the first load, but not at reloads.
            for layer in self.model.modules():
                kernel = getattr(getattr(layer, "quant_method", None), "moe_kernel", None)
                if kernel is not None:
                    kernel.fused_experts.process_weights_after_loading(layer)
        self.inbox.finished()
        if not self.inbox.dirty:
            self._scales_before = None

    def shutdown(self) -> None:
        """Drop an update that is staged or arriving. vLLM calls this when it ends, or when it
        closes the connection to the trainer.
        """
        self.inbox.forget()

    def serve_adapter(self, worker: Any, card: Mapping[str, str]) -> None:
        """Make updates, from now on, replace the factors of the LoRA adapter that `card` describes
        (the server's entry for it), instead of the model's weights. A second call is a no-op.
        """
        if self._load_adapter is not None:
            return
        self._directory, self._adapter = Path(card["root"]), card["id"]
        self._adapters = worker.model_runner.lora_manager
        load = self._load_adapter = self._adapters._load_adapter

        def newest(request: Any) -> Any:
            if request.lora_name != self._adapter or self._folder is None:
                return load(request)
            return load(LoRARequest(self._adapter, request.lora_int_id, self._folder.name))

        # vLLM drops adapters at an update, and would reload them from the request's folder.
        self._adapters._load_adapter = newest

    def _load(self, weights: Weights) -> None:
        if self._load_adapter is not None:
            old_folder, folder = self._folder, tempfile.TemporaryDirectory()
            shutil.copy(self._directory / "adapter_config.json", folder.name)
            save_file(dict(weights), Path(folder.name, "adapter_model.safetensors"))
            self._load_adapter(LoRARequest(self._adapter, 1, folder.name))  # raises if it cannot
            self._folder = folder
            self._adapters.remove_all_adapters()
            if old_folder is not None:
                old_folder.cleanup()
            return
        if isinstance(weights, Patched) and not self.inbox.torn:
            element_map = self._find_places(weights.served)
            if element_map is not None:
                element_map.write(weights)
                return
        self._apart = True
        initialize_layerwise_reload(self.model)
        # Lazily: a checkpoint on disk must not be in memory all at once.
        self.model.load_weights((name, weights[name]) for name in weights)

    def _find_places(self, served: Weights) -> Places | None:
        """Return the map from a checkpoint's elements to the model's parameters, built once; None
        if updates of this model cannot be written in place.
        """
        if self._places is None and not self.whole_because:
            # On CPUs, the closure of a layer's function may hold packed weights.
            computing = (getattr(layer, "cpu_linear", None) for layer in self.model.modules())
            try:
                if self.model_config.use_mla or any(
                    getattr(layer_function, "__closure__", None) for layer_function in computing
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
        # After the reload, which sets all scales to 1 unless the checkpoint is quantised.
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
        """The folder of the model's checkpoint; if the model is given by name, the folder to which
        vLLM has downloaded it.
        """
        model_path = Path(self.model_config.model)
        if model_path.is_dir():
            return model_path
        from huggingface_hub import snapshot_download

        return Path(
            snapshot_download(
                self.model_config.model, revision=self.model_config.revision, local_files_only=True
            )
        )
