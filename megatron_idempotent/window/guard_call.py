"""One call of a schedule in which a failure on this rank stops nobody else."""

from __future__ import annotations

import contextlib
import functools
import traceback
from collections.abc import Callable, Iterator
from typing import Any

import torch
from megatron.core.pipeline_parallel import schedules
from megatron.core.utils import get_model_config

from .abort import abort_window
from .agreement import SessionPoisoned, describe, is_poisoned, poison
from .guard_layers import Layers
from .guard_owed import Debts, gather
from .guard_zeros import gradient_like, no_gradient, output_like, tensors_of
from .hold import set_for


class GuardedCall:
    """One call on this rank. `error` is what failed here, `failures` what did by global rank.

    `exchange` gets this rank's failure or None, at the end of the window, and returns all ranks'.
    `check` has gradients looked at for NaN before, where finalizing would do so.
    """

    def __init__(
        self,
        arguments: dict[str, Any],
        exchange: Callable[[str | None], dict[int, str]],
        *,
        check: bool = True,
    ) -> None:
        model = arguments["model"]
        self._arguments = arguments
        self._exchange = exchange
        self._check = check
        self._forward_only = arguments.get("forward_only", False)
        self.chunks = model if isinstance(model, list) else [model]
        self.config = get_model_config(self.chunks[0])
        if not self._forward_only and not all(hasattr(c, "bucket_groups") for c in self.chunks):
            raise ValueError(
                f"guarded_window() got {type(self.chunks[0]).__name__} to train: pass the chunks "
                "wrapped in megatron.core.distributed.DistributedDataParallel"
            )
        self.debts = Debts(self.chunks)
        self.error: BaseException | None = None
        self.failures: dict[int, str] = {}
        self._told: str | None = None
        self._settled = False
        self._layers = Layers(self.config, arguments)
        # From a failure in the model on, nothing is computed; after one in the loss, everything.
        self._skipping = False
        self._chunk_of: dict[int, tuple[Any, Any]] = {}

    def run(self, forward_backward_func: Callable[..., Any]) -> Any:
        """Call the schedule; what it returns.

        Raises:
            SessionPoisoned: a failure that cannot be carried, or a rank that did not arrive.
        """
        try:
            with self._installed():
                returned = forward_backward_func(**self._arguments)
                self.settle()
        except SessionPoisoned:
            raise
        except Exception as error:
            raise poison(f"a window was left by {describe(error)}") from error
        except BaseException as error:
            poison(f"a window was left by {describe(error)}")
            raise
        self.debts.learn(failed=self.error is not None)
        return returned

    @contextlib.contextmanager
    def _installed(self) -> Iterator[None]:
        """Put this window around the schedule's steps; all is back when it ends."""
        finalize = self.config.finalize_model_grads_func
        with contextlib.ExitStack() as stack:
            stack.enter_context(self.debts.watched())
            for name, step in (("forward_step", self._forward), ("backward_step", self._backward)):
                original = getattr(schedules, name)
                set_for(stack, schedules, name, functools.partial(step, original))
            if finalize is not None:
                finalize_all = functools.partial(self._finalize, finalize)
                set_for(stack, self.config, "finalize_model_grads_func", finalize_all)
            yield

    def settle(self) -> None:
        """Agree, once per window, whether any rank failed. A collective."""
        if self._settled:
            return
        self._settled = True
        if self.error is None and self._check and not self._forward_only:
            try:
                self.debts.check()
            except Exception as error:  # noqa: BLE001  told to all ranks, and raised on all
                self._fail(error, "gradient check")
        self.failures = self._exchange(self._told)

    def stop(self, optimizer: Any) -> None:
        """Drop what the window left, on all ranks alike.

        A first window's counts too: ranks that finished their backward would otherwise leave
        upstream's first batch, and then start their reductions in another order than the others.
        """
        if not self._forward_only:
            abort_window(self.chunks, optimizer)
        if self.error is not None:
            # The caller may go on while it holds the error; its frames hold the activations.
            traceback.clear_frames(self.error.__traceback__)

    def _forward(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        step, model, input_tensor = args[0], args[2], args[4]
        if not self._skipping:
            try:
                result = original(self._with_watched_loss(step), *args[1:], **kwargs)
            except Exception as error:  # noqa: BLE001  raised on all ranks at the window's end
                self._stop_timer("forward-compute")
                self._give_up(error, f"forward of {self._name(model, kwargs)}")
            else:
                self._remember(result[0], model)
                return result
        gather(model)
        self._clear_deferred()
        device = next(model.parameters()).device
        output = output_like(self._arguments, self.config, input_tensor, device)
        self._remember(output, model)
        return output, torch.tensor(0, dtype=torch.int)

    def _backward(
        self,
        original: Callable[..., Any],
        input_tensor: Any,
        output_tensor: Any,
        *args: Any,
        **kw: Any,
    ) -> Any:
        _, chunk = self._chunk_of.pop(id(_single(output_tensor)))
        if not self._skipping:
            try:
                with self.debts.backward(chunk):
                    return original(input_tensor, output_tensor, *args, **kw)
            except Exception as error:  # noqa: BLE001  raised on all ranks at the window's end
                self._stop_timer("backward-compute")
                self._give_up(error, f"backward of {self._name(chunk, {})}")
        self.debts.reduce(chunk)
        self._clear_deferred()
        return gradient_like(input_tensor)

    def _finalize(self, original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.settle()
        if not self.failures:
            return original(*args, **kwargs)
        return None

    def _with_watched_loss(self, step: Callable[..., Any]) -> Callable[..., Any]:
        def forward_step(*args: Any, **kwargs: Any) -> tuple[Any, Any]:
            output, loss_func = step(*args, **kwargs)
            if loss_func is None:
                return output, None

            def loss(*loss_args: Any, **loss_kwargs: Any) -> Any:
                try:
                    return loss_func(*loss_args, **loss_kwargs)
                except Exception as error:
                    if not tensors_of(output):
                        raise  # there is nothing to send zeros through
                    self._fail(error, "loss")
                    return no_gradient(output), {}

            return output, loss

        return forward_step

    def _give_up(self, error: Exception, where: str) -> None:
        """Compute nothing more in this window, or end the session where others depend on it."""
        self._fail(error, where)
        if is_poisoned():
            raise poison(f"{where}: {describe(error)}") from error
        self._layers.require_that_nobody_waits(error, where)
        self._skipping = True

    def _fail(self, error: BaseException, where: str) -> None:
        if self.error is None:
            self.error, self._told = error, f"{where}: {describe(error)}"

    def _remember(self, output: Any, model: Any) -> None:
        if self._forward_only:
            return
        single = _single(output)
        # The tensor is kept, so that its id stays its own.
        self._chunk_of[id(single)] = (single, model)

    def _name(self, model: Any, kwargs: dict[str, Any]) -> str:
        name = f"chunk {self.chunks.index(model)}" if len(self.chunks) > 1 else "the model"
        microbatch = kwargs.get("current_microbatch")
        return name if microbatch is None else f"{name}, microbatch {microbatch}"

    def _stop_timer(self, name: str) -> None:
        if self.config.timers is not None:
            timer = self.config.timers(name, log_level=2)
            if getattr(timer, "_started", False):
                timer.stop()

    def _clear_deferred(self) -> None:
        """Empty the lists that the schedule drains at its end and expects to be equally long."""
        if not self.config.defer_embedding_wgrad_compute:
            return
        for chunk in self.chunks:
            for module in chunk.modules():
                for name in ("embedding_activation_buffer", "grad_output_buffer"):
                    if getattr(module, name, None):
                        getattr(module, name).clear()


def _single(output: Any) -> Any:
    return output[0] if isinstance(output, list) else output
