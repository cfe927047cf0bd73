"""Each patch for a framework against that framework's own code, where a checkout or wheel is given.

`SLIME_SOURCE`, `MILES_SOURCE`, `MEGATRON_BRIDGE_SOURCE`, `MS_SWIFT_SOURCE`, `MCORE_ADAPTER_SOURCE`,
`VERL_SOURCE` and `NEMO_RL_SOURCE` name the folder that holds the package (of a wheel: unpacked).
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable
from typing import Any

import pytest

from megatron_idempotent import apply, report
from megatron_idempotent.patching.base import MEGATRON
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.source import locate
from megatron_idempotent.proof.cpu import RankError
from megatron_idempotent.proof.prove import control_outcome

FRAMEWORKS = [p for p in patches().values() if p.distribution != MEGATRON]

pytestmark = [
    pytest.mark.full,
    pytest.mark.skipif(
        locate("megatron.training.training") is None,
        reason="this release's wheel does not carry megatron.training, which set up the programs",
    ),
]


def source_of(distribution: str) -> str | None:
    return os.environ.get(f"{distribution.upper().replace('-', '_')}_SOURCE")


def decided(patch_id: str) -> str:
    """Runs on a rank: what `apply()` would make of the patch."""
    sys.path.insert(0, source_of(patches()[patch_id].distribution) or "")
    return apply(dry_run=True)[patch_id].status


def reproduce(patch_id: str, applied: tuple[str, ...]) -> str:
    """Runs on a rank: one reproduction, and what became of its patch."""
    from megatron_idempotent.proof.prove import _reproduce

    sys.path.insert(0, source_of(patches()[patch_id].distribution) or "")
    _reproduce(patch_id, applied, True)
    return report()[patch_id].status


def on_source(source: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs on a rank: a function where the framework is on the path."""
    sys.path.insert(0, source)
    return function(*arguments)


@pytest.mark.parametrize("patch", FRAMEWORKS, ids=lambda patch: patch.id)
def test_the_hazard_is_there_gone_with_the_patches_and_back_without_its_own(patch, megatron_ranks):
    if source_of(patch.distribution) is None:
        pytest.skip(f"no source of {patch.distribution} is given")
    (status,) = megatron_ranks(1, decided, patch.id, distributed=False)
    if status in ("fixed_upstream", "missing_target", "unsupported_version"):
        pytest.skip(f"{patch.id} is for other releases of {patch.distribution}")
    ranks = patch.ranks
    everything = tuple(patches())
    found = megatron_ranks(ranks, reproduce, patch.id, everything, timeout_s=120)
    assert found == ["applied"] * ranks
    for applied in ((), tuple(set(everything) - {patch.id})):
        with pytest.raises(RankError) as failure:
            megatron_ranks(ranks, reproduce, patch.id, applied, timeout_s=120)
        said = f"{failure.value.exception_type}: {failure.value.message}"
        assert re.search(patch.stock_error, said)

    def run(ranks: int, function: Callable[..., Any], *arguments: Any, **how: Any) -> list[Any]:
        source = source_of(patch.distribution)
        return megatron_ranks(ranks, on_source, source, function, *arguments, **how)

    assert control_outcome(run, patch.id) in ("ok", "-")
