"""Runs an adapter's steps on a rank, and holds each to its definition.

Legend: B rows, T positions.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
import io
import math
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_idempotent.megatron import moe
from megatron_idempotent.proof.cpu import tiny
from megatron_idempotent.window.params import ensure_params_synced

from . import fsdp2, oracle
from .batches import LOSSES, forward, shorten
from .draws import Draw
from .forwards import Forwards, PacksSeen
from .layouts import EXPERTS, LAYERS, Layout
from .memories import Memories
from .oracle import MTP_FACTOR, TrueUpdate, Truth, negative_logprobs, truth_of
from .parameters import (
    LOSS_SCALE,
    Main,
    ParameterPart,
    Stepped,
    compared,
    joined,
    joined_main,
    mains_of,
    not_of_adam,
    parts,
    spread,
    stepped_by_adam,
)
from .protocol import MICRO_BATCH, Adapter, Calls, Finished, Rows, Subject, Wrong, why_not

HEADS, T = tiny.HEADS, tiny.SEQUENCE
"""Heads and positions of the model."""

_FLOAT32 = 2.0**-24
#: Megatron computes the softmax over the vocabulary in float32, whatever the model has: as many
#: roundings as there are words and a few more, in each token's gradient. Tokens' gradients are
#: independent: their sum is smaller than the sum of their norms by the root of their number.
_SOFTMAX = (tiny.VOCABULARY + 32) * _FLOAT32
#: So it does those of a router, over all experts and over the chosen ones: in what each token gets
#: of its experts, and in its gradient. The difference of terms that are alike is a few more.
_ROUTER = (EXPERTS + 32) * _FLOAT32
#: Of a whole step in float32, layer by layer, as tests/step/roundings.py derives them.
_ROUNDINGS = 4e5 * _FLOAT32
#: Of a gradient and of log-probs in bfloat16: twice what three roundings of each operation's result
#: come to, if they are independent of each other: tests/proof/certify/test_oracle.py measures it.
#: By the kind of loss, and whether layers have losses of their own: both round more. Roundings of
#: float16 are an eighth of them.
OF_BFLOAT16 = {
    ("token", False): 0.06,
    ("sequence", False): 0.07,
    ("token", True): 0.08,
    ("sequence", True): 0.095,
}
_HALF_LOGPROBS = 0.014
_FINER = {"bf16": 1.0, "fp16": 8.0}
#: Adam divides by sqrt(v) + epsilon. So much more than any gradient makes its step proportional to
#: the gradient, where with a usual epsilon it would be the same for a gradient twice as large.
_EPSILON = 2.0**20
_SGD = {"momentum": 0.5}
_ADAM = {"beta1": 0.5, "beta2": 0.5, "epsilon": _EPSILON}
_LR = 0.5
#: Routers keep the margins by which they decide over the steps of a check.
_LR_OF_EXPERTS = 0.005


class Bench:
    """Holds one adapter around one model; `known` are the whole model's parameters as they are."""

    def __init__(
        self, adapter: Adapter, layout: Layout, *, draw: Draw | None = None, thorough: bool = False
    ) -> None:
        """Build the model and give it to the adapter; `draw` is the check's, equal on all ranks."""
        self.adapter = adapter
        self.layout = layout
        self.draw = draw or Draw(0, layout.name)
        self.thorough = thorough
        self.packs_seen: PacksSeen | None = None
        self.double, self.half = layout.dtype == "fp64", layout.dtype in _FINER
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.make_model()
        # Its own: an adapter may have left collectives of the others half-way.
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        self._group = group
        self.place = ""
        """The step that is taken, for what is wrong with it; "" if it is like any other."""
        self._seats: list[str] = self.told_by_all(self._seat_in_words)
        # The ranks that have each parameter, by its name and the number of the shard.
        self._holders: dict[tuple[str, int], list[int]] = {}
        kind, options = ("sgd", _SGD) if self.double else ("adam", _ADAM)
        self.update = TrueUpdate(kind, lr=self._rate, **options)
        self.adapter.build(self.subject)
        self.memories = Memories(self.subject)
        self._forwards_of: tuple[Any, Forwards] | None = None
        self.known = self.whole()
        self.of_bound = 0.0
        """The largest part of its bound that an error had so far."""
        self.bits = ""
        """A digest of the parameters after the steps of `same-bits`."""

    @property
    def _rate(self) -> float:
        rate = _LR_OF_EXPERTS if self.layout.experts else _LR
        return rate if self.double else rate * _EPSILON

    def make_model(self) -> None:
        """Build the model and its optimizer, with the same weights each time."""
        if self.layout.fsdp2:
            self.sharded, optimizer = fsdp2.build(_LR, _SGD["momentum"])
            self.replica = self.rank
            model = tiny.Tiny(config=None, chunks=[self.sharded], optimizer=optimizer)
            self.subject = self.subject_of(model, fsdp2.forward)
            return
        from megatron.core import parallel_state

        self.model = self.built()
        for chunk in self.model.chunks:
            spread(chunk, self.layout)
        self.model.optimizer.reload_model_params()
        self.replica = int(parallel_state.get_data_parallel_rank())
        self.subject = self.subject_of(self.model, forward)

    def built(self, **more: Any) -> tiny.Tiny:
        """Build a model of the layout, with `more` arguments of `tiny.build`."""
        settings = self._settings()
        if "mtp" in self.layout.flags:
            # Upstream's arguments allow MTP rotary positions or none; learned ones would be twice.
            settings["model_overrides"] = {"position_embedding_type": "none"}
        settings["config_overrides"] = {
            "calculate_per_token_loss": True,
            **settings["config_overrides"],
            **getattr(self.adapter, "config_overrides", {}),
        }
        # It is for the framework to wire the config.
        how = {"batch": MICRO_BATCH, "wire": False, **settings, **self.layout.options, **more}
        return tiny.build(**how)

    def _settings(self) -> dict[str, Any]:
        """Return the arguments of `tiny.build` that steps which are held to the definition need."""
        optimizer: dict[str, Any]
        precise: dict[str, Any] = {}
        config: dict[str, Any] = {}
        if self.double:
            torch.set_default_dtype(torch.float64)  # the norms' too
            config |= {"params_dtype": torch.float64, "pipeline_dtype": torch.float64}
            precise = {"ddp_overrides": {"grad_reduce_in_fp32": False}}
            optimizer = {"optimizer": "sgd", "sgd_momentum": _SGD["momentum"]}
        else:
            optimizer = {
                "adam_beta1": _ADAM["beta1"],
                "adam_beta2": _ADAM["beta2"],
                "adam_eps": _EPSILON,
            }
        if self.layout.dtype == "fp16":
            optimizer["loss_scale"] = LOSS_SCALE
        # Layers that have a loss of their own.
        if self.layout.experts:
            config |= {"moe_router_topk": oracle.TOPK, "moe_aux_loss_coeff": oracle.COEFFICIENT}
        if "mtp" in self.layout.flags:
            config |= {"mtp_num_layers": 1, "mtp_loss_scaling_factor": MTP_FACTOR}
        rates = {"lr": self._rate, "min_lr": self._rate, "weight_decay": 0.0, "clip_grad": 0.0}
        return {"config_overrides": config, "optimizer_overrides": optimizer | rates, **precise}

    def subject_of(self, model: tiny.Tiny, forward: Callable[[Any, Any], Tensor]) -> Subject:
        """Return what an adapter gets of a model that was built."""
        # Of rows auxiliary losses are known without looking.
        looks = self.layout.packs and self.layout.auxiliary
        self.packs_seen = PacksSeen(model.chunks[0]) if looks else None
        return Subject(
            chunks=model.chunks,
            optimizer=model.optimizer,
            config=model.config,
            forward=forward,
            loss=LOSSES[self.layout.loss_kind],
            loss_kind=self.layout.loss_kind,
            micro_batch_size=MICRO_BATCH,
            packs=self.layout.packs,
            max_tokens=MICRO_BATCH * T,
        )

    def rows(self, replica: int, seed: int, number: int) -> dict[str, Any]:
        """Return rows [B, T] of a replica, of which all positions count; the same on all ranks.

        In a layout of packs each has a length of three quarters of T.
        """
        generator = torch.Generator().manual_seed(1000 * seed + replica)
        shape = number, T
        tokens_BT = torch.randint(0, tiny.VOCABULARY, shape, generator=generator)
        ones = torch.float64 if self.double else torch.float32
        rows = {
            "input_ids": tokens_BT.cuda(),
            "token_mask": torch.ones(shape, dtype=ones).cuda(),
            "sample_mask": torch.ones(number, dtype=ones).cuda(),
            "scale": torch.ones(number, dtype=ones).cuda(),
        }
        return shorten(rows, [3 * T // 4] * number) if self.layout.packs else rows

    def alike(self, seed: int, *numbers: int) -> Calls:
        """Return a step with a call of so many rows for each number, as many on each replica."""
        return lambda replica: [
            self.rows(replica, 10 * seed + call, number) for call, number in enumerate(numbers)
        ]

    def mixed(self, replica: int, seed: int, number: int) -> dict[str, Any]:
        """Return rows of lengths from 1 to T, of which one does not count, and one has a gap.

        In a sequence of length 1 nothing counts: a mean over sequences has none.
        """
        rows = self.rows(replica, seed, number)
        rows["token_mask"][:] = 1
        least = 2 if self.layout.loss_kind == "sequence" else 1
        places = [11 * (row + 3 * replica + seed) % T for row in range(number)]
        lengths = [max(least, 1 + place) for place in places]
        rows["sample_mask"][1] = 0
        rows["token_mask"][2, T // 4 : T // 2] = 0
        return shorten(rows, lengths)

    def sparse(
        self, replica: int, seed: int, number: int, share: float, *, size: float = 1.0
    ) -> dict[str, Any]:
        """Return rows in which about such a share of positions counts, two of each row at least.

        Some rows do not count. In a layout of packs lengths are from 3 to T. Each row has a scale
        from `size` / 2 to twice as much, as advantages are; in float64 of either sign, because a
        sum that cancels is as near to its definition there.
        """
        rows = self.rows(replica, seed, number)
        generator = torch.Generator().manual_seed(1000 * seed + replica + 500)
        scale_B = size * 2 ** (2 * torch.rand(number, generator=generator) - 1)
        if self.double:
            scale_B[torch.rand(number, generator=generator) < 0.5] *= -1
        rows["scale"][:] = scale_B.to(rows["scale"])
        keep_BT = torch.rand(number, T, generator=generator) < share
        keep_BT[:, 1:3] = True  # an MTP layer has something to predict, too
        rows["token_mask"][:] = keep_BT.to(rows["token_mask"])
        drop_B = torch.rand(number, generator=generator) < 0.2
        drop_B[::MICRO_BATCH] = False  # something counts in each microbatch
        rows["sample_mask"][drop_B.to(rows["sample_mask"].device)] = 0
        if not self.layout.packs:
            return rows
        lengths = torch.randint(3, T + 1, (number,), generator=generator).tolist()
        return shorten(rows, lengths)

    def ragged(self, replica: int, seed: int, number: int) -> tuple[dict[str, Any], Tensor]:
        """Return rows whose mask ends at drawn lengths from 2 to T, and these lengths [B]."""
        rows = self.rows(replica, seed, number)
        rows["token_mask"][:] = 1
        generator = torch.Generator().manual_seed(1000 * seed + replica + 700)
        rows = shorten(rows, torch.randint(2, T + 1, (number,), generator=generator).tolist())
        lengths_B = rows["lengths"] if self.layout.packs else rows.pop("lengths")
        return rows, lengths_B

    def declares(self, check: str) -> bool:
        """Return whether the adapter does not promise a check on this layout."""
        return why_not(getattr(self.adapter, "cannot", {}), check, self.layout) is not None

    @property
    def multiple(self) -> int:
        """The number that a call's microbatches are a multiple of: an interleaved pipeline's."""
        return self.layout.sizes["pp"] if self.layout.sizes["vpp"] > 1 else 1

    @property
    def seat(self) -> tuple[int, int, bool]:
        """The rank's replica and pipeline stage, and whether it computes the loss."""
        if self.layout.fsdp2:
            return self.replica, 0, True
        from megatron.core import parallel_state as ps

        stage = int(ps.get_pipeline_model_parallel_rank())
        return self.replica, stage, stage == self.layout.sizes["pp"] - 1

    @property
    def _seat_in_words(self) -> str:
        words = [f"replica {self.replica}"]
        if not self.layout.fsdp2:
            from megatron.core import parallel_state as ps

            words += [
                f"{word} {rank()}"
                for size, word, rank in (
                    ("pp", "stage", ps.get_pipeline_model_parallel_rank),
                    ("tp", "tensor-parallel rank", ps.get_tensor_model_parallel_rank),
                    ("cp", "context-parallel rank", ps.get_context_parallel_rank),
                    ("ep", "expert-parallel rank", ps.get_expert_model_parallel_rank),
                )
                if self.layout.sizes[size] > 1
            ]
        return f"rank {self.rank} ({', '.join(words)})"

    @property
    def fails_within_model(self) -> bool:
        """True if a failure in the model of a replica can be carried, and is not in a collective.

        Replicas that share experts or shards meet in the model.
        """
        return not self.layout.fsdp2 and self.layout.sizes["ep"] == 1

    @property
    def forwards(self) -> Forwards:
        """Return what watches the chunks' forwards; another one after another model was made."""
        if self._forwards_of is None or self._forwards_of[0] is not self.subject:
            self._forwards_of = self.subject, Forwards(self.subject.chunks)
        return self._forwards_of[1]

    def take(
        self, calls_of: Calls, *, between: Callable[[], None] | None = None, after: str = ""
    ) -> None:
        """Take a step, and hold it to the definition over the rows of all replicas.

        `between` is called before each microbatch and after the last. `after` is what came before
        the step, for what is said of it.
        """
        self.place = after and f"the step after {after}"
        before = self._stepped()
        finished = self.step(calls_of, between=between)
        after_it = self._stepped()
        self.expect(finished, self.everybody(calls_of))
        if finished.updated:
            pairs = zip(before, after_it, strict=True)
            faults = (not_of_adam(then, now, lr=self._rate, **_ADAM) for then, now in pairs)
            self.stop_at(next(filter(None, faults), None))
        self.place = ""

    def _stepped(self) -> list[Stepped]:
        """Copy what Adam steps on this rank; nothing in float64, and of FSDP2."""
        if self.double:
            return []
        return [*stepped_by_adam(self.subject.chunks, self.subject.optimizer)]

    def everybody(self, calls_of: Calls) -> list[Rows]:
        """Return the rows of all replicas and calls."""
        return [rows for one in range(self.layout.replicas) for rows in calls_of(one)]

    def step(self, calls_of: Calls, *, between: Callable[[], None] | None = None) -> Finished:
        """Take a step, and look at nothing. A rank on which anything raises aborts.

        Otherwise the others would wait.
        """
        adapter = self.adapter
        _ = self.forwards
        try:
            adapter.begin()
            for rows in calls_of(self.replica):
                if between is not None:
                    between()
                adapter.microbatch(rows)
            if between is not None:
                between()
            finished = adapter.finish()
        except Exception as error:
            adapter.abort()
            self._refuse_clipping(error)
            raise
        return self.checked(finished)

    def checked(self, finished: Any) -> Finished:
        """Return what an adapter's `finish` has returned, with floats.

        Raises:
            Wrong: it is not what `Adapter.finish` returns.
        """
        if not isinstance(finished, Finished):
            if inspect.iscoroutine(finished):
                finished.close()  # nobody awaits it
            raise Wrong(
                f"finish() returns {in_words(finished)}: the adapter has to return "
                "certify.Finished(updated=…, grad_norm=…, loss=…)"
            )
        numbers: dict[str, Any] = {"grad_norm": finished.grad_norm, "loss": finished.loss}
        for name, value in numbers.items():
            try:
                numbers[name] = None if value is None else float(value)
            except (TypeError, ValueError):
                raise Wrong(
                    f"finish() returns {in_words(value)} as {name}: the adapter has to return a "
                    "number, or None"
                ) from None
        return dataclasses.replace(finished, **numbers)

    def unwatched(self, steps: Sequence[Calls]) -> None:
        """Take steps, and hold each to its definition after the last of them.

        What a step has made is what the next one's forward computes with. Nobody has looked at it
        until then, because to look is to wait for the gathers that the framework has to wait for.
        """
        if self.layout.fsdp2 or self.packs_seen is not None:
            # Nothing is pending between FSDP2's steps; packs are those of one step at a time.
            for calls_of in steps:
                self.take(calls_of)
            return
        before: list[list[ParameterPart]] = []
        finished = []
        for calls_of in steps:
            used: list[ParameterPart] = []

            def copy(chunk: int, to: list[ParameterPart] = used) -> None:
                to += self._own_parts(synced=False, chunks=[chunk])

            with self.forwards.reading(copy):
                finished.append(self.step(calls_of))
            before.append(used)
        seen = [{part.name for part in used} for used in before]
        whole = {part.name for part in self._own_parts(synced=False)}
        if not all(self.told_by_all(all(names == whole for names in seen))):
            return  # the adapter has forwards of its own, which are not seen
        self._same(self.whole(before[0]), "a look at what the first forward has computed with")
        for index, calls_of in enumerate(steps):
            found = self.whole(before[index + 1] if index + 1 < len(before) else None)
            self.expect(finished[index], self.everybody(calls_of), found=found)

    def expect(
        self,
        finished: Finished,
        everybody: Sequence[Rows],
        *,
        found: dict[str, Tensor] | None = None,
    ) -> None:
        """Hold a finished step to its definition over the rows of all replicas.

        `found` is what it has made of the whole model; None to look at it now. A step in which
        nothing counts has a gradient of zero, and may be skipped.

        Raises:
            Wrong: parameters, norm or loss differ by more than roundings can explain.
        """
        truth = self._truth(everybody)
        if not truth.count and not finished.updated:
            self.unchanged("a step that was skipped")
            return
        still = self.update.without(self.known)
        wanted = self.update.next(self.known, truth.gradient)
        if not finished.updated:
            raise Wrong("finish() says that it has not updated")
        if self.forwards.evaluated is not None:
            raise Wrong(
                f"the step trains in eval mode: {self.forwards.evaluated} was left in it, in which "
                "dropout is off; call train() before the forward"
            )
        if found is None:
            found = self.whole()
        self._compare_parameters(found, wanted, still, truth, finished, everybody)
        allowed = self.tolerance(truth)
        # A mean over nothing is no number.
        loss = finished.loss if truth.count else None
        for name, value, right, size in (
            ("gradient norm", finished.grad_norm, truth.grad_norm, truth.grad_norm),
            ("loss", loss, truth.loss, truth.loss_size),
        ):
            if value is not None and not self._within(abs(value - right), allowed * size):
                raise Wrong(f"finish() reports the {name} {value:.6g}; {right:.6g} is right")
        self.known = found

    def _truth(self, everybody: Sequence[Rows]) -> Truth:
        found = None
        if self.packs_seen is not None:
            found = self.packs_seen.of_rows(
                everybody, replica=self.replica, gather=self.told_by_all
            )
        return truth_of(
            self._computing,
            everybody,
            packs=found,
            layers=LAYERS,
            heads=HEADS,
            kind=self.layout.loss_kind,
            balance_mean=getattr(self.adapter, "balance_mean", False),
            mtp_sum="mtp" in self.layout.flags and moe.adds_up_mtp_losses(self.subject.config),
            share=(self.rank, self.ranks),
            add=self._add_up,
        )

    def _add_up(self, own: Tensor) -> None:
        # By itself: cloudpickle takes `torch.distributed.config` along where a function names both.
        dist.all_reduce(own, group=self._group)

    def logprobs(self, rows: Rows) -> Tensor:
        """Compute the log-probability [B, T] of the token after each position, by definition."""
        known = {name: value.double() for name, value in self._computing.items()}
        return -negative_logprobs(known, rows["input_ids"], LAYERS, HEADS)

    def hold_logprobs(self, rows: Rows, lengths_B: Tensor, logprobs_BT: Any) -> None:
        """Hold what `logprobs` has returned to its definition, at positions with a next token.

        Raises:
            Wrong: other values, no tensor [B, T], or None on all ranks of a replica.
        """
        fault, shape = None, rows["input_ids"].shape
        if logprobs_BT is not None and (
            not isinstance(logprobs_BT, Tensor) or logprobs_BT.shape != shape
        ):
            fault = (
                f"logprobs() returns {in_words(logprobs_BT)}: the adapter has to return a tensor "
                f"[B, T], here {[*shape]}, on ranks of the last stage, and None on others"
            )
        elif logprobs_BT is not None:
            right_BT = self.logprobs(rows)
            has_next_BT = torch.arange(1, T + 1, device=lengths_B.device) < lengths_B[:, None]
            right_N, their_N = (
                values_BT.detach().double()[has_next_BT] for values_BT in (right_BT, logprobs_BT)
            )
            error = float((their_N - right_N).norm() / right_N.norm())
            if not error <= self.roundings:
                fault = f"log-probs differ from the model's by {100 * error:.3g} % of their norm"
        answered = {
            replica
            for replica, there in self.told_by_all((self.replica, logprobs_BT is not None))
            if there
        }
        if self.replica not in answered:
            fault = (
                "logprobs() returns None on all ranks of a replica: the adapter has to return a "
                "tensor [B, T] on ranks of the last stage"
            )
        self.stop_at(fault)

    @property
    def roundings(self) -> float:
        """The part of its size by which a log-probability may differ from its definition."""
        if not self.double:
            return _HALF_LOGPROBS / _FINER[self.layout.dtype] if self.half else _ROUNDINGS
        routers = LAYERS + ("mtp" in self.layout.flags) if self.layout.experts else 0
        return _SOFTMAX + routers * _ROUTER

    @property
    def _computing(self) -> dict[str, Tensor]:
        """The parameters that the model computes with."""
        if not self.half:
            return self.known
        dtype = self.subject.config.params_dtype
        return {name: value.to(dtype) for name, value in self.known.items()}

    def tolerance(self, truth: Truth) -> float:
        """Return by what part of its norm a gradient may differ from the definition."""
        if self.half:
            bound = OF_BFLOAT16[self.layout.loss_kind, self.layout.auxiliary]
            return bound / _FINER[self.layout.dtype]
        independent = math.sqrt(max(truth.terms, 1.0)) if self.double else 1.0
        return self.roundings * independent

    def away_and_back(self, *, freeing: bool = True) -> None:
        """Offload and onload between two steps, after which parameters are the same bits.

        Raises:
            Wrong: nothing has left the device, with `freeing`, or something has not come back.
        """
        self.memories.offload(self.adapter, freeing=freeing)
        self.memories.onload(self.adapter)
        self.unchanged("offload() and onload()")

    def digest(self) -> str:
        """Return a digest of the whole model's parameters, the same on all ranks."""
        found = hashlib.sha256()
        for name in sorted(self.known):
            found.update(name.encode())
            found.update(_bits(self.known[name]).numpy().tobytes())
        return found.hexdigest()[:16]

    def unchanged(self, what: str) -> None:
        """Raise `Wrong` unless the parameters are the same bits as before."""
        self._same(self.whole(), what)

    def hold_export(self, exported: Any) -> None:
        """Hold what an export has returned to the model's parameters, as they are.

        Raises:
            Wrong: other values, or none where all other ranks have none either.
        """
        if exported is None:
            exported = getattr(self.adapter, "exported", None)
        names, fault = compared(exported, self._own_parts(synced=False), self.known)
        told = self.told_by_all((names, isinstance(exported, (Mapping, list, tuple))))
        given = set[str]().union(*(each for each, _ in told))
        # One rank may export for all. What holds no tensors, such as a path, is not compared.
        if any(container for _, container in told) and (missing := self.known.keys() - given):
            raise Wrong(
                f"export() gives {len(given)} of {len(self.known)} parameters on all ranks "
                f"together, and lacks {min(missing)}"
            )
        self.stop_at(fault and f"export() gives other weights than the model has: {fault}")

    def _same(self, found: Mapping[str, Tensor], what: str) -> None:
        if moved := names_moved(found, self.known):
            raise Wrong(f"{what} has changed {len(moved)} parameters, the first is {moved[0]}")

    def _compare_parameters(
        self,
        found: Mapping[str, Tensor],
        wanted: Mapping[str, Tensor],
        still: Mapping[str, Tensor],
        truth: Truth,
        finished: Finished,
        everybody: Sequence[Rows],
    ) -> None:
        """Compare what this step's gradient did; the moments of earlier ones lead to `still`."""
        names = list(wanted)

        def between(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> Tensor:
            return torch.cat([(after[n].double() - before[n].double()).flatten() for n in names])

        moved, right = between(found, still), between(wanted, still)
        size, error = float(right.norm()), float((moved - right).norm())
        # Earlier gradients, which the moments hold, had roundings of their own.
        earlier = float(between(still, self.known).norm())
        stored = torch.cat([found[name].flatten() for name in names])
        rounding = float(stored.double().norm()) * torch.finfo(stored.dtype).eps
        if self._within(error, self.tolerance(truth) * (size + earlier) + 2 * rounding):
            return
        if not torch.isfinite(moved).all():
            raise Wrong("parameters are NaN or infinite after the step")
        if not size:
            raise Wrong("nothing counts in the step, and its gradient is not zero")
        self._refuse_clipping(None)
        if not between(found, self.known).any():
            raise Wrong("the step has moved no parameter")
        factor = float(moved @ right) / size**2
        near = max(0.01, self.tolerance(truth))
        rest = float((moved - factor * right).norm())
        # The factor has to be what is wrong, and not beside other errors of its size.
        if rest <= near * abs(factor) * size and rest < error / 2:
            clipped = self._clipped(finished, truth, factor)
            raise Wrong(f"the gradient is {factor:.4g} times the right one{clipped}")
        off = {}
        for name in names:
            right_size = float((wanted[name] - still[name]).norm())
            error_here = float((found[name].double() - wanted[name]).norm())
            if error_here > near * right_size:
                off[name] = error_here / right_size if right_size else math.inf
        fault = f"the gradient is off by {100 * error / size:.3g} % of its norm"
        if off:
            first = next(iter(off))
            of_shards = (ranks for (name, _), ranks in self._holders.items() if name == first)
            seats = ", ".join(self._seats[rank] for ranks in of_shards for rank in ranks)
            fault += (
                f", in {len(off)} of {len(names)} parameters; the first is {first}, off by "
                f"{100 * off[first]:.3g} %, on {seats}"
            )
        raise Wrong(fault + self._miscounted(everybody, truth, moved, right, near))

    def _miscounted(
        self, everybody: Sequence[Rows], truth: Truth, moved: Tensor, right: Tensor, near: float
    ) -> str:
        """Return how often each call's rows count in a gradient that is wrong, if that explains it.

        All ranks take part. A step is the sum of its calls, and each may have another factor.
        """
        if self.packs_seen is not None or len(everybody) < 2:
            return ""
        gradient = torch.cat([value.flatten() for value in truth.gradient.values()])
        alone = []
        for rows in everybody:
            piece = self._truth([rows])
            flat = torch.cat([value.flatten() for value in piece.gradient.values()])
            alone.append(flat * piece.count / max(truth.count, 1.0))
        of_calls = torch.stack(alone, 1) * float(right @ gradient / gradient.square().sum())
        factors = torch.linalg.pinv(of_calls.T @ of_calls) @ (of_calls.T @ moved)
        if float((of_calls @ factors - moved).norm()) > near * float(moved.norm()):
            return ""
        calls = len(everybody) // self.layout.replicas
        wrong = [
            f"of call {index % calls + 1} of replica {index // calls} count {factor:.3g} times"
            for index, factor in enumerate(factors.tolist())
            if abs(factor - 1) > 0.05 and alone[index].any()
        ]
        return f"; the rows {', '.join(wrong[:4])}" if wrong else ""

    def _clipped(self, finished: Finished, truth: Truth, factor: float) -> str:
        """Return what to say of a gradient that is too small, if its reported norm is right."""
        norm = finished.grad_norm
        if not 0 < factor < 1 or norm is None:
            return ""
        if abs(norm - truth.grad_norm) > self.tolerance(truth) * truth.grad_norm:
            return ""
        return (
            f", and the norm that finish() reports is right; if the step clips to "
            f"{factor * norm:.3g}, build it without clipping, which certify does not judge"
        )

    def _refuse_clipping(self, cause: BaseException | None) -> None:
        """Raise `Wrong` if Megatron's optimizer is set to clip, which it does in float32 alone."""
        inner = getattr(self.subject.optimizer, "chained_optimizers", [self.subject.optimizer])
        for one in inner:
            limit = getattr(getattr(one, "config", None), "clip_grad", 0.0)
            if limit:
                raise Wrong(
                    f"the optimizer is set to clip gradients (clip_grad is {limit:g}): certify "
                    "judges the gradient itself, so build the step with clip_grad=0.0"
                ) from cause

    def _within(self, error: float, bound: float) -> bool:
        if not error <= bound:  # nor if it is NaN
            return False
        self.of_bound = max(self.of_bound, error / bound if bound else 0.0)
        return True

    def whole(self, own: Sequence[ParameterPart] | None = None) -> dict[str, Tensor]:
        """Gather the whole model's parameters by Megatron's names. All ranks take part.

        `own` is what this rank has of it; None for what it has now. In bfloat16 these are the main
        parameters, and the model's are held to them.

        Raises:
            Wrong: two replicas have different bits.
        """
        everybody = self.told_by_all(self._own_parts() if own is None else own)
        found: dict[str, dict[int, ParameterPart]] = {}
        self._holders = {}
        shards: dict[tuple[str, int], list[Main]] = {}
        for rank, theirs in enumerate(everybody):
            for part in theirs:
                known = found.setdefault(part.name, {}).setdefault(part.rank, part)
                self._holders.setdefault((part.name, part.rank), []).append(rank)
                # As bits: NaN is no other value than NaN.
                if not torch.equal(_bits(known.value), _bits(part.value)):
                    first = self._holders[part.name, part.rank][0]
                    raise Wrong(
                        f"{self._seats[rank]} has other bits in {part.name} than its replica, "
                        f"{self._seats[first]}"
                    )
                if part.main is not None:
                    shards.setdefault((part.name, part.rank), []).append(part.main)
        if self.half:
            for name, of_rank in found.items():
                for rank, part in of_rank.items():
                    main = joined_main(name, part.value, shards.get((name, rank), []))
                    of_rank[rank] = dataclasses.replace(part, value=main)
        return {name: joined(list(of_rank.values())) for name, of_rank in found.items()}

    def _own_parts(
        self, *, synced: bool = True, chunks: Sequence[int] | None = None
    ) -> list[ParameterPart]:
        """Copy what this rank has of these chunks; `synced` waits for gathers under way."""
        if self.layout.fsdp2:
            return [
                ParameterPart(name=name, dimension=0, rank=self.rank, size=self.ranks, value=shard)
                for name, shard in fsdp2.shards(self.sharded).items()
            ]
        if synced:
            ensure_params_synced(self.model.chunks)
        mains: dict[Any, Main] = {}
        if self.half:
            mains = mains_of(self.model.optimizer)
            for value in (p for chunk in self.model.chunks for p in chunk.parameters()):
                # Frozen before DDP, or of 32 bits, it is its own.
                if not hasattr(value, "main_grad") or value.dtype == torch.float32:
                    itself = value.detach().to("cpu", torch.float32, copy=True).flatten()
                    mains.setdefault(value, Main(start=0, values=itself))
        return [
            dataclasses.replace(
                part, value=part.value.detach().cpu().clone(), main=mains.get(part.value)
            )
            for index, chunk in enumerate(self.model.chunks)
            if chunks is None or index in chunks
            for part in parts(chunk, self.layout)
        ]

    def stop_at(self, fault: str | None) -> None:
        """Raise `Wrong` on all ranks, which would wait for one alone, if one has a fault."""
        faults = [each for each in self.told_by_all(fault) if each]
        if faults:
            raise Wrong(faults[0])

    def told_by_all(self, told: Any) -> list[Any]:
        """Gather a value of each rank, by rank. All ranks take part."""
        mine = io.BytesIO()
        _Pickler(mine).dump(told)
        everybody: list[Any] = [None] * self.ranks
        dist.all_gather_object(everybody, mine.getvalue(), group=self._group)
        return [pickle.loads(each) for each in everybody]


def names_moved(after: Mapping[str, Tensor], before: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the parameters that have other values than before."""
    return [name for name, value in after.items() if not torch.equal(value, before[name])]


def in_words(value: Any) -> str:
    """Return what a value is, for who returned it in the place of another: `a list`."""
    if isinstance(value, Tensor):
        return f"a tensor {[*value.shape]}"
    return "None" if value is None else f"a {type(value).__name__}"


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8)


class _Pickler(pickle.Pickler):
    """Pickles plain tensors by their bytes: torch's own way takes longer than all else here."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or not obj.numel():
            return NotImplemented
        return _unpickled, (_bits(obj.detach().flatten()).numpy().tobytes(), obj.dtype, obj.shape)


def _unpickled(data: bytes, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
