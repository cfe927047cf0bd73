"""Parameter groups that differ only in their learning rates have the same rates after a load.

Symptom:
    With `--decoupled-lr`, or overrides of `max_lr` or `min_lr` for some parameters, a run that
    loads an optimizer continues with the rates of one group in all groups, until its end, because
    the scheduler reads the rates in the groups. Building the state dict to load into is enough. No
    error.

Cause:
    A load finds each group's saved state by `param_group_identifier_keys`, which do not include the
    rates: of several saved groups with equal keys it takes the last one.

Affects:
    0.16 to 0.18; before 0.16 decoupled rates have their own key. What the patch does: groups with
    equal keys are matched by their rates. If a run resumes with changed rates, they are matched by
    their order.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/pull/4705

Remove when:
    no release before 0.19 is supported.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from ._case import Fault, Original, Patch, a_body_has, bench, target

_INDEX = "_megatron_idempotent_index"
_RATES = ("max_lr", "min_lr")
Groups = list[dict[str, Any]]


def load_state_dict(original: Original, self: Any, state_dict: dict[str, Any]) -> None:
    """Wrap the distributed optimizer's load: match parameter groups by learning rates, too."""
    saved = [dict(group) for group in state_dict["optimizer"]["param_groups"]]
    inner = {**state_dict["optimizer"], "param_groups": saved}
    try:
        with _matched(self.optimizer.param_groups, saved):
            original(self, {**state_dict, "optimizer": inner})
    finally:
        for group in self.optimizer.param_groups:  # a load replaces the dictionaries
            group.pop(_INDEX, None)


def reorder(original: Original, current_groups: Groups, state_dict_groups: Groups) -> Groups:
    """Wrap the matching of parameter groups in other optimizers: compare learning rates, too."""
    saved = [dict(group) for group in state_dict_groups]
    with _matched(current_groups, saved):
        groups = original(current_groups, saved)
    return [{name: value for name, value in group.items() if name != _INDEX} for group in groups]


@contextmanager
def _matched(current: Groups, saved: Groups) -> Iterator[None]:
    """Let upstream match parameter groups by an index stored in each group, in the `with` block.
    A current group gets the index of a saved group with the same keys and learning rates or, if
    there is none, with the same keys.
    """
    from megatron.core.optimizer import distrib_optimizer, optimizer

    keys = optimizer.param_group_identifier_keys
    unmatched = list(enumerate(saved))
    for compared in ((*keys, *_RATES), keys):
        for group in current:
            if _INDEX not in group:
                values = _values(group, compared)
                match = next((p for p in unmatched if _values(p[1], compared) == values), None)
                if match is not None:
                    group[_INDEX], _ = match
                    unmatched.remove(match)
    for index, group in enumerate(saved):
        group[_INDEX] = index
    modules = (optimizer, distrib_optimizer)
    # If a group has no counterpart, upstream raises.
    all_matched = all(_INDEX in group for group in current)
    for module in modules if all_matched else ():
        module.param_group_identifier_keys = (*keys, _INDEX)
    try:
        yield
    finally:
        for module in modules:
            module.param_group_identifier_keys = keys
        for group in (*current, *saved):
            group.pop(_INDEX, None)


def _values(group: dict[str, Any], keys: tuple[str, ...]) -> list[Any]:
    # NeMo adds a prefix to some names.
    return [group.get(key, group.get(f"pre_{key}")) for key in keys]


def reproduce() -> None:
    """Load an optimizer's own state, whose groups have different learning rates.
    On stock Megatron groups have the rates of another group afterwards.
    """
    model = bench(optimizer_overrides={"lr": 1.0, "min_lr": 0.0, "decoupled_lr": 0.25})
    model.train_step(1, data_seed=0)
    (optimizer,) = model.optimizer.chained_optimizers

    def rates() -> list[float]:
        return [group["max_lr"] for group in optimizer.optimizer.param_groups]

    saved_rates = rates()
    optimizer.load_state_dict(optimizer.state_dict())
    if rates() != saved_rates:
        raise Fault(f"groups with rates {saved_rates} have {rates()} after a load of their own")


PATCH = Patch(
    "parameter groups that differ in their rates have the same ones after a load",
    target("distributed.load_state_dict", load_state_dict),
    target("any._filter_and_reorder_param_groups", reorder),
    since="0.16",
    before="0.19",
    # Before 0.16 decoupled rates are a key in `_get_param_groups`.
    came_with=(
        "megatron.core.optimizer:_get_param_groups",
        "combine_param_group_overrides(param_overrides_list)",
    ),
    # From the commit that made rates a part of the group's key.
    fixed_when=a_body_has("needed_groups.append(value)"),
)
