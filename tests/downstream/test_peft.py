"""Adapters of Megatron-Bridge and mcore-bridge on CPU ranks: each gradient is that of one rank.

All is float64 but the softmax over words and experts, which Megatron computes in float32; with
fused weight gradients and shared outer factors all is float32.
`MEGATRON_BRIDGE_SOURCE` names the folder that holds the package; mcore-bridge and `peft` are those
that are installed.
"""

import importlib
import importlib.util
import json
import os
import sys
import zlib
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from megatron_idempotent.patches.frameworks import _bridge, _peft
from ranks import tiered

import megatron_idempotent

pytestmark = pytest.mark.full

EXPERTS, MICROBATCHES = 4, 4
# As many terms as words, and a few roundings more, of each layer's softmaxes in float32.
TOLERANCE = 10 * (128 + 32) * 2.0**-24
# Of a whole step in float32, as certify has it.
OF_FLOAT32 = 4e5 * 2.0**-24
SP = {"tp": 2, "sequence_parallel": True}
MOE = {"experts": EXPERTS}
SHARED = {"moe_shared_expert_intermediate_size": 64}
OVERLAPPED = {**SHARED, "moe_shared_expert_overlap": True}
GROUPED = {"grouped": True}
TWO = {"n_adapters": 2, "dim": 8}  # of which halves have the 16 bytes that `_grouped_mm` asks for
DROPS = {"dropout": 0.5}
AFTER = {
    "dropout_position": "post",
    "target_modules": ["linear_qkv", "linear_proj", "linear_fc2"],  # ranks have halves of fc1
    **DROPS,
}
OUTER, EACH = {"experts_shared_outer_loras": True}, {"share_expert_adapters": False}

#: Name → (ranks, layout, arguments of `_peft.build`).
BRIDGE = {
    "LoRA tp": (2, {"tp": 2}, {}),
    "LoRA tp sp, rank 16": (2, SP, {"dim": 16}),
    "LoRA tp sp, fused": (2, SP, {"fused": True}),
    "LoRA tp sp, dropout": (2, SP, DROPS),
    "LoRA tp, dropout after": (2, {"tp": 2}, AFTER),
    "LoRA pp": (2, {"pp": 2, "layers_per_stage": 1}, {}),
    "LoRA cp": (2, {"cp": 2}, {}),
    "LoRA dp": (2, {}, {}),
    "LoRA ep": (2, MOE | {"ep": 2}, {}),
    "LoRA tp sp, ep": (2, MOE | SP | {"ep": 2, "etp": 1}, {}),
    "LoRA etp": (2, MOE | SP | {"etp": 2}, {}),
    "LoRA shared experts": (2, MOE | SP | {"etp": 1}, {"config": SHARED}),
    "LoRA shared experts, overlapped": (2, MOE | SP | {"etp": 1}, {"config": OVERLAPPED}),
    "LoRA grouped ep, fused": (2, MOE | {"ep": 2}, GROUPED | {"fused": True}),
    "LoRA grouped ep dp": (4, MOE | {"ep": 2}, GROUPED),
    "LoRA shared outer dp": (2, MOE, GROUPED | OUTER),
    "LoRA shared outer ep dp, fused": (4, MOE | {"ep": 2}, GROUPED | OUTER | {"fused": True}),
    "LoRA per expert etp": (2, MOE | SP | {"etp": 2}, GROUPED | EACH),
    "LoRA router, tp sp ep": (
        2,
        MOE | SP | {"ep": 2, "etp": 1},
        {"target_modules": ["linear_qkv", "router"]},
    ),
    "DoRA tp": (2, {"tp": 2}, {}),
    "DoRA tp sp, rank 16": (2, SP, {"dim": 16}),
    "DoRA tp sp, dropout": (2, SP, DROPS),
    "DoRA tp, dropout": (2, {"tp": 2}, DROPS),
    "MultiLoRA tp": (2, {"tp": 2}, TWO),
    "MultiLoRA tp sp": (2, SP, TWO),
    "MultiLoRA pp": (2, {"pp": 2, "layers_per_stage": 1}, TWO),
    "MultiLoRA grouped ep": (2, MOE | {"ep": 2}, GROUPED | TWO),
    "MultiLoRA grouped tp sp, ep": (2, MOE | SP | {"ep": 2, "etp": 1}, GROUPED | TWO),
    "CanonicalLoRA tp": (2, {"tp": 2}, {}),
    "CanonicalLoRA tp sp, ep": (2, MOE | SP | {"ep": 2, "etp": 1}, {}),
}
MCORE = {
    "tp": (2, {"tp": 2}, {}),
    "tp sp": (2, SP, {}),
    "pp": (2, {"pp": 2, "layers_per_stage": 1}, {}),
    "ep": (2, MOE | {"ep": 2}, {}),
    "grouped tp sp, ep": (2, MOE | SP | {"ep": 2, "etp": 1}, GROUPED),
    "shared experts": (2, MOE | SP | {"etp": 1}, {"config": SHARED}),
    "shared experts, overlapped": (2, MOE | SP | {"etp": 1}, {"config": OVERLAPPED}),
}
#: What stays in each `make test` where a source is given; the rest each week.
USUAL = ("LoRA tp sp, fused", "LoRA shared outer ep dp, fused", "DoRA tp sp, rank 16", "tp sp")


def patched(source):
    """Runs on a rank: let a source of Megatron-Bridge be found, if one is given; apply all."""
    if source:
        sys.path.insert(0, source)
    megatron_idempotent.apply()


def built(source, kind, layout, more):
    """Runs on a rank: (a model, [(whole name, cuts, parameter)] of all that is trained).

    Values depend on a parameter's place in the whole model and on nothing else.
    """
    patched(source)
    if kind == "mcore-bridge":
        from mcore_adapters import put as kind
    bench = _peft.build(kind, layout, **more)
    placed = []
    if more.get("dropout"):
        _drop_the_same(bench.chunks[0].module)
    for name, parameter in bench.chunks[0].module.named_parameters():
        whole, cuts = _place(name, parameter, bench.chunks[0].module)
        shape = list(parameter.shape)
        for dimension, _, size in cuts:
            shape[dimension] *= size
        generator = torch.Generator().manual_seed(zlib.crc32(whole.encode()))
        value = torch.randn(shape, generator=generator) / 10 + whole.endswith("_magnitude")
        with torch.no_grad():
            parameter.copy_(cut(value, whole, cuts))
        if parameter.requires_grad:
            placed.append((whole, cuts, parameter))
    return bench, placed


def _drop_the_same(module):
    """Let each adapter drop what its place in the whole model says, in all microbatches."""
    from megatron.core import parallel_state

    ranks = parallel_state.get_tensor_model_parallel_world_size()
    own = parallel_state.get_tensor_model_parallel_rank()

    class Whole(torch.nn.Dropout):
        def forward(self, x):
            shape = list(x.shape)
            if self.cut is not None:
                shape[self.cut] *= ranks
            keep = torch.rand(shape, generator=torch.Generator().manual_seed(self.seed)) > self.p
            if self.cut is not None:
                keep = keep.chunk(ranks, self.cut)[own]
            return x * keep / (1 - self.p)

    for name, adapter in module.named_modules():
        if name.endswith(".adapter"):
            features = adapter.input_is_parallel == (adapter.dropout_position == "pre")
            positions = 0 if module.config.sequence_parallel else None
            adapter.dropout = Whole(adapter.dropout.p)
            adapter.dropout.cut = -1 if features else positions
            adapter.dropout.seed = zlib.crc32(name.encode())


def recomputed(source, kind, layout):
    """Runs on a rank: the gradients without recomputation, and with each kind of it."""
    patched(source)
    found, part = [], "moe" if "experts" in layout else "mlp"
    for how in (
        {},
        {"recompute_granularity": "selective", "recompute_modules": [part]},
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
    ):
        bench = _peft.build(kind, layout, config=how, **DROPS)
        torch.manual_seed(5)
        bench.forward_backward(2, data_seed=0)
        found.append(bench.gradients())
    return found


def masks(source, layout, more):
    """Runs on a rank: which features the adapters of the first expert dropped first, by layer."""
    patched(source)
    bench, found = _peft.build("LoRA", layout, **more, **DROPS), {}
    for name, adapter in bench.chunks[0].module.named_modules():
        if name.endswith(".adapter") and ".experts." in name:
            layer = name.split(".")[-2]
            adapter.dropout.register_forward_hook(
                lambda _, x, y, layer=layer: found.update({layer: found.get(layer, y == 0)})
            )
    bench.forward_backward(1, data_seed=0)
    return found


def gradients(source, kind, layout, more):
    """Runs on a rank: {whole name: (cuts, gradient)} of all that is trained."""
    from megatron.core import parallel_state

    bench, placed = built(source, kind, layout, more)
    replicas = parallel_state.get_data_parallel_world_size()
    bench.forward_backward(MICROBATCHES // replicas, data_seed=0)
    return {whole: (cuts, each.main_grad.clone()) for whole, cuts, each in placed}


def through_checkpoint(source, kind, layout, folder, load):
    """Runs on a rank: save the adapters alone; or load them, and return which differ from those."""
    from megatron.core import dist_checkpointing, parallel_state

    bench, placed = built(source, kind, layout, {})
    module = bench.chunks[0].module
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    state = {
        name: value
        for name, value in module.sharded_state_dict(metadata=metadata).items()
        if ".adapter." in name
    }
    if not load:
        return dist_checkpointing.save(state, folder)
    kept = {whole: each.detach().clone() for whole, _, each in placed}
    with torch.no_grad():
        for _, _, each in placed:
            each.zero_()
    module.load_state_dict(dist_checkpointing.load(state, folder), strict=False)
    return [whole for whole, _, each in placed if not torch.equal(each, kept[whole])]


def exports(source, kind, layout, more, folder=None):
    """Runs on a rank: what Bridge exports: adapters alone, the merged model, and the base.

    With a folder the adapters are saved there, for peft.
    """
    bench, _ = built(source, kind, layout, more)
    factors, merged = _peft.exported(bench.chunks)
    _, base = _peft.exported(bench.chunks, merge=False)
    if folder is not None:
        saving = _auto_bridge()
        saving.save_hf_adapter(bench.chunks, folder, _peft.bridge(kind, dim=4, alpha=8))
    return factors, merged, {name.replace(".base_layer", ""): v for name, v in base.items()}


def _auto_bridge(provider=None):
    """Bridge's own class, without a model of Hugging Face; a provider builds the model."""
    bridge = _peft.auto_bridge()
    own = bridge.__new__(bridge)
    own.hf_pretrained, own.to_megatron_provider = None, lambda load_weights: provider

    def export_adapter_weights(chunks, **_):
        chunks = [SimpleNamespace(module=getattr(each, "module", each)) for each in chunks]
        factors, _ = _peft.exported(chunks)
        return [SimpleNamespace(param_name=name, weight=each) for name, each in factors.items()]

    own.export_adapter_weights = export_adapter_weights
    return own


def saved_adapters(source, kind, layout, folder):
    """Runs on a rank: save adapters as Bridge saves them in training, and their export beside."""
    from megatron.core import dist_checkpointing

    bench, _ = built(source, kind, layout, {})
    adapters = _peft.bridge(kind, dim=4, alpha=8)
    _, _, checkpoints = _bridge.import_checkpoints()
    state = checkpoints._generate_model_state_dict([bench.chunks[0].module])
    state = checkpoints.apply_peft_adapter_filter_to_state_dict(state, adapters)
    dist_checkpointing.save(state, f"{folder}/iter_0000001")
    target = f"{type(adapters).__module__}.{kind}"
    config = f"peft:\n  _target_: {target}\n  alpha: 8\n  dim: 4\n"
    Path(folder, "iter_0000001", "run_config.yaml").write_text(config)
    _auto_bridge().save_hf_adapter(bench.chunks, f"{folder}/right", adapters)


def export_saved(source, layout, folder):
    """Runs on a rank: let Bridge export a checkpoint's adapters, out of a model of its own."""
    patched(source)
    _bridge.import_checkpoints()
    _peft.bridge("LoRA")
    hooks = []

    def provide_distributed_model(**_):
        chunks = _peft.build(lambda module, **_: hooks[0]([module]), layout).chunks
        return [each.module for each in chunks]

    provider = SimpleNamespace(
        finalize=lambda: None,
        register_pre_wrap_hook=hooks.append,
        provide_distributed_model=provide_distributed_model,
    )
    exporting = _auto_bridge(provider)
    exporting.export_adapter_ckpt(f"{folder}/iter_0000001", f"{folder}/found")


def reloaded(source, kind, layout, more):
    """Runs on a rank: logits of a model with adapters, of one of its export, and of its base."""
    bench, _ = built(source, kind, layout, more)
    weights = {
        name.replace(".to_wrap", ""): each.detach().clone()
        for name, each in bench.chunks[0].module.named_parameters()
    }
    found, (_, merged) = [logits(bench)], _peft.exported(bench.chunks)
    bench = _peft.build(lambda module, **_: None, layout, **more)
    with torch.no_grad():
        for name, each in bench.chunks[0].module.named_parameters():
            each.copy_(weights[name])
    base = logits(bench)
    _peft.load_exported(bench.chunks, merged)
    return [*found, logits(bench), base]


def logits(bench):
    """This rank's part of the logits, None where another pipeline stage has them."""
    from megatron_idempotent.proof.cpu.tiny import inputs, microbatches

    found = [None]

    def forward_step(data, model):
        _, positions_BT, hidden = inputs(0)
        output = model(next(data), positions_BT, hidden)
        return output, lambda logits_BTV: (logits_BTV.sum(), {"": found.append(logits_BTV)})

    with torch.no_grad():
        bench.schedule(microbatches(0), 1, forward_step, forward_only=True)
    return found[-1]


def cut(value, name, cuts):
    """Return a rank's part of a whole value; one of gate and up has a part of both."""
    for dimension, rank, size in cuts:
        halves = [value]
        rows = dimension == value.dim() - 2 or value.dim() == 1
        ins = ("linear_in", "lora_A", "adapter_up", "adapter_gate")
        if "linear_fc1" in name and rows and not any(each in name for each in ins):
            halves = value.chunk(2, dimension)
        value = torch.cat([half.chunk(size, dimension)[rank] for half in halves], dimension)
    return value


def _place(name, parameter, model):
    """(a parameter's name in the model of one rank, its cuts: dimension, part, of how many)."""
    from megatron.core import parallel_state as ps

    words, cuts = name.split("."), []
    routed = "experts" in words
    part = ps.get_tensor_model_parallel_rank(), ps.get_tensor_model_parallel_world_size()
    if routed:
        part = ps.get_expert_tensor_parallel_rank(), ps.get_expert_tensor_parallel_world_size()
    expert = ps.get_expert_model_parallel_rank(), ps.get_expert_model_parallel_world_size()
    first = expert[0] * EXPERTS // expert[1]
    if "layers" in words:
        place = words.index("layers") + 1
        words[place] = str(model.decoder.layers[int(words[place])].layer_number - 1)
    if "local_experts" in words:
        place = words.index("local_experts") + 1
        words[place] = str(int(words[place]) + first)
    elif routed and words[-1].startswith("weight") and words[-1] != "weight":
        words[-1] = f"weight{int(words[-1].removeprefix('weight')) + first}"
    elif routed and parameter.dim() == 3:
        cuts.append((0, *expert))
    columns = words[-1] == "weight_magnitude" and {"linear_qkv", "linear_fc1"} & set(words)
    if getattr(parameter, "tensor_model_parallel", False) or columns:
        cuts.append((getattr(parameter, "partition_dim", 0), *part))
    return ".".join(words), cuts


def assert_as_one_rank(megatron_ranks, source, kind, case):
    ranks, layout, more = case
    alone = {name: value for name, value in layout.items() if name == "experts"}
    once = {**more, "config": SHARED if "config" in more else {}}
    (whole,) = megatron_ranks(1, gradients, source, kind, alone, once)
    allowed = OF_FLOAT32 if {"fused", "n_adapters", *OUTER} & set(more) else TOLERANCE
    seen = set()
    for found in megatron_ranks(ranks, gradients, source, kind, layout, more):
        for name, (cuts, gradient) in found.items():
            right = whole[name][1]
            error = (gradient - cut(right, name, cuts)).abs().max() / right.abs().max()
            assert float(error) <= allowed, name
            seen.add(name)
    assert seen == set(whole)


@pytest.fixture
def source():
    """The folder that holds Megatron-Bridge's package."""
    found = os.environ.get("MEGATRON_BRIDGE_SOURCE")
    if found is None:
        pytest.skip("no source of megatron-bridge is given")
    return found


@pytest.mark.parametrize("name", tiered(BRIDGE, USUAL))
def test_bridges_adapters_get_the_gradients_of_one_rank(megatron_ranks, source, name):
    assert_as_one_rank(megatron_ranks, source, name.split()[0], BRIDGE[name])


@pytest.mark.parametrize(
    ("kind", "layout"),
    [
        ("LoRA", SP),
        ("LoRA", {"tp": 2}),
        ("DoRA", SP),
        ("DoRA", {"tp": 2}),
        ("LoRA", MOE | SP | {"ep": 2, "etp": 1}),
        ("LoRA", MOE | {"etp": 2}),
    ],
    ids=["LoRA-sp", "LoRA-tp", "DoRA-sp", "DoRA-tp", "LoRA-ep", "LoRA-etp"],
)
def test_recomputed_adapters_drop_what_they_dropped(megatron_ranks, source, kind, layout):
    for right, *others in megatron_ranks(2, recomputed, source, kind, layout):
        assert right.abs().max() > 0
        assert [each.equal(right) for each in others] == [True, True]


@pytest.mark.parametrize("more", [{}, GROUPED], ids=["one by one", "grouped"])
@pytest.mark.parametrize("layout", [{}, SP], ids=["dp", "tp"])
def test_ranks_that_share_experts_drop_other_features_of_their_own(
    megatron_ranks, source, layout, more
):
    first, second = megatron_ranks(2, masks, source, MOE | layout | {"etp": 2}, more)
    assert not first["linear_fc2"].equal(second["linear_fc2"])
    # With sequence parallelism Megatron runs layers in the state of the tensor-parallel rank.
    assert first["linear_fc1"].equal(second["linear_fc1"]) == (layout != SP)


@pytest.mark.parametrize("kind", ["LoRA", "DoRA"])
def test_adapters_alone_are_saved_and_loaded_in_another_layout(
    megatron_ranks, source, tmp_path, kind
):
    megatron_ranks(2, through_checkpoint, source, kind, SP, str(tmp_path), False)
    assert megatron_ranks(1, through_checkpoint, source, kind, {}, str(tmp_path), True) == [[]]


@pytest.mark.parametrize(
    ("kind", "layout", "more"),
    [
        ("LoRA", SP, {}),
        ("DoRA", SP, {}),
        ("DoRA", {"pp": 2}, {}),
        ("LoRA", MOE | SP | {"etp": 2}, {}),
        ("LoRA", MOE | {"ep": 2}, {}),
        ("LoRA", MOE | {"ep": 2}, GROUPED),
        ("CanonicalLoRA", MOE | {"ep": 2}, {}),
    ],
    ids=["LoRA-tp", "DoRA-tp", "DoRA-pp", "LoRA-etp", "LoRA-ep", "LoRA-grouped-ep", "canonical-ep"],
)
def test_exports_of_two_ranks_are_those_of_one(megatron_ranks, source, kind, layout, more):
    stages = {"layers_per_stage": 1} if "pp" in layout else {}
    alone = {name: value for name, value in layout.items() if name == "experts"}
    (right,) = megatron_ranks(1, exports, source, kind, alone, more)
    for found in megatron_ranks(2, exports, source, kind, layout | stages, more):
        for own, whole in zip(found, right, strict=True):
            assert own.keys() == whole.keys()
        factors, merged, base = zip(found, right, strict=True)
        for own, whole in factors, base:
            assert [name for name in own if not own[name].equal(whole[name])] == []
        for name, value in merged[1].items():
            # A product of 4 terms, a sum, and DoRA's norm of a row, which adds up its squares.
            roundings = value.shape[-1] + 16
            bound = roundings * torch.finfo(value.dtype).eps * value.abs().max()
            assert (merged[0][name] - value).abs().max() <= bound, name


@pytest.mark.parametrize(
    ("kind", "layout", "more"),
    [
        ("LoRA", SP, {}),
        ("DoRA", SP, {}),
        ("DoRA", {"pp": 2, "layers_per_stage": 1}, {}),
        ("LoRA", MOE | {"ep": 2}, {}),
        ("LoRA", MOE | {"ep": 2}, GROUPED),
        ("CanonicalLoRA", MOE | SP | {"ep": 2, "etp": 1}, {}),
        ("LoRA", MOE | SP | {"etp": 2}, {}),
    ],
    ids=["tp", "DoRA-tp", "DoRA-pp", "ep", "grouped-ep", "canonical-tp-ep", "etp"],
)
def test_a_reloaded_export_computes_what_the_adapters_did(
    megatron_ranks, source, kind, layout, more
):
    seen = 0
    for right, found, base in megatron_ranks(2, reloaded, source, kind, layout, more):
        if right is not None:
            # Bridge merges in float32: a sum, a product of 4 terms and DoRA's norm are 8 roundings
            # of each of 8 layers' weights. What comes after makes an error some 16 times as large.
            bound = 8 * 8 * 16 * 2.0**-24 * right.norm()
            assert (found - right).norm() <= bound < (base - right).norm() / 1e2
            seen += 1
    assert seen


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("kind", ["LoRA", "DoRA"])
def test_peft_computes_with_an_export_what_the_merged_model_does(
    megatron_ranks, source, tmp_path, kind
):
    peft, transformers = pytest.importorskip("peft"), pytest.importorskip("transformers")
    found = megatron_ranks(2, exports, source, kind, SP, {}, str(tmp_path))
    _, *both = found[0]
    width = both[0]["model.layers.0.mlp.gate_proj.weight"].shape
    config = transformers.LlamaConfig(
        vocab_size=len(both[0]["lm_head.weight"]),
        hidden_size=width[1],
        intermediate_size=width[0],
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    merged, base = (transformers.LlamaForCausalLM(config).double().eval() for _ in both)
    for model, weights in zip((merged, base), both, strict=True):
        model.load_state_dict({name: weights[name].double() for name in model.state_dict()})
    tokens = torch.arange(12)[None]
    with torch.no_grad():
        right, plain = (model(tokens).logits for model in (merged, base))
        found = peft.PeftModel.from_pretrained(base, str(tmp_path)).double()(tokens).logits
    # Whatever the weights, transformers computes norms and softmaxes in float32: seven follow each
    # other on both sides. What comes after one makes its error at most some 16 times as large.
    bound = 2 * 7 * 16 * 2.0**-24 * right.norm()
    assert (found - right).norm() <= bound < (plain - right).norm() / 1e3


@pytest.mark.parametrize(
    ("kind", "layout"),
    [("LoRA", SP), ("DoRA", SP), ("LoRA", MOE | {"ep": 2})],
    ids=["LoRA-tp", "DoRA-tp", "LoRA-ep"],
)
def test_a_checkpoint_of_adapters_is_exported_as_the_model_that_saved_it(
    megatron_ranks, source, tmp_path, kind, layout
):
    safetensors = pytest.importorskip("safetensors.torch")
    (tmp_path / "iter_0000001").mkdir()
    alone = {name: value for name, value in layout.items() if name == "experts"}
    megatron_ranks(2, saved_adapters, source, kind, layout, str(tmp_path))
    megatron_ranks(1, export_saved, source, alone, str(tmp_path))
    found, right = (tmp_path / each for each in ("found", "right"))
    configs = [json.loads((each / "adapter_config.json").read_text()) for each in (found, right)]
    assert configs[0] == configs[1]
    own, whole = (
        safetensors.load_file(each / "adapter_model.safetensors") for each in (found, right)
    )
    assert own.keys() == whole.keys()
    assert [name for name in own if not own[name].equal(whole[name])] == []


@pytest.mark.parametrize("name", tiered(MCORE, USUAL))
def test_mcore_bridges_adapters_get_the_gradients_of_one_rank(megatron_ranks, name):
    for package in ("peft", "mcore_bridge"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    assert_as_one_rank(megatron_ranks, "", "mcore-bridge", MCORE[name])
