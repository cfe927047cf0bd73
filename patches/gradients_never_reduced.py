"""Without `config.finalize_model_grads_func` gradients are never reduced, without an error.

Symptom:
    In a program with its own training loop every data-parallel rank steps on its own gradients, and
    the replicas drift apart. No error, with or without overlap_grad_reduce; the loss still goes
    down. With overlap from the second window on: `Should not have multiple communication calls
    outstanding at once`.

Cause:
    The pipeline schedules call `config.finalize_model_grads_func` after the last microbatch if it
    is set. Only `megatron.training.training.train` sets it, and the default is None.

Affects:
    Every release. What to do: call `wire_train_config(model_chunks, optimizer)` once the model and
    the optimizer are built; it sets this function and the others that the schedules need. To check
    a program for the hazard, run it once with `MEGATRON_IDEMPOTENT_CHECK=1`.

Upstream:
    https://github.com/NVIDIA/Megatron-LM/blob/core_v0.19.0/megatron/core/model_parallel_config.py,
    `finalize_model_grads_func`. https://github.com/NVIDIA-NeMo/Megatron-Bridge/pull/6067 reports it
    for a provider that copies its config: the schedule then finds no `finalize_model_grads_func`.

Remove when:
    DDP sets the function on the configs of the models that it wraps.
"""

from __future__ import annotations

from ._case import Fault, Helper, bench, gathered


def reproduce(*, helped: bool) -> None:
    """Run a window of a program that sets no functions, such as `no_sync_func`, on the config.
    The window's gradients are not reduced. With `helped` the program calls `wire_train_config`,
    which sets the functions.
    """
    _one_window(helped, wire=False)


def control(*, helped: bool) -> bytes:
    """Run a window of a program that sets all functions itself, as a control.
    Return the gradients' bytes.
    """
    return _one_window(helped, wire=True)


def _one_window(helped: bool, *, wire: bool) -> bytes:
    from megatron_idempotent import wire_train_config

    model = bench(
        overlap_grad_reduce=False, distributed_optimizer=False, with_optimizer=False, wire=wire
    )
    if helped:
        wire_train_config(model.chunks)
    model.forward_backward(2, data_seed=0)
    gradients = model.gradients().cuda()
    if not all(gradients.equal(peer) for peer in gathered(gradients)):
        raise Fault("gradients differ between data-parallel ranks")
    bits: bytes = gradients.cpu().numpy().tobytes()
    return bits


HELPER = Helper(
    summary="without config.finalize_model_grads_func gradients are never reduced, silently",
    call="wire_train_config",
    loudness="both",
)
