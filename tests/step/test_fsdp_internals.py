"""Internals of torch's FSDP2 that `FSDPTrainStep` relies on: found by name, or refused."""

from __future__ import annotations

import ast
import inspect

import pytest


def table():
    """Each class of FSDP2, and the names that are looked for in it."""
    from megatron_idempotent.step import fsdp_run

    for needs in (fsdp_run._NEEDS, fsdp_run._RESET_NEEDS):
        for path, names in needs.items():
            yield path, names, fsdp_run


def test_this_torch_has_all_of_it():
    from megatron_idempotent.step.fsdp_run import check_internals

    check_internals()
    for path, names, internals in table():
        assert not internals._lacking({path: names})


def test_what_is_missing_is_refused_by_name(monkeypatch):
    import torch
    from torch.distributed.fsdp._fully_shard import _fsdp_common, _fsdp_param, _fsdp_state

    from megatron_idempotent.step.fsdp_run import check_internals

    monkeypatch.delattr(_fsdp_param.FSDPParam, "to_sharded")
    monkeypatch.delattr(_fsdp_common, "DataParallelMeshInfo")

    class FSDPStateContext:
        def __init__(self) -> None:
            self.all_states = []

    monkeypatch.setattr(_fsdp_state, "FSDPStateContext", FSDPStateContext)
    monkeypatch.setattr(
        _fsdp_state.FSDPState, "_root_post_backward_final_callback", lambda self, once_more: None
    )
    with pytest.raises(RuntimeError) as told:
        check_internals()
    for part in (
        f"that torch {torch.__version__} does not have: ",
        "FSDPState._root_post_backward_final_callback",
        "FSDPStateContext.is_last_backward",
        "_fully_shard._fsdp_common.DataParallelMeshInfo",
        "FSDPParam.to_sharded",
        "Use a torch from 2.8",
    ):
        assert part in str(told.value)
    assert "FSDPModule" not in str(told.value)


def test_all_that_is_used_of_fsdp2_is_looked_for():
    from torch import Tensor, nn

    from megatron_idempotent.step import fsdp, fsdp_run

    of_fsdp, asked = set(), {"reset_iter_state", "manual_backward_finalization_active"}  # if there
    common = {name for kind in (nn.Module, Tensor, tuple, type) for name in dir(kind)}
    for path, names, _ in table():
        of_fsdp |= fsdp_run._names(fsdp_run._found(path)) - common
        asked |= {one.partition("(")[0] for name in names for one in name.split("|")}
    seen = set()
    for module in (fsdp_run, fsdp):
        tree = ast.parse(inspect.getsource(module))
        # What these classes keep for themselves, under a name that FSDP2 has for something else.
        own = {
            node.attr
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        }
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)} - own
        assert used & of_fsdp <= asked, module.__name__
        seen |= used & of_fsdp
    assert len(seen) > 20
