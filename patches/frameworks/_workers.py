"""Runs a framework's own worker around a small model, for reproductions.

The worker's methods are the framework's, from the module on the path. They are called on a stand-in
that has the attributes that they read. Its model is a tiny GPT of `cpu.tiny`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any

from megatron_idempotent.patches._case import Broken, Fault

from ._standins import Off

#: The microbatches of a window.
MICROBATCHES = 4
#: Sites at which a microbatch can fail: before its forward, in its loss function, in its backward.
SITES = ("data", "loss", "backward")


class Windows:
    """Holds a tiny model and its data, and can let one microbatch of a training window raise.
    `fail` says which microbatch, and where: when its data are read, in its loss or its backward.

    Args:
        layout: arguments of `cpu.tiny.build`.
    """

    def __init__(self, **layout: Any) -> None:
        from megatron_idempotent.proof.cpu import tiny

        self.bench = tiny.build(**layout)
        self.losses: list[float] = []
        """The loss of every microbatch, over all windows."""
        self.fail: tuple[str, int] | None = None
        """One of `SITES`, and the number of the microbatch that fails there, from 0 on; or None."""
        self._read = 0

    def batches(self, seed: int) -> list[dict[str, Any]]:
        """Return this data-parallel rank's `MICROBATCHES` microbatches, drawn with `seed`."""
        from megatron_idempotent.proof.cpu import tiny

        _, positions_BT, hidden = tiny.inputs(seed)
        tokens = itertools.islice(tiny.microbatches(seed), MICROBATCHES)
        return [
            {"tokens": tokens_BT, "positions": positions_BT, "mask": hidden} for tokens_BT in tokens
        ]

    def reading(self, batches: list[Any]) -> Iterator[Any]:
        """Yield the batches one by one; raise `Broken` before the batch that `fail` names."""
        for batch in batches:
            self._break("data")
            yield batch

    def loss(self, logits_BTV: Any, tokens_BT: Any) -> Any:
        """Return the targets' mean negative log-prob; raise `Broken` if `fail` names the loss.
        If `fail` names the backward, the backward of the result raises.
        """
        self._break("loss")
        loss = -target_logprobs(logits_BTV, tokens_BT).mean()
        self.losses.append(float(loss))
        if self._fails("backward") and loss.requires_grad:
            loss.register_hook(_broken)
        self._read += 1
        return loss

    def forward_step(self, data: Any, model: Any, **_: Any) -> tuple[Any, Any]:
        """Return the logits of the next microbatch of `data`, and its loss function."""
        row = next(data)
        logits_BTV = model(row["tokens"], row["positions"], row["mask"])
        return logits_BTV, lambda output: (self.loss(output, row["tokens"]), {})

    def measured(self, logits_BTV: Any, target_BT: Any) -> tuple[Any, Any]:
        """Return the loss (`self.loss`) of logits [B, T, V], and the targets' log-probs [B, T - 1].
        Stand-ins return both to the framework in place of what it would compute itself.
        """
        return self.loss(logits_BTV, target_BT), target_logprobs(logits_BTV, target_BT)[:, :-1]

    def failing(self, site: tuple[str, int], call: Callable[[], Any]) -> None:
        """Run `call()` so that it fails at `site`, a (point, microbatch) pair, and catch the error.
        Forget the losses that the call has recorded. Raise `AssertionError` if nothing failed.

        All ranks call it at once: a rank that fails alone leaves the others waiting for it.
        """
        number = len(self.losses)
        self.fail, self._read = site, 0
        try:
            call()
        except Broken:
            del self.losses[number:]
            return
        finally:
            self.fail = None
        raise AssertionError(f"nothing failed at {site}")

    def outcome(self) -> tuple[list[float], bytes]:
        """Return the losses recorded so far, and the bytes of this rank's parameters.
        With overlap_param_gather, first gather the parameters.
        """
        for chunk in self.bench.chunks:
            if chunk.ddp_config.overlap_param_gather:
                chunk.start_param_sync(force_sync=True)
        return self.losses, self.bench.bits()

    def expect_no_gradients(self) -> None:
        """Raise a `Fault` if any gradient is not zero, after a window that raised."""
        for chunk in self.bench.chunks:
            if any(bool(buffer.grad_data.any()) for buffer in chunk.buffers):
                raise Fault("the gradients of a window that raised are not zero")

    def _break(self, site: str) -> None:
        if self._fails(site):
            raise Broken(f"a microbatch that fails: {site}")

    def _fails(self, site: str) -> bool:
        return self.fail == (site, self._read)


def methods(*classes: type, **attributes: Any) -> Any:
    """Create an object with the methods of several framework classes, without their constructors.
    A method of a later class overrides the method of this name in an earlier one.

    An attribute that is not passed is None.
    """
    members = {
        name: value
        for framework_class in classes
        for name, value in vars(framework_class).items()
        if not name.startswith("__")
    }
    return type(classes[-1].__name__, (Off,), members)(**attributes)


def target_logprobs(logits_BTV: Any, target_BT: Any) -> Any:
    """Return the log-probs [B, T] of target tokens, in float32."""
    logprobs_BTV = logits_BTV.float().log_softmax(-1)
    return logprobs_BTV.gather(-1, target_BT[..., None])[..., 0]


def weights_of(chunks: list[Any], **_: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, weight) for all parameters of `chunks`.
    It stands in for a bridge's method `export_hf_weights`.
    """
    for chunk in chunks:
        yield from chunk.module.named_parameters()


def _broken(_: Any) -> None:
    raise Broken("a microbatch that fails: backward")
