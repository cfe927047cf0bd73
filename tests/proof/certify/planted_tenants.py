"""Adapters whose steps over one base disturb each other, or the base."""

from __future__ import annotations

from typing import Any

import torch

from megatron_idempotent.proof.certify.adapters import SplitStep


class _Tenants(SplitStep):
    """Knows whether it trains a tenant's adapter; no bug yet."""

    def trained(self) -> list[Any]:
        return [
            each
            for chunk in self.subject.chunks
            for each in (chunk.param_to_bucket_group if self.name else ())
        ]


class NudgesTheBase(_Tenants):
    """Moves a frozen parameter by less than roundings can explain."""

    @torch.no_grad()
    def finish(self) -> Any:
        found = super().finish()
        if self.name:
            module = self.subject.chunks[0].module
            module.decoder.layers[0].mlp.linear_fc1.weight[0, 0] += 2.0**-40
        return found


class SharesMoments(_Tenants):
    """Has one state of the optimizer for all tenants."""

    shared: dict[int, Any] = {}  # noqa: RUF012

    def finish(self) -> Any:
        inner = self.subject.optimizer
        states = [one.optimizer.state for one in getattr(inner, "chained_optimizers", [inner])]
        for index, (state, each) in enumerate(
            (state, each) for state in states for each in self.trained()
        ):
            if index in self.shared:
                state[each] = self.shared[index]
        found = super().finish()
        for index, (state, each) in enumerate(
            (state, each) for state in states for each in self.trained()
        ):
            self.shared[index] = state[each]
        return found


class AbortsAll(_Tenants):
    """Drops the steps of all tenants with one."""

    all_of_them: list[Any] = []  # noqa: RUF012

    def build(self, subject: Any) -> None:
        super().build(subject)
        self.all_of_them.append(self)

    def abort(self) -> None:
        for each in self.all_of_them:
            each.step.abort()


class NoTenants(SplitStep):
    """Trains one set of parameters."""

    tenant = None  # type: ignore[assignment]
