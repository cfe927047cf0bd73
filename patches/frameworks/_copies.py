"""Holds wrappers for frameworks' copies of Megatron's `train()` and wiring.

The module also tells whether a framework cleans up after an exception by itself. The case files of
the wrappers list the statements that a wrapper relies on, not reviewed bodies: the code around
these statements changes with every release, and many frameworks run from a checkout without a
version.
"""

from __future__ import annotations

import ast
import gc
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from megatron_idempotent.megatron.ddp import is_no_sync_of
from megatron_idempotent.megatron.targets import target
from megatron_idempotent.patching import Original, Target, arguments

if TYPE_CHECKING:
    from megatron_idempotent.patching.source import Body


def forget_no_sync(config: Any, chunks: Sequence[Any]) -> None:
    """Set `config.no_sync_func` to None if it consists of these chunks' bound `no_sync` methods."""
    if is_no_sync_of(config.no_sync_func, chunks):
        config.no_sync_func = None


def is_megatrons_no_sync(installed: Any) -> bool:
    """Return whether a `no_sync_func` is the method `no_sync` of a model wrapper such as DDP.
    It may also be a list of such methods, one per chunk. The wrappers may be those of any model.
    """
    from megatron.core.distributed.data_parallel_base import _BaseDataParallel

    functions = installed if isinstance(installed, (list, tuple)) else [installed]
    return all(
        isinstance(getattr(function, "__self__", None), _BaseDataParallel)
        and function.__name__ == "no_sync"
        for function in functions
    )


def restoring(
    original: Original,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    config: Any,
    param_sync_func: Any,
) -> Any:
    """Call `original`; then restore `config.param_sync_func` and the garbage collector's state.
    Both are restored even if `original` raises.

    If `config.param_sync_func` is None afterwards, it becomes `param_sync_func`. Python's garbage
    collector is turned on again if it was on.
    """
    was_on = gc.isenabled()
    try:
        return original(*args, **kwargs)
    finally:
        if config.param_sync_func is None:
            config.param_sync_func = param_sync_func
        if was_on:
            gc.enable()


def rollout(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Run slime's or miles' `train` in such a way that a worker can call it again.
    First clear the `no_sync_func` of an earlier call; afterwards restore `param_sync_func` and the
    garbage collector.
    """
    from megatron.core.utils import get_model_config
    from megatron.training.global_vars import get_args

    chunks, options = arguments(original, args, kwargs)["model"], get_args()
    config = get_model_config(chunks[0])
    forget_no_sync(config, chunks)
    sync_func = config.param_sync_func
    if options.overlap_param_gather and options.align_param_gather:
        functions = [chunk.start_param_sync for chunk in chunks]
        sync_func = functions[0] if len(functions) == 1 else functions
    return restoring(original, args, kwargs, config=config, param_sync_func=sync_func)


def rollout_target(module: str) -> Target:
    """Return the `Target` that wraps slime's or miles' `train` in `module` with `rollout`."""
    return target(
        f"{module}:train",
        rollout,
        "config = get_model_config(model[0])",
        "config.no_sync_func = [model_chunk.no_sync for model_chunk in model]",
        "config.param_sync_func = [model_chunk.start_param_sync for model_chunk in model]",
        "config.param_sync_func = None",
    )


def rollout_is_repaired(bodies: Mapping[str, Body]) -> bool:
    """Return whether a second call of the framework's `train` works without this patch.
    It works if `train` does not check that `config.no_sync_func`, which the first call has set, is
    None, and if `train` turns the garbage collector on again.
    """
    return all(
        body.contains("gc.enable()") and not body.contains("config.no_sync_func is None")
        for body in bodies.values()
    )


def cleans_up(
    cleanup: str = "", *, protected: str = "", in_handler: bool = False
) -> Callable[[Mapping[str, Body]], bool]:
    """Return a function for `Patch.fixed_when`: True if all wrapped functions clean up on errors.
    A function cleans up if its body contains a `try` statement with a `finally`.

    Args:
        cleanup: a statement that the `finally` must have; empty for any.
        protected: a statement that the `try` must have; empty for any.
        in_handler: True to look for `cleanup` in the `except` clauses instead of the `finally`.
    """

    def cleanup_of(node: ast.Try) -> list[ast.stmt]:
        in_handlers = [line for handler in node.handlers for line in handler.body]
        return in_handlers if in_handler else node.finalbody

    def has_cleanup(body: Body) -> bool:
        return any(
            isinstance(node, ast.Try)
            and _has(cleanup_of(node), cleanup)
            and _has(node.body, protected)
            for node in ast.walk(body.tree)
        )

    return lambda bodies: all(map(has_cleanup, bodies.values()))


def _has(statements: Sequence[ast.stmt], statement: str) -> bool:
    """Return whether `statement`, a text, is one of `statements`; for an empty text, whether there
    are any statements.
    """
    return statement in map(ast.unparse, statements) if statement else bool(statements)
