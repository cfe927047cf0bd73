"""Holds functions that case files about saving and loading share."""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

from ._case import Fault, Original

if TYPE_CHECKING:
    from megatron_idempotent.patching.source import Body

NOT_SAVED = "Assume that nothing was saved: the checkpoint before is the last one."
UNCHANGED = "Nothing was loaded on any rank."
PART = "Ranks may have loaded only a part: load a complete checkpoint before the next step."


def save(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wrap a checkpoint save: if one rank raises, raise on all ranks.
    Otherwise the other ranks would wait for it in a collective.
    """
    from megatron_idempotent.window import agreement

    with agreement.as_one_at_barriers(NOT_SAVED):
        return original(*args, **kwargs)


def load(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Wrap a checkpoint load: if one rank raises, raise on all ranks.
    Otherwise the other ranks would wait for it in a collective.
    """
    from megatron_idempotent.window import agreement

    with agreement.as_one_at_barriers(PART):
        return original(*args, **kwargs)


def reports_failures(body: Body, function: str) -> bool:
    """Tell if each call of a function in a body stands where its failure can be reported to others.
    That is a `try` with an `except`, or a `with` whose context manager is named after ranks, errors
    or failures. The body has to call the function at least once.
    """

    def calls(nodes: Iterable[ast.AST]) -> set[ast.AST]:
        return {
            node
            for root in nodes
            for node in ast.walk(root)
            if isinstance(node, ast.Call) and f".{ast.unparse(node.func)}".endswith(f".{function}")
        }

    def reports(node: ast.With | ast.Try) -> bool:
        if isinstance(node, ast.With):
            managers = [ast.unparse(item.context_expr) for item in node.items]
            return any(word in text for text in managers for word in ("rank", "error", "fail"))
        return bool(node.handlers)

    blocks = [node for node in body.nodes if isinstance(node, (ast.With, ast.Try))]
    reported = [calls(node.body) for node in blocks if reports(node)]
    return bool(reported) and calls([body.tree]) == set().union(*reported)


def look_at_files(reader: Any, items: Iterable[Any]) -> None:
    """Raise if a file with one of the checkpoint's `items` cannot be opened, or is truncated.
    A file is truncated if it is shorter than the end of its last item.
    """
    ends: dict[str, int] = {}
    for stored in items:
        end = stored.offset + stored.length
        ends[stored.relative_path] = max(end, ends.get(stored.relative_path, 0))
    for name, end in ends.items():
        path = reader.fs.concat_path(reader.path, name)
        with reader.fs.create_stream(path, "rb") as stream:
            length = stream.seek(0, 2)
        if length < end:
            raise ValueError(f"{path} has {length} bytes, and {end} were saved: it is truncated")


def expect_told(load: Callable[[], object]) -> None:
    """Call `load` while rank 1 cannot open files; raise a `Fault` if only one of two ranks raises.
    On stock Megatron rank 0 waits for rank 1 in a collective.
    """
    import resource

    import torch
    from torch.distributed.checkpoint.api import CheckpointException  # which is no Exception

    rank, failures, failed = torch.distributed.get_rank(), [False, False], False
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (3 if rank else limits[0], limits[1]))
    try:
        load()
    except (Exception, CheckpointException):  # noqa: BLE001  each kind is a result
        failed = True
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    if failed:  # without the patch the other rank waits for this load
        try:
            load()
        except (Exception, CheckpointException) as error:
            # Its first collective may have met a later one of the rank that waits.
            raise Fault(f"rank 1 could not load, and its next load failed, too: {error}") from error
    torch.distributed.all_gather_object(failures, failed)
    if failures[0] != failures[1]:
        raise Fault("rank 1 could not load, and rank 0 waited for it")


def loaded_over(weights: Iterable[Any], load: Callable[[], object]) -> list[bytes]:
    """Set `weights` to zero in place, call `load`, and return the weights' bytes in float32."""
    import torch

    weights = list(weights)
    with torch.no_grad():
        for weight in weights:
            weight.zero_()
        load()
    return [weight.detach().float().numpy().tobytes() for weight in weights]
