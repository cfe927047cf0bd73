"""Runs the ranks of a policy in separate processes, and calls methods on all of them.

    ranks = EmbeddedRanks(WorkerSpec(factory="package.module:make", argument=job), size=2)
    await ranks.start()
    losses = await ranks.call("train", batch)

Importing this imports neither torch nor Megatron.
"""

from megatron_idempotent.lazy import attributes

__getattr__, __dir__ = attributes(__name__)
