"""Compares all state that a run depends on, bit by bit, for the checks of state.

A run is three steps with dropout, a schedule of rates and, in float16, a loss scale that moves.
Each step draws from all random states, and the first leaves counts and values that no new model
has. The run is taken once undisturbed; after a save, a load or an offload each rank must hold the
state that it had then. Legend: N elements of a shard.
"""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import random
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor

from megatron_idempotent.megatron.ddp import innermost
from megatron_idempotent.megatron.optimizers import (
    grad_scalers,
    is_hybrid,
    renew_copies,
    stepping,
)
from megatron_idempotent.proof.cpu import tiny
from megatron_idempotent.step.snapshot import logged
from megatron_idempotent.window.params import ensure_params_synced

from .bench import Bench
from .layouts import Layout
from .parameters import (
    ParameterPart,
    inner_optimizers,
    joined,
    kept_by,
    numbered,
    parts,
    updated_by,
)
from .protocol import KEEPS, MICRO_BATCH, RUN, Finished, Subject

STEPS = 3
"""Steps of a run."""
_SKIPPED = 10
"""The optimizer's count of steps is this much larger than the run's, from the first step on."""
_RATE = 1e-2
_BUFFERS = {"expert_bias": "expert bias", "local_tokens_per_expert": "token counts"}

Snapshot = Mapping[str, Any]
"""Maps each kind of state to a copy of a rank's: nested mappings with tensors."""


class States(Bench):
    """Runs an adapter's steps, and compares the ranks' state bit by bit with that of a run without
    saves, loads or offloads (the undisturbed run).
    """

    def __init__(self, adapter: Any, layout: Layout, *, folder: Path, **options: Any) -> None:
        """Build the layout's model as `Bench` does, with `folder` for the checkpoints."""
        self.root = self.folder = folder
        if layout.dtype == "fp64":  # Megatron's optimizers keep no state of it
            layout = dataclasses.replace(layout, flags=layout.flags | {"fp32"})
        super().__init__(adapter, layout, **options)
        self.course: list[tuple[Finished, Snapshot]] = []
        """The result of each step of the undisturbed run, and the state after it."""
        self.lost: dict[str, str] = {}
        """Differences after a load, by kind of state that the adapter's checkpoints keep."""

    @property
    def kept_kinds(self) -> list[str]:
        """The kinds of state, such as "scheduler", that the adapter's checkpoints keep in addition
        to weights and optimizer state.
        """
        return [kind for kind in KEEPS if kind in getattr(self.adapter, "keeps", ())]

    def built(self, **more: Any) -> tiny.Tiny:
        """Build the layout's model; the adapter's method `before_ddp`, if there is one, may change
        each chunk's module before DDP wraps it.
        """
        return super().built(**{"before_ddp": getattr(self.adapter, "before_ddp", None), **more})

    def _settings(self) -> dict[str, Any]:
        """Return settings of `tiny.build` as training runs have them, such as dropout and clipping.
        They are allowed here, because `States` compares runs with each other, and not with the
        oracle's step.
        """
        config: dict[str, Any] = {"hidden_dropout": 0.1}
        if self.layout.experts:
            config |= {
                "moe_router_enable_expert_bias": True,
                "moe_router_score_function": "sigmoid",
                "moe_router_topk": 2,
            }
        if "mtp" in self.layout.flags:
            config |= {"mtp_num_layers": 1}
        # Up to 0.16 an auxiliary loss has 64 times the scale as its gradient, in 16 bits.
        scale = {"initial_loss_scale": 2.0**6, "loss_scale_window": 3, "min_loss_scale": 1.0}
        optimizer = {
            "lr": _RATE,
            # Not torch's defaults, which groups have before a load.
            "adam_beta1": 0.85,
            "adam_beta2": 0.97,
            "adam_eps": 1e-7,
            "min_lr": 0.0,
            "weight_decay": 0.1,
            "clip_grad": 1.0,
            **(scale if self.layout.dtype == "fp16" else {}),
            **getattr(self.adapter, "optimizer_overrides", {}),
        }
        return {"config_overrides": config, "optimizer_overrides": optimizer}

    def subject_of(self, model: tiny.Tiny, forward: Callable[[Any, Any], Tensor]) -> Subject:
        """Return the `Subject` for the adapter, with a learning-rate scheduler and a checkpoint
        folder. Also seed Python's and NumPy's random generators.
        """
        from megatron.core import parallel_state
        from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler

        # Each stage has its own seed, as upstream has it.
        seed = 1 + 100 * int(parallel_state.get_pipeline_model_parallel_rank())
        random.seed(seed)
        numpy.random.seed(seed)
        random.gauss(0.0, 1.0), numpy.random.normal()  # both generators keep a second number
        scheduler = OptimizerParamScheduler(
            model.optimizer,
            init_lr=0.0,
            max_lr=_RATE,
            min_lr=0.0,
            lr_warmup_steps=2,
            lr_decay_steps=20,
            lr_decay_style="linear",
            start_wd=0.1,
            end_wd=0.2,
            wd_incr_steps=20,
            wd_incr_style="linear",
        )
        scheduler.step(1)
        subject = super().subject_of(model, forward)
        return dataclasses.replace(subject, scheduler=scheduler, folder=self.folder)

    def _refuse_clipping(self, cause: BaseException | None) -> None:
        """Do nothing: an optimizer may clip here, because no step is compared with a definition."""

    def begin_again(self) -> None:
        """Build a new model, and a new adapter of the same class for it, as after a restart."""
        self.adapter = type(self.adapter)()
        self.set_up()
        for total in logged():
            total.zero_()

    def begin_in(self, folder: str) -> None:
        """Use the subfolder `folder` for checkpoints from now on, and call `begin_again`. In the
        same folder the new adapter would give its saves the names of earlier ones.
        """
        self.folder /= folder
        self.folder.mkdir(exist_ok=True)
        self.begin_again()

    def advance(self, *numbers: int, between: Callable[[], object] | None = None) -> Finished:
        """Run one training step for each of `numbers`, and advance the scheduler after each step; a
        step's number chooses its rows. Return the last step's result.

        `between` is called before each of a step's two microbatch calls and after the last.
        """
        *earlier, number = numbers
        if earlier:
            self.advance(*earlier)
        size = MICRO_BATCH * 2
        is_first = not any(inner.state for inner in steppers(self.model.optimizer))
        finished = self.step(self.alike(10 + number, size, size), between=between)
        # A skipped step leaves no state that a save or a load could lose.
        skipped = "the step was skipped, and shows nothing: a gradient is not finite"
        self.stop_at(None if finished.updated else skipped)
        if is_first:
            self._age()
        self._draw()
        self.subject.scheduler.step(1)
        return finished

    def _age(self) -> None:
        """Change optimizer and routers so that their state looks like a long run's: step counts, a
        lowered loss scale, inexact biases.
        """
        for inner in steppers(self.model.optimizer):
            for state in inner.state.values():
                state["step"] += _SKIPPED
        for scaler in grad_scalers(self.model.optimizer):
            if state := scaler.state_dict():
                backed_off = {"scale": state["scale"] / 2, "hysteresis_tracker": 1}
                scaler.load_state_dict({**state, **backed_off})
        for name, buffer in _buffers(self.model.chunks):
            if _kind(name) == "expert bias":
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                buffer += 0.01 * torch.randn(buffer.shape, generator=generator).to(buffer.device)

    def _draw(self) -> None:
        """Draw a number from each random generator, as data and layers do. Python's and NumPy's
        generators then still hold the second number of a pair.
        """
        from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

        _ = random.gauss(0.0, 1.0), random.gauss(0.0, 1.0), numpy.random.normal(size=2)
        torch.rand(1)
        for name in get_cuda_rng_tracker().get_states():
            with get_cuda_rng_tracker().fork(name):
                torch.rand(1, device="cuda")

    def run_through(self) -> None:
        """Run the steps of the undisturbed run, record each step's result and the state after it in
        `course`, and call `begin_again`.
        """
        for number in range(STEPS):
            finished = self.advance(number)
            self.course.append((finished, self.snapshot()))
        self.begin_again()

    def snapshot(self) -> dict[str, Any]:
        """Wait for pending parameter gathers; return a copy of this rank's state, by kind, such as
        "weights".
        """
        ensure_params_synced(self.model.chunks)
        counters = getattr(self.adapter, "counters", None) or dict
        return {
            "weights": dict(_weights(self.model.chunks)),
            "optimizer": dict(_optimizer(self.model.optimizer)),
            "scheduler": {
                **_plain(self.subject.scheduler),
                "groups": _rates(self.model.optimizer),
            },
            "random": random_states(),
            "loss scale": {
                f"of optimizer {index}": _copied(scaler.state_dict())
                for index, scaler in enumerate(grad_scalers(self.model.optimizer))
            },
            **{
                kind: {n: _copied(b) for n, b in _buffers(self.model.chunks) if _kind(n) == kind}
                for kind in _BUFFERS.values()
            },
            "modes": [
                (module.training, [p.requires_grad for p in module.parameters(recurse=False)])
                for chunk in self.model.chunks
                for module in chunk.modules()
            ],
            "auxiliary losses": dict(enumerate(_copied(list(logged())))),
            "counters": dict(counters()),
        }

    def hold_saved(self, state: Any) -> None:
        """Raise `Wrong` if a save has fewer bytes, in the checkpoint folder and in `state`
        together, than half of a rank's trained weights.

        Files outside of the folder do not count: another machine may not see them.
        """
        self.gather(None)  # all have written
        files = sum(path.stat().st_size for path in self.folder.rglob("*") if path.is_file())
        parameters = [p for chunk in self.model.chunks for p in chunk.parameters()]
        least = sum(p.nbytes for p in parameters if p.requires_grad) // 2
        returned, leasts = zip(*self.gather((len(pickle.dumps(state)), least)), strict=True)
        self.stop_at(
            f"save() has left {files} bytes below subject.folder, and returned {sum(returned)}, "
            f"where a rank trains {2 * max(leasts)} bytes of weights: write below subject.folder"
            if files + sum(returned) < max(leasts)
            else None
        )

    def load(self, state: Any, expected: int | Snapshot = 1, *, cause: str = "load()") -> None:
        """Call the adapter's `load(state)`; raise `Wrong` unless this rank's weights and optimizer
        state are then the expected ones. Differences in other kinds of state are noted in `lost`,
        and these kinds put back.

        `expected` is the state to expect, or the number of the step after which it was saved.
        """
        self.adapter.load(state)
        self.hold_loaded(expected, cause)

    def hold_loaded(self, expected: int | Snapshot, cause: str) -> None:
        """Raise `Wrong` unless this rank's weights and optimizer state after a load are the
        expected ones. Differences in other kinds of state are noted in `lost`, and these kinds put
        back.
        """
        if isinstance(expected, int):
            _, expected = self.course[expected]
        self.loaded(expected, cause)
        self.hold(expected, cause)

    def loaded(self, expected: Snapshot, cause: str, kinds: Iterable[str] | None = None) -> None:
        """Note in `lost` the kinds of state that the adapter's checkpoints keep and a load did not
        restore. Then write all kinds of `expected` back, except weights and optimizer.

        If other loads lose a kind, too, the check `keeps-...` reports it.
        """
        actual, moment = self.snapshot(), f"{cause} rank {self.rank}"
        kinds = self.kept_kinds if kinds is None else kinds
        faults = {kind: first_fault(expected, actual, moment, [kind]) for kind in kinds}
        for of_rank in self.gather(faults):
            self.lost = {**{kind: fault for kind, fault in of_rank.items() if fault}, **self.lost}
        self.put(expected)

    def put(self, saved: Snapshot) -> None:
        """Write a snapshot's state back into this rank's model and generators, except weights and
        optimizer state.
        """
        scheduler, optimizer = self.subject.scheduler, self.model.optimizer
        rates = saved["scheduler"]
        vars(scheduler).update({name: rates[name] for name in _plain(scheduler)})
        for group, options in zip(_groups(optimizer), rates["groups"], strict=True):
            group.update(options)
        put_random(saved["random"])
        scales = saved["loss scale"].values()
        for scaler, state in zip(grad_scalers(optimizer), scales, strict=True):
            scaler.load_state_dict(_copied(state))
        values = {**saved["expert bias"], **saved["token counts"]}
        for name, buffer in _buffers(self.model.chunks):
            if name in values:
                buffer.data = buffer.to(values[name].dtype)  # a new model's biases have 16 bits
                buffer.copy_(values[name])

    def hold(self, expected: int | Snapshot, cause: str, kinds: Iterable[str] = RUN) -> None:
        """Raise `Wrong` on all ranks unless each rank's state of these kinds equals the expected
        state, bit for bit.

        Args:
            expected: the state to expect, or the number of the step of the undisturbed run after
                which a rank had it.
            cause: the disturbance, for the error.
            kinds: the kinds of state that are compared.
        """
        if isinstance(expected, int):
            _, expected = self.course[expected]
        self.stop_at(first_fault(expected, self.snapshot(), f"{cause} rank {self.rank}", kinds))

    @contextlib.contextmanager
    def keeping(self, cause: str) -> Iterator[Snapshot]:
        """Raise `Wrong` on all ranks if the block changes any state.

        Yield the state. `cause` names the block in errors.
        """
        snapshot = self.snapshot()
        yield snapshot
        self.hold(snapshot, cause, snapshot)

    def follow(self, number: int, cause: str) -> None:
        """Run step `number` of the run; raise `Wrong` unless the step's result, and the state after
        the step, equal those of the undisturbed run.
        """
        self.hold_step(number, cause, self.advance(number))

    def hold_step(self, number: int, cause: str, finished: Finished) -> None:
        """Raise `Wrong` unless the result of step `number`, and the state after it, equal those of
        the undisturbed run.
        """
        actual = finished, self.snapshot()
        self._compare(f"{cause} and step {number + 1}", actual, self.course[number])

    def follow_as(
        self, model_state: Mapping[str, Any], rank_state: Snapshot, number: int, cause: str
    ) -> None:
        """Run a step; then run it again in a new model that is set to the given state from before
        the step. Raise `Wrong` if the results, or the states after the two steps, differ.

        Args:
            model_state: the weights and optimizer state of the whole model before the step.
            rank_state: this rank's other state before the step.
            number: the number of the step.
            cause: the disturbance before the step, for the error.
        """
        actual = self.advance(number), self.snapshot()
        self.begin_again()
        self.put_whole(model_state, steps=number)
        self.put(rank_state)
        self._compare(f"{cause} and a step", actual, (self.advance(number), self.snapshot()))

    def _compare(
        self, cause: str, actual: tuple[Finished, Snapshot], expected: tuple[Finished, Snapshot]
    ) -> None:
        fault = first_fault(expected[1], actual[1], f"{cause} rank {self.rank}", RUN)
        if fault is None and actual[0] != expected[0]:
            fault = f"after {cause} finish() tells {actual[0]}, and {expected[0]} is right"
        self.stop_at(fault)

    # The whole model, for another layout.

    def hold_whole(self, expected: Mapping[str, Any], cause: str) -> None:
        """Raise `Wrong` unless the whole model's weights and optimizer state are `expected`, bit
        for bit.
        """
        difference = first_difference(expected, self.whole_state())
        self.stop_at(difference and f"after {cause} the whole model has another {difference}")

    def groups_at(self, rates: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the options of each optimizer group, with the learning rate of `rates` times the
        group's `lr_mult` and the weight decay of `rates` times its `wd_mult`.
        """
        return [
            {
                **options,
                "lr": rates["lr"] * group.get("lr_mult", 1.0),
                "weight_decay": rates["weight_decay"] * group.get("wd_mult", 1.0),
            }
            for group, options in zip(
                _groups(self.model.optimizer), _rates(self.model.optimizer), strict=True
            )
        ]

    def whole_state(self) -> dict[str, dict[str, Tensor]]:
        """Gather the whole model's weights, main parameters and moments on every rank, by
        Megatron's names. A collective.
        """
        everybody = self.gather(
            [
                (dataclasses.replace(part, value=_copied(part.value)), key, start, _copied(value))
                for part, key, start, value in self._shards()
            ]
        )
        pieces: dict[tuple[str, str], dict[int, Any]] = {}
        for shards in everybody:
            for part, key, start, value in shards:
                of_rank = pieces.setdefault((part.name, key), {})
                if part.rank not in of_rank:
                    empty = torch.full((part.value.numel(),), torch.nan, dtype=value.dtype)
                    of_rank[part.rank] = part, empty
                of_rank[part.rank][1][start : start + value.numel()] = value.flatten()
        state: dict[str, dict[str, Tensor]] = {}
        for (name, key), of_rank in pieces.items():
            shards = [
                dataclasses.replace(part, value=flat.view_as(part.value))
                for part, flat in of_rank.values()
            ]
            state.setdefault(name, {})[key] = joined(shards)
        return state

    def put_whole(self, model_state: Mapping[str, Mapping[str, Tensor]], steps: int) -> None:
        """Copy the whole model's state into this rank's shards of weights and optimizer state,
        without any loader.
        """
        self.advance(STEPS)  # there is no state to write into before a step
        ensure_params_synced(self.model.chunks)
        with torch.no_grad():
            for part, key, start, value in self._shards():
                source = part.shard_of(model_state[part.name][key]).flatten()
                value.copy_(source[start : start + value.numel()].view(value.shape))
            for inner in filter(is_hybrid, inner_optimizers(self.model.optimizer)):
                renew_copies(inner)
            for inner in steppers(self.model.optimizer):
                for state in inner.state.values():
                    state["step"] = torch.tensor(float(steps + _SKIPPED))

    def _shards(self) -> Iterator[tuple[ParameterPart, str, int, Tensor]]:
        """Yield (part, key, start, tensor) for this rank's shard of each weight, main value and
        moment: the `ParameterPart` of the model parameter, the kind of tensor, such as "weight",
        the index of the shard's first element in this rank's flattened part of the parameter, and
        the shard itself.
        """
        state_of = {state.parameter: state for state in kept_by(self.model.optimizer)}
        for chunk in self.model.chunks:
            for part in parts(chunk, self.layout):
                yield part, "weight", 0, part.value.detach()
                if (state := state_of.get(part.value)) is not None:
                    for key, value in state.tensors.items():
                        yield part, key, state.start, value.detach()


def first_fault(
    expected: Snapshot, actual: Snapshot, moment: str, kinds: Iterable[str]
) -> str | None:
    """Return in words which of `kinds` differs first between two snapshots, and how; None if none
    does.
    """
    for kind in kinds:
        difference = first_difference(expected[kind], actual[kind])
        if difference is not None:
            return f"after {moment} has other {kind}: {difference}"
    return None


def first_difference(expected: Any, actual: Any) -> str | None:
    """Describe the first difference in bits between two states, such as both values or the distance
    of two tensors; return None if the states are equal.
    """
    if isinstance(expected, Mapping) and isinstance(actual, Mapping):
        if expected.keys() != actual.keys():
            odd = sorted(map(str, expected.keys() ^ actual.keys()))
            return f"{odd[0]} is {'missing' if odd[0] in map(str, expected) else 'new'}"
        for name, value in expected.items():
            difference = first_difference(value, actual[name])
            if difference is not None:
                space = "" if difference.startswith((" ", "[")) else " "
                return f"{name}{space}{difference}"
        return None
    if isinstance(expected, (list, tuple)) and isinstance(actual, (list, tuple)):
        return first_difference(dict(enumerate(expected)), dict(enumerate(actual)))
    if isinstance(expected, Tensor) and isinstance(actual, Tensor):
        if expected.dtype != actual.dtype:
            return f"is {actual.dtype} instead of {expected.dtype}"
        if expected.shape == actual.shape and torch.equal(_bits(expected), _bits(actual)):
            return None
        if expected.shape != actual.shape or not expected.is_floating_point():
            return f"is {_short(actual)} instead of {_short(expected)}"
        distance = float((expected.double() - actual.double()).norm())
        moved = int((_bits(expected) != _bits(actual)).any(-1).sum()) if expected.dim() else 1
        return f"differs in {moved} elements, by {distance:.3g} together"
    return None if expected == actual else f"is {_short(actual)} instead of {_short(expected)}"


def _short(value: Any) -> str:
    return repr(value)[:60]


def _bits(value: Tensor) -> Tensor:
    return value.contiguous().view(-1, 1).view(torch.uint8)


def _copied(value: Any) -> Any:
    """Return a value with copies on the host of all tensors in it, in mappings, lists and tuples of
    any class. Torch's pytree would take an unknown mapping for a leaf, and its tensors uncopied.
    """
    if isinstance(value, Tensor):
        return value.detach().to("cpu", copy=True)
    if isinstance(value, Mapping):
        return {name: _copied(item) for name, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(_copied, value))
    return value


def _weights(chunks: Iterable[Any]) -> Iterator[tuple[str, Tensor]]:
    for index, chunk in enumerate(chunks):
        for name, value in chunk.module.named_parameters():
            yield f"{name} of chunk {index}", _copied(value)


def _buffers(chunks: Iterable[Any]) -> Iterator[tuple[str, Tensor]]:
    for chunk in chunks:
        model = innermost(chunk)
        yield from ((numbered(model, name), value) for name, value in model.named_buffers())


def _kind(buffer: str) -> str | None:
    return _BUFFERS.get(buffer.rpartition(".")[2])


def steppers(optimizer: Any) -> list[Any]:
    """Return the torch optimizers that update parameters, also those inside CPU-offloading hybrid
    ones.
    """
    return [stepper for inner in inner_optimizers(optimizer) for stepper in stepping(inner)]


def _optimizer(optimizer: Any) -> Iterator[tuple[str, Any]]:
    """Yield, for each parameter of the torch optimizers, a name and a copy of the parameter and its
    optimizer state; step counts are converted to floats.
    """
    for number, inner in enumerate(steppers(optimizer)):
        for index, parameter in enumerate(updated_by(inner)):
            state = {
                name: float(value) if name == "step" else _copied(value)
                for name, value in inner.state.get(parameter, {}).items()
            }
            state["parameter"] = _copied(parameter)
            yield f"optimizer {number} parameter {index}", state


def _groups(optimizer: Any) -> list[dict[str, Any]]:
    return [group for inner in inner_optimizers(optimizer) for group in inner.param_groups]


def _rates(optimizer: Any) -> list[dict[str, Any]]:
    """Copy the options of each optimizer group, such as its learning rate, without parameters and
    step counts.
    """
    left_out = ("params", "step")
    return [{n: v for n, v in group.items() if n not in left_out} for group in _groups(optimizer)]


def _plain(scheduler: Any) -> dict[str, Any]:
    return {n: v for n, v in vars(scheduler).items() if isinstance(v, (int, float, str))}


def random_states() -> dict[str, Any]:
    """Copy the random states of Python, NumPy, torch and Megatron's tracker."""
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    name, words, *numbers = numpy.random.get_state()
    return {
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(words.copy()), *numbers),
        "torch": torch.get_rng_state().clone(),
        "tracker": _copied(dict(get_cuda_rng_tracker().get_states())),
    }


def put_random(states: Mapping[str, Any]) -> None:
    """Set the random states of Python, NumPy, torch and Megatron's tracker to those that
    `random_states` returned.
    """
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    random.setstate(states["python"])
    name, words, *numbers = states["numpy"]
    numpy.random.set_state((name, words.numpy(), *numbers))
    torch.set_rng_state(states["torch"])
    get_cuda_rng_tracker().set_states(_copied(states["tracker"]))
