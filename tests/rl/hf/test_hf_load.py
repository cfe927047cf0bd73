"""Checkpoints that do not fit, and are refused with all that is wrong; and what a load leaves."""

from __future__ import annotations

import json
import shutil
from typing import Any

import hf_programs
import pytest
import torch

from megatron_idempotent.rl.hf import (
    Architecture,
    CheckpointDamaged,
    FailedElsewhere,
    MegatronWeights,
    load_hf,
)


def rewritten(source: Any, target: Any, change: Any) -> Any:
    """A copy of a checkpoint whose tensors, by name, were changed."""
    from safetensors.torch import load_file, save_file

    shutil.copytree(source, target)
    tensors = load_file(source / "model.safetensors")
    change(tensors)
    save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
    return target


def spoil(tensors: dict[str, Any]) -> None:
    del tensors["model.layers.2.mlp.up_proj.weight"]
    tensors["model.layers.9.mlp.up_proj.weight"] = torch.zeros(2, 3)
    tensors["model.norm.weight"] = torch.zeros(23)
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(5)  # which is no fault


def widen(tensors: dict[str, Any]) -> None:
    tensors["lm_head.weight"] = tensors["lm_head.weight"].double()
    tensors["model.norm.weight"] = tensors["model.norm.weight"].long()


def first_two(tensors: dict[str, Any]) -> None:
    for name in list(tensors):
        if name.startswith(("model.layers.2", "model.layers.3")):
            del tensors[name]


def cut_short(folder: Any) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def without_a_file(folder: Any) -> None:
    (folder / "model.safetensors").rename(folder / "a.safetensors")
    weight_map = {"model.norm.weight": "a.safetensors", "x": "a.safetensors", "y": "b"}
    index = {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def without_weights(folder: Any) -> None:
    (folder / "model.safetensors").unlink()


def half_an_index(folder: Any) -> None:
    without_weights(folder)
    (folder / "model.safetensors.index.json").write_text('{"weight_')


def shallower(folder: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] = 2
    config.pop("layer_types", None)
    (folder / "config.json").write_text(json.dumps(config))


#: Name → what is done to the tensors, to the folder, and what a load says.
MISFITS: dict[str, tuple[Any, Any, list[str]]] = {
    "spoilt": (
        spoil,
        None,
        [
            "CheckpointMismatch: ",
            "in 3 places",
            "model.layers.2.mlp.up_proj.weight is missing",
            "model.layers.9.mlp.up_proj.weight [2, 3] is unexpected",
            "model.norm.weight is [23], config.json has [24]",
        ],
    ),
    "wide": (
        widen,
        None,
        [
            "CheckpointMismatch: ",
            "lm_head.weight is float64 and would be rounded to float32",
            "model.norm.weight is int64, the parameter float32",
        ],
    ),
    "cut": (
        None,
        cut_short,
        ["CheckpointDamaged: ", "cut/model.safetensors is missing, incomplete or damaged"],
    ),
    "parts": (
        None,
        without_a_file,
        ["CheckpointDamaged: ", "a.safetensors lacks x, which", "parts/b is missing"],
    ),
    "none": (None, without_weights, ["CheckpointDamaged: ", "none has neither model.safetensors"]),
    "index": (None, half_an_index, ["CheckpointDamaged: ", "index.json cannot be read as JSON"]),
    # A deeper model, of which a load would leave parts as they are.
    "shallow": (first_two, shallower, ["num_layers=4, the checkpoint has 2"]),
}


def misfits(good: Any, folder: Any) -> None:
    """Runs on a rank: what a load of each says; the model is as it was."""
    hf_programs.parallel()
    _, _, chunks = hf_programs.loaded(good)
    before = [parameter.clone() for parameter in chunks[0].parameters()]
    for name, (_, _, fragments) in MISFITS.items():
        with pytest.raises(ValueError) as caught:  # noqa: PT011  the text is looked at
            load_hf(folder / name, chunks)
        said = f"{type(caught.value).__name__}: {caught.value}"
        assert [each for each in fragments if each not in said] == [], said
        assert all(map(torch.equal, chunks[0].parameters(), before)), name
    # A layer that came without its norms, and another that the checkpoint has not.
    layer = chunks[0].decoder.layers[1]
    layer.self_attention.q_layernorm = torch.nn.Identity()
    layer.mlp.extra = torch.nn.Linear(2, 3, bias=False)
    layer.self_attention.linear_proj.weight = torch.nn.Parameter(torch.zeros(24, 39))
    with pytest.raises(ValueError, match="is not the checkpoint's Qwen3ForC") as caught:
        load_hf(good, chunks)
    for part in (
        "decoder.layers.1.mlp.extra.weight [3, 2] has no counterpart",
        "decoder.layers.1.self_attention.linear_proj.weight is [24, 39], shard 0 of 1 has [24, 40]",
        "no parameter takes model.layers.1.self_attn.q_norm.weight",
    ):
        assert part in str(caught.value)


def test_everything_that_does_not_fit_is_listed_and_nothing_is_changed(
    megatron_ranks, checkpoints, tmp_path
):
    good = checkpoints / "qwen3"
    for name, (of_tensors, of_folder, _) in MISFITS.items():
        rewritten(good, tmp_path / name, of_tensors or (lambda _: None))
        if of_folder is not None:
            of_folder(tmp_path / name)
    megatron_ranks(1, misfits, good, tmp_path)


def tied_and_another(root: Any, folders: list[Any]) -> None:
    """Runs on a rank: output layers that came with tied embeddings, and rounding."""
    hf_programs.parallel()
    same, another, longer = folders
    _, _, chunks = hf_programs.loaded(same)
    with pytest.raises(ValueError, match=r"true and lm_head\.weight is another weight"):
        load_hf(another, chunks)
    with pytest.raises(ValueError, match=r"lm_head\.weight \[52, 24\] is unexpected"):
        load_hf(longer, chunks)
    # To a narrower type where that is wanted, as torch rounds.
    arch = Architecture.read(root / "qwen2-tied")
    config = hf_programs.config_of(arch, params_dtype=torch.bfloat16)
    chunks = hf_programs.chunks_of(arch, config)
    with pytest.raises(ValueError, match=r"rounded to bfloat16 \(allow_rounding=True lets it\)"):
        load_hf(root / "qwen2-tied", chunks)
    load_hf(root / "qwen2-tied", chunks, allow_rounding=True)
    found = hf_programs.exported(MegatronWeights(chunks, arch))
    wanted = hf_programs.stored(root / "qwen2-tied")
    hf_programs.same(found, {name: tensor.bfloat16() for name, tensor in wanted.items()})
    # From a narrower one into a wider.
    config = hf_programs.config_of(arch, params_dtype=torch.float32)
    chunks = hf_programs.chunks_of(arch, config)
    load_hf(root / "qwen2-tied-half", chunks)
    found = hf_programs.exported(MegatronWeights(chunks, arch, dtype=torch.bfloat16))
    hf_programs.same(found, hf_programs.stored(root / "qwen2-tied-half"))


def test_tied_weights_may_come_twice_if_they_are_equal_and_types_are_not_narrowed_unasked(
    megatron_ranks, checkpoints, tmp_path
):
    def twice(tensors: dict[str, Any], change: float) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + change

    def lengthen(tensors: dict[str, Any]) -> None:
        embedding = tensors["model.embed_tokens.weight"]
        tensors["lm_head.weight"] = embedding.repeat(2, 1)[:52]

    good = checkpoints / "llama3-tied"
    same = rewritten(good, tmp_path / "same", lambda tensors: twice(tensors, 0.0))
    another = rewritten(good, tmp_path / "another", lambda tensors: twice(tensors, 1.0))
    longer = rewritten(good, tmp_path / "longer", lengthen)
    megatron_ranks(1, tied_and_another, checkpoints, [same, another, longer])


def on_one_rank_only(root: Any, bad: Any) -> None:
    """Runs on two ranks with half of the vocabulary each: one has a damaged copy of the files."""
    hf_programs.parallel(tp=2)
    _, _, chunks = hf_programs.loaded(root / "llama")
    second = torch.distributed.get_rank() == 1
    weights = chunks[0].embedding.word_embeddings.weight
    assert weights.shape == (26, 24)
    # 52 rows, of which the last is no token: 0, whatever it was.
    assert bool((weights[-1] == 0).all()) is second
    with torch.no_grad():
        for parameter in chunks[0].parameters():
            parameter.fill_(7.0)
    kind, said = (
        (CheckpointDamaged, "model.safetensors is missing")
        if second
        else (FailedElsewhere, "nothing was loaded: rank 1: CheckpointDamaged: .*model.safetensors")
    )
    with pytest.raises(kind, match=said):
        load_hf(bad if second else root / "llama", chunks)
    assert all(bool((parameter == 7.0).all()) for parameter in chunks[0].parameters())
    load_hf(root / "llama", chunks)
    assert bool((weights[-1] == 0).all()) is second


def test_what_one_rank_cannot_read_no_rank_loads(megatron_ranks, checkpoints, tmp_path):
    bad = tmp_path / "bad"
    shutil.copytree(checkpoints / "llama", bad)
    path = bad / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])
    megatron_ranks(2, on_one_rank_only, checkpoints, bad)
