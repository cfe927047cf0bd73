"""Random checkpoints of a few thousand parameters, in the form that every engine reads."""

from __future__ import annotations

import json
import string
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from tokenizers import Regex, Tokenizer, models, pre_tokenizers

PAD, END, UNKNOWN = 0, 1, 2
FAMILIES = ("llama", "qwen2", "qwen3", "qwen3_moe")


def checkpoints(folders: Any, **always: Any) -> Callable[..., Path]:
    """`make(seed=1, family="qwen3")` writes a checkpoint once, and returns its directory.

    `folders` is pytest's `tmp_path_factory`; `always` are settings of all checkpoints.
    """
    made: dict[str, Path] = {}

    def make(**settings: Any) -> Path:
        settings = {**always, **settings}
        key = repr(sorted(settings.items()))
        if key not in made:
            made[key] = make_checkpoint(folders.mktemp("checkpoint"), **settings)
        return made[key]

    return make


def make_checkpoint(
    directory: Path,
    *,
    family: str = "qwen2",
    seed: int = 0,
    vocabulary: int = 64,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    max_positions: int = 256,
    tied: bool = False,
    init_std: float = 0.3,
    dtype: torch.dtype = torch.float32,
) -> Path:
    """Write config.json, model.safetensors and a tokenizer of characters; return `directory`.

    Every parameter is drawn from the seed, norms and biases too, so two seeds differ in all of
    them. `init_std` is that of the matrices: with 0.3 the distributions are far from uniform, and
    far from certain. Ids 0 to 2 are padding, end and unknown; "qwen3_moe" has 4 experts.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    assert family in FAMILIES, family
    settings: dict[str, Any] = {
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
        "max_position_embeddings": max_positions,
        "tie_word_embeddings": tied,
        "bos_token_id": None,
        "eos_token_id": END,
        "pad_token_id": PAD,
    }
    if family == "qwen3_moe":
        settings |= {
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": hidden,
            "norm_topk_prob": True,
        }
    if family == "qwen2":
        del settings["head_dim"]
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **settings), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            if "norm" in name:
                parameter.copy_(1 + 0.1 * drawn)
            else:
                # A bias as large as the matrices would drown what the input says.
                parameter.copy_((0.1 if parameter.dim() == 1 else init_std) * drawn)
    model.save_pretrained(directory)
    _write_tokenizer(directory, vocabulary, max_positions)
    return directory


def read_weights(directory: Path) -> dict[str, torch.Tensor]:
    """A checkpoint's tensors by Hugging Face name."""
    return load_file(directory / "model.safetensors")


def _write_tokenizer(directory: Path, vocabulary: int, max_positions: int) -> None:
    pieces = ["<pad>", "<end>", "<unk>", " ", *string.ascii_letters, *string.digits]
    pieces = [*pieces, *(f"<{place}>" for place in range(len(pieces), vocabulary))][:vocabulary]
    words = {piece: place for place, piece in enumerate(pieces)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"<\w+>|."), behavior="isolated")
    tokenizer.add_special_tokens(["<pad>", "<end>", "<unk>"])
    tokenizer.save(str(directory / "tokenizer.json"))
    # By hand: the class has another name in each major release of transformers.
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "pad_token": "<pad>",
        "eos_token": "<end>",
        "unk_token": "<unk>",
        "model_max_length": max_positions,
        "clean_up_tokenization_spaces": False,
    }
    (directory / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
