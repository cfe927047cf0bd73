"""Puts Megatron-Bridge's own adapters into a tiny model, for reproductions and tests.

The functions that patches of adapters share come first. Bridge imports Transformer Engine's layers,
which need CUDA. Classes of the same names, in torch, stand in for them. Bridge only checks the
class of dense layers, so these are megatron-core's own; only grouped experts run in a stand-in.
"""

from __future__ import annotations

import functools
import importlib
import itertools
import zlib
from collections.abc import Callable
from typing import Any

from megatron_idempotent.patches._case import Fault, gathered

from . import _standins

_REAL = (
    "utils.import_utils",
    "utils.activation_map",
    "peft.utils",
    "peft.walk_utils",
    "peft.module_matcher",
    "peft.recompute",
    "peft.base",
    "peft.adapter_wrapper",
    "peft.lora_merge",
    "peft.lora_layers",
    "peft.dora_layers",
    "peft.lora",
    "peft.dora",
    "peft.canonical_lora",
    "peft.multi_lora_layers",
    "peft.multi_lora",
)


_CONVERSION = (
    "utils.common_utils",
    "models.conversion.utils",
    "models.conversion.transformers_compat",
    "models.conversion.param_mapping",
    "models.conversion.quant_mapping",
    "models.conversion.mapping_registry",
    "models.conversion.peft_bridge",
    "models.conversion.quant_bridge",
    "models.conversion.model_bridge",
    "models.conversion.auto_bridge",
)
#: Megatron's names of a layer's weights → Qwen's names; `_GATED` has weights that Qwen splits in
#: two.
_LAYER = {
    "input_layernorm.weight": "input_layernorm",
    "pre_mlp_layernorm.weight": "post_attention_layernorm",
    "self_attention.linear_proj.weight": "self_attn.o_proj",
    "mlp.linear_fc2.weight": "mlp.down_proj",
    "mlp.router.weight": "mlp.gate",
    "mlp.experts.local_experts.*.linear_fc2.weight": "mlp.experts.*.down_proj",
    "mlp.experts.linear_fc2.weight*": "mlp.experts.*.down_proj",
}
_GATED = {
    "mlp.linear_fc1.weight": "mlp",
    "mlp.experts.local_experts.*.linear_fc1.weight": "mlp.experts.*",
    "mlp.experts.linear_fc1.weight*": "mlp.experts.*",
}
_MODEL = {
    "embedding.word_embeddings.weight": "model.embed_tokens",
    "decoder.final_layernorm.weight": "model.norm",
    "output_layer.weight": "lm_head",
}


def unfuse(*layers: Any) -> None:
    """Turn off `gradient_accumulation_fusion` in `layers`, so that hooks see weight gradients."""
    for layer in layers:
        if hasattr(layer, "gradient_accumulation_fusion"):
            layer.gradient_accumulation_fusion = False


def own_rows(layer: Any, _inputs: Any, outputs: Any) -> Any:
    """Forward hook: pad this rank's output features with zeros for other ranks' features."""
    output, bias = outputs
    return among_zeros(output, layer.tp_group), bias


def among_zeros(tensor: Any, group: Any) -> Any:
    """Pad this rank's part [..., D] of a tensor with zeros to [..., D * ranks], and return that.
    The part is at the place that this rank has in `group`; zeros stand for other ranks' parts.
    """
    from torch.nn.functional import pad

    size, rank = tensor.shape[-1], group.rank()
    return pad(tensor, (size * rank, size * (group.size() - 1 - rank)))


def is_cut(adapter: Any) -> bool:
    """Return whether tensor-parallel ranks split the weight of the layer that has this adapter."""
    return adapter.input_is_parallel or not adapter.linear_out.gather_output


def drops(adapter: Any) -> bool:
    """Return whether a Bridge adapter applies dropout now: it trains, with a rate above 0."""
    return adapter.training and getattr(adapter.dropout, "p", 0) > 0


def normalizing(base: Any, norm: Any) -> Any:
    """Return a layer that computes `base(norm(x))`, and returns it together with `norm(x)`.
    It has the class and attributes of Transformer Engine's `TELayerNormColumnParallelLinear`.
    """
    engine = grouped_layers()["TELayerNormColumnParallelLinear"]()
    engine.weight, engine.bias, engine.config = base.weight, base.bias, base.config
    engine.return_layernorm_output = engine.return_layernorm_output_gathered = True

    def forward(x: Any) -> Any:
        normed = norm(x)
        return (base(normed)[0], normed), None

    engine.forward = forward
    return engine


def build(
    kind: str | Callable[..., None],
    layout: dict[str, Any],
    *,
    grouped: bool = False,
    fused: bool = False,
    config: Any = (),
    **options: Any,
) -> Any:
    """Build a tiny model with gated MLPs and with adapters whose factors are random, not zero.

    `kind` is the name of a Bridge class, or a function that adds adapters to a chunk's module.

    With `fused` Megatron's layers add weight gradients to `main_grad` themselves, with a kernel in
    Python. The model is float64, unless this kernel or torch's `_grouped_mm` needs float32.
    """
    import torch
    from megatron_idempotent.patches._deferred_embedding import kernel

    from megatron_idempotent.proof.cpu import tiny

    if fused:
        from megatron.core.tensor_parallel import layers

        layers.fused_weight_gradient_mlp_cuda = kernel()
        layers._grad_accum_fusion_available = True

    def put(module: Any) -> None:
        if grouped:
            _group_experts(module)
        sizes = {"dim": 4, "alpha": 8, **options}
        if isinstance(kind, str):
            bridge(kind, **sizes)(module)
            if kind == "MultiLoRA":  # 24 of a microbatch's tokens belong to the first adapter
                layers = importlib.import_module("megatron.bridge.peft.multi_lora_layers")
                tokens = torch.tensor([24, 40], dtype=torch.int32)
                layers.set_tokens_per_adapter_slot(module, tokens)
        else:
            kind(module, **sizes)

    single = fused or bool({"experts_shared_outer_loras", "n_adapters"} & options.keys())
    dtype = torch.float32 if single else torch.float64
    torch.set_default_dtype(dtype)
    bench = tiny.build(
        config_overrides={
            "params_dtype": dtype,
            "pipeline_dtype": dtype,
            "gradient_accumulation_fusion": fused,
            "gated_linear_unit": True,
            "activation_func": torch.nn.functional.silu,
            "add_bias_linear": False,
            "num_query_groups": 2,
            **({"moe_aux_loss_coeff": 0.0} if "experts" in layout else {}),
            **dict(config),
        },
        ddp_overrides={"grad_reduce_in_fp32": False},
        before_ddp=put,
        **{"with_optimizer": False, "distributed_optimizer": False, **layout},
    )
    with torch.no_grad():
        for name, parameter in bench.chunks[0].module.named_parameters():
            if (
                "linear_out.weight" in name
            ):  # initially zero, which leaves the other factor without a gradient
                generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 10)
    return bench


def expect_replicas(chunks: Any) -> None:
    """Raise a `Fault` if gradients of replicated adapter parameters differ between ranks."""
    from megatron.core import parallel_state as ps

    for name, parameter in _trained(chunks):
        routed = ".experts." in name
        group = ps.get_tensor_model_parallel_group()
        if routed:
            group = ps.get_expert_model_parallel_group()
        if parameter.dim() == 3 or (not routed and getattr(parameter, "tensor_model_parallel", 0)):
            continue
        if name.endswith("weight_magnitude") and ("linear_qkv" in name or "linear_fc1" in name):
            continue
        gradients = gathered(parameter.main_grad, group)
        if not all(gradients[0].equal(gradient) for gradient in gradients):
            raise Fault(f"ranks that share {name} have different gradients")


def expect_balance(chunks: Any) -> None:
    """Raise a `Fault` unless sum(A * A.grad) is sum(B * B.grad) for each adapter's factors A and B.
    The sums are equal if both factors' gradients are complete.
    """
    import torch
    from megatron.core import parallel_state as ps

    sums: dict[str, dict[str, Any]] = {}
    for name, parameter in _trained(chunks):
        adapter, _, factor = name.rpartition(".linear_")
        group = ps.get_tensor_model_parallel_group()
        if parameter.dim() == 3:
            group = ps.get_expert_model_parallel_group()
        total = _summed((parameter * parameter.main_grad).sum().detach(), group)
        sums.setdefault(adapter, {})[factor] = total
    for adapter, both in sums.items():
        if not torch.allclose(both["in.weight"], both["out.weight"], rtol=0.01):
            raise Fault(f"the gradients of {adapter} are not of one product: {both}")


def expect_norms(chunks: Any) -> None:
    """Raise a `Fault` unless DoRA computes the row norms of each layer's complete merged weight.
    The merged weight is the base weight plus the product of the adapter's factors, all gathered
    from the tensor-parallel ranks.
    """
    import torch
    from megatron.core import parallel_state as ps

    for name, module in chunks[0].module.named_modules():
        if hasattr(module, "_get_weight_norm"):
            rows, group = module.adapter.input_is_parallel, ps.get_tensor_model_parallel_group()
            inner, base = (
                torch.cat(gathered(layer.weight, group), 1 if rows else 0)
                for layer in (module.adapter.linear_in, module.to_wrap)
            )
            outer = torch.cat(gathered(module.adapter.linear_out.weight, group))
            norm = (base + module.scaling * outer @ inner).norm(dim=1)
            expected = norm if rows else norm.chunk(group.size())[group.rank()]
            if not torch.allclose(module._get_weight_norm(), expected):
                raise Fault(f"{name} has the norm of a part of its rows")


def expect_products(chunks: Any) -> None:
    """Raise a `Fault` unless each expert adapter's output and gradients fit its complete factors.
    The expected values come from the product of the factors, which are gathered from the ranks.

    The input is the same on all ranks, or split by columns; outputs are split by columns, or are
    summed over ranks. The gradients are compared too. All ranks of the expert, or of the shared
    expert, take part.
    """
    import torch
    from megatron.core import parallel_state as ps

    for name, module in list(chunks[0].module.named_modules()):
        if not name.endswith(".adapter") or "expert" not in name:
            continue
        routed = ".experts." in name
        group = ps.get_tensor_model_parallel_group()
        if routed:
            group = ps.get_expert_tensor_parallel_group()
        rank, ranks, rows = group.rank(), group.size(), module.input_is_parallel
        factors = [module.linear_in.weight, module.linear_out.weight]
        a = torch.cat(gathered(factors[0], group), -1 if rows else -2).requires_grad_()
        b = torch.cat(gathered(factors[1], group), -2).requires_grad_()
        generator = torch.Generator().manual_seed(5)
        x = torch.randn(8, a.shape[-1], generator=generator).requires_grad_()
        dy = torch.randn(8, b.shape[-2], generator=generator)
        splits = [8] + [0] * (len(a) - 1)
        dense = (a[0], b[0]) if a.dim() == 3 else (a, b)
        right = module.alpha / module.dim * x @ dense[0].T @ dense[1].T
        inputs = x.detach().chunk(ranks, -1)[rank] if rows else x.detach().clone()
        inputs.requires_grad_()
        output = module(inputs, splits) if a.dim() == 3 else module(inputs)
        expected = right if rows else right.chunk(ranks, -1)[rank]
        actual = _summed(output.detach(), group) if rows else output.detach()
        gradients = torch.autograd.grad(
            output, (inputs, *factors), dy if rows else dy.chunk(ranks, -1)[rank], allow_unused=True
        )
        dx, da, db = torch.autograd.grad(right, (x, a, b), dy)
        expected_gradients = (
            dx.chunk(ranks, -1)[rank] if rows else dx,
            da.chunk(ranks, -1 if rows else -2)[rank],
            db.chunk(ranks, -2)[rank],
        )
        fits = torch.allclose(actual, expected)
        pairs = zip(gradients, expected_gradients, strict=True)
        for index, (gradient, expected_gradient) in enumerate(pairs):
            if gradient is not None and index == 0 and not rows:
                gradient = _summed(gradient, group)
            fits = fits and gradient is not None and torch.allclose(gradient, expected_gradient)
        if not fits:
            raise Fault(f"{name} is not the product of its factors")


def _trained(chunks: Any) -> list[tuple[str, Any]]:
    module = chunks[0].module
    return [(name, param) for name, param in module.named_parameters() if param.requires_grad]


def _summed(tensor: Any, group: Any) -> Any:
    import torch

    tensor = tensor.clone()
    torch.distributed.all_reduce(tensor, group=group)
    return tensor


def bridge(kind: str, **options: Any) -> Any:
    """Import Bridge's adapter class `kind`, such as LoRA; return an instance with these options."""
    engine = importlib.import_module("megatron.core.extensions.transformer_engine")
    for name, layer in grouped_layers().items():
        setattr(engine, name, layer)
    modules = _standins.import_all(
        "megatron.bridge", _REAL, "transformer_engine", skip_missing=True
    )
    names = {
        "LoRA": "lora",
        "DoRA": "dora",
        "CanonicalLoRA": "canonical_lora",
        "MultiLoRA": "multi_lora",
    }
    return getattr(modules[f"peft.{names[kind]}"], kind)(**options)


def exported(chunks: Any, *, merge: bool = True) -> tuple[dict[str, Any], dict[str, Any]]:
    """Run Bridge's two exports: of the adapters' factors, and of the model's weights.
    Return a dictionary by Qwen's names for each. With `merge` the adapters are merged into the
    model's weights; without, the weights are the base model's.

    All ranks take part. It does not work before 0.5, which has other modules.
    """
    modules, config, tasks = [chunk.module for chunk in chunks], *_planned(chunks)
    factors = _qwen()().stream_adapter_weights_megatron_to_hf(modules, show_progress=False)
    merged = _qwen()().stream_weights_megatron_to_hf(
        modules,
        config,
        show_progress=False,
        conversion_tasks=tasks,
        merge_adapter_weights=merge,
    )
    adapters, model = ({name: value.clone() for name, value in s} for s in (factors, merged))
    return adapters, model


def auto_bridge() -> Any:
    """Import Bridge's conversion modules, and return its class `AutoBridge`."""
    _qwen()
    return importlib.import_module("megatron.bridge.models.conversion.auto_bridge").AutoBridge


def load_exported(chunks: Any, weights: dict[str, Any]) -> None:
    """Let Bridge load weights with Qwen's names into a model without adapters. A collective."""
    import torch

    config, tasks = _planned(chunks)
    source = _standins.Off(state=weights, config=config)
    modules = [chunk.module for chunk in chunks]
    parameters = [dict(module.named_parameters()) for module in modules]
    with torch.no_grad():
        for name, value, stage in _qwen()().stream_weights_hf_to_megatron(source, modules, tasks):
            parameters[stage][name].copy_(value)


def _planned(chunks: Any) -> tuple[Any, list[Any]]:
    """Return a Hugging Face configuration, and a list of Bridge's conversion tasks for `chunks`."""
    from transformers import PretrainedConfig

    config = PretrainedConfig()
    config.tie_word_embeddings = False
    tasks = _qwen()().build_conversion_tasks(config, [chunk.module for chunk in chunks])
    return config, [task for task in tasks if task is not None]


@functools.cache
def _qwen() -> Any:
    modules = _standins.import_all(
        "megatron.bridge", _CONVERSION, "modelopt", "transformer_engine", skip_missing=True
    )
    fsdp: Any = importlib.import_module("megatron.bridge.training.fsdp_compat")
    fsdp.MEGATRON_FSDP_TYPES = ()
    kinds = modules["models.conversion.param_mapping"]
    layer = ("decoder.layers.*.", "model.layers.*.")
    names = {f"{layer[0]}{core}": f"{layer[1]}{qwen}" for core, qwen in _LAYER.items()} | _MODEL
    mappings = [kinds.AutoMapping(core, f"{qwen}.weight") for core, qwen in names.items()]
    qkv = {letter: f"{layer[1]}self_attn.{letter}_proj.weight" for letter in "qkv"}
    mappings.append(kinds.QKVMapping(f"{layer[0]}self_attention.linear_qkv.weight", **qkv))
    for core, qwen in _GATED.items():
        both = {half: f"{layer[1]}{qwen}.{half}_proj.weight" for half in ("gate", "up")}
        mappings.append(kinds.GatedMLPMapping(f"{layer[0]}{core}", **both))
    model_bridge = modules["models.conversion.model_bridge"]

    class Qwen(model_bridge.MegatronModelBridge):  # type: ignore[misc,name-defined]
        provider_bridge = None

        def mapping_registry(self) -> Any:
            registry = modules["models.conversion.mapping_registry"].MegatronMappingRegistry
            return registry(*mappings)

    return Qwen


@functools.cache
def grouped_layers() -> dict[str, Any]:
    """Return class name → stand-in for Transformer Engine's linear and grouped linear layers.
    Only the grouped layers can compute; the others are empty modules.
    """
    import torch
    from megatron.core import parallel_state
    from torch import nn

    plain: dict[str, Any] = {
        name: type(name, (nn.Module,), {})
        for name in (
            "TELinear",
            "TEColumnParallelLinear",
            "TELayerNormColumnParallelLinear",
            "TERowParallelLinear",
        )
    }

    class TEGroupedLinear(nn.Module):
        dimension: int | None = None
        is_expert = True

        def __init__(
            self, num_gemms: int, input_size: int, output_size: int, *, config: Any, **_: Any
        ):
            super().__init__()
            self.num_gemms, self.config = num_gemms, config
            ranks = parallel_state.get_expert_tensor_parallel_world_size()
            shape = [output_size, input_size]
            if self.dimension is not None:
                shape[self.dimension] //= ranks
            self.out_features, self.in_features = shape
            groups = config.expert_model_parallel_size > 1 or (
                ranks != config.tensor_model_parallel_size
            )
            for index in range(num_gemms):
                weight: Any = nn.Parameter(torch.zeros(shape, dtype=config.params_dtype))
                weight.allreduce = not groups
                if self.dimension is not None:
                    weight.tensor_model_parallel = True
                    weight.partition_dim, weight.partition_stride = self.dimension, 1
                setattr(self, f"weight{index}", weight)

        def forward(self, x: Any, m_splits: Any) -> Any:
            parts = x.split([int(size) for size in m_splits])
            weights = (getattr(self, f"weight{index}") for index in itertools.count())
            return torch.cat(
                [nn.functional.linear(*pair) for pair in zip(parts, weights, strict=False)]
            ), None

    grouped: dict[str, Any] = {"TEGroupedLinear": TEGroupedLinear}
    for kind, cut in (("ColumnParallel", 0), ("RowParallel", 1)):
        name = f"TE{kind}GroupedLinear"
        grouped[name] = type(name, (TEGroupedLinear,), {"dimension": cut})
    return plain | grouped


def _group_experts(module: Any) -> None:
    """Replace the experts of each MoE layer in `module` by stand-ins for grouped layers."""
    import torch
    from torch import nn

    layers = grouped_layers()

    class Grouped(nn.Module):
        """Has the form of `TEGroupedMLP`; computes what a `SequentialMLP` with its weights does."""

        def __init__(self, experts: Any) -> None:
            super().__init__()
            self.config = config = experts.config
            width = config.moe_ffn_hidden_size * (2 if config.gated_linear_unit else 1)
            sizes = {
                "linear_fc1": ("Column", config.hidden_size, width),
                "linear_fc2": ("Row", config.moe_ffn_hidden_size, config.hidden_size),
            }
            for name, (kind, *size) in sizes.items():
                layer = layers[f"TE{kind}ParallelGroupedLinear"](
                    len(experts.local_experts), *size, config=config
                )
                for index, expert in enumerate(experts.local_experts):
                    with torch.no_grad():
                        getattr(layer, f"weight{index}").copy_(getattr(expert, name).weight)
                setattr(self, name, layer)

        def forward(self, hidden: Any, tokens: Any, probs: Any, *_: Any) -> Any:
            fc1: Any = self.linear_fc1
            fc2: Any = self.linear_fc2
            inner, _ = fc1(hidden, tokens)
            if self.config.gated_linear_unit:
                gate, up = inner.chunk(2, -1)
                inner = self.config.activation_func(gate) * up
            else:
                inner = self.config.activation_func(inner)
            return fc2(inner * probs.unsqueeze(-1).to(inner.dtype), tokens)

    for layer in module.modules():
        if hasattr(layer, "experts") and hasattr(layer.experts, "local_experts"):
            layer.experts = Grouped(layer.experts)
