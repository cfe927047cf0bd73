"""Uses SGLang servers as engines, over HTTP."""

from .engine import SglangEngine

__all__ = ["SglangEngine"]
