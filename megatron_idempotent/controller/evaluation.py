"""Evaluating a version that engines have, which must not cost the training anything but time."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping

from megatron_idempotent.workers.errors import RanksLost

from .shared import Shared

_log = logging.getLogger(__name__)

Evaluate = Callable[[int], Awaitable[Mapping[str, float]]]
"""Called with each version that engines were given, and with 0; metrics, or none. Where it raises,
the row of the version has `evaluation/failed` instead, and the run goes on."""


async def evaluated(shared: Shared, evaluate: Evaluate, version: int) -> Mapping[str, float]:
    """Its metrics. Errors: `RanksLost`."""
    with shared.measure.phase("evaluation", version=version):
        shared.doing = "evaluation"
        try:
            return await evaluate(version)
        except RanksLost:
            raise
        except Exception as error:  # noqa: BLE001 (numbers to look at; the training needs none)
            _log.error("version %d is not evaluated: %r", version, error)
            return {"evaluation/failed": 1.0}
        finally:
            shared.progressed()
