"""The checkpoint of a run that is given none."""

from __future__ import annotations

import math

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from megatron_idempotent.rl.trainer.config import ModelConfig  # noqa: E402
from megatron_idempotent.rl.trainer.megatron_setup import write_checkpoint  # noqa: E402
from megatron_idempotent.rl.trainer.task.prompts import SHIPPED_FILE, read_prompts  # noqa: E402
from megatron_idempotent.rl.trainer.task.tokenizer import TextTokenizer  # noqa: E402


def test_the_random_checkpoint_is_what_the_settings_and_the_seed_say(tmp_path):
    from transformers import AutoModelForCausalLM

    tokenizer = TextTokenizer.of_words(read_prompts(SHIPPED_FILE).all)
    sizes = ModelConfig(
        layers=3, hidden=48, ffn=80, heads=6, query_groups=3, rotary_base=77, init_std=0.5
    )
    before = torch.get_rng_state()
    for name, seed in (("one", 1), ("again", 1), ("other", 2)):
        write_checkpoint(tmp_path / name, sizes, tokenizer, seed=seed, positions=21)
    assert torch.equal(torch.get_rng_state(), before)

    one, again, other = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("one", "again", "other")
    )
    config = one.config
    assert (config.num_hidden_layers, config.hidden_size, config.intermediate_size) == (3, 48, 80)
    assert (config.num_attention_heads, config.num_key_value_heads) == (6, 3)
    assert (config.vocab_size, config.max_position_embeddings) == (16, 21)
    assert config.rope_parameters["rope_theta"] == 77
    # After the first, a frequency of 77^(-2/8), the head being 8 wide.
    assert float(one.model.rotary_emb.inv_freq[1]) == pytest.approx(77**-0.25)
    weights = dict(one.named_parameters())
    assert all(torch.equal(weights[name], value) for name, value in again.named_parameters())
    assert not torch.equal(weights["lm_head.weight"], other.lm_head.weight)
    layer = one.model.layers[0]
    # 2,304 and more numbers each: the standard error of a deviation is 1.5 % of it.
    assert float(layer.mlp.up_proj.weight.detach().std()) == pytest.approx(0.5, rel=0.08)
    for into_the_stream in (layer.mlp.down_proj, layer.self_attn.o_proj):
        assert float(into_the_stream.weight.detach().std()) == pytest.approx(
            0.5 / math.sqrt(6), rel=0.08
        )

    loaded = TextTokenizer.load(tmp_path / "one")
    assert loaded.encode_prompt("copy a b") == tokenizer.encode_prompt("copy a b")
    assert (loaded.end_ids, loaded.pad_id) == (tokenizer.end_ids, tokenizer.pad_id)
