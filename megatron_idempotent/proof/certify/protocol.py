"""Defines `Adapter`, which a framework implements to be certified, and its `Subject`.

Legend: B rows, T positions.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, get_args

from .layouts import Layout, LossKind

if TYPE_CHECKING:
    from pathlib import Path

    import torch


class Wrong(Exception):
    """Raised by a check that finds a fault of an adapter, such as a wrong gradient; the message
    describes the fault in one line.
    """


class Planted(BaseException):
    """The error that a check raises in a loss or in the model, to see how a framework handles a
    failure.

    An instance is also an error of the type that the check has drawn, such as `KeyError`: a
    framework may not take that for a bad sample, and go on.

    Example: `raise Planted("the loss fails")`.
    """

    drawn: ClassVar[type[BaseException]] = RuntimeError
    """The type of the next failure on this rank."""

    def __new__(cls, *args: Any) -> Planted:
        """Return an error that is an instance both of `Planted` and of the exception type in
        `Planted.drawn`, such as `KeyError`.
        """
        kind = type(f"Planted{cls.drawn.__name__}", (Planted, cls.drawn), {})
        return super().__new__(kind, *args)


MICRO_BATCH = 2
"""Rows of a microbatch."""

Rows = Mapping[str, Any]
"""Sequences of one rank: `input_ids` [B, T], `token_mask` [B, T], `sample_mask` [B], `scale` [B].

B may be 0. Position t >= 1 of a row counts if its token mask and the row's sample mask are 1. A row
counts as a sequence if its sample mask is 1; in layouts with `sequences` one of its positions or
more counts then, because frameworks count other rows differently. The loss multiplies the row by
its scale, as by an advantage: 1, another number, or where a check wants it a NaN or infinite. In
layouts of packs rows have `lengths` [B] too, the tokens of each; after them comes padding."""

Packed = Mapping[str, Any]
"""A pack of n sequences, as `Subject.forward` and `Subject.loss` take it: S tokens, with padding.

`input_ids`, `position_ids`, `labels` (the token that each position predicts), `loss_mask` and
`scale` are [1, S], and `packed_seq_params` is Megatron's. The adapter makes all of it."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Subject:
    """Holds the model, optimizer, forward and loss that an adapter trains with, on one rank.

    Example: `TrainStep(subject.chunks, subject.optimizer, forward=subject.forward)`.
    """

    chunks: list[Any]
    """The pipeline stage's model chunks, in Megatron's `DistributedDataParallel`; or one plain
    module on FSDP2."""
    optimizer: Any
    """Megatron's optimizer, or torch's, with a constant learning rate."""
    config: Any
    """The chunks' `TransformerConfig`, with `calculate_per_token_loss` unless the adapter's
    `config_overrides` say otherwise; None on FSDP2."""
    forward: Callable[[Any, Rows | Packed], torch.Tensor]
    """A function of a chunk and rows that returns what the chunk does: on the last stage the
    negative log-probability [B, T] of the token after each position, or [1, S] of a pack. Rows and
    packs come whole; under context parallelism it is that of the rank's own positions."""
    loss: Callable[[torch.Tensor, Rows | Packed], tuple[torch.Tensor, torch.Tensor]]
    """A function of the last stage's output and its rows, or the pack, that returns the sum over
    the positions that count, and their number; of the rank's own positions, where ranks share. With
    `loss_kind` "sequence" it is the sum of the sequences' means, and the number of sequences, of
    which the rank with the first position counts each."""
    micro_batch_size: int
    """Rows of one microbatch. Each call has a multiple of it, except in `rows-left-over`: there the
    last microbatch has fewer rows, or the framework refuses the call. An auxiliary loss is one of a
    microbatch: with `moe` or `mtp` in the layout's name, a call's rows are to be
    cut into microbatches in their order."""
    packs: bool = False
    """True if rows have `lengths`, and the adapter is to train on packs of them."""
    max_tokens: int = 0
    """The most tokens of a pack, padding included: a microbatch of whole rows fits."""
    loss_kind: LossKind = "token"
    """The unit of the loss's mean: "token" for positions that count, "sequence" for sequences that
    do, of which each is the mean over its positions that count."""
    scheduler: Any = None
    """Megatron's `OptimizerParamScheduler` in the checks of state, which call its `step` after each
    `finish`; None in the others."""
    folder: Path | None = None
    """A folder that all ranks share, for checkpoints; None where no check of state is made."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """Holds the result of an adapter's `finish`, equal on all ranks that report it.

    Example: `Finished(grad_norm=1.5, loss=4.2)`.
    """

    updated: bool = True
    """False if the step was skipped, and no parameter changed."""
    grad_norm: float | None = None
    """Norm of the gradient before clipping; None if the framework does not tell."""
    loss: float | None = None
    """Mean over all positions, or sequences, of the step that count, on all replicas, each times
    the scale of its row, without auxiliary losses; None if it does not tell."""


def why_not(cannot: Mapping[str, str], check: str, layout: Layout) -> str | None:
    """Return the reason that an adapter's `cannot` gives for a check on a layout; None if it gives
    none.
    """
    names = [check, *(f"{check}/{word}" for word in sorted(layout.words))]
    return next((cannot[name] for name in names if name in cannot), None)


Calls = Callable[[int], list[Rows]]
"""A function of a replica's number that returns the rows of each of its calls in a step."""


PUT = ("scheduler", "random", "loss scale", "expert bias", "token counts")
"""The kinds of state that the checks put back themselves after a load."""
KEEPS = (*PUT, "auxiliary losses", "counters")
"""The kinds that a checkpoint may have beside weights and optimizer.

"expert bias" and "token counts" are routers' buffers, "auxiliary losses" what Megatron's trackers
have summed up for a report, and "counters" what the adapter's `counters()` returns."""
RUN = ("weights", "optimizer", *PUT)
"""The kinds that a step depends on."""
Part = Literal["weights", "gradients", "optimizer"]
"""A part that `offload` can move alone."""
SAYS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {"keeps": KEEPS, "reshards": ("dp", "tp", "pp", "ep", "cp"), "parts": get_args(Part)}
)
"""The attributes of an adapter that are a tuple of names, and the names that each may have."""


class Adapter(Protocol):
    """The interface by which checks drive a framework's training step on one rank. Frameworks
    implement it; all ranks call the same methods in the same order.

    An adapter may also have `logprobs(rows)`, the log-probability [B, T] of the token after each
    position on ranks of the last stage, and None on others; `export()`, which returns the
    parameters, or sets them as `exported`, and changes nothing that the step depends on; `save()`,
    which returns all that a later process needs, as copies that later steps do not write to, and
    `load(state)`, called right after `build`, and by the checks of state on a subject that has
    stepped too; `offload()`, which moves parameters,
    gradient buffers and optimizer state to the host or frees them, as colocated frameworks do while
    engines sample, and `onload(training=True)`, which brings all of it back, or with
    `training=False` at least what log-probs read; an open step may keep its gradients or refuse.
    Checks of methods that it lacks are skipped. A class attribute `config_overrides` has fields of
    `TransformerConfig` that the framework sets. With a class attribute `packs = True` it trains on
    packs of rows that have `lengths`: it makes packs of them with the framework's own code, and
    gives those to the chunk or to `Subject.forward`. Without, layouts of packs are not judged. With
    `sequences = True` it also trains on a loss that is a mean over sequences, where
    `Subject.loss_kind` asks for it; without, layouts with `sequences` are not judged. With
    `balance_mean = True` experts' loss is a mean over all positions of the step, whether they count
    or not. With `order_stable = True` it promises that the same rows, in the same microbatches,
    give the same bits. With `fsdp2 = True` it trains FSDP2 models, and no others. A method
    `low_rank(module, rank=, magnitudes=)` puts the framework's own low-rank layers into a chunk's
    module before DDP wraps it: alpha is twice the rank, and parameters are named as
    Megatron-Bridge's are. Without it the layers are those of `low_rank.py`.

    Checks of state (`certify --state`) ask for more. What `save()` returns is pickled for each
    rank; one that writes files writes them below `subject.folder`, under another name each time,
    and returns what names them. A save that leaves too few bytes in both is an error. All saves of
    a check stay: switch off what removes older ones. A load that cannot read raises on all ranks.
    `load_weights(state)` loads the weights alone, into a subject that has stepped: main parameters
    become the weights, or keep elements that round to them; moments stay. `save_async()` returns
    what `save` does before all is written, and `saved()` waits until it is, and raises on all ranks
    if one cannot write. A class attribute
    `keeps` names the kinds of state that the checkpoint has beside weights and optimizer, some of
    `KEEPS`; the checks put back the other kinds themselves. `counters()` returns what the framework
    counts itself, such as iterations and samples. With a class attribute `parts`, some of `Part`,
    `offload(only=part)` moves one of them alone, and `onload()` brings it back; `onload()` does so
    too after two calls of `offload()`, and after one that raised midway. With `reshards = ("dp",
    "tp")` a checkpoint can be loaded with other numbers of these ranks.
    """

    cannot: Mapping[str, str]
    """The checks that the framework does not promise to pass, with the reason, by the check's name,
    or by "check/word" for layouts with that word, such as "uneven-replicas/ep". They do not fail
    the verdict."""

    def build(self, subject: Subject) -> None:
        """Prepare the framework to train the subject's model; called again for a second run with
        the same model.
        """

    def begin(self) -> None:
        """Open a training step, to which calls of `microbatch` then add gradients."""

    def microbatch(self, rows: Rows, *, fail: bool = False) -> None:
        """Run forward and backward on this rank's rows, and accumulate their gradients in the open
        step. The rows may make several microbatches.

        With `fail`, raise in the loss of its first microbatch, on ranks that compute the loss. A
        rank on which any call raises calls `abort()` next.
        """

    def finish(self) -> Finished:
        """Divide the step's gradients by the number of positions, or sequences, that count in all
        replicas, and update the parameters.

        One step updates once.
        """

    def abort(self) -> None:
        """Drop the open step and its gradients, so that the next step begins as if the dropped one
        had never begun.
        """
