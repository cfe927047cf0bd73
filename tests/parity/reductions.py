"""Programs of schedule calls and reductions, run on ranks, and what their gradients should be.

A program is a setting of Megatron's DDP and a sequence of operations. `run` carries programs out,
stock or patched, and says at each use of the gradients whether they are right: the sum of what the
calls since zeroing have added, averaged over the data-parallel ranks wherever the program reduces.
The reference has no part of Megatron's DDP in it for the small net, and no overlap, no distributed
optimizer and no reduction of Megatron's for the layouts that need a GPT. Everything is compared to
the bit: two ranks add in any order alike.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from functools import cache
from typing import Any, NamedTuple

SIZE, ROWS = 8, 3

#: Layouts that a small net has no use for: ranks, and options of `cpu.tiny.build`.
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "pp2": (4, {"pp": 2}),
    "vpp2": (4, {"pp": 2, "vpp": 2, "layers_per_stage": 1}),
    "vpp2-align": (4, {"pp": 2, "vpp": 2, "layers_per_stage": 1, "align": True}),
    "ep2": (2, {"ep": 2, "experts": 4}),
    "tp2-sp": (4, {"tp": 2, "sequence_parallel": True}),
}


class Setting(NamedTuple):
    """How DDP is set up, and around which model."""

    overlap: bool = True
    distributed: bool = True
    wired: bool = True
    """Whether `config.no_sync_func` is set."""
    instances: int = 1
    net: str = "dense"
    """`dense`; `experts`, some parameters in buffers of their own; `twice`, a layer that is
    recomputed and used twice, which registers twice; or a layout."""

    def __str__(self) -> str:
        return "-".join(
            [
                self.net,
                "overlap" if self.overlap else "plain",
                "scatter" if self.distributed else "reduce",
                "wired" if self.wired else "bare",
                *([f"{self.instances}x"] if self.instances > 1 else []),
            ]
        )


class Program(NamedTuple):
    """`ops` are methods of `Run` and their arguments."""

    name: str
    setting: Setting
    ops: tuple[tuple[Any, ...], ...]

    @property
    def uses(self) -> int:
        return sum(op == ("use",) for op in self.ops)


class Result(NamedTuple):
    """What a program did on one rank."""

    uses: list[tuple[bool, str]]
    """Whether the gradients were right at each use that it came to, and a digest of their bits."""
    error: str | None
    """`Type: message` of what ended it early."""


#: Microbatches of the schedule calls of each step.
STEPS: dict[str, list[tuple[int, ...]]] = {
    "1": [(1,)] * 3,
    "2": [(2,)] * 3,
    "2,3,1": [(2,), (3,), (1,)],
    "1+1": [(1, 1)] * 3,
    "2+2": [(2, 2)] * 3,
    "2+1": [(2, 1)] * 3,
    "1+2": [(1, 2)] * 3,
    "1 to 3 calls": [(1,), (1, 1), (1, 1, 1)],
    "2 to 6": [(2,), (2, 2), (2, 2, 2)],
    "6 to 2": [(2, 2, 2), (2, 2), (2,)],
    "as it comes": [(1, 2), (2, 1), (3,), (1, 1, 1)],
}
#: Where the reduction is asked for: by the schedule, at each call or at the last one of a step, or
#: by hand behind a step, where `finalize_model_grads_func` is None.
REDUCTIONS = ("each", "last", "finalize", "finish", "start+finalize", "start+finish")
#: Which calls the program holds inside of `no_sync` itself.
HELD = ("none", "all", "all but the last")


def programs_of(
    setting: Setting,
    steps: dict[str, list[tuple[int, ...]]] = STEPS,
    reductions: tuple[str, ...] = REDUCTIONS,
) -> Iterator[Program]:
    """All combinations of a setting."""
    for (name, calls), reduced, held in itertools.product(steps.items(), reductions, HELD):
        ops: list[tuple[Any, ...]] = []
        for step in calls:
            ops.append(("zero",))
            for index, microbatches in enumerate(step):
                last = index == len(step) - 1
                finalize = reduced == "each" or (reduced == "last" and last)
                hold = held == "all" or (held == "all but the last" and not last)
                ops.append(("call", microbatches, finalize, hold))
            if reduced not in ("each", "last"):
                ops += [(word,) for word in reduced.split("+")]
            ops.append(("use",))
        yield Program(f"{setting}: {name}, {reduced}, held {held}", setting, tuple(ops))


def settings(nets: tuple[str, ...] = ("dense", "experts", "twice")) -> list[Setting]:
    """All settings of one optimizer instance around these nets."""
    switches = [(True, False)] * 3
    return [Setting(*each, net=net) for net in nets for each in itertools.product(*switches)]


def drawn(seed: int) -> Program:
    """A random program: what a caller might do, sensible or not."""
    draw = random.Random(seed)
    setting = Setting(*(draw.random() < 0.6 for _ in range(3)), net=draw.choice(["dense", "twice"]))
    hold = draw.choice(HELD)
    ops: list[tuple[Any, ...]] = []
    for _ in range(6):
        if draw.random() < 0.8:
            ops.append(("zero_by_hand",) if draw.random() < 0.15 else ("zero",))
        calls = draw.choice([1, 1, 2, 3])
        for index in range(calls):
            held = hold == "all" or (hold == "all but the last" and index < calls - 1)
            ops.append(("call", draw.randint(1, 3), draw.random() < 0.3, held))
            if draw.random() < 0.1:
                ops.append(draw.choice([("aborted", 2), ("backward", draw.random() < 0.5)]))
        if draw.random() < 0.2:
            ops.append(("start",))
        ops.append(draw.choice([("finish",), ("finalize",)]))
        ops.append(("use",))
        for word in ("scale", "forward", "held_forward"):
            if draw.random() < 0.2:
                ops.append((word,))
        if draw.random() < 0.3:
            ops += [(draw.choice(["start", "finish", "finalize"]),), ("finish",), ("use",)]
    return Program(f"{setting}: drawn {seed}", setting, tuple(ops))


class Run:
    """One program on this rank, in Megatron and in the reference."""

    def __init__(self, setting: Setting) -> None:
        from megatron.core.distributed import finalize_model_grads

        self.setting = setting
        self.finalize_model_grads = finalize_model_grads
        make: Callable[[Setting], Any] = _Gpt if setting.net in LAYOUTS else _Net
        self.bench = make(setting)
        self.count = 0
        self.seen: list[tuple[bool, str]] = []
        self._added = False

    @property
    def groups(self) -> list[Any]:
        chunks = self.bench.chunks
        return [g for c in chunks for g in (*c.bucket_groups, *c.expert_parallel_bucket_groups)]

    def zero(self) -> None:
        for chunk in self.bench.chunks:
            chunk.zero_grad_buffer()
        self.bench.zero_reference()

    def zero_by_hand(self) -> None:
        for chunk in self.bench.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffer.grad_data.zero_()
        self.bench.zero_reference()

    def call(self, microbatches: int, finalize: bool, held: bool) -> None:
        config = self.bench.config
        config.finalize_model_grads_func = self.finalize_model_grads if finalize else None
        data_seed, self.count = self.count, self.count + microbatches
        with ExitStack() as stack:
            if held:
                for chunk in self.bench.chunks:
                    stack.enter_context(chunk.no_sync())
            self.bench.forward_backward(microbatches, data_seed)
        self.bench.add_to_reference(microbatches, data_seed)
        self._added = True
        if finalize:
            self._reduce()

    def aborted(self, microbatches: int) -> None:
        """A call that raises on all ranks in its last forward; what has been added stays."""
        self.bench.config.finalize_model_grads_func = None
        data_seed, self.count = self.count, self.count + microbatches
        try:
            self.bench.forward_backward(microbatches, data_seed, fail_at=microbatches - 1)
        except _Aborted:
            self.bench.add_to_reference(microbatches - 1, data_seed, divisor=microbatches)
            self._added = True

    def backward(self, held: bool) -> None:
        """One microbatch past the schedules."""
        data_seed, self.count = self.count, self.count + 1
        with self.bench.chunks[0].no_sync() if held else ExitStack():
            self.bench.backward(data_seed)
        self.bench.add_to_reference(1, data_seed)
        self._added = True

    def forward(self) -> None:
        self.bench.forward_backward(1, 0, forward_only=True)

    def held_forward(self) -> None:
        with self.bench.chunks[0].no_sync():
            self.forward()

    def start(self) -> None:
        for chunk in self.bench.chunks:
            chunk.start_grad_sync()
        if not self.setting.overlap:  # then it has ended
            self._reduce()

    def finish(self) -> None:
        for chunk in self.bench.chunks:
            chunk.finish_grad_sync()
        self._reduce()

    def finalize(self) -> None:
        self.finalize_model_grads(self.bench.chunks)
        self._reduce()

    def _reduce(self) -> None:
        if self._added:
            self.bench.reduce_reference()
        self._added = False

    def scale(self) -> None:
        for chunk in self.bench.chunks:
            chunk.scale_gradients(0.5)
        self.bench.scale_reference(0.5)

    def use(self) -> None:
        self.seen.append(self._looked_at())

    def check(self) -> None:
        """What debug mode does before an optimizer's step."""
        from megatron_idempotent.window.check import check_replicas

        check_replicas(self.bench.chunks)

    def _looked_at(self) -> tuple[bool, str]:
        import torch

        right, digest = True, hashlib.sha256()
        for group in self.groups:
            for bucket in group.buckets:
                mine = slice(0, bucket.grad_data.numel())
                if self.setting.distributed:  # a reduce-scatter: this rank's shard alone
                    size = mine.stop // group.intra_distributed_optimizer_instance_size
                    rank = group.intra_distributed_optimizer_instance_rank
                    mine = slice(rank * size, (rank + 1) * size)
                for param in bucket.params_list:
                    offset = (param.main_grad.data_ptr() - bucket.grad_data.data_ptr()) // 4
                    part = slice(max(mine.start - offset, 0), max(mine.stop - offset, 0))
                    found = param.main_grad.flatten()[part]
                    digest.update(found.numpy().tobytes())
                    expected = self.bench.expected(param).flatten()[part]
                    right = right and torch.equal(found, expected)
        return right, digest.hexdigest()

    def close(self) -> None:
        for group in self.groups:
            if group.grad_reduce_handle is not None:
                group.grad_reduce_handle.wait()


class _Aborted(Exception):
    """What ends a call early."""


class _Net:
    """Three layers, small enough for thousands of programs. Each rank knows all ranks' data."""

    def __init__(self, setting: Setting) -> None:
        import torch
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
        )
        from megatron.core.transformer.transformer_config import TransformerConfig

        self.rank, self.ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
        self.config = TransformerConfig(
            num_layers=1, hidden_size=SIZE, num_attention_heads=1, use_cpu_initialization=True
        )
        options: dict[str, Any] = {"num_distributed_optimizer_instances": setting.instances}
        ddp_config = DistributedDataParallelConfig(
            overlap_grad_reduce=setting.overlap,
            use_distributed_optimizer=setting.distributed,
            grad_reduce_in_fp32=True,
            bucket_size=80,
            **(options if setting.instances > 1 else {}),
        )
        self.net, self._kind = _net(self.config, setting.net), setting.net
        chunk = DistributedDataParallel(self.config, ddp_config, self.net)
        self.chunks = [chunk]
        if setting.wired:
            self.config.no_sync_func = chunk.no_sync
        self._index = {param: i for i, param in enumerate(self.net.parameters())}
        self.zero_reference()

    def forward_backward(
        self,
        microbatches: int,
        data_seed: int,
        *,
        forward_only: bool = False,
        fail_at: int | None = None,
    ) -> None:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(data_iterator: Any, model: Any) -> Any:
            index = next(data_iterator)
            if index == fail_at:
                raise _Aborted
            return model(_rows(data_seed + index, self.rank)), _loss

        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(range(microbatches)),
            model=self.chunks,
            num_microbatches=microbatches,
            seq_length=ROWS,
            micro_batch_size=1,
            forward_only=forward_only,
        )

    def backward(self, data_seed: int) -> None:
        _loss(self.chunks[0](_rows(data_seed, self.rank)))[0].backward()

    def zero_reference(self) -> None:
        import torch

        self._local = [
            [torch.zeros_like(param) for param in self.net.parameters()] for _ in range(self.ranks)
        ]

    def add_to_reference(
        self, microbatches: int, data_seed: int, *, divisor: int | None = None
    ) -> None:
        for rank, local in enumerate(self._local):
            for seed in range(data_seed, data_seed + microbatches):
                for index, gradient in _gradients(self._kind, seed, rank, divisor or microbatches):
                    local[index].add_(gradient)

    def reduce_reference(self) -> None:
        for ranks in zip(*self._local, strict=True):
            parts = [gradient / self.ranks for gradient in ranks]
            while len(parts) > 1:  # as instances of the optimizer do: each within, then over them
                parts = [one + other for one, other in zip(parts[::2], parts[1::2], strict=True)]
            for gradient in ranks:
                gradient.copy_(parts[0])

    def scale_reference(self, factor: float) -> None:
        for local in self._local:
            for gradient in local:
                gradient.mul_(factor)

    def expected(self, param: Any) -> Any:
        return self._local[self.rank][self._index[param]]


def _net(config: Any, kind: str) -> Any:
    import torch
    from megatron.core.enums import ModelType
    from torch.utils.checkpoint import checkpoint

    class Net(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.config, self.model_type = config, ModelType.encoder_or_decoder
            self.layers = torch.nn.ModuleList(torch.nn.Linear(SIZE, SIZE) for _ in range(3))
            if kind == "experts":
                for param in self.layers[1].parameters():
                    param.allreduce = False

        def set_input_tensor(self, _: Any) -> None:
            """For the schedules."""

        def forward(self, rows: Any) -> Any:
            for layer in self.layers:
                rows = torch.tanh(layer(rows))
                for _ in range(2 if kind == "twice" else 0):
                    rows = torch.tanh(checkpoint(self.layers[1], rows, use_reentrant=True))
            return rows

    torch.manual_seed(7)
    return Net()


def _rows(seed: int, rank: int) -> Any:
    import torch

    generator = torch.Generator().manual_seed(1009 * seed + rank)
    return torch.randn(ROWS, SIZE, generator=generator).requires_grad_()


def _loss(output: Any) -> tuple[Any, dict[str, Any]]:
    loss = output.pow(2).mean()
    return loss, {"loss": loss.detach().clone()}


@cache
def _gradients(kind: str, seed: int, rank: int, divisor: int) -> list[tuple[int, Any]]:
    """A microbatch's gradients, by index of the parameter, in the order in which they come."""
    plain, found = _net(None, kind), []
    for index, param in enumerate(plain.parameters()):

        def note(param: Any, index: int = index) -> None:
            found.append((index, param.grad))
            param.grad = None

        param.register_post_accumulate_grad_hook(note)
    loss, _ = _loss(plain(_rows(seed, rank)))
    (loss / divisor).backward()
    return found


class _Gpt:
    """A bench of `cpu.tiny` in some layout, and the same without what the program is about."""

    def __init__(self, setting: Setting) -> None:
        from megatron_idempotent.cpu import tiny

        _, options = LAYOUTS[setting.net]
        self.model = tiny.build(
            **options,
            overlap_grad_reduce=setting.overlap,
            distributed_optimizer=setting.distributed,
            with_optimizer=False,
        )
        self.config, self.chunks = self.model.config, self.model.chunks
        if not setting.wired:
            self.config.no_sync_func = None
        plain = {name: value for name, value in options.items() if name != "align"}
        self._plain = tiny.build(
            **plain, overlap_grad_reduce=False, distributed_optimizer=False, with_optimizer=False
        )
        self._plain.config.finalize_model_grads_func = None
        named = (chunk.module.named_parameters() for chunk in self._plain.chunks)
        mine = (chunk.module.parameters() for chunk in self.chunks)
        self._expected = {
            param: other
            for params, others in zip(mine, named, strict=True)
            for param, (_, other) in zip(params, others, strict=True)
        }

    def forward_backward(
        self, microbatches: int, data_seed: int, *, forward_only: bool = False
    ) -> None:
        self.model.forward_backward(
            microbatches, data_seed=data_seed, forward_only=forward_only, zero_first=False
        )

    def zero_reference(self) -> None:
        for chunk in self._plain.chunks:
            chunk.zero_grad_buffer()

    def add_to_reference(self, microbatches: int, data_seed: int) -> None:
        self._plain.forward_backward(microbatches, data_seed=data_seed, zero_first=False)

    def reduce_reference(self) -> None:
        import torch
        from megatron.core import parallel_state

        for chunk in self._plain.chunks:
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers):
                buffer.grad_data *= buffer.gradient_scaling_factor
                # All ranks of the buffer's data-parallel group take part.
                torch.distributed.all_reduce(buffer.grad_data, group=buffer.data_parallel_group)
            if self.config.sequence_parallel:
                group = parallel_state.get_tensor_model_parallel_group()
                for param in chunk.module.parameters():
                    if getattr(param, "sequence_parallel", False):
                        torch.distributed.all_reduce(param.main_grad, group=group)

    def expected(self, param: Any) -> Any:
        return self._expected[param].main_grad


def run(programs: list[Program], *, applied: str | None) -> list[Result]:
    """On a rank: carry the programs out. All of one call share the process groups.

    Programs behave alike on all ranks, their failures too.

    Args:
        applied: None for stock; `forwards` or `backwards` for the order in which the patches are
            applied; `checked` for the debug mode besides, which looks at each use.
    """
    from megatron.core import parallel_state

    _apply(applied)
    instances = programs[0].setting.instances
    if instances > 1:
        parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
    elif programs[0].setting.net not in LAYOUTS:
        parallel_state.initialize_model_parallel()
    results = []
    for program in programs:
        running, error = Run(program.setting), None
        for word, *arguments in program.ops:
            try:
                getattr(running, word)(*arguments)
                if word == "use" and applied == "checked":
                    running.check()
            except Exception as failure:  # noqa: BLE001  whatever it is, the next program is run
                error = f"{type(failure).__name__}: {failure}"
                break
        running.close()
        results.append(Result(running.seen, error))
    return results


def _apply(applied: str | None) -> None:
    import megatron_idempotent
    from megatron_idempotent.engine.catalogue import patches
    from megatron_idempotent.engine.report import COVERED

    if applied == "backwards":
        rows = [row.id for row in megatron_idempotent.apply(dry_run=True) if row.status in COVERED]
        for patch_id in reversed(rows):
            megatron_idempotent.apply(only=[patch_id])
    elif applied is not None:
        megatron_idempotent.apply(strict=True)
    if applied == "checked":
        megatron_idempotent.apply(only=[name for name, patch in patches().items() if patch.debug])


class Verdict(NamedTuple):
    """What stock and patched made of a program, all ranks together."""

    stock: str
    """`right`, or what was wrong first: `silently wrong`, or the error."""
    patched: str
    complaint: str | None
    """Why the patches are to blame; None where they are not."""


def judge(program: Program, stock: list[Result], patched: list[Result]) -> Verdict:
    """Compare, use by use: what stock gets right, up to its first fault, stays right.

    From there on the patches may make it right, or raise; nothing may be silently wrong.
    """
    uses, bits, error = _all_ranks(stock)
    patched_uses, patched_bits, patched_error = _all_ranks(patched)
    right = next((i for i, use in enumerate(uses) if not use), len(uses))
    complaint = None
    if patched_uses[:right] != uses[:right]:
        complaint = f"a false alarm at use {len(patched_uses)}: {patched_error}"
    elif patched_bits[:right] != bits[:right]:
        complaint = "other bits than stock's"
    elif not all(patched_uses):
        complaint = f"silently wrong at use {patched_uses.index(False)}"
    elif len(patched_uses) < program.uses and not (patched_error or "").partition(": ")[2]:
        complaint = f"ends without a word: {patched_error}"
    said = [
        "right" if len(found) == program.uses and all(found) and why is None else
        "silently wrong" if not all(found) else str(why)
        for found, why in ((uses, error), (patched_uses, patched_error))
    ]  # fmt: skip
    return Verdict(*said, complaint)


def _all_ranks(results: list[Result]) -> tuple[list[bool], list[tuple[str, ...]], str | None]:
    """Right where every rank is; upstream's ranks may raise in another parameter's name."""
    by_use = list(zip(*(result.uses for result in results), strict=True))
    uses = [all(right for right, _ in ranks) for ranks in by_use]
    bits = [tuple(digest for _, digest in ranks) for ranks in by_use]
    return uses, bits, results[0].error
