"""Errors between the two ends of a transport, apart from damaged bytes."""

from __future__ import annotations


class TransportError(RuntimeError):
    """A transfer that cannot be begun or finished; close the sender, then open it again."""


class TransportTimeout(TransportError):
    """The other end did not come, or did not answer, in time."""
