"""Scenarios with several threads or processes; see `forks`."""

from __future__ import annotations

import os
from typing import Any

from scenarios import import_megatron, live, stock


def many_threads(while_importing: bool) -> dict[str, Any]:
    """Apply from many threads at once, also while others import the targets."""
    import threading

    import megatron_idempotent

    if not while_importing:
        import_megatron()
    barrier = threading.Barrier(12)
    failures: list[str] = []

    def work(number: int) -> None:
        barrier.wait()
        try:
            if while_importing and number % 4 == 0:
                import_megatron()
            for _ in range(5):
                megatron_idempotent.apply()
        except Exception as error:  # noqa: BLE001 - a thread's error reaches nobody otherwise
            failures.append(f"{type(error).__name__}: {error}")

    threads = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    from megatron_idempotent.patching import install

    depth = {}
    for name, value in live().items():
        depth[name] = 0
        while hasattr(value, "__wrapped__"):
            value, depth[name] = value.__wrapped__, depth[name] + 1
    return {
        "failures": failures,
        "stock": [stock(name) for name in live()],
        "wrapped": depth,
        "layers": [list(site.layers) for site in install.state.sites.values()],
        "statuses": sorted({row.status for row in megatron_idempotent.report()}),
    }


def forked(hold_the_lock: bool) -> dict[str, Any]:
    """Apply, fork while a thread of the parent may hold the locks, apply in the child."""
    import threading

    import_megatron()
    import megatron_idempotent
    from megatron_idempotent.patching import import_hooks, install

    megatron_idempotent.apply(only=["grad-scale-func"])
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with install.lock, import_hooks._lock:
            held.set()
            done.wait()

    thread = threading.Thread(target=hold)
    if hold_the_lock:
        thread.start()
        held.wait()
    receive, send = os.pipe()
    child = os.fork()
    if child == 0:
        inherited = not stock("optimizer")
        megatron_idempotent.apply()
        reverted = megatron_idempotent.revert()["grad-scale-func"].status
        os.write(send, f"{inherited} {reverted} {stock('seed')}".encode())
        os._exit(0)
    answer = os.read(receive, 1000).decode()
    os.waitpid(child, 0)
    if hold_the_lock:
        done.set()
        thread.join()
    megatron_idempotent.apply()
    return {"child": answer, "parent": [stock(name) for name in live()]}


def spawned() -> list[Any]:
    """Apply, and let a spawned child say what it finds."""
    import multiprocessing

    import_megatron()
    import megatron_idempotent

    megatron_idempotent.apply()
    context = multiprocessing.get_context("spawn")
    with context.Pool(1) as pool:
        return pool.apply(order_in_spawned_child)


def order_in_spawned_child() -> list[Any]:
    """Return whether patches came along, and whether `apply()` works here."""
    import megatron_idempotent

    came = {row.reason for row in megatron_idempotent.report()}
    import_megatron()
    without = [stock(name) for name in live()]
    megatron_idempotent.apply()
    return [sorted(came), without, [stock(name) for name in live()]]
