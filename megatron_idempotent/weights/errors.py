"""Errors of an update of weights. Messages give the fact, both values, a remedy."""

from __future__ import annotations


class WeightsError(ValueError):
    """Weights that cannot be taken as they are."""


class UpdateMismatch(WeightsError):
    """Tensors that do not fit the model: names, shapes or types; the message lists all of them."""


class UpdateDamaged(WeightsError):
    """Bytes that are not those that were sent: a checksum differs, or a bucket is incomplete."""


class UpdateRefused(WeightsError):
    """An update that does not come in turn: late, built on another version, or beside another."""
