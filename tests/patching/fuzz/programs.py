"""Small programs around each function that is fuzzed, with the real Megatron."""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import inspect
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Literal

from events import Event, Pipe, State, call, described, digest, nothing

#: Microbatches that a program can read: a loop that does not end, ends here.
ENOUGH = 60


def training(*options: str, wired: bool = False, by_keyword: bool = False) -> Iterator[Event]:
    """`train`, twice. `wired`: the caller has set the functions that overlap needs."""
    module = importlib.import_module("megatron.training.training")
    running = _start(*options)
    args, config, (chunk,) = running.args, running.config, running.chunks
    name = " ".join(options)
    if wired:
        name += ", wired by the caller"
        config.no_sync_func, config.param_sync_func = chunk.no_sync, chunk.start_param_sync
    if "--exit-interval" in options:
        args.do_valid, args.eval_interval, args.eval_iters = True, 1, 1
    for time in ("first", "again"):
        args.train_iters += 1
        given = {
            "forward_step_func": running._forward_step,
            "model": running.chunks,
            "optimizer": running.optimizer,
            "opt_param_scheduler": running.scheduler,
            "train_data_iterator": running.data[0],
            "valid_data_iterator": running.data[0],
            "process_non_loss_data_func": None,
            "config": config,
            "checkpointing_context": {},
            "non_loss_data_func": None,
        }
        function = (
            partial(module.train, **given) if by_keyword else partial(module.train, *given.values())
        )
        yield call(f"train {time} {name}", function, _state(running), _undone(running))
        # What a program has to do on stock, and what a patch does: count.
        args.iteration = args.train_iters
        args.num_floating_point_operations_so_far = 0


def stepping() -> Iterator[Event]:
    """`train_step` as frameworks call it, without `train`."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    module = importlib.import_module("megatron.training.training")
    running = _start("--log-num-zeros-in-grad")
    config = running.config
    config.grad_scale_func = running.optimizer.scale_loss
    config.finalize_model_grads_func = module.finalize_model_grads
    given = {
        "forward_step_func": running._forward_step,
        "data_iterator": running.data[0],
        "model": running.chunks,
        "optimizer": running.optimizer,
        "opt_param_scheduler": running.scheduler,
        "config": config,
        "forward_backward_func": get_forward_backward_func(),
    }
    for name, function in (
        ("by position", lambda: module.train_step(*given.values())),
        ("by keyword", lambda: module.train_step(**given, iteration=1)),
        ("again", lambda: module.train_step(*given.values(), 2)),
    ):
        yield call(f"train_step {name}", function, _state(running), _undone(running))


def evaluating() -> Iterator[Event]:
    """`evaluate`, the fourth time out of time."""
    module = importlib.import_module("megatron.training.training")
    running = _start("--eval-iters", "1")
    given = {
        "forward_step_func": running._forward_step,
        "data_iterator": running.data[0],
        "model": running.chunks,
        "process_non_loss_data_func": None,
        "config": running.config,
    }

    def out_of_time() -> Any:
        running.args.exit_duration_in_mins = 1e-9
        return module.evaluate(*given.values())

    for name, function in (
        ("by position", lambda: module.evaluate(*given.values())),
        ("by keyword", lambda: module.evaluate(**given, eval_iters=2)),
        ("aloud", lambda: module.evaluate(*given.values(), True)),
        ("out of time", out_of_time),
        ("after that", lambda: module.evaluate(*given.values())),
    ):
        yield call(f"evaluate {name}", function, _state(running), _undone(running))


def saving() -> Iterator[Event]:
    """`save` after steps, with a writer that notes what it is to write."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest
    from megatron.core.dist_checkpointing.strategies.torch import TorchDistSaveShardedStrategy

    from megatron_idempotent.proof.cpu import tiny

    class Writer(TorchDistSaveShardedStrategy):  # type: ignore[misc]
        """Upstream's own starts processes."""

        written: Any = None

        def save(self, sharded_state_dict: Any, checkpoint_dir: Any) -> None:
            self.written = [
                (value.key, described(value.data))
                for value in nested_values(sharded_state_dict)
                if hasattr(value, "key")
            ]

        def async_save(self, sharded_state_dict: Any, checkpoint_dir: Any, *_: Any) -> Any:
            self.save(sharded_state_dict, checkpoint_dir)
            return AsyncRequest(print, (), [])

    _alone()
    model = tiny.build(overlap_param_gather=True)
    # Commits of before 0.17 ask for the format and its version.
    asked = inspect.signature(TorchDistSaveShardedStrategy).parameters
    form = ("torch_dist", 1) if "backend" in asked else ()
    for name, options in (
        ("by position", {}),
        ("with a manifest", {"validate_access_integrity": False, "verify_integrity": True}),
        ("asynchronously", {"async_sharded_save": True}),
    ):
        model.train_step(1, data_seed=0)
        sharded = model.chunks[0].module.sharded_state_dict()
        writer = Writer(*form)
        with tempfile.TemporaryDirectory() as folder:
            if options:
                given = {"sharded_state_dict": sharded, "checkpoint_dir": folder}
                function = partial(
                    dist_checkpointing.save, **given, sharded_strategy=writer, **options
                )
            else:
                function = partial(dist_checkpointing.save, sharded, folder, writer)

            def state(folder: str = folder, writer: Any = writer) -> dict[str, Any]:
                return {
                    "written": writer.written,
                    "files": sorted(os.listdir(folder)),
                    "parameters": digest(model.parameters()),
                }

            yield call(f"save {name}", function, state)


def building(dtype: Literal["fp32", "bf16"]) -> Iterator[Event]:
    """`get_megatron_optimizer`, and a step with what it made."""
    import torch
    from megatron.core import optimizer
    from megatron.core.distributed import finalize_model_grads

    from megatron_idempotent.proof.cpu import tiny

    _alone()
    half = dtype == "bf16"
    model = tiny.build(dtype=dtype, wire=False, with_optimizer=False, overlap_grad_reduce=False)
    model.config.finalize_model_grads_func = finalize_model_grads
    options = optimizer.OptimizerConfig(
        optimizer="adam",
        lr=1e-3,
        clip_grad=1.0,
        use_distributed_optimizer=True,
        loss_scale=1024.0 if half else None,
        bf16=half,
        params_dtype=torch.bfloat16 if half else torch.float32,
    )
    before = model.config.grad_scale_func

    def step() -> dict[str, Any]:
        # A program that wires the loss scale by itself, which is right on stock.
        model.optimizer = optimizer.get_megatron_optimizer(options, model.chunks)
        model.config.grad_scale_func = model.optimizer.scale_loss
        model.forward_backward(1, data_seed=0)
        return {"step": described(model.step()), "parameters": digest(model.parameters())}

    def scale() -> dict[str, Any]:
        # Left None on stock is what the patch is against.
        function = model.config.grad_scale_func
        return {} if function is before else {"scale": float(function(torch.ones(())))}

    build = partial(optimizer.get_megatron_optimizer, options)
    yield call(f"build in {dtype}", lambda: build(model.chunks), scale)
    yield call(f"step in {dtype}", step, nothing)
    yield call(f"build again in {dtype}", lambda: build(model_chunks=model.chunks), scale)


def seeding(*, offset: int) -> Iterator[Event]:
    """`model_parallel_cuda_manual_seed` on two pipeline stages: one is forked off here.

    Args:
        offset: of the second stage's seeds, as a caller gives them.
    """
    pipe = Pipe()
    with tempfile.TemporaryDirectory() as folder:
        child = os.fork()
        if child == 0:
            try:
                pipe.say(list(_seeding_on(1, folder, offset)))
            finally:
                os._exit(0)
        try:
            events = list(_seeding_on(0, folder, 0))
        finally:
            others = pipe.last([], child)
            os.waitpid(child, 0)
    for mine, theirs in zip(events, others, strict=True):
        drawn = [event.seen.get("drawn") for event in (mine, theirs)]
        hazard = not mine.raised and drawn[0] == drawn[1]
        yield Event(
            call=mine.call,
            # Stages that draw the same are what the patch is against: no right answer.
            raised=mine.raised or theirs.raised or ("stages draw the same" if hazard else ""),
            seen={"result": mine.seen.get("result"), "drawn": drawn},
            before={},
            after={},
        )


def _seeding_on(stage: int, folder: str, offset: int) -> Iterator[Event]:
    import torch
    import torch.distributed as dist
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel import random

    leave()
    store = dist.FileStore(os.path.join(folder, "store"), 2)
    dist.init_process_group("gloo", store=store, rank=stage, world_size=2)
    parallel_state.initialize_model_parallel(pipeline_model_parallel_size=2)

    def state() -> dict[str, Any]:
        states = random.get_cuda_rng_tracker().get_states()
        drawn = {name: digest(value) for name, value in states.items()}
        return {"drawn": {**drawn, "default": digest(torch.cuda.get_rng_state())}}

    seed = random.model_parallel_cuda_manual_seed
    for name, function in (
        ("seeds", lambda: seed(42 + offset)),
        ("by keyword", lambda: seed(seed=6 + offset)),
        ("for inference", lambda: seed(7 + offset, inference_rng_tracker=True)),
        ("for training after it", lambda: seed(8 + offset)),
        ("with ranks", lambda: seed(9 + offset, tp_rank=0, ep_rank=0, etp_rank=0)),
    ):
        yield call(f"{name}, {offset} apart", function, state)


PROGRAMS: dict[str, list[Callable[[], Iterator[Event]]]] = {
    "train": [
        partial(training, "--overlap-grad-reduce", "--overlap-param-gather", by_keyword=True),
        partial(training, "--overlap-grad-reduce", wired=True),
        partial(training, "--manual-gc", "--exit-interval", "2"),
    ],
    "train_step": [stepping],
    "evaluate": [evaluating],
    "save": [saving],
    "get_megatron_optimizer": [partial(building, "fp32"), partial(building, "bf16")],
    "model_parallel_cuda_manual_seed": [partial(seeding, offset=100), partial(seeding, offset=0)],
}
"""Each is run in a process of its own: upstream keeps state in globals and classes."""


def warm_up(function: str) -> None:
    """Run its programs, so that children of this process find everything imported."""
    arguments = importlib.import_module("megatron.training.arguments")
    _stock_parse_args[:] = [arguments.parse_args]
    # That one forks by itself: another stands in for it.
    function = "save" if function == "model_parallel_cuda_manual_seed" else function
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        for program in PROGRAMS[function]:
            for _ in program():
                pass
    leave()
    gc.collect()
    gc.freeze()


# What programs share.


def _start(*options: str) -> Any:
    from megatron.core.rerun_state_machine import RerunDataIterator

    from megatron_idempotent.proof.cpu import program

    _alone()
    arguments = importlib.import_module("megatron.training.arguments")
    arguments.parse_args = _parse_args
    running = program.start(options, num_microbatches=2)
    running.data = [RerunDataIterator(_limited(data.iterable)) for data in running.data]
    return running


_parsed: dict[tuple[str, ...], Any] = {}
_stock_parse_args: list[Any] = []


def _parse_args(*given: Any, **named: Any) -> Any:
    """Upstream's, once for each command line: it takes most of the time of a start."""
    line = tuple(sys.argv)
    if line not in _parsed:
        _parsed[line] = _stock_parse_args[0](*given, **named)
    return copy.deepcopy(_parsed[line])


def _limited(batches: Iterator[Any]) -> Iterator[Any]:
    for _ in range(ENOUGH):
        yield next(batches)
    raise RuntimeError(f"it reads more than {ENOUGH} microbatches")


def _alone() -> None:
    import torch.distributed as dist

    leave()
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)


def leave() -> None:
    """End what the program before set up."""
    import torch.distributed as dist
    from megatron.core import num_microbatches_calculator, parallel_state, rerun_state_machine
    from megatron.training import global_vars

    if not dist.is_initialized():
        return
    parallel_state.destroy_model_parallel()
    for name, value in vars(parallel_state).items():
        # Upstream leaves some, and a forked child that drops one waits for its threads for ever.
        if isinstance(value, dist.ProcessGroup):
            setattr(parallel_state, name, None)
    dist.destroy_process_group()
    global_vars.destroy_global_vars()
    num_microbatches_calculator.destroy_num_microbatches_calculator()
    rerun_state_machine.destroy_rerun_state_machine()


def _state(running: Any) -> State:
    names = ("no_sync_func", "grad_sync_func", "finalize_model_grads_func", "grad_scale_func")
    return lambda: {
        **{name: described(getattr(running.config, name)) for name in names},
        "losses": list(running.losses),
        "parameters": digest(running.parameters()),
        "trained samples": running.args.consumed_train_samples,
        "skipped samples": running.args.skipped_train_samples,
        "evaluated samples": running.args.consumed_valid_samples,
    }


def _undone(running: Any) -> State:
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import get_timers

    return lambda: {
        "param_sync_func": described(running.config.param_sync_func),
        "collector": gc.isenabled(),
        "optimizer.step": described(vars(running.optimizer).get("step")),
        "modes": [module.training for module in running.chunks[0].modules()],
        "rerun mode": str(get_rerun_state_machine().get_mode()),
        "config.timers": running.config.timers is not None,
        "running timers": sorted(n for n, t in get_timers()._timers.items() if t._started),
    }
