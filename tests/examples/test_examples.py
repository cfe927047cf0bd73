"""The examples in docstrings run: in this process, or on ranks with a real model.

sybil reads them. The examples of a file share a namespace: that of their module, everything public,
and what is given to the file below, or in `served_examples`. Where the examples of one file need
different things, `file.py:name` stands for those of one class or function. Where one needs a
cluster, a GPU or processes of its own, its calls are held against the signatures of what they call.
"""

from __future__ import annotations

import ast
import functools
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from short_examples import NEEDS_ALL, PACKAGE, binds, names_of, resolved, seen_by

from megatron_idempotent.megatron.targets import target

pytestmark = NEEDS_ALL

CLUSTER = "processes of its own, which cost 5 CPU seconds each"
#: What is not run, by file, and what it would need.
BOUND = {
    "rl/controller/data_plane.py": "a cluster of Ray's, and TransferQueue",
    "proof/certify/run.py": "an adapter in a package of its own",
    "proof/cpu/pool.py": CLUSTER,
    "fp8/settings.py": "Transformer Engine and a GPU",
    "rl/engines/vllm_inbox.py:IncomingUpdate": "a sender beside it that sends between the lines",
    "rl/engines/vllm_server.py": "vLLM",
    "step/packs.py:pack_batches": "attention that takes packs: tests/step/test_packs.py has it",
    "rl/workers/embedded.py": CLUSTER,
    "rl/workers/ray.py": "a cluster of Ray's",
    "rl/workers/torchrun.py": "torchrun's ranks in other processes",
    "megatron/expert_replay.py:ExpertReplay": "experts: tests/step/test_expert_replay.py has it",
    "rl/sync/bucket.py": "a store, and engines: examples/weight_bucket.py has them",
}
ON_RANKS = {
    "proof/cpu/probes.py:watching_collectives",
    "proof/cpu/attention.py",
    "logprobs/kl.py:topk_kl",
    "logprobs/model.py",
    "step/fsdp.py",
    "step/lifecycle.py",
    "step/megatron.py:TrainStep",
    "step/megatron.py:gpt_inputs",
    "step/schedule.py",
    "window/abort.py",
    "window/accumulation.py",
    "window/agreement.py",
    "window/guard.py",
    "window/params.py",
    "window/setup.py",
}
#: On two ranks, with a checkpoint; `served_examples.SERVED` names the rest of those with a server.
SHARDED = {
    "rl/hf/buckets.py",
    "rl/weights/safetensors_io.py:Checkpoint",
    "rl/hf/export.py",
    "rl/hf/config.py",
    "rl/hf/fsdp.py",
    "rl/hf/names.py",
}


def _owners(path: Path) -> dict[str, range]:
    """The lines of each class and function of a file, by its name."""
    body = ast.parse(path.read_text("utf-8")).body
    return {
        node.name: range(node.lineno, (node.end_lineno or 0) + 1)
        for node in body
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
    }


@functools.cache
def _read(path: Path, text: str) -> list[Any]:
    """Return the examples in the docstrings of a file that has this text."""
    from sybil.document import PythonDocStringDocument
    from sybil.evaluators.python import PythonEvaluator
    from sybil.parsers.abstract.lexers import BlockLexer

    if "Example:\n" not in text:
        return []
    # Up to the first line that is not further in, or the docstring's end.
    lexer = BlockLexer(
        re.compile(r"^(?P<prefix> *)Example:\n", re.MULTILINE),
        r"\n(?= {{0,{len_prefix}}}\S)|\s*\Z",
    )

    def parse(document: Any) -> Iterator[Any]:
        for region in lexer(document):
            region.parsed, region.evaluator = region.lexemes["source"], PythonEvaluator()
            yield region

    return list(PythonDocStringDocument.parse(str(path), parse).examples())


def _examples(file: str, *, package: Path = PACKAGE) -> list[Any]:
    """The examples of `file.py`, or of `file.py:name`."""
    name, _, owner = file.partition(":")
    path = package / name
    found = _read(path, path.read_text("utf-8"))
    if not owner or not found:
        return found
    lines = _owners(path)[owner]
    return [example for example in found if example.line in lines]


def _run(file: str, **given: Any) -> dict[str, Any]:
    """Run the examples of a file; return their variables."""
    names = {**names_of(file), **given}
    for example in _examples(file):
        example.namespace = names
        example.region.evaluator(example)
    return names


def here(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Names given to the examples that need no ranks, by file."""
    import megatron.core
    import torch

    from megatron_idempotent import token_logprobs
    from megatron_idempotent.fp8 import Pack, TokenAlignment
    from megatron_idempotent.logprobs import shift_targets
    from megatron_idempotent.rl.weights.records import TensorInfo

    alignment = TokenAlignment(sequence=1, pack=1)
    wide_BTV = torch.randn(2, 8, 128, requires_grad=True)
    logits_BTV = torch.randn(2, 8, 16, requires_grad=True)
    tokens_BT, mask_BT = torch.randint(16, (2, 8)), torch.ones(2, 8)
    (tmp_path / "training.py").write_text("def train():\n    config.param_sync_func = None\n")
    installed = Path(megatron.core.__path__[0]).parents[1]
    return {
        "step/microbatches.py:valid_counts": {"tokens_BT": tokens_BT, "mask_BT": mask_BT},
        "proof/cpu/probes.py:peak_bytes": {"logits": logits_BTV, "loss_of": torch.sum},
        "cli/drift.py": {},
        "patching/contract.py": {"train": _run},
        "cli/reads.py": {},
        "patching/surroundings.py": {},
        "patching/api.py": {},
        "patching/scoped.py": {"train": lambda _: None},
        "patching/base.py": {},
        "patching/record.py": {"train": print, "target": target},
        "patching/report.py": {},
        "patching/source.py": {"Path": tmp_path.joinpath},
        "patching/trees.py": {"Path": lambda _: installed, "patches": _patches},
        "fp8/blockwise.py": {"weight": torch.randn(256, 128)},
        "fp8/export.py": {
            "config": {},
            "hf_weights": lambda: [("model.layers.0.mlp.up_proj.weight", torch.randn(128, 128))],
            "send": lambda name, tensor: None,
        },
        "fp8/packing.py": {
            "sequences": [torch.arange(5), torch.arange(3)],
            "pad_id": 0,
            "model": lambda tokens_T: torch.randn(*tokens_T.shape, 16),
            "stats": SimpleNamespace(logprob=torch.zeros(32)),
            "valid": torch.ones(32),
            "microbatch": {"sample_mask": torch.ones(2)},
        },
        "logprobs/api.py": {"logits": logits_BTV, "labels": tokens_BT, "mask": mask_BT},
        "logprobs/targets.py": {
            "logits": logits_BTV,
            "tokens": tokens_BT,
            "attention_mask": mask_BT,
        },
        "logprobs/topk.py": {"logits": wide_BTV, "group": None, "vocab_size": 100},
        "logprobs/kl.py:token_kl": {
            "logits": wide_BTV,
            "teacher_logits": wide_BTV.detach() + 1,
            "loss_mask": mask_BT,
        },
        "step/packs.py:bin_sequences": {
            "sequences": [torch.arange(5), torch.arange(3)],
            "alignment": alignment,
            "Pack": Pack,
        },
        "step/packs.py:own_positions": {
            "output": logits_BTV,
            "tokens_BT": tokens_BT,
            "shift_targets": shift_targets,
            "token_logprobs": token_logprobs,
        },
        "step/packs.py:all_positions": {"stats": SimpleNamespace(logprob=mask_BT)},
        "rl/weights/safetensors_io.py:SafetensorsFile": {
            "path": tmp_path / "model.safetensors",
            "TensorInfo": TensorInfo,
            "a": mask_BT,
        },
        "proof/prove.py": {},
        "patching/record.py:Reviewed": {},
        "lazy.py": {},
        "step/loss.py": {"torch": torch},
        "rl/weights/staging.py:SideStream": {"weight": torch.ones(3)},
        "rl/workers/exports.py": {"MegatronWeights": object},
        "rl/workers/protocol.py": {"job": None},
    }


def _patches() -> Any:
    from megatron_idempotent.patching.catalog import patches

    return {"train-interval-timer": patches()["train-interval-timer"]}


def run_here(tmp_path: Path) -> tuple[set[str], dict[str, int], list[str]]:
    """Runs on a rank, where patches and globals that an example sets end with it; see also
    `bind_the_rest`."""
    bound = bind_the_rest(tmp_path)
    given = here(tmp_path)
    for file, names in given.items():
        _run(file, **names)
    return set(given), *bound


class BadSample(Exception):
    """A loss raises this."""


def run_on_ranks() -> set[str]:
    """Runs on ranks, with a tiny model of Megatron's, and one on FSDP2."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
    )
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.core.utils import get_model_config
    from scenario import ROWS, Bench, T, TokenLoss, build, data, forward

    from megatron_idempotent.logprobs import model_logprobs, vocab_topk

    _run("window/setup.py")
    assert parallel_state.get_pipeline_model_parallel_world_size() == 2
    parallel_state.destroy_model_parallel()
    done = {"window/setup.py"}

    def run(file: str, **given: Any) -> dict[str, Any]:
        done.add(file)
        return _run(file, **given)

    model, scheduler, replica = build(overlap_param_gather=True)
    stream = [data(seed, 4, replica) for seed in (1, 2)]
    hidden_TT = torch.ones(T, T).tril() < 0.5
    for batch in stream:
        batch["advantages"] = torch.randn(4)
        batch["attention_mask"] = hidden_TT.expand(4, 1, T, T)
    loss = _run("step/loss.py", torch=torch)["PolicyGradient"]()
    parts = {"chunks": model.chunks, "optimizer": model.optimizer, "scheduler": scheduler}
    left = run("step/megatron.py:TrainStep", **parts, loss=loss, stream=stream)
    assert left["result"].updated
    # The step and the loss count the same tokens.
    assert 4 < left["result"].metrics["nll"] < 6
    run("step/lifecycle.py", step=left["step"], loss=loss)
    left["step"].abort()

    sizes = {"num_microbatches": 4, "seq_length": T, "micro_batch_size": ROWS}
    seen = []

    def forward_step(data_iterator: Any, chunk: Any) -> Any:
        microbatch = next(data_iterator)
        seen.append(microbatch)

        def mean(output: Any) -> Any:
            if microbatch.get("bad"):
                raise BadSample
            return output.mean(), {}

        return forward(chunk, microbatch), mean

    window = {**sizes, "forward_step_func": forward_step, "forward_only": False}
    microbatch = {"input_ids": stream[0]["input_ids"][:ROWS]}
    names = {"forward_backward": get_forward_backward_func(), **parts}
    bad = {**window, "data_iterator": iter([microbatch, {**microbatch, "bad": True}])}
    run("window/abort.py", **names, window=bad, BadSample=BadSample)
    assert not model.gradients().any()
    rest = {name: value for name, value in window.items() if name != "num_microbatches"}
    run("window/accumulation.py", **names, window=rest, stream=[[microbatch] * 3, [microbatch] * 5])
    assert len(seen) == 2 + 8
    requests = [iter([microbatch] * 4) for _ in range(2)]
    names = run("step/schedule.py", **parts, requests=requests, call=window)
    assert names["result"].microbatches == 2 * 8
    data_iterator = iter([microbatch] * 4)
    del window["forward_step_func"]
    model.chunks[0].zero_grad_buffer()
    run(
        "window/guard.py",
        **parts,
        window=window,
        forward_step=forward_step,
        data=data_iterator,
        get_forward_backward_func=get_forward_backward_func,
    )
    weights = model.chunks[0].state_dict()
    run("window/params.py", **parts, model_chunks=model.chunks, weights=weights)
    run("window/agreement.py", pack=list, rollouts=[])
    run("proof/cpu/probes.py:watching_collectives", model=model)

    tokens_BT = microbatch["input_ids"]
    config = get_model_config(model.chunks[0])
    run(
        "proof/cpu/attention.py",
        config=config,
        GPTModel=GPTModel,
        get_gpt_decoder_block_spec=get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec=get_gpt_layer_local_spec,
    )
    for file in ("logprobs/kl.py:topk_kl", "step/megatron.py:gpt_inputs"):
        run(
            file,
            model=model.chunks[0],
            model_logprobs=model_logprobs,
            inputs=[tokens_BT, torch.arange(T).expand_as(tokens_BT), hidden_TT.expand(1, 1, T, T)],
            teacher=vocab_topk(logits=torch.randn(*tokens_BT.shape, 128), k=4),
            microbatch={**microbatch, "attention_mask": hidden_TT.expand(1, 1, T, T)},
            targets=tokens_BT,
        )
    run(
        "logprobs/model.py",
        model=model.chunks[0],
        tokens=tokens_BT,
        positions=torch.arange(T).expand_as(tokens_BT),
        mask=hidden_TT.expand(1, 1, T, T),
        targets=tokens_BT,
        advantages=torch.ones(tokens_BT.shape),
    )
    sharded, optimizer, scheduler = Bench("fsdp").parts
    parts = {"model": sharded, "optimizer": optimizer, "scheduler": scheduler}
    assert run("step/fsdp.py", **parts, loss=TokenLoss(), stream=stream)["result"].updated
    return done


def _bind(file: str, *, package: Path = PACKAGE) -> int:
    """Hold the calls of a file's examples against signatures; how many there were.

    Raises:
        ValueError: a call that does not fit, with its place.
    """
    imported: dict[str, Any] = {}
    made: dict[str, Any] = {}
    bound = 0
    for example in _examples(file, package=package):
        flags = ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT
        tree = compile(example.parsed, file, "exec", flags)
        assert isinstance(tree, ast.Module)
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                exec(compile(ast.Module([node], []), file, "exec"), imported)
        names = {**seen_by(file, tree), **imported}
        for node in ast.walk(tree):
            match node:
                case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(func=maker)):
                    made[name] = resolved(maker, names)
                case ast.withitem(ast.Call(func=maker), ast.Name(id=name)):
                    made[name] = resolved(maker, names)
        for node in ast.walk(tree):
            if isinstance(node, ast.Call):
                try:
                    bound += _binds(node, names, made)
                except (AttributeError, NameError, TypeError) as error:
                    where = f"{file}:{example.line + node.lineno}"
                    raise ValueError(f"{where}: {ast.unparse(node)}: {error}") from error
    return bound


def _binds(call: ast.Call, names: dict[str, Any], made: dict[str, Any]) -> bool:
    function, before = resolved(call.func, names), 0
    match call.func:
        case ast.Name(id=name) if function is None:
            raise NameError(f"{name} is not there")
        case ast.Attribute(ast.Name(id=name), method) if inspect.isclass(made.get(name)):
            function, before = getattr(made[name], method), 1
    return function is not None and binds(function, call, before=before)


#: In a file that has the same names, and what is told of it.
WRONG = {
    "with RankPool(2) as pool:\n    pool.run(2)": "3: pool.run(2): missing a required argument",
    "with RankPool(2) as pool:\n    pool.walk(2)": "3: pool.walk(2): type object 'RankPool' has no",
    "RankPond(2)": "2: RankPond(2): RankPond is not there",
}


def bind_wrong(folder: Path) -> list[str]:
    """Return what is told of wrong examples in a file of the folder."""
    told, file = [], "proof/cpu/pool.py"
    (folder / file).parent.mkdir(parents=True)
    for example in WRONG:
        lines = example.replace("\n", "\n    ")
        (folder / file).write_text(f'"""Example:\n    {lines}\n"""\n')
        with pytest.raises(ValueError) as error:  # noqa: PT011 - its message is looked at
            _bind(file, package=folder)
        told.append(str(error.value).removeprefix(f"{file}:"))
    return told


def bind_the_rest(folder: Path) -> tuple[dict[str, int], list[str]]:
    """Runs on a rank: how many calls in each file that is not run fit what they call, -1 for a file
    that     imports what is not installed; and what is told of wrong ones."""
    found = {}
    for file in BOUND:
        try:
            found[file] = _bind(file)
        except ModuleNotFoundError as missing:
            if str(missing.name).startswith("megatron_idempotent"):
                raise
            found[file] = -1
    return found, bind_wrong(folder)


def test_examples_run(megatron_ranks, tmp_path):
    from served_examples import SERVED

    ((done, bound, told),) = megatron_ranks(1, run_here, tmp_path)
    first, _ = megatron_ranks(2, run_on_ranks)
    assert first == ON_RANKS
    assert all(bound.values()), bound
    assert all(map(str.startswith, told, WRONG.values())), told
    run = done | ON_RANKS | SERVED.keys() | SHARDED
    assert not run & BOUND.keys(), "what runs is not listed with a reason"
    held = run | BOUND.keys()
    left = {
        place
        for path in PACKAGE.rglob("*.py")
        if (file := path.relative_to(PACKAGE).as_posix()) not in held
        for place in (f"{file}:{name}" for name in _owners(path))
        if place not in held and _examples(place)
    }
    assert not left
    assert all(map(_examples, held))


def test_examples_with_engines_fleets_and_checkpoints_run(megatron_ranks, tmp_path):
    for needed in ("aiohttp", "safetensors", "transformers"):
        pytest.importorskip(needed)
    from served_examples import on_one_rank, on_two_ranks

    megatron_ranks(1, on_one_rank, tmp_path, timeout_s=120.0)
    assert megatron_ranks(2, on_two_ranks, tmp_path, timeout_s=120.0) == [SHARDED] * 2
