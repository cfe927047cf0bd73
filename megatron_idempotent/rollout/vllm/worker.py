"""Extends vLLM's workers, which then take commands while they serve."""

from __future__ import annotations

import json
from typing import Any


class StagingExtension:
    """Mixed into vLLM's worker by `--worker-extension-cls`; the client calls it by its name."""

    weight_transfer_engine: Any

    def megatron_idempotent(self, command: str) -> dict[str, Any]:
        """Runs one command of the client, given as JSON; returns the worker's state after it.

        vLLM runs it between two steps of the model, so it does not wait for anything: buckets are
        received by a thread. It never raises: an error in a worker is logged as one of the engine.
        Errors come back under "error", as in `Inbox.answer`.
        """
        asked = json.loads(command)
        inbox = getattr(self.weight_transfer_engine, "inbox", None)
        if inbox is None:
            return {
                "error": {
                    "kind": "EngineUnsupported",
                    "message": "the engine was started with another weight transfer backend; "
                    'start it with --weight-transfer-config \'{"backend": "megatron_idempotent"}\'',
                }
            }
        if asked["do"] == "settle":
            return self._settle(inbox)
        answered: dict[str, Any] = inbox.answer(asked)
        return answered

    def _settle(self, inbox: Any) -> dict[str, Any]:
        """End an update that another worker's error, or a lost client, has left open here."""
        state: dict[str, Any] = inbox.answer({"do": "state"})
        if not state["updating"]:
            return state
        inbox.failed(RuntimeError("it did not end on all workers"))
        try:
            self.finish_weight_update()  # type: ignore[attr-defined]
        except Exception as error:  # noqa: BLE001 (it is raised by the client)
            found = {"kind": "EngineError", "message": f"finish_weight_update failed: {error}"}
            return {**inbox.answer({"do": "state"}), "error": found}
        settled: dict[str, Any] = inbox.answer({"do": "state"})
        return settled
