"""Judges a framework's training step against its definition, on CPU ranks, in every layout."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatron_idempotent.lazy import attributes

if TYPE_CHECKING:
    from .checks import CHECKS, Check
    from .layouts import LAYOUTS, Layout, layout
    from .protocol import Adapter, Finished, Planted, Rows, Subject
    from .run import Result, certify

_HOMES = {
    "CHECKS": "checks",
    "LAYOUTS": "layouts",
    "Adapter": "protocol",
    "Check": "checks",
    "Finished": "protocol",
    "Layout": "layouts",
    "Planted": "protocol",
    "Result": "run",
    "Rows": "protocol",
    "Subject": "protocol",
    "certify": "run",
    "layout": "layouts",
}

__all__ = [
    "CHECKS",
    "LAYOUTS",
    "Adapter",
    "Check",
    "Finished",
    "Layout",
    "Planted",
    "Result",
    "Rows",
    "Subject",
    "certify",
    "layout",
]

__getattr__ = attributes(__name__, _HOMES)
