"""Rotary tables that are kept for later calls are computed outside of inference mode."""

from upstream.edits import Repair, decorate

_ROTARY = "megatron.core.models.common.embeddings.rotary_pos_embedding:RotaryEmbedding"
_YARN = "megatron.core.models.common.embeddings.yarn_rotary_pos_embedding:YarnRotaryEmbedding"
# Under the cache, so that it runs only when a table is computed.
_LINES = "@torch.inference_mode(False)  # training may use the cached result"

REPAIR = Repair(
    edits=(
        decorate(f"{_ROTARY}.forward", _LINES),
        decorate(f"{_ROTARY}._set_cos_sin_cache", _LINES),
        decorate(f"{_YARN}.forward", _LINES),
        decorate(f"{_YARN}._set_cos_sin_cache", _LINES),
    ),
    unit_tests=("transformer/test_rope.py",),
)
