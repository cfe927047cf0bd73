"""Errors of the patch engine. Users see these, so each message carries the fact and the remedy."""

from __future__ import annotations


class PatchError(RuntimeError):
    """A patch that was asked for by name, or any patch in strict mode, could not be applied."""


class UnknownPatchError(ValueError):
    """A patch id in `only=`, `exclude=` or the environment is in no case file."""


class Conflict(Exception):
    """Somebody else's object sits where upstream's function should be. Becomes a row's reason."""


class VerificationError(RuntimeError):
    """A patch is no longer in place, or the ranks of a group are patched differently."""
