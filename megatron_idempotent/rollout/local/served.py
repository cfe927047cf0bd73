"""A model's tensors under their Hugging Face names, and the exchange of all of them at once."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from typing import Any

import torch

from megatron_idempotent.weights import TensorInfo
from megatron_idempotent.weights.side_stream import used_here

# transformers holds the experts of a layer in two tensors, [E, 2 I, H] and [E, H, I], and
# checkpoints have three matrices for each expert.
_EXPERTS = re.compile(r"(?P<experts>.*\.experts)\.(?P<fused>gate_up_proj|down_proj)$")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """The place of a checkpoint's tensor in the model."""

    info: TensorInfo
    whole: str
    """Name of the model's own tensor."""
    part: tuple[int, slice] | None = None
    """The expert and its rows; None for the whole tensor."""


class ServedWeights:
    """The parameters and saved buffers of a model.

    Tensors are exchanged by pointer: an update costs as much time for any size of model, and old
    tensors are there until the last of them is replaced. Tied weights are one tensor.
    """

    def __init__(self, model: Any) -> None:
        self._tensors: dict[str, torch.Tensor] = _own_tensors(model)
        self._infos = {name: TensorInfo.of(name, each) for name, each in self._tensors.items()}
        self._places = {
            place.info.name: place
            for info in self._infos.values()
            for place in _checkpoint_places(info)
        }
        self._before: dict[str, torch.Tensor] = {}
        self.device: torch.device = model.device

    @property
    def expected(self) -> tuple[TensorInfo, ...]:
        """Every tensor of an update, by its name in a checkpoint."""
        return tuple(place.info for place in self._places.values())

    @torch.no_grad()
    def assemble(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """The model's own tensors made of those of a checkpoint; what is served does not change.

        Where only some parts of a tensor come, the others are copied from what is served.
        """
        whole: dict[str, torch.Tensor] = {}
        for name, tensor in tensors.items():
            place = self._places[name]
            if place.part is None:
                whole[place.whole] = tensor
            else:
                if place.whole not in whole:
                    whole[place.whole] = self._copy(place.whole)
                expert, rows = place.part
                whole[place.whole][expert, rows] = tensor
        return whole

    def exchange(self, whole: Mapping[str, torch.Tensor]) -> None:
        """Serve these tensors. Where it raises, `torn` says whether all are back."""
        try:
            for name, tensor in whole.items():
                self._before.setdefault(name, self._tensors[name].data)
                self._put(name, tensor)
        except Exception:
            self.restore()
            raise
        self._before.clear()

    def restore(self) -> None:
        """Serve what was served before an exchange that failed."""
        for name in list(self._before):
            self._put(name, self._before[name])
            del self._before[name]

    @property
    def torn(self) -> bool:
        """True if tensors of more than one version are served."""
        return bool(self._before)

    def free(self) -> None:
        """Give up all tensors' memory; an exchange of all of them takes it again."""
        self._before.clear()
        for name, tensor in self._tensors.items():
            self._put(name, tensor.data.new_empty(0))

    def _put(self, name: str, tensor: torch.Tensor) -> None:
        self._tensors[name].data = used_here(tensor)

    def _copy(self, name: str) -> torch.Tensor:
        info, served = self._infos[name], self._tensors[name].data
        if served.shape == info.shape:
            return served.clone()
        return torch.empty(info.shape, dtype=info.dtype, device=self.device)  # freed: all come


def _own_tensors(model: Any) -> dict[str, torch.Tensor]:
    """Returns the tensors that a checkpoint has, each once; tied ones under their first name."""
    saved = model.state_dict(keep_vars=True)
    unique = {id(tensor): name for name, tensor in reversed(saved.items())}
    return {name: tensor for name, tensor in saved.items() if unique[id(tensor)] == name}


def _checkpoint_places(info: TensorInfo) -> list[_Place]:
    """Returns the places of a checkpoint's tensors in one of the model's."""
    found = _EXPERTS.fullmatch(info.name)
    if found is None or len(info.shape) != 3:
        return [_Place(info=info, whole=info.name)]
    experts, rows, columns = info.shape
    if found["fused"] == "down_proj":
        parts = {"down_proj": slice(0, rows)}
    else:
        parts = {"gate_proj": slice(0, rows // 2), "up_proj": slice(rows // 2, rows)}
    return [
        _Place(
            info=TensorInfo(
                name=f"{found['experts']}.{expert}.{projection}.weight",
                shape=(part.stop - part.start, columns),
                dtype=info.dtype,
            ),
            whole=info.name,
            part=(expert, part),
        )
        for expert in range(experts)
        for projection, part in parts.items()
    ]
