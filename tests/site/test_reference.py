"""The reference has an entry for each name that rooms export or pages use."""

from __future__ import annotations

import ast
import collections
import re
import runpy

import pytest
from package import PACKAGE, ROOT, trees

from megatron_idempotent.lazy import homes

PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").rglob("*.md")])
#: Stand-ins for torch.cuda's own names, and Megatron's layer norm as a layer spec names it.
NOT_OURS = {"megatron_idempotent.proof.cpu.device", "megatron_idempotent.megatron.layer_specs"}
#: `arguments` reads a signature, `train` is Megatron's on most pages: a page names neither alone.
WORDS = {"train", "arguments", "layout", "enable", "disable"}


def entries() -> set[str]:
    """The paths that have an entry."""
    text = "\n".join(page.read_text("utf-8") for page in (ROOT / "docs" / "api").glob("*.md"))
    return set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


def definitions() -> dict[str, set[str]]:
    """The modules that have a public class or function, by its name."""
    found = collections.defaultdict(set)
    for path, tree in trees().items():
        module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
        for node in tree.body:
            public = isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            if public and not node.name.startswith("_") and module not in NOT_OURS:
                found[node.name].add(module)
    return found


def exports() -> dict[str, str]:
    """The path of each class and function that a room exports, by its name."""
    rooms = [path.parent.relative_to(ROOT) for path in PACKAGE.rglob("__init__.pyi")]
    names = [
        (name, module) for room in rooms for name, module in homes(".".join(room.parts)).items()
    ]
    ours = definitions()
    return {name: f"{module}.{name}" for name, module in names if module in ours.get(name, ())}


def test_all_that_a_room_exports_is_in_the_reference():
    assert len(exports()) > 120
    assert not {*exports().values()} - entries()


def used(text: str) -> set[tuple[str, str]]:
    """The names that a page has as code or imports, each with the modules that stand before it."""
    imported = re.findall(r"from megatron_idempotent([\w.]*) import ([^\n(]+|\([^)]+\))", text)
    found = {
        (name, module.strip("."))
        for module, names in imported
        for name in re.findall(r"\w+", names)
        if name != "as"
    }
    spans = re.findall(r"`((?:\w+\.)*)(\w+)(?:\([^`]*\))?`", re.sub(r"(?ms)^```.*?^```", "", text))
    return found | {(name, prefix.strip(".")) for prefix, name in spans}


def test_each_name_of_the_package_that_a_page_uses_is_in_the_reference():
    listed = {entry.rpartition(".")[2] for entry in entries()}
    ours, exported = definitions(), exports()
    missing = set()
    for page in PAGES:
        for name, prefix in used(page.read_text("utf-8")) - {(word, "") for word in WORDS}:
            modules = ours.get(name, ())
            by_path = prefix and any(f".{module}".endswith(f".{prefix}") for module in modules)
            named = modules and (name[0].isupper() or name in exported or by_path)
            if named and name not in listed:
                missing.add((page.name, name))
    assert not missing


@pytest.mark.parametrize(
    ("code", "entry"),
    [
        ("TrainStep", "step.megatron.TrainStep"),
        ("weight_sync.WeightSync(engines)", "rl.sync.weight_sync.WeightSync"),
        ("verify(group)", "patching.verify.verify"),
        ("report", None),
        ("train()", None),
        ("gc.enable()", None),
        ("torch.cuda.Stream", None),
    ],
)
def test_code_becomes_a_link_only_if_it_names_what_is_ours(code, entry):
    ours = runpy.run_path(str(ROOT / ".ci" / "mkdocs_names.py"))
    span = f"<code>{code}</code>"
    link = f'<autoref identifier="megatron_idempotent.{entry}">{span}</autoref>'
    for html, made in (
        (f"<p>{span}</p>", f"<p>{link if entry else span}</p>"),
        *((each, each) for each in (f"<h2>{span}</h2>", f'<a href="x">{span}</a>')),
    ):
        assert ours["PART"].sub(ours["linked"], html) == made
