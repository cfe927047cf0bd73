"""The optimizer's next step undoes weights that were written into a live model.

Symptom:
    A weights-only load, an adapter's restore or a rollback copies weights into a model in training.
    Forwards use them. The next step restores the earlier weights, updated once. No error.

Cause:
    A 16-bit model's optimizer steps on main parameters in float32, or on the host, and writes them
    over the model. Megatron's `load_checkpoint` calls `reload_model_params()` for that; other code
    that copies weights has to call it itself. With the precision-aware optimizer of Transformer
    Engine that call silently does nothing.

Affects:
    Every release, with main parameters: fp16, bf16, `optimizer_cpu_offload`. No wrapper can repair
    it, because an optimizer does not see when a tensor is written. What to do: call
    `ensure_main_params_synced(optimizer)` after the write. `TrainStep` raises instead of finishing
    a step whose main parameters do not round to the model's. The precision-aware optimizer was
    tested on the host only: on the device it needs Transformer Engine. There its float32 main
    parameters are updated; with `store_param_remainders` no update is needed, up to a 16-bit
    rounding.

Upstream:
    https://github.com/NovaSky-AI/SkyRL/pull/2149; https://github.com/radixark/miles/pull/2572.

Remove when:
    upstream has a call that updates all main parameters, and does not step on outdated ones.
"""

from __future__ import annotations

from typing import Any

from ._case import Fault, Helper, bench


def reproduce(*, helped: bool) -> None:
    """Write earlier weights into a model, and step with a learning rate of 0.
    The step restores the later weights; with `helped`, `ensure_main_params_synced` prevents this.
    """
    from megatron_idempotent import ensure_main_params_synced

    model = _stepped()
    if helped:
        ensure_main_params_synced(model.optimizer)
    _expect_kept(model)


def control(*, helped: bool) -> bytes:
    """Write earlier weights, call `reload_model_params()`, and train, as a control.
    With `helped` it calls `ensure_main_params_synced` twice instead. Return the parameters' bytes.
    """
    from megatron_idempotent import ensure_main_params_synced

    model = _stepped()
    if helped:
        ensure_main_params_synced(model.optimizer)
        ensure_main_params_synced(model.optimizer)
    else:
        model.optimizer.reload_model_params()
    _expect_kept(model)
    for group in model.optimizer.param_groups:
        group["lr"] = 0.5
    return _advance(model)


def _stepped() -> Any:
    """Return a model after one step, with the weights from before the step written back into it.
    The learning rate is then set to 0.
    """
    import torch

    model = bench(dtype="bf16", optimizer_overrides={"lr": 0.5, "weight_decay": 0.0})
    saved = [parameter.detach().clone() for parameter in model.chunks[0].parameters()]
    _advance(model)
    with torch.no_grad():
        for parameter, value in zip(model.chunks[0].parameters(), saved, strict=True):
            parameter.copy_(value)
    for group in model.optimizer.param_groups:
        group["lr"] = 0.0
    return model


def _advance(model: Any) -> bytes:
    model.train_step(1, data_seed=0)
    bits: bytes = model.bits()
    return bits


def _expect_kept(model: Any) -> None:
    """Raise a `Fault` if a step with a learning rate of 0 changes the weights."""
    bits_before = model.bits()
    if _advance(model) != bits_before:
        raise Fault("a step with a learning rate of 0 has changed the weights")


HELPER = Helper(
    summary="weights written into a live 16-bit model are undone by the next step",
    call="ensure_main_params_synced",
)
