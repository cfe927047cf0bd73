"""Reads the ids of a step's groups, by which all ranks count how many there are.

Legend: n sequences.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from .pieces import field_of
from .records import GROUP_IDS, SAMPLE_MASK


def group_ids(batch: Any, sequences: int) -> tuple[Tensor, Tensor | None]:
    """Returns each sequence's group id [n], and which sequences are valid [n]; None if all are.

    Raises:
        ValueError: `group_ids` is missing, or is not one integer for each sequence.
    """
    found = field_of(batch, GROUP_IDS)
    if found is None:
        raise ValueError(
            f"a {type(batch).__name__} without {GROUP_IDS!r}, and a loss or metric that is divided "
            f"by the number of groups: give it the group of each of its {sequences} sequences, "
            "integers [sequences]"
        )
    ids_n = torch.as_tensor(found)
    if ids_n.is_floating_point() or ids_n.dtype == torch.bool or ids_n.numel() != sequences:
        raise ValueError(
            f"whose {GROUP_IDS!r} are {ids_n.dtype} of shape {tuple(ids_n.shape)} for {sequences} "
            "sequences: give one integer for each"
        )
    mask_n = field_of(batch, SAMPLE_MASK)
    return ids_n.reshape(-1), None if mask_n is None else mask_n.reshape(-1) > 0


def distinct(found: Iterable[tuple[Tensor, Tensor | None]]) -> tuple[int, ...]:
    """Return the ids of groups with a valid sequence, each once; reads from the device once."""
    valid = [ids_n if mask_n is None else ids_n[mask_n] for ids_n, mask_n in found]
    if not valid:
        return ()
    device = valid[0].device
    ids = torch.unique(torch.cat([each.to(device, torch.int64) for each in valid]))
    return tuple(ids.tolist())
