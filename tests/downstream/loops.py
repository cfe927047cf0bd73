"""Small packages named like frameworks, with the statements that the patches rely on.

So that targeting, late import and the repairs themselves are tested where no checkout is given.
"""

from __future__ import annotations

import importlib
import os
import sys
import textwrap
from pathlib import Path
from typing import Any

SLIME = "slime.backends.megatron_utils.model"
BRIDGE = "megatron.bridge.training.setup"
VERL = "verl.utils.megatron_utils"

_ROLLOUT = """
    import gc

    from megatron.core.utils import get_model_config
    from megatron.training.global_vars import get_args

    def only(functions):
        return functions[0] if len(functions) == 1 else functions

    def train(model, steps):
        config = get_model_config(model[0])
        args = get_args()
        if args.overlap_grad_reduce:
            assert config.no_sync_func is None, "config.no_sync_func is taken"
            config.no_sync_func = [model_chunk.no_sync for model_chunk in model]
            config.no_sync_func = only(config.no_sync_func)
        if args.overlap_param_gather and args.align_param_gather:
            config.param_sync_func = [model_chunk.start_param_sync for model_chunk in model]
            config.param_sync_func = only(config.param_sync_func)
        if args.manual_gc:
            gc.disable()
        aside = config.param_sync_func
        config.param_sync_func = None
        for number, step in enumerate(steps):
            step()
            if number == 0:
                config.param_sync_func = aside
"""
_BRIDGE = """
    def _update_model_config_funcs(model, model_config, ddp_config):
        if ddp_config.overlap_grad_reduce:
            assert model_config.no_sync_func is None, "config.no_sync_func is taken"
            model_config.no_sync_func = [model_chunk.no_sync for model_chunk in model]
            if len(model) == 1:
                model_config.no_sync_func = model_config.no_sync_func[0]
"""
_VERL = """
    from megatron.core.utils import get_model_config

    def register_megatron_training_hooks(model, optimizer):
        for one_model in model:
            config = get_model_config(one_model)
            config.grad_scale_func = optimizer.scale_loss
            assert config.no_sync_func is None, "config.no_sync_func is taken"
            config.no_sync_func = [model_chunk.no_sync for model_chunk in model]
            if len(model) == 1:
                config.no_sync_func = config.no_sync_func[0]
"""
SOURCES = {SLIME: _ROLLOUT, BRIDGE: _BRIDGE, VERL: _VERL}


def write(folder: Path, module: str, *, without: str = "") -> None:
    """The framework's module as a checkout holds it, on the path from now on."""
    *parents, name = module.split(".")
    here = folder
    for depth, parent in enumerate(parents):
        here = here / parent
        here.mkdir(exist_ok=True)
        if (parent, depth) != ("megatron", 0):  # a namespace that several distributions share
            (here / "__init__.py").touch()
    source = SOURCES[module]
    assert without in source
    text = source.replace(without, "...") if without else source
    # Each rank of a test writes it, into one folder: a rank must never read a half-written one.
    unfinished = here / f"{name}.py.{os.getpid()}"
    unfinished.write_text(textwrap.dedent(text))
    unfinished.replace(here / f"{name}.py")
    sys.path.insert(0, str(folder))
    importlib.invalidate_caches()


def load(module: str) -> Any:
    """Import it now."""
    return importlib.import_module(module)
