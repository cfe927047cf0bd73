"""Scales of key-value caches in the layers of a model that keeps them as vLLM does."""

from __future__ import annotations

import pytest
import torch

from megatron_idempotent.rl.engines import EngineUnsupported
from megatron_idempotent.rl.engines.vllm.kv_scales import CacheScales
from megatron_idempotent.rl.weights import UpdateMismatch


class Attention(torch.nn.Module):
    """The buffers and numbers of vLLM's layer, `make test-vllm` has the layer itself."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.kv_cache_dtype = dtype
        self.calculate_kv_scales = True
        for which in "kvq":
            self.register_buffer(f"_{which}_scale", torch.tensor(1.0))
            setattr(self, f"_{which}_scale_float", 1.0)
        self._k_scale_cpu, self._v_scale_cpu = torch.tensor(1.0), torch.tensor(1.0)


class Layer(torch.nn.Module):
    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.self_attn = torch.nn.Module()
        self.self_attn.attn = Attention(dtype)
        self.self_attn.qkv_proj = torch.nn.Linear(2, 2)


def model(*dtypes: str) -> torch.nn.Module:
    whole = torch.nn.Module()
    whole.model = torch.nn.Module()
    whole.model.layers = torch.nn.ModuleList([Layer(dtype) for dtype in dtypes])
    return whole


def given(layer: int, **scales: float) -> dict[str, float]:
    names = {"k": "k_scale", "v": "v_scale", "q": "attn.q_scale"}
    return {f"model.layers.{layer}.self_attn.{names[w]}": v for w, v in scales.items()}


def in_use(layer: torch.nn.Module) -> dict[str, tuple[float, float]]:
    attention = layer.self_attn.attn
    return {
        which: (
            float(getattr(attention, f"_{which}_scale")),
            getattr(attention, f"_{which}_scale_float"),
        )
        for which in "kvq"
    }


def test_scales_are_written_in_place_as_float32_rounds_them_to_all_that_reads_them() -> None:
    whole = model("fp8", "fp8_e4m3")
    scales = CacheScales(whole)
    buffer = whole.model.layers[0].self_attn.attn._k_scale
    told = {**given(0, k=0.1, v=0.2, q=0.3), **given(1, k=0.4, v=0.5)}
    scales.check(told)
    scales.write(scales.read(), told)
    rounded = {value: float(torch.tensor(value)) for value in (0.1, 0.2, 0.3, 0.4, 0.5)}
    assert rounded[0.1] != 0.1
    attention = whole.model.layers[0].self_attn.attn
    assert attention._k_scale is buffer
    assert in_use(whole.model.layers[0]) == {
        "k": (rounded[0.1],) * 2,
        "v": (rounded[0.2],) * 2,
        "q": (rounded[0.3],) * 2,
    }
    assert (float(attention._k_scale_cpu), float(attention._v_scale_cpu)) == (
        rounded[0.1],
        rounded[0.2],
    )
    assert not attention.calculate_kv_scales
    # Of queries there need not be any: what was there stays.
    assert in_use(whole.model.layers[1])["q"] == (1.0, 1.0)


def test_a_reload_that_resets_them_leaves_those_of_before() -> None:
    whole = model("fp8")
    scales = CacheScales(whole, doubled=True)
    scales.write(scales.read(), given(0, k=0.5, v=0.25))
    before = scales.read()
    assert before["model.layers.0.self_attn.attn"] == {"k": 1.0, "v": 0.5, "q": 1.0}
    attention = whole.model.layers[0].self_attn.attn
    for which in "kvq":
        getattr(attention, f"_{which}_scale").fill_(1.0)
        setattr(attention, f"_{which}_scale_float", 1.0)
    scales.write(before, None)
    assert scales.read() == before
    assert attention._v_scale_float == 0.5


@pytest.mark.parametrize("dtypes", [(), ("auto",), ("fp8_per_token_head",), ("bfloat16", "auto")])
def test_a_model_without_such_a_cache_refuses_scales(dtypes: tuple[str, ...]) -> None:
    with pytest.raises(EngineUnsupported, match=r"--kv-cache-dtype fp8, or leave kv_scales out"):
        CacheScales(model(*dtypes)).check(given(0, k=0.5, v=0.5))


def test_scales_have_to_be_those_of_all_layers_and_of_no_other() -> None:
    whole = model("fp8", "fp8", "auto")
    both = {**given(0, k=1.5, v=1.5), **given(1, k=1.5, v=1.5)}
    CacheScales(whole).check(both)
    with pytest.raises(UpdateMismatch, match=r"lack model.layers.1.self_attn.attn.k_scale, .*v_sc"):
        CacheScales(whole).check(given(0, k=1.5, v=1.5))
    for other in (given(2, k=1.5), given(7, k=1.5)):
        with pytest.raises(UpdateMismatch, match=r"no layer of the model: model.layers.[27]"):
            CacheScales(whole).check({**both, **other})
    # A stage of a pipeline has some of the layers only.
    CacheScales(whole, whole=False).check({**both, **given(7, k=1.5, v=1.5)})


def test_names_may_be_those_of_vllm_itself() -> None:
    whole = model("fp8")
    place = "model.layers.0.self_attn.attn"
    told = {f"{place}.k_scale": 0.5, f"{place}.v_scale": 0.25}
    scales = CacheScales(whole)
    scales.check(told)
    scales.write({}, told)
    assert scales.read()[place] == {"k": 0.5, "v": 0.25, "q": 1.0}
