"""Builds the model of layouts with `fsdp2`: a GPT in plain torch, sharded by `fully_shard`.

Its parameters have the names that Megatron gives them. Legend: B rows, T positions, H hidden size.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from megatron_idempotent.proof.cpu import tiny

from .layouts import LAYERS
from .protocol import Rows


class _Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_qkv = nn.Linear(tiny.HIDDEN, 3 * tiny.HIDDEN)
        self.linear_proj = nn.Linear(tiny.HIDDEN, tiny.HIDDEN)

    def forward(self, x_BTH: Tensor) -> Tensor:
        heads_BTN3D = self.linear_qkv(x_BTH).unflatten(-1, (tiny.HEADS, 3, -1))
        query, key, value = (each.transpose(1, 2) for each in heads_BTN3D.unbind(3))
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        mixed: Tensor = self.linear_proj(seen.transpose(1, 2).flatten(2))
        return mixed


class _MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear_fc1 = nn.Linear(tiny.HIDDEN, 4 * tiny.HIDDEN)
        self.linear_fc2 = nn.Linear(4 * tiny.HIDDEN, tiny.HIDDEN)

    def forward(self, x_BTH: Tensor) -> Tensor:
        out: Tensor = self.linear_fc2(functional.gelu(self.linear_fc1(x_BTH)))
        return out


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm = nn.LayerNorm(tiny.HIDDEN)
        self.self_attention = _Attention()
        self.pre_mlp_layernorm = nn.LayerNorm(tiny.HIDDEN)
        self.mlp = _MLP()

    def forward(self, x_BTH: Tensor) -> Tensor:
        x_BTH = x_BTH + self.self_attention(self.input_layernorm(x_BTH))
        out_BTH: Tensor = x_BTH + self.mlp(self.pre_mlp_layernorm(x_BTH))
        return out_BTH


class _Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word_embeddings = nn.Embedding(tiny.VOCABULARY, tiny.HIDDEN)
        self.position_embeddings = nn.Embedding(tiny.SEQUENCE, tiny.HIDDEN)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        place_T = torch.arange(tokens_BT.shape[1], device=tokens_BT.device)
        x_BTH: Tensor = self.word_embeddings(tokens_BT) + self.position_embeddings(place_T)
        return x_BTH


class _Decoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([_Layer() for _ in range(LAYERS)])
        self.final_layernorm = nn.LayerNorm(tiny.HIDDEN)

    def forward(self, x_BTH: Tensor) -> Tensor:
        for layer in self.layers:
            x_BTH = layer(x_BTH)
        normed_BTH: Tensor = self.final_layernorm(x_BTH)
        return normed_BTH


class _GPT(nn.Module):
    """Computes the negative log-probability [B, T] of the token after each position."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = _Embedding()
        self.decoder = _Decoder()
        self.output_layer = nn.Linear(tiny.HIDDEN, tiny.VOCABULARY, bias=False)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        logits_BTV = self.output_layer(self.decoder(self.embedding(tokens_BT)))
        targets_BT = tokens_BT.roll(-1, 1)
        return functional.cross_entropy(logits_BTV.mT, targets_BT, reduction="none")


def build(lr: float, momentum: float) -> tuple[Any, Any]:
    """Return a model in float64, sharded over all ranks, and SGD; with the same weights each time.

    Example: `model, optimizer = build(0.5, 0.5)`.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    torch.manual_seed(1234)
    model = _GPT().double()
    with torch.no_grad():
        for parameter in model.parameters():  # norms too, so that each gradient is its own
            parameter.add_(torch.randn(parameter.shape).to(parameter), alpha=0.02)
    model = model.cuda()
    mesh = init_device_mesh(next(model.parameters()).device.type, (dist.get_world_size(),))
    for layer in model.decoder.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)


def forward(model: Any, rows: Rows) -> Tensor:
    """Call the model; return the negative log-probability of the next token [B, T]."""
    output: Tensor = model(rows["input_ids"])
    return output


def shards(model: Any) -> dict[str, Tensor]:
    """Copy this rank's shards of all parameters, by name; each is cut in its first dimension."""
    for module in model.modules():
        if hasattr(module, "reshard"):
            module.reshard()
    return {
        name: parameter.to_local().detach().cpu().clone()
        for name, parameter in model.named_parameters()
    }
