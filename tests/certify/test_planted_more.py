"""Bugs of sizes, places and time are caught where they are wrong; right adapters stay green."""

from __future__ import annotations

import random

import planted_more
import planted_proof
import pytest

from megatron_idempotent.certify import certify, layout

BUGS = planted_more.BUGS
RIGHT = {
    "Loop": ("dp1", "dp2", "dp2-distopt"),
    "KnownTotals": ("dp2",),
    "SumsOutside": ("dp2-distopt",),
    "OneCallEach": ("dp2", "pp2"),
    "AllInOneCall": ("dp2", "pp2"),
    "ReplaysAfterFailure": ("dp2",),
    "SortsByLength": ("dp2",),
    "AbortRebuilds": ("dp2", "dp2-distopt"),
}
#: As many as a few seconds hold; the others with -m exhaustive.
SAMPLE = random.Random(40).sample(sorted(BUGS), 3)
