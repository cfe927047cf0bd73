"""Every place of a window, and of an optimizer step, at which an exception can be raised.

`Sites` puts a counter into all of them. A clean run tells how many there are; armed with a number
it raises there, on every rank alike, and nowhere else.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from typing import Any

FINALIZE = "megatron.core.distributed.finalize_model_grads"


class Interrupted(BaseException):
    """Raised at a site. Not an `Exception`, because a keyboard interrupt is none either."""


class Sites:
    """The sites that one model passes, in the order in which it passes them."""

    def __init__(self) -> None:
        self.passed: list[str] = []
        self.armed: int | None = None

    def hit(self, name: str) -> None:
        """This is a site."""
        here = len(self.passed)
        self.passed.append(name)
        if here == self.armed:
            raise Interrupted(f"site {here}, {name}")

    def interrupt(self, run: Callable[[], Any], at: int | None) -> BaseException | None:
        """Run, raising at site number `at`; return what was raised."""
        self.passed, self.armed = [], at
        try:
            run()
        except Interrupted as raised:
            return raised
        finally:
            self.armed = None
        return None

    def around(self, owner: Any, method: str) -> None:
        """Two sites: before and after each call of a method, on this object only."""
        original = getattr(owner, method, None)
        if original is None:  # not in this release
            return

        @functools.wraps(original)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self.hit(f"before {method}")
            result = original(*args, **kwargs)
            self.hit(f"after {method}")
            return result

        setattr(owner, method, counted)

    def in_window(self, model: Any) -> None:
        """All sites of forward, backward, reduction and finalization."""
        for chunk in model.chunks:
            for name, module in chunk.module.named_modules():
                module.register_forward_pre_hook(lambda *_, n=name: self.hit(f"forward of {n}"))
            for name, param in chunk.module.named_parameters():
                param.register_hook(lambda _, n=name: self.hit(f"gradient of {n}"))
                param.register_post_accumulate_grad_hook(
                    lambda _, n=name: self.hit(f"accumulated {n}")
                )
                # After DDP's own hook on the same node, which was there first.
                node = param.expand_as(param).grad_fn.next_functions[0][0]
                node.register_hook(lambda *_, n=name: self.hit(f"registered {n}"))
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                self._in_group(group)
        module = importlib.import_module(FINALIZE)
        for name in vars(module):
            if name.startswith(("_allreduce", "_update")):
                self.around(module, name)

    def _in_group(self, group: Any) -> None:
        for method in ("finish_grad_sync", "finish_param_sync"):
            self.around(group, method)
        start = group.start_grad_sync

        def started(*args: Any, **kwargs: Any) -> None:
            self.hit("before start_grad_sync")
            start(*args, **kwargs)
            if group.grad_reduce_handle is not None:
                group.grad_reduce_handle = _Handle(self, group.grad_reduce_handle)
            self.hit("after start_grad_sync")

        group.start_grad_sync = started

    def in_step(self, model: Any) -> None:
        """All stages of `optimizer.step()`."""
        optimizers = getattr(model.optimizer, "chained_optimizers", [model.optimizer])
        for optimizer in {id(o): o for o in (model.optimizer, *optimizers)}.values():
            for method in (
                "prepare_grads",
                "_copy_model_grads_to_main_grads",
                "_unscale_main_grads_and_check_for_nan",
                "get_grad_norm",
                "clip_grad_norm",
                "count_zeros",
                "step_with_ready_grads",
                "_copy_main_params_to_model_params",
            ):
                self.around(optimizer, method)
        for optimizer in optimizers:
            self.around(optimizer.optimizer, "step")
        for chunk in model.chunks:
            for group in (*chunk.bucket_groups, *chunk.expert_parallel_bucket_groups):
                self.around(group, "start_param_sync")


class _Handle:
    """A reduction in flight; waiting for it is a site."""

    def __init__(self, sites: Sites, handle: Any) -> None:
        self._sites, self._handle = sites, handle

    def wait(self) -> None:
        self._sites.hit("before the wait for a reduction")
        self._handle.wait()
        self._sites.hit("after the wait for a reduction")
