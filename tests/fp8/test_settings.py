"""Reports what FP8 training lacks: here, all of it; elsewhere, one thing after the other."""

from __future__ import annotations

import importlib
import sys
import types
import warnings
from typing import Any

import pytest
import torch

from megatron_idempotent.fp8.packing import RECIPES, TokenAlignment, token_alignment
from megatron_idempotent.fp8.settings import Fp8Settings, fp8_settings


def lacking(recipe: str, **arguments: Any) -> list[str]:
    """Lines of the error, without the first."""
    with pytest.raises(ValueError, match=f"fp8_recipe='{recipe}'") as told:
        fp8_settings(recipe, **arguments)
    return str(told.value).splitlines()[1:]


def skip_without(recipe: str) -> None:
    """0.12 has no blockwise recipe."""
    if recipe not in importlib.import_module("megatron.core.enums").Fp8Recipe.__members__:
        pytest.skip(f"this release has no recipe {recipe}")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
@pytest.mark.parametrize("recipe", RECIPES)
def test_a_machine_without_any_of_it_is_told_all_at_once(recipe):
    pytest.importorskip("megatron.core", exc_type=ImportError)
    if "transformer_engine" in sys.modules:
        pytest.skip("Transformer Engine is installed here")
    skip_without(recipe)
    engine, device, *sizes = lacking(recipe, features={"hidden_size": 4100, "ffn": 4096})
    assert "No module named 'transformer_engine'" in engine
    assert "install transformer-engine[pytorch] from " in engine
    assert f"no CUDA device (torch {torch.__version__}" in device
    assert "compute capability" in device
    multiple = 32 if recipe == "mxfp8" else 16
    assert sizes == [f"- hidden_size is 4100: {recipe} takes multiples of {multiple}"]


@pytest.fixture
def hopper(mocker):
    """A device and an engine that can do all that Hopper can, to be made worse."""
    # They look for the engine when they are imported, so that comes first.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # some say that there is none
        for module in ("megatron.core.distributed", "megatron.core.optimizer"):
            importlib.import_module(module)
    skip_without("blockwise")
    mocker.patch("torch.cuda.is_available", return_value=True)
    mocker.patch("torch.cuda.get_device_name", return_value="H200")
    mocker.patch("torch.version.cuda", "12.9")
    engine = types.ModuleType("transformer_engine")
    engine.__version__ = "2.8.0+cu129"
    mocker.patch.dict(
        sys.modules,
        {
            "transformer_engine": engine,
            "transformer_engine.pytorch": types.ModuleType("transformer_engine.pytorch"),
        },
    )
    mocker.patch("torch.cuda.get_device_capability", return_value=(9, 0))
    return engine


@pytest.mark.parametrize(
    ("capability", "recipes"),
    [
        ((8, 0), []),
        ((8, 9), ["delayed", "tensorwise"]),
        ((9, 0), ["delayed", "tensorwise", "blockwise"]),
        ((10, 0), ["delayed", "tensorwise", "mxfp8", "blockwise"]),
        ((12, 0), ["delayed", "tensorwise", "blockwise"]),
    ],
)
def test_devices_train_with_what_transformer_engine_has_kernels_for(
    hopper, mocker, capability, recipes
):
    mocker.patch("torch.cuda.get_device_capability", return_value=capability)
    found = f"- H200 has compute capability {capability[0]}.{capability[1]}: "
    for recipe in RECIPES:
        if recipe in recipes:
            fp8_settings(recipe)
        else:
            (line,) = lacking(recipe)
            assert line.startswith(found)
            if recipe == "mxfp8":
                needed = "mxfp8 needs compute capability 10.0 or higher, below 12.0"
                assert line == found + needed


def test_an_older_engine_or_cuda_is_named_with_what_is_needed(hopper, mocker):
    hopper.__version__ = "2.2.0"
    assert lacking("blockwise") == [
        "- Transformer Engine 2.2.0: blockwise needs 2.3.0.dev0 or later"
    ]
    assert fp8_settings("tensorwise").transformer["fp8"] == "hybrid"
    assert fp8_settings("tensorwise", fp8="e4m3").transformer["fp8"] == "e4m3"
    hopper.__version__ = "2.8.0"
    mocker.patch("torch.version.cuda", "12.8")
    assert lacking("blockwise") == ["- torch is built with CUDA 12.8: blockwise needs 12.9"]
    fp8_settings("delayed")


def test_an_engine_that_lacks_a_library_says_which(hopper, mocker):
    # What an import of a wheel for another CUDA raises: no module of that name can be found.
    mocker.patch.dict(sys.modules, {"transformer_engine.pytorch": None})
    (line,) = lacking("delayed")
    assert "cannot be imported (import of transformer_engine.pytorch halted" in line


def test_a_release_without_the_recipe_or_its_weights_is_named(hopper, mocker):
    from megatron.core import enums
    from megatron.core.distributed import DistributedDataParallelConfig

    known = {"delayed": 1, "tensorwise": 2, "mxfp8": 3}
    mocker.patch("torch.cuda.get_device_capability", return_value=(10, 0))
    mocker.patch.object(enums, "Fp8Recipe", types.SimpleNamespace(__members__=known))
    (line,) = lacking("blockwise")
    assert "has delayed, tensorwise, mxfp8; blockwise needs a later release" in line
    # As in 0.12, which has MXFP8 and not the field that its weights need.
    mocker.patch.object(DistributedDataParallelConfig, "__dataclass_fields__", {})
    (line,) = lacking("mxfp8", fp8_param=True)
    assert "no fp8_param with mxfp8" in line
    fp8_settings("mxfp8")


def built(settings: Fp8Settings) -> TokenAlignment:
    """Runs on a rank: Megatron's own configurations, and what a packer is told."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig
    from megatron.core.transformer import TransformerConfig

    DistributedDataParallelConfig(**settings.ddp)
    OptimizerConfig(**settings.optimizer)
    sizes = {"num_layers": 1, "hidden_size": 32, "num_attention_heads": 1}
    return TokenAlignment.of_config(TransformerConfig(**sizes, **settings.transformer))


@pytest.mark.parametrize(
    ("recipe", "fp8_param"),
    [
        ("delayed", False),
        ("tensorwise", True),
        ("mxfp8", True),
        ("mxfp8", False),
        ("blockwise", True),
    ],
)
def test_megatrons_configurations_take_the_settings(
    hopper, mocker, megatron_ranks, recipe, fp8_param
):
    mocker.patch("torch.cuda.get_device_capability", return_value=(10, 0))
    settings = fp8_settings(recipe, fp8_param=fp8_param, features={"hidden_size": 32})
    assert megatron_ranks(1, built, settings) == [token_alignment(recipe, 1, 1, False)]
    by_block = recipe in ("mxfp8", "blockwise")
    assert settings.transformer == {
        "fp8": "e4m3" if by_block else "hybrid",
        "fp8_recipe": recipe,
        "fp8_param": fp8_param,
    }
    reused = {"reuse_grad_buf_for_mxfp8_param_ag": True} if fp8_param and recipe == "mxfp8" else {}
    assert settings.ddp == {"fp8_param_gather": fp8_param, **reused}
    assert settings.optimizer == {"fp8_recipe": recipe, **reused}
    names = {"fp8", "fp8_recipe", "fp8_param_gather", *reused}
    assert set(settings.arguments()) == names


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"recipe": "auto"}, "recipe 'auto'; allowed: delayed"),
        ({"recipe": "custom"}, "recipe 'custom'"),
        ({"recipe": "delayed", "fp8": "e5m2"}, "fp8='e5m2'"),
    ],
)
def test_recipes_and_formats_that_megatron_has_not_are_refused(arguments, text):
    with pytest.raises(ValueError, match=text):
        fp8_settings(**arguments)
