"""`texts.txt` knows the functions of the installed release by their text, and no other text."""

from __future__ import annotations

import pytest
from body_texts import renewed_texts

from megatron_idempotent.cli.trees import installed_trees
from megatron_idempotent.patching import install, source
from megatron_idempotent.patching.base import MEGATRON, generated
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.releases import installed
from megatron_idempotent.patching.source import TEXTS, hash_of, parse_body, parse_function

pytestmark = pytest.mark.full


@pytest.fixture
def trees():
    if installed(MEGATRON) is None:
        pytest.skip("there is no Megatron in this environment")
    return installed_trees()


def _functions(trees):
    for patch in patches().values():
        for target in patch.targets:
            for tree in trees:
                text = tree.text(target.module)
                if text is not None and parse_function(text, target.qualname) is not None:
                    yield text, target.qualname


def test_what_is_read_of_the_installed_release_is_what_the_file_says(trees):
    known = generated(TEXTS)
    assert renewed_texts(known, trees) == known, (
        "run `python tools/casebook.py` with the paths of wheels and commits"
    )


def test_a_known_text_has_the_hash_and_the_line_of_what_it_parses_to(trees):
    install.forget_sources()
    unparsed = 0
    for text, qualname in _functions(trees):
        body = parse_body(text, qualname)
        known = {name: vars(body).get(name) for name in ("hash", "line")}
        unparsed += "tree" not in vars(body)
        assert known["hash"] in (None, hash_of(body.tree)), qualname
        assert known["line"] in (None, source.line_of(body.tree)), qualname
    assert unparsed > 50


def test_a_changed_text_is_parsed(trees):
    text = next(text for text, name in _functions(trees) if name == "train")
    assert "hash" in vars(parse_body(text, "train"))
    line = "    timers('interval-time', log_level=0).start(barrier=True)\n"
    assert line in text
    changed = parse_body(text.replace(line, line.replace("barrier=True", "barrier=False")), "train")
    assert changed.hash != parse_body(text, "train").hash
    assert changed.hash == hash_of(changed.tree)
