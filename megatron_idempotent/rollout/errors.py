"""Errors that an engine can answer with."""

from __future__ import annotations


class EngineError(RuntimeError):
    """An engine that could not do what it was told; the message names the engine."""


class EngineDead(EngineError):
    """The engine does not answer any more; its running requests are lost and can be sent again."""


class EngineTimeout(EngineError):
    """The engine has not answered in time; what it did is unknown until its health is asked."""


class EngineUnsupported(EngineError):
    """The engine, as it was started, lacks what was asked for; the message says how to get it."""
