"""The checkpoint that a run starts from where none is given: a small Llama with random weights."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
import torch.distributed as dist

from megatron_idempotent.trainer import saved
from megatron_idempotent.trainer.config import ModelConfig
from megatron_idempotent.trainer.task.tokenizer import TOKENIZER_FILE, TextTokenizer


def ensure_checkpoint(
    directory: Path, model: ModelConfig, tokenizer: TextTokenizer, *, seed: int, positions: int
) -> Path:
    """The random checkpoint of a run, written by rank 0 unless it is there. Collective.

    A function of the sizes and the seed: RMSNorm, rotary positions, SwiGLU, grouped queries, no
    biases; `positions` is the longest sequence. It is written beside its name and renamed.
    """
    if dist.get_rank() == 0 and not directory.is_dir():
        unfinished = directory.with_name(directory.name + ".unfinished")
        shutil.rmtree(unfinished, ignore_errors=True)
        write_checkpoint(unfinished, model, tokenizer, seed=seed, positions=positions)
        saved.write_sums(unfinished)
        unfinished.rename(directory)
    dist.barrier()
    return directory


def write_checkpoint(
    directory: Path, model: ModelConfig, tokenizer: TextTokenizer, *, seed: int, positions: int
) -> None:
    """Write it, in this process alone; the random state is left as it was."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=tokenizer.vocabulary_size,
        hidden_size=model.hidden,
        intermediate_size=model.ffn,
        num_hidden_layers=model.layers,
        num_attention_heads=model.heads,
        num_key_value_heads=model.query_groups,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": float(model.rotary_base)},
        initializer_range=model.init_std,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=tokenizer.end_ids[0],
        pad_token_id=tokenizer.pad_id,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        decoder = LlamaForCausalLM(config)
    with torch.no_grad():
        # As Megatron begins: what adds to the residual stream is smaller in a deeper model.
        for name, parameter in decoder.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                parameter.mul_((2 * model.layers) ** -0.5)
    decoder.save_pretrained(directory)
    tokenizer.save(directory / TOKENIZER_FILE)
