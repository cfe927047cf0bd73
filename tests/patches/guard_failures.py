"""Make one rank fail at a chosen place of a window, and run windows under the guard."""

import contextlib
import functools
import itertools

DEADLINE_S = 20.0


class Broken(Exception):
    """The failing rank raises this."""


def guard(model, **options):
    """Have `model.forward_backward` go through guarded_window(), where it has a schedule's name."""
    from megatron.core import pipeline_parallel

    from megatron_idempotent.window.guard import guarded_window

    stock = pipeline_parallel.get_forward_backward_func
    stock = getattr(stock, "stock", stock)
    options = {"optimizer": model.optimizer, "deadline_s": DEADLINE_S, **options}

    def get(*args):
        return functools.partial(guarded_window, stock(*args), **options)

    get.stock = stock
    pipeline_parallel.get_forward_backward_func = get


def unguard():
    """The schedules as upstream has them again."""
    from megatron.core import pipeline_parallel

    get = pipeline_parallel.get_forward_backward_func
    pipeline_parallel.get_forward_backward_func = getattr(get, "stock", get)


@contextlib.contextmanager
def failing(model, site, index, here=True):
    """The `index`-th time that this rank passes `site` in a window, it raises; if `here`."""
    passed = itertools.count()

    def trip():
        if next(passed) == index:
            raise Broken(site)

    if not here:
        yield
        return
    with contextlib.ExitStack() as stack:
        kind, _, depth = site.partition("@")
        if kind in ("data", "loss"):
            stack.callback(setattr, model, "on_microbatch", None)
            model.on_microbatch = functools.partial(_on_microbatch, kind, trip)
        elif kind in ("layer", "backward"):
            for chunk in model.chunks:
                layer = next(m.layers for m in chunk.modules() if hasattr(m, "layers"))[int(depth)]
                hook = functools.partial(_in_layer, kind, trip)
                stack.callback(layer.register_forward_hook(hook).remove)
        elif kind == "dispatch":
            for chunk in model.chunks:
                group = chunk.bucket_groups[int(depth)]
                group.start_grad_sync = functools.partial(_before, trip, group.start_grad_sync)
                stack.callback(vars(group).pop, "start_grad_sync", None)
        yield


def _on_microbatch(kind, trip, index, loss):
    if (kind == "loss") == (loss is not None):
        trip()


def _in_layer(kind, trip, module, inputs, output):
    if kind == "layer":
        trip()
    elif output[0].requires_grad:
        output[0].register_hook(lambda gradient: trip())


def _before(trip, start, *args, **kwargs):
    trip()
    return start(*args, **kwargs)
