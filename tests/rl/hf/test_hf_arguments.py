"""The same model from the command line of megatron.training; and Llama 3's rotary embeddings."""

from __future__ import annotations

import dataclasses
import importlib.util
from typing import Any

import hf_programs
import pytest
import torch

from megatron_idempotent.rl.hf import Architecture, build_gpt, load_hf
from megatron_idempotent.rl.trainer.megatron_setup import PLAIN_ARGUMENTS

pytestmark = pytest.mark.full

#: Of a float32 model on CPU ranks; the model's own are those that are tested.
PROGRAM = [
    "--seq-length=16",
    "--micro-batch-size=2",
    "--global-batch-size=2",
    "--train-iters=1",
    "--lr=0.1",
    *PLAIN_ARGUMENTS,
]
#: What programs choose, and functions that are made again.
OWN = {
    *("timers", "init_method", "output_layer_init_method", "embedding_init_method"),
    *("grad_scale_func", "deallocate_pipeline_outputs", "cp_comm_type", "transformer_impl"),
    *("inference_sampling_seed", "batch_p2p_comm", "overlap_p2p_comm"),
    *("tensor_parallel_num_weight_shards", "expert_tensor_parallel_num_weight_shards"),
}


def from_the_command_line(root: Any, name: str) -> dict[str, Any]:
    """Runs on a rank: fields of the configuration that differ, after logits were compared."""
    import megatron_idempotent
    from megatron_idempotent.rl.trainer.megatron_setup import build_megatron_model

    megatron_idempotent.apply()
    folder = root / name
    arch = Architecture.read(folder)
    arguments = [*arch.megatron_arguments(), *PROGRAM]
    stock = build_megatron_model(arguments, arch, positions=16)
    config = stock.modules[0].config
    load_hf(folder, stock.chunks, optimizer=stock.optimizer)
    logits = hf_programs.logits_of(stock.chunks, config)
    reference = torch.load(folder / "logits.bin")
    hf_programs.close(logits, reference, name, torch.float32)
    wanted = hf_programs.config_of(arch)
    names = [field.name for field in dataclasses.fields(config)]
    return {
        each: (getattr(config, each), getattr(wanted, each))
        for each in names
        if each not in OWN and getattr(config, each) != getattr(wanted, each)
    }


@pytest.mark.skipif(importlib.util.find_spec("megatron.training") is None, reason="not in a wheel")
@pytest.mark.parametrize("name", ["qwen2-tied", "moe"])
def test_the_command_line_makes_the_same_model(megatron_ranks, checkpoints, name):
    (differ,) = megatron_ranks(1, from_the_command_line, checkpoints, name)
    assert differ == {}


def frequencies(factors: list[float | None]) -> list[Any]:
    """Runs on a rank: those of whole models that are built for such embeddings."""
    hf_programs.parallel()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
    sizes |= {"num_hidden_layers": 1, "vocab_size": 8, "head_dim": 128, "rope_theta": 500_000.0}
    arch = Architecture.of({"architectures": ["LlamaForCausalLM"], **sizes})
    found = []
    for factor in factors:
        scaled = dataclasses.replace(arch, rope_factor=factor)
        found.append(build_gpt(scaled, hf_programs.config_of(scaled)).rotary_pos_emb.inv_freq)
    return found


def test_rotary_frequencies_are_those_of_transformers_to_the_bit(megatron_ranks):
    pytest.importorskip("transformers")
    import hf_checkpoints
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    factors = [None, 8.0, 32.0]
    (found,) = megatron_ranks(1, frequencies, factors)
    for factor, ours in zip(factors, found, strict=True):
        rope = {**hf_checkpoints.LLAMA3, "factor": factor}
        if factor is None:
            rope = {"rope_type": "default", "rope_theta": 500_000.0}
        config = LlamaConfig(head_dim=128, rope_parameters=rope, max_position_embeddings=1 << 17)
        assert torch.equal(ours, LlamaRotaryEmbedding(config).inv_freq), factor
