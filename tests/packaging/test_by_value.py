"""The package travels through cloudpickle by reference and by value, and works on arrival."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.full

ENGINES = ("megatron", "fsdp")


def all_by_value() -> tuple[bytes, bytes, bytes]:
    """Runs on a rank that has used the package and is in a step; returns both classes as names, and
    all of it, with its code."""
    import importlib
    import os
    import pkgutil

    import cloudpickle
    from scenario import Bench, class_of

    import megatron_idempotent
    from megatron_idempotent.patching.catalog import case_file_of, hazards
    from megatron_idempotent.window.agreement import is_poisoned, poison

    os.environ["A_SECRET"] = "of this process alone"
    # Locks, groups, weak keys, thread-locals and caches are in use; this rank ends anyway.
    bench = Bench(overlap_param_gather=True)
    bench.step.microbatch(bench.begin(), bench.batch(2))
    megatron_idempotent.window.agree()
    names_alone = cloudpickle.dumps([class_of(engine) for engine in ENGINES])

    package = "megatron_idempotent."
    names = [each.name for each in pkgutil.walk_packages(megatron_idempotent.__path__, package)]
    files = map(case_file_of, hazards())
    names += [package + file.removesuffix(".py").replace("/", ".") for file in files]
    everything = {}
    for name in names:
        if name.endswith("__main__"):
            continue
        try:
            module = importlib.import_module(name)
        except ModuleNotFoundError as missing:
            if str(missing.name).startswith(package):
                raise
            continue  # what an optional dependency is needed for
        if _launches_kernels(module):
            continue
        for own, value in vars(module).items():
            if getattr(value, "__module__", None) == module.__name__ and own[:2] != "__":
                everything[f"{module.__name__}.{own}"] = value
    assert len(everything) > 1200
    cloudpickle.register_pickle_by_value(megatron_idempotent)
    try:
        every = cloudpickle.dumps([*everything.values(), megatron_idempotent])
    except Exception as error:
        for name, value in everything.items():
            try:
                cloudpickle.dumps(value)
            except Exception as its:
                raise AssertionError(f"{name}: {its}") from its
        raise AssertionError("all of it together") from error
    assert b"of this process alone" not in every
    code = cloudpickle.dumps(
        {
            "apply": megatron_idempotent.apply,
            "megatron": megatron_idempotent.TrainStep,
            "fsdp": megatron_idempotent.FSDPTrainStep,
            "token_logprobs": megatron_idempotent.token_logprobs,
            "poison": poison,
            "is_poisoned": is_poisoned,
            "Config": everything["megatron_idempotent.rl.trainer.config.Config"],
            "Controller": everything["megatron_idempotent.rl.controller.controller.Controller"],
            "ControllerSettings": everything[
                "megatron_idempotent.rl.controller.state.ControllerSettings"
            ],
        }
    )
    return names_alone, every, code


def _launches_kernels(module: Any) -> bool:
    """Triton compiles kernels from their files, so these stay where the files are."""
    held = [value for value in vars(module).values() if callable(value)]
    defined = [sys.modules.get(str(getattr(value, "__module__", ""))) for value in held]
    return any(
        type(value).__name__ == "JITFunction"
        for each in {id(one): one for one in (module, *defined) if one is not None}.values()
        if each.__name__.startswith("megatron_idempotent.")
        for value in vars(each).values()
    )


def loaded(every: bytes) -> int:
    """Runs on a rank that has done nothing yet."""
    import cloudpickle

    return len(cloudpickle.loads(every))


def used(engine: str, names: bytes, code: bytes) -> None:
    """Runs on ranks that have done nothing yet: what arrived does what the package here does."""
    import cloudpickle
    import torch
    from scenario import Bench, class_of, raised_by

    import megatron_idempotent
    from megatron_idempotent.window import agreement

    assert cloudpickle.loads(names) == [class_of(engine) for engine in ENGINES]
    arrived: dict[str, Any] = cloudpickle.loads(code)
    kind = arrived[engine]
    assert kind is not class_of(engine)

    # What is patched, poisoned or open is one per process.
    arrived["apply"]()
    assert megatron_idempotent.report()["aux-loss-scale-left-set"].status == "applied"
    results = []
    for each in (kind, None):
        bench = Bench(engine, each)
        results.append((bench.run([bench.batch(2)]), bench.digest()))
    assert results[0][0].metrics == results[1][0].metrics
    assert results[0][1] == results[1][1]
    bench = Bench(engine, kind)
    step_id = bench.begin()
    if engine == "megatron":
        import scenario
        from megatron.core.pipeline_parallel import get_forward_backward_func

        refused = raised_by(
            get_forward_backward_func(),
            forward_step_func=None,
            data_iterator=None,
            model=bench.step._chunks,
            num_microbatches=1,
            seq_length=scenario.T,
            micro_batch_size=2,
            forward_only=False,
        )
        assert "a TrainStep is open for these chunks" in str(refused)
    bench.step.microbatch(step_id, bench.batch(2))
    bench.step.abort()

    logits_TV, targets_T = torch.randn(5, 7), torch.arange(5)
    got = arrived["token_logprobs"](logits=logits_TV, targets=targets_T).logprob
    want = megatron_idempotent.token_logprobs(logits=logits_TV, targets=targets_T).logprob
    assert torch.equal(got, want)
    # Settings, one record of which has others for fields, and the controller with toys around it.
    assert arrived["Config"]().run.ranks == 2
    sys.path.append(str(Path(__file__).parents[1] / "rl" / "controller"))
    import toy

    for name in ("Controller", "ControllerSettings"):
        setattr(toy, name, arrived[name])
    assert toy.Toy().run(2).status.trainer_version == 2
    arrived["poison"]("a reason")
    assert agreement.is_poisoned()
    agreement.forget()
    assert not arrived["is_poisoned"]()


def test_the_whole_package_travels_by_value_and_by_reference(megatron_ranks):
    ((names, every, code),) = megatron_ranks(1, all_by_value, timeout_s=120)
    assert megatron_ranks(1, loaded, every, timeout_s=120)[0] > 1200
    for engine in ENGINES:
        megatron_ranks(2, used, engine, names, code, timeout_s=120)
