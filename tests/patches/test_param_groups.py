"""Parameter groups that differ in their rates keep them when an optimizer is loaded."""

import pytest
from ranks import RELEASE, built, on_ranks

if not (0, 16) <= RELEASE < (0, 19):
    pytest.skip(
        "rates are in the keys of groups, or no group differs in them", allow_module_level=True
    )


@pytest.mark.parametrize("distributed", [True, False])
@pytest.mark.parametrize("lr", [1.0, 0.5], ids=["as it was", "resumed with another rate"])
@on_ranks(2)
def test_each_group_has_its_saved_rate(distributed, lr):
    """Into groups of other rates too, which are found by their order."""
    import torch

    def made(lr):
        rates = {"lr": lr, "min_lr": 0.0, "decoupled_lr": 0.25}
        model = built(optimizer_overrides=rates, distributed_optimizer=distributed, dtype="bf16")
        model.train_step(1, data_seed=0)
        (optimizer,) = model.optimizer.chained_optimizers
        return optimizer

    def rates(optimizer):
        return [group["max_lr"] for group in optimizer.optimizer.param_groups]

    saved, live = made(1.0), made(lr)
    expected, state = rates(saved), saved.state_dict()
    assert sorted(expected) == [0.25, 1.0, 1.0]
    groups = [dict(group) for group in state["optimizer"]["param_groups"]]
    with torch.no_grad():
        live.load_state_dict(state)
    assert rates(live) == expected
    assert state["optimizer"]["param_groups"] == groups  # the caller's, as they were
    assert not [name for group in live.optimizer.param_groups for name in group if name[0] == "_"]
