"""Builds the model of layouts with `fsdp2`: the oracle's GPT, sharded by `fully_shard`.

Its parameters have the names that Megatron gives them. Legend: B rows, T positions, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from megatron_idempotent.proof.cpu import tiny

from .layouts import LAYERS
from .oracle import Gpt
from .protocol import Rows


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = tiny.HIDDEN
        self.input_layernorm = nn.LayerNorm(size)
        self.self_attention = nn.ModuleDict(
            {"linear_qkv": nn.Linear(size, 3 * size), "linear_proj": nn.Linear(size, size)}
        )
        self.pre_mlp_layernorm = nn.LayerNorm(size)
        self.mlp = nn.ModuleDict(
            {"linear_fc1": nn.Linear(size, 4 * size), "linear_fc2": nn.Linear(4 * size, size)}
        )

    def forward(self, x_BTH: Tensor) -> Tensor:
        parameters = dict(self.named_parameters(prefix="layer"))
        return Gpt(parameters).layer(x_BTH, "layer")


class _GPT(nn.Module):
    """A small GPT; its forward returns the negative log-probability [B, T] of each next token."""

    def __init__(self) -> None:
        super().__init__()
        words = nn.Embedding(tiny.VOCABULARY, tiny.HIDDEN)
        positions = nn.Embedding(tiny.SEQUENCE, tiny.HIDDEN)
        self.embedding = nn.ModuleDict({"word_embeddings": words, "position_embeddings": positions})
        self.decoder: Any = nn.Module()
        self.decoder.layers = nn.ModuleList([_Layer() for _ in range(LAYERS)])
        self.decoder.final_layernorm = nn.LayerNorm(tiny.HIDDEN)
        self.output_layer = nn.Linear(tiny.HIDDEN, tiny.VOCABULARY, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        gpt = Gpt(dict(self.named_parameters()))
        x_BTH = gpt.embedded(tokens_BT)
        for layer in self.decoder.layers:
            x_BTH = layer(x_BTH)
        x_BTH = gpt.norm(x_BTH, "decoder.final_layernorm")
        return gpt.negative_logprobs(x_BTH, tokens_BT, 1)


def build(lr: float, momentum: float) -> tuple[Any, Any]:
    """Build a small GPT in float64, sharded over all ranks by `fully_shard`, and its SGD optimizer.
    Each call gives the same weights.

    Example: `model, optimizer = build(0.5, 0.5)`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1234)
    model = _GPT().double()
    with torch.no_grad():
        for parameter in model.parameters():  # norms too, so that no two gradients are alike
            parameter.add_(torch.randn(parameter.shape).to(parameter), alpha=0.02)
    model = model.cuda()
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for layer in model.decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def forward(model: Any, rows: Rows) -> Tensor:
    """Run the model on `input_ids`; return the negative log-probability [B, T] of next tokens."""
    output: Tensor = model(rows["input_ids"])
    return output


def shards(model: Any) -> dict[str, Tensor]:
    """Copy this rank's shard of each FSDP2 parameter to the CPU; return the copies by parameter
    name. Each parameter is sharded along its first dimension.
    """
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return {
        name: parameter.to_local().detach().cpu().clone()
        for name, parameter in model.named_parameters()
    }
