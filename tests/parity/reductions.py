"""Programs of schedule calls and reductions, run on ranks, beside what their gradients should be.

`run` carries programs out, stock or patched, and says at each use of the gradients whether they are
right: the sum of what the calls since zeroing have added, averaged over the data-parallel ranks
wherever the program reduces. The reference has no part of Megatron's DDP in it for the small net,
and no overlap, no distributed optimizer and no reduction of Megatron's for the layouts that need a
GPT. Everything is compared to the bit: two ranks add in any order alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cache
from typing import Any

import torch
from reduction_programs import LAYOUTS, Program, Result, Setting

SIZE, ROWS = 8, 3


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
        """Do what debug mode does before an optimizer's step."""
        from megatron_idempotent.megatron.replica_check import check_replicas

        check_replicas(self.bench.chunks)

    def _looked_at(self) -> tuple[bool, str]:
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
    """Ends a call early."""


class _Net:
    """Three layers, small enough for thousands of programs. Each rank knows all ranks' data."""

    def __init__(self, setting: Setting) -> None:
        from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
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
            """Return the forward-step function for the schedules."""

        def forward(self, rows: Any) -> Any:
            for layer in self.layers:
                rows = torch.tanh(layer(rows))
                for _ in range(2 if kind == "twice" else 0):
                    rows = torch.tanh(checkpoint(self.layers[1], rows, use_reentrant=True))
            return rows

    torch.manual_seed(7)
    return Net()


def _rows(seed: int, rank: int) -> Any:
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


#: A layout, and what has been added and reduced since zeroing → this rank's gradients. Programs
#: differ in their settings and reductions, and do the same calls.
_KNOWN_SUMS: dict[tuple[Any, ...], list[Any]] = {}


@cache
def _plain(layout: str) -> Any:
    """A bench without what programs are about: it keeps its weights, so that one serves all."""
    from megatron_idempotent.proof.cpu import tiny

    options = {name: value for name, value in LAYOUTS[layout][1].items() if name != "align"}
    model = tiny.build(
        **options,
        layers_per_stage=1,
        overlap_grad_reduce=False,
        distributed_optimizer=False,
        with_optimizer=False,
    )
    model.config.finalize_model_grads_func = None
    return model


class _Gpt:
    """A bench of `cpu.tiny` in some layout, and the same without what the program is about."""

    def __init__(self, setting: Setting) -> None:
        from megatron_idempotent.proof.cpu import tiny

        # Of one layer a stage has two buckets, and programs treat no third one otherwise.
        options = {**LAYOUTS[setting.net][1], "layers_per_stage": 1}
        self.model = tiny.build(
            **options,
            overlap_grad_reduce=setting.overlap,
            distributed_optimizer=setting.distributed,
            with_optimizer=False,
        )
        self.config, self.chunks, self._net = self.model.config, self.model.chunks, setting.net
        if not setting.wired:
            self.config.no_sync_func = None
        self._plain = _plain(setting.net)
        self.zero_reference()
        self._plain_buffers = [
            buffer
            for chunk in self._plain.chunks
            for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)
        ]
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
        self._history: tuple[Any, ...] = (self._net,)

    def add_to_reference(self, microbatches: int, data_seed: int) -> None:
        """Add the gradients of a call; what an earlier program has computed is copied."""
        self._history += ((microbatches, data_seed),)
        gradients = [buffer.grad_data for buffer in self._plain_buffers]
        if known := _KNOWN_SUMS.get(self._history):
            for gradient, value in zip(gradients, known, strict=True):
                gradient.copy_(value)
            return
        self._plain.forward_backward(microbatches, data_seed=data_seed, zero_first=False)
        _KNOWN_SUMS[self._history] = [gradient.clone() for gradient in gradients]

    def reduce_reference(self) -> None:
        from megatron.core import parallel_state

        self._history += ("reduced",)
        for buffer in self._plain_buffers:
            buffer.grad_data *= buffer.gradient_scaling_factor
            # All ranks of the buffer's data-parallel group take part.
            torch.distributed.all_reduce(buffer.grad_data, group=buffer.data_parallel_group)
        for chunk in self._plain.chunks:
            if self.config.sequence_parallel:
                group = parallel_state.get_tensor_model_parallel_group()
                for param in chunk.module.parameters():
                    if getattr(param, "sequence_parallel", False):
                        torch.distributed.all_reduce(param.main_grad, group=group)

    def expected(self, param: Any) -> Any:
        return self._expected[param].main_grad


def run(programs: list[Program], *, applied: Sequence[str | None]) -> list[list[Result]]:
    """Runs on a rank: carry the programs out, once for each of `applied`; return the results of
    each time. All share the process groups, and the sums of the reference.

    Programs behave alike on all ranks, their failures too.

    Args:
        applied: None for stock, which comes first; `forwards` or `backwards` for the order in which
            the patches are applied; `checked` for the debug mode besides, which looks at each use.
    """
    from megatron.core import parallel_state

    instances = programs[0].setting.instances
    if instances > 1:
        parallel_state.initialize_model_parallel(num_distributed_optimizer_instances=instances)
    elif programs[0].setting.net not in LAYOUTS:
        parallel_state.initialize_model_parallel()
    results = []
    for way in applied:
        _apply(way)
        results.append([_carried_out(program, checked=way == "checked") for program in programs])
    return results


def _carried_out(program: Program, *, checked: bool) -> Result:
    running, error = Run(program.setting), None
    for word, *arguments in program.ops:
        try:
            getattr(running, word)(*arguments)
            if word == "use" and checked:
                running.check()
        except Exception as failure:  # noqa: BLE001  whatever it is, the next program is run
            error = f"{type(failure).__name__}: {failure}"
            break
    running.close()
    return Result(running.seen, error)


def _apply(applied: str | None) -> None:
    import megatron_idempotent
    from megatron_idempotent.patching.catalog import patches
    from megatron_idempotent.patching.rows import COVERED

    if applied == "backwards":
        rows = [row.id for row in megatron_idempotent.apply(dry_run=True) if row.status in COVERED]
        for patch_id in reversed(rows):
            megatron_idempotent.apply(only=[patch_id])
    elif applied is not None:
        megatron_idempotent.apply(strict=True)
    if applied == "checked":
        megatron_idempotent.apply(only=[name for name, patch in patches().items() if patch.debug])
