"""Gives several tenants an adapter each over one frozen base, and holds each to its own steps.

The oracle knows no LoRA, and needs none: a tenant's adapter is values of its own for norms and
biases, in parameters that take the base's place in the model while the tenant's forward runs. The
gradient of a tenant's step is then that of its definition, of these parameters alone.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from .batches import forward
from .bench import Bench
from .low_rank import OverBase
from .oracle import Truth
from .parameters import ParameterPart, parts, spread
from .protocol import Calls, Rows


def in_adapter(name: str) -> bool:
    """Return whether a parameter is in adapters: norms are, and biases.

    That of linear_qkv is not: stock Megatron computes no gradient of it where the weight is frozen
    (the patch frozen-weight-bias-untrained does).
    """
    return "norm" in name or (name.endswith(".bias") and "linear_qkv" not in name)


class Base:
    """Holds a frozen model, and for each tenant parameters, DDP and optimizer of its own.

    Example: `Base(bench, ("alice", "bob")).swap("bob")`.
    """

    def __init__(self, host: Bench, names: Sequence[str]) -> None:
        """Build another model as `host` has it; the first tenant begins with the base's values."""
        from megatron.core.distributed import DistributedDataParallel
        from megatron.core.optimizer import get_megatron_optimizer

        self._host, self._names = host, tuple(names)
        # The modules and names of parameters, with the tenants' own for each.
        self._places: list[tuple[Any, str, dict[str, Any]]] = []
        first = host.built(before_ddp=self._add_adapters)
        self.models = {names[0]: first}
        for name in names[1:]:
            self._train(name)
            self.swap(name)
            settings = first.chunks[0].ddp_config
            chunks = [
                DistributedDataParallel(first.config, copy.copy(settings), chunk.module)
                for chunk in first.chunks
            ]
            optimizer = get_megatron_optimizer(copy.copy(first.optimizer.config), chunks)
            self.models[name] = dataclasses.replace(first, chunks=chunks, optimizer=optimizer)
        self._train(*names)

    def swap(self, name: str) -> None:
        """Put a tenant's adapter into the model, and take the other one out."""
        for module, attribute, own in self._places:
            module._parameters[attribute] = own[name]

    def _train(self, *names: str) -> None:
        for _, _, own in self._places:
            for name, parameter in own.items():
                parameter.requires_grad_(name in names)

    def _add_adapters(self, module: Any) -> None:
        chunk = SimpleNamespace(module=module)
        spread(chunk, self._host.layout)
        module.requires_grad_(False)
        places = {
            id(parameter): (each, attribute)
            for each in module.modules()
            for attribute, parameter in each._parameters.items()
        }
        # All in the model, as those of LoRA are, whichever is used.
        adapters = {name: nn.ParameterDict() for name in self._names}
        for part in list(parts(chunk, self._host.layout)):
            if in_adapter(part.name):
                own = {}
                for number, name in enumerate(self._names):
                    own[name] = nn.Parameter(part.value.detach() * (1 + number / 2))
                    vars(own[name]).update(vars(part.value))  # how ranks share it
                    adapters[name][part.name.replace(".", "/")] = own[name]
                self._places.append((*places[id(part.value)], own))
        module.adapters = nn.ModuleDict(adapters)
        self._train(self._names[0])
        self.swap(self._names[0])


class Tenant(OverBase):
    """Holds the adapter of one tenant, with its own optimizer state; `known` is base and adapter.

    Example: `Tenant(bench, base, "alice").take(calls)`.
    """

    def __init__(self, host: Bench, base: Base, name: str) -> None:
        """Take the adapter that the host's returns for this tenant, and build it."""
        self._base, self._name, self._is_open = base, name, False
        self._whose_step = f"a step of {name}"
        made: Any = host.adapter
        super().__init__(host, made.tenant(name), in_adapter)

    def make_model(self) -> None:
        """Take the tenant's part of the base."""
        self.model = self._base.models[self._name]
        self.replica = self._host.replica

        def adapted(chunk: Any, rows: Rows) -> Tensor:
            self._base.swap(self._name)
            return forward(chunk, rows)

        self.subject = self.subject_of(self.model, adapted)

    def begin(self, calls_of: Calls) -> None:
        """Begin a step of these calls, of which each `microbatch` makes one."""
        self._calls_of, self._rest = calls_of, list(calls_of(self.replica))
        self.adapter.begin()
        self._is_open = True

    def microbatch(self) -> None:
        """Make the next call of the step."""
        self.adapter.microbatch(self._rest.pop(0))

    def finish(self) -> None:
        """Finish the step, and hold it to its definition."""
        finished = self.checked(self.adapter.finish())
        self._is_open = False
        replicas = range(self.layout.replicas)
        self.expect(finished, [rows for each in replicas for rows in self._calls_of(each)])

    def abort(self) -> None:
        """Abort the step, if one is open."""
        if self._is_open:
            self._is_open = False
            self.adapter.abort()

    def _truth(self, everybody: Sequence[Rows]) -> Truth:
        truth = super()._truth(everybody)
        gradient = {
            name: value if in_adapter(name) else torch.zeros_like(value)
            for name, value in truth.gradient.items()
        }
        return self._narrowed(truth, gradient)

    def _own_parts(self, **which: Any) -> list[ParameterPart]:
        self._base.swap(self._name)
        found = super()._own_parts(**which)
        return [part for part in found if not part.name.startswith("adapters.")]
