"""Runs the real megatron-core on a CPU: emulates `torch.cuda` for it, and makes gloo ranks.

    from megatron_idempotent.proof import cpu

    with cpu.enabled():                      # this process
        ...
    losses = cpu.run_ranks(2, train, 10)     # fresh processes, runtime on, gloo group up

Nothing is emulated before `enable()`, everything is back as it was after `disable()`, and
neither importing this package nor the pytest plugin imports torch. What is emulated:

"""

from megatron_idempotent.lazy import attributes

from .table import EMULATED

__doc__ = (__doc__ or "") + "\n".join(f"- {names}: {answer}" for names, answer in EMULATED)
__doc__ += "\n\nEvery other public name of `torch.cuda` raises `NotEmulatedError`.\n"

__getattr__, __dir__ = attributes(__name__)
