"""Parameter groups that differ only in their learning rates have the same ones after a load.

Symptom:
    With `--decoupled-lr`, or overrides of `max_lr` or `min_lr` for some parameters, a run that
    loads an optimizer goes on with the rates of one group in all of them, until its end: the
    scheduler reads them in the groups. Building the state dict to load into is enough. No error.

Cause:
    A load finds each group's saved one by `param_group_identifier_keys`, in which rates are not:
    of several saved groups with equal keys the last one is taken.

Affects:
    0.16 to 0.18; before, decoupled rates have a key of their own. What the patch does: groups with
    equal keys are told apart by their rates. Where a run is resumed with other rates, they are
    paired in their order.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/pull/4705

Remove when:
    No release before 0.19 is supported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ._case import Fault, Original, Patch, a_body_has, bench, target

_PLACE = "_megatron_idempotent_place"
_RATES = ("max_lr", "min_lr")
Groups = list[dict[str, Any]]


def load_state_dict(original: Original, self: Any, state_dict: dict[str, Any]) -> None:
    """Mark which of the saved groups is whose, and let the distributed optimizer load them."""
    saved = [dict(group) for group in state_dict["optimizer"]["param_groups"]]
    inner = {**state_dict["optimizer"], "param_groups": saved}
    try:
        with _told_apart(self.optimizer.param_groups, saved):
            original(self, {**state_dict, "optimizer": inner})
    finally:
        for group in self.optimizer.param_groups:  # after a load they are other dictionaries
            group.pop(_PLACE, None)


def reorder(original: Original, current_groups: Groups, state_dict_groups: Groups) -> Groups:
    """Mark which of the saved groups is whose, and let other optimizers order them."""
    saved = [dict(group) for group in state_dict_groups]
    with _told_apart(current_groups, saved):
        found = original(current_groups, saved)
    return [{name: value for name, value in each.items() if name != _PLACE} for each in found]


@contextmanager
def _told_apart(current: Groups, saved: Groups) -> Iterator[None]:
    """Give groups that belong together the same place, by which upstream finds them."""
    from megatron.core.optimizer import distrib_optimizer, optimizer

    keys = optimizer.param_group_identifier_keys
    left = list(enumerate(saved))
    for only in ((*keys, *_RATES), keys):
        for group in current:
            if _PLACE not in group:
                named = _named(group, only)
                mine = next((each for each in left if _named(each[1], only) == named), None)
                if mine is not None:
                    group[_PLACE], _ = mine
                    left.remove(mine)
    for place, group in enumerate(saved):
        group[_PLACE] = place
    modules = (optimizer, distrib_optimizer)
    # Groups without a counterpart are left to upstream, which raises.
    whole = all(_PLACE in group for group in current)
    for module in modules if whole else ():
        module.param_group_identifier_keys = (*keys, _PLACE)
    try:
        yield
    finally:
        for module in modules:
            module.param_group_identifier_keys = keys
        for group in (*current, *saved):
            group.pop(_PLACE, None)


def _named(group: dict[str, Any], keys: tuple[str, ...]) -> list[Any]:
    # NeMo calls some of them by other names.
    return [group.get(key, group.get(f"pre_{key}")) for key in keys]


def reproduce() -> None:
    """Load an optimizer's own state: the rates of its groups have to stay."""
    model = bench(optimizer_overrides={"lr": 1.0, "min_lr": 0.0, "decoupled_lr": 0.25})
    model.train_step(1, data_seed=0)
    (optimizer,) = model.optimizer.chained_optimizers

    def rates() -> list[float]:
        return [group["max_lr"] for group in optimizer.optimizer.param_groups]

    before = rates()
    optimizer.load_state_dict(optimizer.state_dict())
    if rates() != before:
        raise Fault(f"groups with rates {before} have {rates()} after a load of their own")


PATCH = Patch(
    "parameter groups that differ in their rates have the same ones after a load",
    target("distributed.load_state_dict", load_state_dict),
    target("any._filter_and_reorder_param_groups", reorder),
    since="0.16",
    before="0.19",
    # Before, decoupled rates are a key of `_get_param_groups`.
    came_with=(
        "megatron.core.optimizer:_get_param_groups",
        "combine_param_group_overrides(param_overrides_list)",
    ),
    # The commit that made rates a part of what identifies a group writes it so.
    fixed_when=a_body_has("needed_groups.append(value)"),
)
