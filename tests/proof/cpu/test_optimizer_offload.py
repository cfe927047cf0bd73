"""Megatron's optimizer on the host (`--optimizer-cpu-offload`) steps as on the device."""

from __future__ import annotations

from typing import Any

from ranks import on_ranks

#: (fraction of the parameters on the host, copies overlap, precision-aware optimizer)
KINDS = [
    *((fraction, overlap, False) for fraction in (0.0, 0.5, 1.0) for overlap in (False, True)),
    *((fraction, True, True) for fraction in (0.0, 0.5, 1.0)),
]


def trained(overrides: dict[str, Any]) -> tuple[Any, list[float], float]:
    """Run three steps; return parameters, gradient norms and the elements stepped on the host."""
    from megatron_idempotent.proof.cpu import tiny

    model = tiny.build(dtype="bf16", optimizer_overrides=overrides)
    norms = []
    for seed in range(3):
        model.forward_backward(2, data_seed=seed)
        norms.append(model.step()[1])
    inner = model.optimizer.chained_optimizers[0].optimizer
    stepped = [
        each
        for one in getattr(inner, "sub_optimizers", [inner])
        for group in one.param_groups
        for each in group["params"]
    ]
    # Moments are where their parameter is; a copy on the host does not share its memory.
    for one in getattr(inner, "sub_optimizers", ()):
        for each, state in one.state.items():
            assert {state[name].is_cuda for name in ("exp_avg", "exp_avg_sq")} == {each.is_cuda}
            owner = inner.inner_param_to_orig_param[each]
            assert owner.is_cuda
            assert each.is_cuda or each.data_ptr() != owner.data_ptr()
    host = sum(each.numel() for each in stepped if not each.is_cuda)
    return model.parameters(), norms, host / sum(each.numel() for each in stepped)


@on_ranks(2)
def test_an_optimizer_on_the_host_computes_what_it_does_on_the_device() -> None:
    import torch

    want = None  # that of fraction 0: an optimizer that is not hybrid has not torch's fused Adam
    for fraction, overlap, precise in KINDS:
        found = trained(
            {
                "optimizer_cpu_offload": True,
                "optimizer_offload_fraction": fraction,
                "overlap_cpu_optimizer_d2h_h2d": overlap,
                "use_precision_aware_optimizer": precise,
            }
        )
        want = want or found
        assert torch.equal(found[0], want[0]), (fraction, overlap, precise)
        assert found[1] == want[1]
        # Whole parameters go there, until there are enough of them.
        assert fraction <= found[2] <= (fraction + 0.2 if 0 < fraction < 1 else fraction)
