"""Runs a stock `megatron.training` program on a rank: real arguments, real set-up, real `train`.

It needs a release whose wheel carries `megatron.training` (0.17.1 on). Nothing of upstream is
replaced here: `Program.train` looks `megatron.training.training.train` up when it is called, so
that patches count and upstream's one-shot failures come out unchanged.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from . import tiny

VOCABULARY = 128
SEQUENCE = 32
#: The length of the run that `setup_model_and_optimizer` needs. With the constant learning rate
#: below it makes no difference, and `train` adds up the true number.
HORIZON_ITERS = 1000


@dataclass(kw_only=True)
class Program:
    """Holds a `megatron.training` program that is set up, and can `train` several times."""

    args: Any
    config: Any
    chunks: list[Any]
    optimizer: Any
    scheduler: Any
    #: One iterator per model chunk; they go on across calls.
    data: list[Any]
    quiet: bool
    #: Every microbatch's loss on the last pipeline stage, over all calls; empty elsewhere.
    losses: list[float] = field(default_factory=list)

    def train(self, n: int) -> None:
        """Train `n` more iterations: raise `args.train_iters` by n, and call Megatron's `train`.
        All ranks take part.
        """
        training = importlib.import_module("megatron.training.training")
        self.args.train_iters += n
        offered = {
            "forward_step_func": self._forward_step,
            "model": self.chunks,
            "optimizer": self.optimizer,
            "opt_param_scheduler": self.scheduler,
            "train_data_iterator": self.data if len(self.data) > 1 else self.data[0],
            "valid_data_iterator": None,
            "process_non_loss_data_func": None,
            "config": self.config,
            "checkpointing_context": {},
            "non_loss_data_func": None,
        }
        with _silence(self.quiet):
            training.train(**offered)

    def load(self) -> int:
        """Load the checkpoint of `args.load`; return its iteration. All ranks take part.

        The counts of samples start again, as in a process that has just begun: until September
        2025 a load asserts that they are zero.
        """
        checkpointing = importlib.import_module("megatron.training.checkpointing")
        for name in ("consumed_train_samples", "skipped_train_samples", "consumed_valid_samples"):
            setattr(self.args, name, 0)
        iteration: int
        iteration, _ = checkpointing.load_checkpoint(self.chunks, self.optimizer, self.scheduler)
        return iteration

    def parameters(self) -> torch.Tensor:
        """Return this rank's parameters as one float32 vector, a copy on the host."""
        return tiny.parameters_of(self.chunks)

    def _forward_step(self, data_iterator: Any, model: Any, *_: Any) -> tuple[Any, Any]:
        tokens_BT, positions_BT, mask = next(data_iterator)
        tokens_BT, positions_BT = map(tiny.own_part, (tokens_BT, positions_BT))
        output = model(tokens_BT, positions_BT, mask, labels=tokens_BT)

        def loss_func(loss_BT: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
            loss, mean = tiny.mean_over_ranks(loss_BT)
            self.losses.append(float(mean))
            return loss, {"lm loss": mean}

        return output, loss_func


def start(
    extra_args: Sequence[str] = (),
    *,
    tp: int = 1,
    pp: int = 1,
    vpp: int | None = None,
    cp: int = 1,
    layers_per_stage: int = 1,
    num_microbatches: int = 4,
    micro_batch_size: int = 2,
    distributed_optimizer: bool = True,
    shared_config: bool = False,
    exact_attention: bool | None = None,
    before_ddp: Callable[[Any], None] | None = None,
    data_seed: int = 7,
    quiet: bool = True,
) -> Program:
    """Set up a tiny GPT by Megatron's own argument parser and initialisation; return it as a
    `Program`.

    Call it once per rank, on all ranks. `extra_args` are Megatron's command-line options, and
    override those set here. `shared_config` gives all virtual stages one config object, as
    frameworks do. `exact_attention` puts in `cpu.attention`, for packs; None does so under context
    parallelism only. `before_ddp` is called with each chunk's module before DDP wraps it. `quiet`
    drops what upstream prints.

    Raises:
        ModuleNotFoundError: the installed release does not carry `megatron.training`.
    """
    from megatron.core import parallel_state
    from megatron.core.enums import ModelType
    from megatron.core.rerun_state_machine import RerunDataIterator
    from megatron.training import arguments, get_args, initialize, training

    world_size = int(os.environ["WORLD_SIZE"])
    data_parallel_size = world_size // (tp * pp * cp)
    argv = [
        *_options(
            num_layers=layers_per_stage * pp * (vpp or 1),
            hidden_size=64,
            num_attention_heads=4,
            seq_length=SEQUENCE,
            max_position_embeddings=SEQUENCE,
            micro_batch_size=micro_batch_size,
            global_batch_size=micro_batch_size * num_microbatches * data_parallel_size,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            num_layers_per_virtual_pipeline_stage=layers_per_stage if vpp else None,
            context_parallel_size=cp,
            train_iters=HORIZON_ITERS,
            lr=1e-3,
            lr_decay_style="constant",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            transformer_impl="local",
            tokenizer_type="NullTokenizer",
            # The tokenizer of some releases adds an end-of-document token; padding hides it.
            vocab_size=VOCABULARY - 1,
            make_vocab_size_divisible_by=VOCABULARY // tp,
            logging_level=30,
            eval_interval=HORIZON_ITERS,
            eval_iters=0,
            log_interval=1,
        ),
        "--no-gradient-accumulation-fusion",
        "--no-persist-layer-norm",
        "--no-masked-softmax-fusion",
        "--use-cpu-initialization",
        *(["--use-distributed-optimizer"] if distributed_optimizer else []),
        *extra_args,
    ]
    if "--use-megatron-fsdp" in extra_args:
        # With FSDP upstream refuses the single connection that sequence parallelism needs.
        os.environ.pop("CUDA_DEVICE_MAX_CONNECTIONS", None)
    with arguments_of(argv), _silence(quiet):
        # 0.17 parses inside initialize_megatron, later releases before it.
        if hasattr(arguments, "parse_and_validate_args"):
            arguments.parse_and_validate_args()
        initialize.initialize_megatron()
        args = get_args()
        provide = _provider(args, shared_config, exact_attention, before_ddp)
        chunks, optimizer, scheduler = training.setup_model_and_optimizer(
            model_type=ModelType.encoder_or_decoder,
            model_provider_func=provide,
            checkpointing_context={},
        )
    args.train_iters = 0
    args.do_train, args.do_valid, args.do_test = True, False, False
    data_parallel_rank = parallel_state.get_data_parallel_rank()
    data = [
        RerunDataIterator(_batches(data_seed + 1000 * data_parallel_rank, args.micro_batch_size))
        for _ in chunks
    ]
    config = training.get_model_config(chunks[0])
    assert isinstance(chunks[0], torch.nn.Module)
    return Program(
        args=args,
        config=config,
        chunks=chunks,
        optimizer=optimizer,
        scheduler=scheduler,
        data=data,
        quiet=quiet,
    )


def _provider(
    args: Any,
    shared_config: bool,
    exact_attention: bool | None,
    before_ddp: Callable[[Any], None] | None,
) -> Callable[..., Any]:
    """Return a model provider for Megatron: a function that builds one pipeline stage of the GPT,
    with the local layer spec.
    """
    from megatron.training.arguments import core_transformer_config_from_args

    from megatron_idempotent.megatron.layer_specs import gpt_stage

    from .attention import with_exact_attention

    config_of = functools.cache if shared_config else lambda function: function
    make_config = config_of(lambda: core_transformer_config_from_args(args))

    def provide(
        pre_process: bool = True,
        post_process: bool = True,
        vp_stage: int | None = None,
        config: Any = None,
        pg_collection: Any = None,
    ) -> Any:
        if config is None:
            config = make_config()
        exact = exact_attention
        if exact is None:
            exact = config.context_parallel_size > 1
        stage = gpt_stage(
            config,
            vp_stage=vp_stage,
            change_spec=with_exact_attention if exact else None,
            vocab_size=args.padded_vocab_size,
            max_sequence_length=args.max_position_embeddings,
            pre_process=pre_process,
            post_process=post_process,
            share_embeddings_and_output_weights=not args.untie_embeddings_and_output_weights,
        )
        if before_ddp is not None:
            before_ddp(stage)
        return stage

    return provide


def _batches(seed: int, size: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield (tokens [B, T], positions [B, T], mask [1, 1, T, T], True where hidden), endlessly."""
    generator = torch.Generator().manual_seed(seed)
    positions_BT = torch.arange(SEQUENCE, device="cuda").expand(size, -1)
    hidden = torch.ones(1, 1, SEQUENCE, SEQUENCE, device="cuda").tril() < 0.5
    while True:
        tokens_BT = torch.randint(0, VOCABULARY, (size, SEQUENCE), generator=generator)
        yield tokens_BT.cuda(), positions_BT, hidden


def _options(**values: Any) -> list[str]:
    """Convert keyword arguments to command-line options: `_options(lr=0.1, vpp=None) == ["--lr",
    "0.1"]`.
    """
    return [
        text
        for name, value in values.items()
        if value is not None
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]


@contextlib.contextmanager
def arguments_of(argv: list[str]) -> Iterator[None]:
    """Set `sys.argv` to these arguments within the block, because Megatron's parser reads them only
    from there.
    """
    outer = sys.argv
    sys.argv = [outer[0], *argv]
    try:
        yield
    finally:
        sys.argv = outer


@contextlib.contextmanager
def _silence(quiet: bool) -> Iterator[None]:
    if not quiet:
        yield
        return
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        yield
