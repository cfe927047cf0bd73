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
#: Megatron computes the softmax over the vocabulary in float32, whatever the model's type: each
#: token's gradient has as many roundings as there are words, and a few more. Tokens' gradients are
#: independent: their sum is smaller than the sum of their norms by the root of their number.
_SOFTMAX = (tiny.VOCABULARY + 32) * _FLOAT32
#: Megatron computes a router's softmaxes in float32, too, over all experts and over those chosen:
#: their roundings are in each token's output and gradient. Differences of like terms add a few.
_ROUTER = (EXPERTS + 32) * _FLOAT32
#: The roundings of a whole step in float32, layer by layer: tests/step/roundings.py derives them.
_ROUNDINGS = 4e5 * _FLOAT32
#: The roundings of a gradient in bfloat16: twice the effect of three independent roundings of each
#: operation's result, which tests/proof/certify/test_oracle.py measures. They depend on the kind of
#: loss, and on whether layers have auxiliary losses. In float16 roundings are an eighth of them.
OF_BFLOAT16 = {
    ("token", False): 0.06,
    ("sequence", False): 0.07,
    ("token", True): 0.08,
    ("sequence", True): 0.095,
}
_HALF_LOGPROBS = 0.014
_FINER = {"bf16": 1.0, "fp16": 8.0}
#: Adam divides by sqrt(v) + epsilon. An epsilon far above any gradient makes the step proportional
#: to the gradient; with a usual one a gradient twice as large would give the same step.
_EPSILON = 2.0**20
_SGD = {"momentum": 0.5}
_ADAM = {"beta1": 0.5, "beta2": 0.5, "epsilon": _EPSILON}
_LR = 0.5
#: So small that routers keep their margins over the steps of a check.
_LR_OF_EXPERTS = 0.005


class Bench:
    """Holds one adapter around one model; `parameters` has the whole model's current parameters."""

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
        # A group of its own: an adapter may have left collectives of other groups half-way.
        group = dist.new_group(backend="gloo")
        assert isinstance(group, dist.ProcessGroup)  # every rank is in it
        self._group = group
        self.step_name = ""
        """The name of the current step in errors; "" for one without a name."""
        self._rank_names: list[str] = self.gather(self._rank_name)
        # The ranks that have each parameter, by its name and the number of the shard.
        self._holders: dict[tuple[str, int], list[int]] = {}
        kind, options = ("sgd", _SGD) if self.double else ("adam", _ADAM)
        self.update = TrueUpdate(kind, lr=self._rate, **options)
        self.adapter.build(self.subject)
        self.memories = Memories(self.subject)
        self._forwards_of: tuple[Any, Forwards] | None = None
        self.parameters = self.gather_parameters()
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
            # With MTP upstream's arguments refuse learned positions, which would be added twice.
            settings["model_overrides"] = {"position_embedding_type": "none"}
        settings["config_overrides"] = {
            "calculate_per_token_loss": True,
            **settings["config_overrides"],
            **getattr(self.adapter, "config_overrides", {}),
        }
        # Wiring the config is up to the framework.
        arguments = {"batch": MICRO_BATCH, "wire": False, **settings, **self.layout.options, **more}
        return tiny.build(**arguments)

    def _settings(self) -> dict[str, Any]:
        """Return the arguments of `tiny.build` for steps that are compared with a definition."""
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
        """Return the `Subject` of a model, for an adapter."""
        # Only packs have to be seen: the rows of each auxiliary loss are known.
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
        """Return rows [B, T] of a replica in which all positions count; the same on all ranks.

        In a layout of packs each has a length of three quarters of T.
        """
        generator = torch.Generator().manual_seed(1000 * seed + replica)
        shape = number, T
        tokens_BT = torch.randint(0, tiny.VOCABULARY, shape, generator=generator)
        dtype = torch.float64 if self.double else torch.float32
        rows = {
            "input_ids": tokens_BT.cuda(),
            "token_mask": torch.ones(shape, dtype=dtype).cuda(),
            "sample_mask": torch.ones(number, dtype=dtype).cuda(),
            "scale": torch.ones(number, dtype=dtype).cuda(),
        }
        return shorten(rows, [3 * T // 4] * number) if self.layout.packs else rows

    def alike(self, seed: int, *numbers: int) -> Calls:
        """Return a step with a call for each of `numbers`, of that many rows on each replica."""
        return lambda replica: [
            self.rows(replica, 10 * seed + call, number) for call, number in enumerate(numbers)
        ]

    def mixed(self, replica: int, seed: int, number: int) -> dict[str, Any]:
        """Return rows of lengths from 1 to T; one does not count, and one has a gap.

        For a mean over sequences lengths are from 2: in a sequence of length 1 nothing counts.
        """
        rows = self.rows(replica, seed, number)
        rows["token_mask"][:] = 1
        least = 2 if self.layout.loss_kind == "sequence" else 1
        offsets = [11 * (row + 3 * replica + seed) % T for row in range(number)]
        lengths = [max(least, 1 + offset) for offset in offsets]
        rows["sample_mask"][1] = 0
        rows["token_mask"][2, T // 4 : T // 2] = 0
        return shorten(rows, lengths)

    def sparse(
        self, replica: int, seed: int, number: int, share: float, *, size: float = 1.0
    ) -> dict[str, Any]:
        """Return rows in which about `share` of the positions counts, at least two in each row.

        Some rows do not count. In a layout of packs lengths are from 3 to T. Each row has a scale
        between `size` / 2 and 2 * `size`, like an advantage. In float64 its sign is drawn, too:
        there a sum that cancels is still within the bound.
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

    def offers(self, *methods: str) -> bool:
        """Return whether the adapter has these methods; None in the place of one is none."""
        return all(callable(getattr(self.adapter, name, None)) for name in methods)

    def declares(self, check: str) -> bool:
        """Return whether the adapter does not promise a check on this layout."""
        return why_not(getattr(self.adapter, "cannot", {}), check, self.layout) is not None

    @property
    def multiple(self) -> int:
        """The factor of a call's number of microbatches: an interleaved pipeline's, else 1."""
        return self.layout.sizes["pp"] if self.layout.sizes["vpp"] > 1 else 1

    @property
    def coordinates(self) -> tuple[int, int, bool]:
        """The rank's replica and pipeline stage, and whether it computes the loss."""
        if self.layout.fsdp2:
            return self.replica, 0, True
        from megatron.core import parallel_state as ps

        stage = int(ps.get_pipeline_model_parallel_rank())
        return self.replica, stage, stage == self.layout.sizes["pp"] - 1

    @property
    def _rank_name(self) -> str:
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
        """True if one replica can fail in its model without leaving others in a collective.

        Replicas that share experts or shards have collectives in the model.
        """
        return not self.layout.fsdp2 and self.layout.sizes["ep"] == 1

    @property
    def forwards(self) -> Forwards:
        """Return the watcher of the chunks' forwards; a new one after `make_model`."""
        if self._forwards_of is None or self._forwards_of[0] is not self.subject:
            self._forwards_of = self.subject, Forwards(self.subject.chunks)
        return self._forwards_of[1]

    def take(
        self, calls_of: Calls, *, between: Callable[[], object] | None = None, cause: str = ""
    ) -> None:
        """Take a step, and hold it to the definition over the rows of all replicas.

        `between` is called before each microbatch and after the last. `cause` names what came
        before the step, for errors.
        """
        self.step_name = cause and f"the step after {cause}"
        stepped_before = self._stepped()
        finished = self.step(calls_of, between=between)
        stepped_after = self._stepped()
        self.expect(finished, self.everybody(calls_of))
        if finished.updated:
            pairs = zip(stepped_before, stepped_after, strict=True)
            faults = (
                not_of_adam(previous, current, lr=self._rate, **_ADAM)
                for previous, current in pairs
            )
            self.stop_at(next(filter(None, faults), None))
        self.step_name = ""

    def _stepped(self) -> list[Stepped]:
        """Copy the state that Adam steps on this rank; nothing in float64 and for FSDP2."""
        if self.double:
            return []
        return [*stepped_by_adam(self.subject.chunks, self.subject.optimizer)]

    def everybody(self, calls_of: Calls) -> list[Rows]:
        """Return the rows of all replicas and calls."""
        return [rows for replica in range(self.layout.replicas) for rows in calls_of(replica)]

    def step(self, calls_of: Calls, *, between: Callable[[], object] | None = None) -> Finished:
        """Take a step without judging it. A rank on which anything raises aborts.

        Without the abort other ranks would wait.
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
        """Return the result of an adapter's `finish`, with numbers as floats.

        Raises:
            Wrong: the result has the wrong type.
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

        The parameters after a step are read in the next step's forward. Reading them earlier would
        wait for gathers, which the framework itself has to wait for.
        """
        if self.layout.fsdp2 or self.packs_seen is not None:
            # FSDP2 leaves no gathers pending between steps; packs are noted for one step at a time.
            for calls_of in steps:
                self.take(calls_of)
            return
        parts_used: list[list[ParameterPart]] = []
        finished = []
        for calls_of in steps:
            used: list[ParameterPart] = []

            def copy(chunk: int, to: list[ParameterPart] = used) -> None:
                to += self._own_parts(synced=False, chunks=[chunk])

            with self.forwards.reading(copy):
                finished.append(self.step(calls_of))
            parts_used.append(used)
        names_used = [{part.name for part in used} for used in parts_used]
        own_names = {part.name for part in self._own_parts(synced=False)}
        if not all(self.gather(all(names == own_names for names in names_used))):
            return  # the adapter has its own forwards, which hooks do not see
        self._same(
            self.gather_parameters(parts_used[0]),
            "a look at what the first forward has computed with",
        )
        for index, calls_of in enumerate(steps):
            parameters = self.gather_parameters(
                parts_used[index + 1] if index + 1 < len(parts_used) else None
            )
            self.expect(finished[index], self.everybody(calls_of), parameters=parameters)

    def expect(
        self,
        finished: Finished,
        everybody: Sequence[Rows],
        *,
        parameters: dict[str, Tensor] | None = None,
    ) -> None:
        """Hold a finished step to its definition over the rows of all replicas.

        `parameters` are the whole model's after the step; None to gather them now. A step in which
        nothing counts has a gradient of zero, and may be skipped.

        Raises:
            Wrong: parameters, norm or loss differ by more than roundings can explain.
        """
        truth = self._truth(everybody)
        if not truth.count and not finished.updated:
            self.unchanged("a step that was skipped")
            return
        coasting = self.update.without(self.parameters)
        expected = self.update.next(self.parameters, truth.gradient)
        if not finished.updated:
            raise Wrong("finish() says that it has not updated")
        if self.forwards.evaluated is not None:
            raise Wrong(
                f"the step trains in eval mode: {self.forwards.evaluated} was left in it, in which "
                "dropout is off; call train() before the forward"
            )
        if parameters is None:
            parameters = self.gather_parameters()
        self._compare_parameters(parameters, expected, coasting, truth, finished, everybody)
        allowed = self.tolerance(truth)
        # A mean over nothing is no number.
        loss = finished.loss if truth.count else None
        for name, value, right, size in (
            ("gradient norm", finished.grad_norm, truth.grad_norm, truth.grad_norm),
            ("loss", loss, truth.loss, truth.loss_size),
        ):
            if value is not None and not self._within(abs(value - right), allowed * size):
                raise Wrong(f"finish() reports the {name} {value:.6g}; {right:.6g} is right")
        self.parameters = parameters

    def _truth(self, everybody: Sequence[Rows]) -> Truth:
        packs = None
        if self.packs_seen is not None:
            packs = self.packs_seen.of_rows(everybody, replica=self.replica, gather=self.gather)
        return truth_of(
            self._computing,
            everybody,
            packs=packs,
            layers=LAYERS,
            heads=HEADS,
            kind=self.layout.loss_kind,
            balance_mean=getattr(self.adapter, "balance_mean", False),
            mtp_sum="mtp" in self.layout.flags and moe.adds_up_mtp_losses(self.subject.config),
            share=(self.rank, self.ranks),
            add=self._add_up,
        )

    def _add_up(self, tensor: Tensor) -> None:
        # A method: cloudpickle takes `torch.distributed.config` along where a function names both.
        dist.all_reduce(tensor, group=self._group)

    def logprobs(self, rows: Rows) -> Tensor:
        """Compute the log-probability [B, T] of the token after each position, by definition."""
        parameters = {name: value.double() for name, value in self._computing.items()}
        return -negative_logprobs(parameters, rows["input_ids"], LAYERS, HEADS)

    def hold_logprobs(self, rows: Rows, lengths_B: Tensor, logprobs_BT: Any) -> None:
        """Compare the adapter's log-probs with their definition, at positions with a next token.

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
            for replica, has_logprobs in self.gather((self.replica, logprobs_BT is not None))
            if has_logprobs
        }
        if self.replica not in answered:
            fault = (
                "logprobs() returns None on all ranks of a replica: the adapter has to return a "
                "tensor [B, T] on ranks of the last stage"
            )
        self.stop_at(fault)

    @property
    def roundings(self) -> float:
        """The bound of a log-probability's error, relative to its size."""
        if not self.double:
            return _HALF_LOGPROBS / _FINER[self.layout.dtype] if self.half else _ROUNDINGS
        routers = LAYERS + ("mtp" in self.layout.flags) if self.layout.experts else 0
        return _SOFTMAX + routers * _ROUTER

    @property
    def _computing(self) -> dict[str, Tensor]:
        """The parameters that the model computes with."""
        if not self.half:
            return self.parameters
        dtype = self.subject.config.params_dtype
        return {name: value.to(dtype) for name, value in self.parameters.items()}

    def tolerance(self, truth: Truth) -> float:
        """Return the bound of a gradient's error, relative to its norm."""
        if self.half:
            bound = OF_BFLOAT16[self.layout.loss_kind, self.layout.auxiliary]
            return bound / _FINER[self.layout.dtype]
        independent = math.sqrt(max(truth.terms, 1.0)) if self.double else 1.0
        return self.roundings * independent

    def away_and_back(self, *, freeing: bool = True) -> None:
        """Offload and onload between two steps; parameters must have the same bits after it.

        Raises:
            Wrong: `freeing`, and no memory was freed; or a tensor is not back on the device.
        """
        self.memories.offload(self.adapter, freeing=freeing)
        self.memories.onload(self.adapter)
        self.unchanged("offload() and onload()")

    def digest(self) -> str:
        """Return a digest of the whole model's parameters, the same on all ranks."""
        sha = hashlib.sha256()
        for name in sorted(self.parameters):
            sha.update(name.encode())
            sha.update(_bits(self.parameters[name]).numpy().tobytes())
        return sha.hexdigest()[:16]

    def unchanged(self, cause: str) -> None:
        """Raise `Wrong` unless the parameters have the same bits as before."""
        self._same(self.gather_parameters(), cause)

    def hold_export(self, exported: Any) -> None:
        """Compare an export with the model's current parameters.

        Raises:
            Wrong: values differ, or no rank exports a parameter.
        """
        if exported is None:
            exported = getattr(self.adapter, "exported", None)
        names, fault = compared(exported, self._own_parts(synced=False), self.parameters)
        exports = self.gather((names, isinstance(exported, (Mapping, list, tuple))))
        exported_names = set[str]().union(*(of_rank for of_rank, _ in exports))
        # One rank may export for all. A result without tensors, such as a path, is not compared.
        if any(container for _, container in exports) and (
            missing := self.parameters.keys() - exported_names
        ):
            raise Wrong(
                f"export() gives {len(exported_names)} of {len(self.parameters)} parameters on all "
                f"ranks together, and lacks {min(missing)}"
            )
        self.stop_at(fault and f"export() gives other weights than the model has: {fault}")

    def _same(self, parameters: Mapping[str, Tensor], cause: str) -> None:
        if moved := names_moved(parameters, self.parameters):
            raise Wrong(f"{cause} has changed {len(moved)} parameters, the first is {moved[0]}")

    def _compare_parameters(
        self,
        actual: Mapping[str, Tensor],
        expected: Mapping[str, Tensor],
        coasting: Mapping[str, Tensor],
        truth: Truth,
        finished: Finished,
        everybody: Sequence[Rows],
    ) -> None:
        """Compare the effect of this step's gradient; earlier moments alone lead to `coasting`."""
        names = list(expected)

        def between(end: Mapping[str, Tensor], start: Mapping[str, Tensor]) -> Tensor:
            return torch.cat([(end[n].double() - start[n].double()).flatten() for n in names])

        moved, right = between(actual, coasting), between(expected, coasting)
        size, error = float(right.norm()), float((moved - right).norm())
        # The moments also hold the roundings of earlier gradients.
        earlier = float(between(coasting, self.parameters).norm())
        stored = torch.cat([actual[name].flatten() for name in names])
        rounding = float(stored.double().norm()) * torch.finfo(stored.dtype).eps
        if self._within(error, self.tolerance(truth) * (size + earlier) + 2 * rounding):
            return
        if not torch.isfinite(moved).all():
            raise Wrong("parameters are NaN or infinite after the step")
        if not size:
            raise Wrong("nothing counts in the step, and its gradient is not zero")
        self._refuse_clipping(None)
        if not between(actual, self.parameters).any():
            raise Wrong("the step has moved no parameter")
        factor = float(moved @ right) / size**2
        near = max(0.01, self.tolerance(truth))
        residual = float((moved - factor * right).norm())
        # Report a factor only if it explains the error: other errors must be smaller.
        if residual <= near * abs(factor) * size and residual < error / 2:
            clipped = self._clipped(finished, truth, factor)
            raise Wrong(f"the gradient is {factor:.4g} times the right one{clipped}")
        off = {}
        for name in names:
            right_size = float((expected[name] - coasting[name]).norm())
            error_here = float((actual[name].double() - expected[name]).norm())
            if error_here > near * right_size:
                off[name] = error_here / right_size if right_size else math.inf
        fault = f"the gradient is off by {100 * error / size:.3g} % of its norm"
        if off:
            first = next(iter(off))
            of_shards = (ranks for (name, _), ranks in self._holders.items() if name == first)
            holders = ", ".join(self._rank_names[rank] for ranks in of_shards for rank in ranks)
            fault += (
                f", in {len(off)} of {len(names)} parameters; the first is {first}, off by "
                f"{100 * off[first]:.3g} %, on {holders}"
            )
        raise Wrong(fault + self._miscounted(everybody, truth, moved, right, near))

    def _miscounted(
        self, everybody: Sequence[Rows], truth: Truth, moved: Tensor, right: Tensor, near: float
    ) -> str:
        """Return how often each call's rows count in a wrong gradient, if that explains the fault.

        All ranks take part. A step is the sum of its calls, each of which may have a factor.
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
        """Return a hint at clipping if a gradient is too small and its reported norm is right."""
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
        """Raise `Wrong` if Megatron's optimizer is set to clip, which it can in float32 alone."""
        inner = getattr(self.subject.optimizer, "chained_optimizers", [self.subject.optimizer])
        for optimizer in inner:
            limit = getattr(getattr(optimizer, "config", None), "clip_grad", 0.0)
            if limit:
                raise Wrong(
                    f"the optimizer is set to clip gradients (clip_grad is {limit:g}): certify "
                    "judges the gradient itself, so build the step with clip_grad=0.0"
                ) from cause

    def _within(self, error: float, bound: float) -> bool:
        if not error <= bound:  # also if it is NaN
            return False
        self.of_bound = max(self.of_bound, error / bound if bound else 0.0)
        return True

    def gather_parameters(
        self, own_parts: Sequence[ParameterPart] | None = None
    ) -> dict[str, Tensor]:
        """Gather the whole model's parameters by Megatron's names. All ranks take part.

        `own_parts` are this rank's; None to copy them now. In bfloat16 the result is the main
        parameters, and the model's must be equal to them, rounded.

        Raises:
            Wrong: two replicas have different bits.
        """
        everybody = self.gather(self._own_parts() if own_parts is None else own_parts)
        by_name: dict[str, dict[int, ParameterPart]] = {}
        self._holders = {}
        shards: dict[tuple[str, int], list[Main]] = {}
        for rank, rank_parts in enumerate(everybody):
            for part in rank_parts:
                first_copy = by_name.setdefault(part.name, {}).setdefault(part.rank, part)
                self._holders.setdefault((part.name, part.rank), []).append(rank)
                # Bits are compared, because NaN is not equal to NaN.
                if not torch.equal(_bits(first_copy.value), _bits(part.value)):
                    first = self._holders[part.name, part.rank][0]
                    raise Wrong(
                        f"{self._rank_names[rank]} has other bits in {part.name} than its replica, "
                        f"{self._rank_names[first]}"
                    )
                if part.main is not None:
                    shards.setdefault((part.name, part.rank), []).append(part.main)
        if self.half:
            for name, of_rank in by_name.items():
                for rank, part in of_rank.items():
                    main = joined_main(name, part.value, shards.get((name, rank), []))
                    of_rank[rank] = dataclasses.replace(part, value=main)
        return {name: joined(list(of_rank.values())) for name, of_rank in by_name.items()}

    def _own_parts(
        self, *, synced: bool = True, chunks: Sequence[int] | None = None
    ) -> list[ParameterPart]:
        """Copy this rank's parts of these chunks; `synced` waits for pending gathers."""
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
                # A parameter frozen before DDP, or of 32 bits, is its own main parameter.
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
        """Raise `Wrong` on all ranks if one has a fault: they would wait for that one."""
        faults = [text for text in self.gather(fault) if text]
        if faults:
            raise Wrong(faults[0])

    def gather(self, value: Any) -> list[Any]:
        """Gather a value of each rank, by rank. All ranks take part."""
        buffer = io.BytesIO()
        _Pickler(buffer).dump(value)
        everybody: list[Any] = [None] * self.ranks
        dist.all_gather_object(everybody, buffer.getvalue(), group=self._group)
        return [pickle.loads(data) for data in everybody]


def names_moved(current: Mapping[str, Tensor], previous: Mapping[str, Tensor]) -> list[str]:
    """Return the names of the parameters whose values have changed."""
    return [name for name, value in current.items() if not torch.equal(value, previous[name])]


def in_words(value: Any) -> str:
    """Return a value's type in words, for an error: `a list`."""
    if isinstance(value, Tensor):
        return f"a tensor {[*value.shape]}"
    return "None" if value is None else f"a {type(value).__name__}"


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(torch.uint8)


class _Pickler(pickle.Pickler):
    """Pickles plain tensors by their bytes: torch's own way takes longer than the whole gather."""

    def reducer_override(self, obj: Any) -> Any:
        if type(obj) is not Tensor or not obj.numel():
            return NotImplemented
        return _unpickled, (_bits(obj.detach().flatten()).numpy().tobytes(), obj.dtype, obj.shape)


def _unpickled(data: bytes, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=dtype).view(shape)
