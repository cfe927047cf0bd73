"""The table of what wrappers read of upstream says what their code does."""

from pathlib import Path

import pytest
from reads import derived, needs_of, renewed

from megatron_idempotent.cli.needs import lines_of
from megatron_idempotent.cli.trees import installed_trees
from megatron_idempotent.patching.base import MEGATRON, generated
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.releases import numbers, release_named, supported
from megatron_idempotent.patching.source import locate
from megatron_idempotent.patching.surroundings import (
    READS,
    Need,
    Needs,
    key_of,
    parsed,
    table,
)
from megatron_idempotent.patching.trees import SourceTree

pytestmark = pytest.mark.full


def test_the_table_says_what_the_wrappers_read():
    pytest.importorskip("torch")
    if locate("megatron.core") is None:
        pytest.skip("there is no Megatron in this environment")
    for name, needs in table().items():
        reads, keeps = derived(patches()[name])
        names = {read.name for read, _ in reads}
        for need in needs.names:
            assert (need.name.lstrip(".") or need.modules[0].rpartition(".")[2]) in names, name
        assert needs.keeps is keeps, name
    assert list(table()) == [p.id for p in patches().values() if p.distribution == MEGATRON]
    # A name that is new in a wrapper is in the table of what is installed. One that torch's objects
    # have leaves it, though it has stood there.
    case = "failed-load-half-done"
    torchs = Need(modules=("megatron.core.optimizer",), owner="", name="offset")
    once = Needs(names=(*table()[case].names, torchs), keeps=table()[case].keeps)
    said = parsed([*lines_of(renewed({**table(), case: once}, installed_trees()))])
    assert said == table(), "run `python tools/casebook.py` in the repository"
    assert generated(READS) == [*lines_of(table())]


def test_a_name_that_the_installed_release_binds_is_asked_of_it():
    newest = max(numbers(need.since) for needs in table().values() for need in needs.names)
    for tree in installed_trees():
        version = tree.versions[MEGATRON]
        if version.release < newest:
            pytest.skip(f"what was looked for in {newest} alone is not asked of older releases")
        for patch_id, needs in table().items():
            asked = [need for need in needs.names if need.covers(key_of(version))]
            places = {(need.modules, need.owner, need.name) for need in asked}
            if supported(version, patches()[patch_id].since, patches()[patch_id].before):
                for need in needs.names:
                    place = (need.modules, need.owner, need.name)
                    assert place in places or not need.is_met(tree), f"{patch_id}: {need}"


def test_a_release_that_lacks_a_name_takes_it_from_no_other_and_a_commit_is_excused():
    if not installed_trees():
        pytest.skip("there is no Megatron in this environment")
    module, name = "megatron.core.transformer.transformer_config", "num_moe_experts"

    class Lacking(SourceTree):
        def text(self, module: str) -> str | None:
            return (super().text(module) or "").replace(name, "other")

    tree = object.__new__(Lacking)
    case = patches()["moe-tokens-of-aborted-window"]
    known = Need(modules=(module,), owner="TransformerConfig", name=name)
    for path, version, spans in (
        ("0.15.3.whl", "0.15.3", {("", "0.15.3", False), ("0.15.4rc", "", False)}),
        ("99.0.whl", "99.0", {("", "99.0", False)}),
        ("commit", "0.15.3", {("", "", True)}),
    ):
        vars(tree).update(vars(*installed_trees()), path=Path(path), _megatrons_release=None)
        tree.versions = {MEGATRON: release_named(version)}
        names = needs_of(case, [tree], Needs(names=(known,)), accepts=True).names
        assert {(n.since, n.before, n.excused) for n in names if n.name == name} == spans
        lines = [*lines_of({case.id: Needs(names=names)})]
        assert {*parsed(lines)[case.id].names} == {*names}


@pytest.mark.parametrize(
    ("patch_id", "name", "use"),
    [
        ("pending-gather-dropped", "finish_param_sync", "(skip_next_bucket_dispatch)"),
        ("spoilt-checkpoint-ends-well", "get_data_parallel_rank", "(with_context_parallel)"),
        ("timers-left-running", "_started", "!"),
        ("scheduler-load-adds-steps", "num_steps", "!"),
        ("deferred-reduction-refused", "register_grad_ready", "!"),  # deleted, too
        ("shared-experts-wedged", "gate_score", "!"),  # by a variable, from a table
        ("frozen-parameters-move", "shard_fp32_groups", ""),
        ("pipeline-seed-offset", "get_states", "[]"),
        ("unscaled-twice", "_collect_main_grad_data_for_unscaling", "[]"),
    ],
)
def test_what_is_done_with_a_name_is_read_off_the_wrapper(patch_id, name, use):
    pytest.importorskip("torch")
    reads, _ = derived(patches()[patch_id])
    assert (name, use) in {(read.name, read.use) for read, _ in reads}


def test_a_pair_in_a_table_names_a_module_and_what_it_has():
    pytest.importorskip("torch")
    reads, _ = derived(patches()["aux-loss-scale-left-set"])
    module = "megatron.core.transformer.moe.moe_utils"
    assert (module, "MoEAuxLossAutoScaler") in {(read.module, read.name) for read, _ in reads}


def test_a_person_who_accepts_a_tree_accepts_how_it_makes_a_result():
    if not installed_trees():
        pytest.skip("there is no Megatron in this environment")
    (tree,) = installed_trees()
    case, module = patches()["pipeline-seed-offset"], "megatron.core.tensor_parallel.random"
    known = table()[case.id]
    (need,) = (need for need in known.names if need.use.startswith("["))

    class Lacking(SourceTree):
        def text(self, name: str) -> str | None:
            text = super().text(name) or ""
            return text.replace("return states\n", "return [*states]\n") if name == module else text

    commit = object.__new__(Lacking)
    vars(commit).update(vars(tree), _texts={})
    assert need.is_allowed(tree)
    assert not need.is_met(commit)
    assert need in needs_of(case, [commit], known).names
    (accepted,) = (
        n for n in needs_of(case, [commit], known, accepts=True).names if n.use[:1] == "["
    )
    assert accepted.is_met(tree)
    assert accepted.is_met(commit)
