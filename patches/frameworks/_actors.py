"""Runs the training actor of slime and of its fork miles, for reproductions.

The actor's methods, and the class that keeps copies of its weights, are the framework's own, from
the modules on the path. The model is one small parameter; Ray, checkpoints, engines and data are
stand-ins.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from megatron_idempotent.patches._case import Broken, Fault, target

from . import _standins

if TYPE_CHECKING:
    from megatron_idempotent.patching import Original, Target
    from megatron_idempotent.patching.source import Body

_LOAD = "load_other_checkpoint"
ACTOR = "{}.backends.megatron_utils.actor:MegatronTrainRayActor"
#: Modules whose functions decorate the actor's methods, in different versions.
_TIMERS = (
    *("observability.timer", "utils.timer", "utils.context_utils"),
    "utils.tracking_utils.structured_log",
)
#: Tag of a checkpoint → the value of its weights.
WEIGHTS = {"actor": 0.0, "ref": 1.0, "teacher": 2.0}


def use_actor(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap a method that reads the actor's model: first load the actor's own weights into it.
    Load nothing if the weights are offloaded.
    """
    # slime does not record whether weights are on the device; with this option they seldom are.
    asleep = getattr(self, "_asleep", self.args.offload_train)
    if (
        self.role == "actor"
        and not asleep
        and getattr(self, "_active_model_tag", "actor") != "actor"
    ):
        self._switch_model("actor")
    return original(self, *args, **kwargs)


def switches_back(bodies: Mapping[str, Body]) -> bool:
    """Return whether upstream's methods need no patch to send and save the actor's own weights.
    That is, whether each body, except that of the load of another checkpoint, reads the tag of the
    loaded weights or switches to the actor's.
    """
    readers = [body for address, body in bodies.items() if not address.endswith(_LOAD)]
    return all(
        body.contains("self._active_model_tag") or body.contains('self._switch_model("actor")')
        for body in readers
    )


def load_other(original: Original, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Wrap the load of another model's checkpoint into the actor's model.
    If the load raises, record that the model's weights are unknown.
    """
    try:
        return original(self, *args, **kwargs)
    except BaseException:
        self._active_model_tag = None
        raise


def targets(framework: str, *more: str) -> list[Target]:
    """Return the `Target`s by which a patch wraps methods of slime's or miles' training actor.
    The methods are `update_weights`, `save_model`, other saving methods in `more`, and the load of
    another model's checkpoint.
    """
    actor = ACTOR.format(framework)
    return [
        target(f"{actor}.update_weights", use_actor, "self.weight_updater.update_weights()"),
        *(target(f"{actor}.{name}", use_actor, "self.model") for name in ("save_model", *more)),
        target(
            f"{actor}.{_LOAD}",
            load_other,
            "self._active_model_tag = model_tag",
            "self.weights_backuper.backup(model_tag)",
        ),
    ]


class Actor:
    """Sets up slime's or miles' training actor with a single parameter, without Ray and engines.
    The actor has weights of its own, and keeps a copy of a reference's weights.

    Args:
        framework: `slime` or `miles`.
        by_init: True to run slime's own `init`; otherwise the model has the actor's weights.
        args: parsed options of the frameworks; all others are off.
    """

    def __init__(self, framework: str, *, by_init: bool = False, **args: Any) -> None:
        import torch
        from megatron.core import parallel_state

        if not parallel_state.model_parallel_is_initialized():
            parallel_state.initialize_model_parallel()
        self.module = self._import(framework)
        self.sent: list[float] = []
        """The weight of each update that engines got."""
        self.saved: list[float] = []
        """The weight of each checkpoint that was saved."""
        self.on_load: Callable[[], None] = lambda: None
        """A function that is called in each load."""
        self.weight = torch.nn.Parameter(torch.zeros(4))
        self.args = _standins.Off(
            compute_advantages_and_returns=True,
            num_gpus_per_node=1,
            update_weight_mode="full",
            update_weight_transport="nccl",
            distributed_timeout_minutes=1,
            enable_weights_backuper=True,
            load="actor",
            ref_load="ref",
            **args,
        )
        self.actor = self.module.MegatronTrainRayActor()
        self._stand_in(framework)
        if by_init:
            self.actor.init(self.args, "actor", with_ref=True)
        else:
            self._as_after_init()

    def update_weights(self) -> float:
        """Run the actor's `update_weights`; return the parameter's value that the engines got."""
        if self._takes_engines:
            self.actor.update_weights(_standins.Off(rollout_engines=[None]))
            return self.sent[-1]
        for more in (
            3,
            2,
            0,
        ):  # number of values that the manager returns besides engines, a lock and a number
            self.module.ray.get = lambda _, more=more: ([None], None, 0, *[None] * more)
            with contextlib.suppress(ValueError):  # this version unpacks another number of values
                self.actor.update_weights()
                break
        return self.sent[-1]

    def save_model(self) -> float:
        """Run the actor's `save_model`; return the parameter's value that was saved."""
        self.actor.save_model(0)
        return self.saved[-1]

    def fail_in_reference_pass(self) -> None:
        """Run the actor's `train_actor`, whose reference log-probs raise; catch the error."""
        more = {"witness_info": None, "attempt": 0} if self._takes_engines else {}
        rollout_data = {"num_microbatches": [1], "global_batch_sizes": [1]}
        try:
            self.actor.train_actor(0, rollout_data, **more)
        except Broken:
            return
        raise AssertionError("train_actor() swallowed the exception")

    @property
    def _takes_engines(self) -> bool:
        """True if the framework is miles, whose methods take more arguments than slime's."""
        return "miles" in self.module.__name__

    def _import(self, framework: str) -> Any:
        _standins.replace("ray")
        _standins.import_alone(f"{framework}.utils.tensor_backper")
        for name in _TIMERS:
            vars(importlib.import_module(f"{framework}.{name}")).update(
                timer=_watching,
                inverse_timer=_watching,
                with_logs=_watching,
                with_defer=lambda _: _watching,
            )
        base = importlib.import_module(f"{framework}.ray.train_actor")
        base.TrainRayActor = _RayActor  # type: ignore[attr-defined]
        return _standins.import_alone(
            ACTOR.format(framework).partition(":")[0], "torch_memory_saver", "transformers"
        )

    def _stand_in(self, framework: str) -> None:
        module = self.module
        vars(module).update(
            AutoConfig=_standins.Thing(),
            AutoTokenizer=_standins.Thing(),
            dist=_standins.Off(
                get_rank=lambda: 0, get_world_size=lambda: 1, barrier=lambda **_: None
            ),
            clear_memory=lambda **_: None,
            forward_only=fail,
            get_data_iterator=lambda *_: (None, [1]),
            initialize_model_and_optimizer=lambda *_, **__: ([None], None, None, 6),
            is_megatron_main_rank=lambda: False,
            load_checkpoint=self._load,
            named_params_and_buffers=lambda *_, **__: [("weight", self.weight)],
            save=lambda *_: self.saved.append(float(self.weight[0])),
            UpdateWeightFromDistributed=lambda *_, **__: _standins.Off(
                update_weights=lambda: self.sent.append(float(self.weight[0])),
                is_rollout_engines_fresh=lambda: True,
            ),
        )
        if framework == "miles":
            module.is_multi_lora_enabled = lambda _: False
            module.all_replay_managers = []

    def _as_after_init(self) -> None:
        actor = self.actor
        actor.args, actor.role = self.args, "actor"
        actor.with_ref = True
        actor.weights_backuper = self.module.TensorBackuper.create(
            source_getter=lambda: [("weight", self.weight)],
            **({} if self._takes_engines else {"single_tag": None}),
        )
        actor._active_model_tag = "actor"
        actor.weights_backuper.backup("actor")
        actor.weight_updater = self.module.UpdateWeightFromDistributed()
        actor.load_other_checkpoint("ref", "ref")
        actor._switch_model("actor")

    def _load(self, *_: Any, **__: Any) -> tuple[int, int]:
        import torch

        with torch.no_grad():
            self.weight.fill_(WEIGHTS[self.args.load])
        self.on_load()
        return 0, 0


def reproduce(framework: str, *, by_init: bool) -> None:
    """Check the weights that engines and a checkpoint get after a reference pass that raises.
    Also check those that engines get right after the start; with `by_init`, once more right after
    slime's `init`. Without the patch they get the reference's weights.
    """
    for start in (True, False) if by_init else (False,):
        actor = Actor(framework, by_init=start)
        _expect_actor_weights(actor.update_weights(), "engines", "after the start")
        for method, receiver in (
            (actor.update_weights, "engines"),
            (actor.save_model, "a checkpoint"),
        ):
            actor.fail_in_reference_pass()
            _expect_actor_weights(method(), receiver, "after a pass of the reference that raised")


def control(framework: str) -> object:
    """Send weights and save a checkpoint while the model has the actor's own weights, as a control.
    Return the weight sent, the weight saved, the model's weight and the active tag.
    """
    actor = Actor(framework)
    weights = [actor.update_weights(), actor.save_model()]
    return [*weights, float(actor.weight[0]), str(actor.actor._active_model_tag)]


def _expect_actor_weights(weight: float, receiver: str, when: str) -> None:
    if weight != WEIGHTS["actor"]:
        (tag,) = (tag for tag, value in WEIGHTS.items() if value == weight)
        raise Fault(f"{receiver} got the weights of `{tag}` {when}")


class _RayActor(_standins.Off):
    """Stands in for the base class of slime's and miles' training actor, which needs Ray."""

    rollout_manager = prof = weight_updater = _heartbeat = _standins.Thing()

    def init(self, args: Any, role: str, *_: Any, **__: Any) -> None:
        self.args, self.role = args, role


def fail(*_: Any, **__: Any) -> None:
    """Raise `Broken`; it replaces a function of the framework that has to fail."""
    raise Broken("a microbatch that cannot be read")


def _watching(decorated: Any) -> Any:
    """Stand in for a framework's timer, which is used as a decorator and in `with` statements.
    Return a decorated function unchanged; for a timer's name, return an empty context.
    """
    return decorated if callable(decorated) else contextlib.nullcontext()
