"""Bodies that nobody reviewed: what a wrapper needs of them, and the part that it relies on."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
from contracts import derived

from megatron_idempotent.cli import statements
from megatron_idempotent.cli.statements import change
from megatron_idempotent.cli.statements import statements as statements_of
from megatron_idempotent.patching import Patch, Target, arguments
from megatron_idempotent.patching.catalog import patches
from megatron_idempotent.patching.contract import unmet
from megatron_idempotent.patching.decide import judge, part_of, review
from megatron_idempotent.patching.source import Body, locate, parse_body, read_body

UPSTREAM = '''
def run(steps, config, *, quiet=False):
    """Run them."""
    timers = get_timers()
    if config.overlap:
        assert config.hook is None, "there is a hook"
        config.hook = [step.hook for step in steps]
    timers("run", log_level=0).start()
    for step in steps:
        count = step(config)
        if count > 3:
            log(count)
    return count, timers
'''


def wrapper(original, *args, **kwargs):
    call = arguments(original, args, kwargs)
    config, steps = call["config"], call["steps"]
    config.hook = None
    count, timers = original(*args, **kwargs)
    return count, timers, steps


def first_wrapper(original, steps, *args, **kwargs):
    return original(list(steps), *args, **kwargs)


def own_wrapper(original, steps, config):
    result = original(steps, config)
    _, timers, *_ = result
    return timers


def keyword_wrapper(original, steps, *args, **kwargs):
    return original(steps, *args, quiet=True, **kwargs)


def yielding(original, *args, **kwargs):
    yield from original(*args, **kwargs)


def puzzling(original, *args, **kwargs):
    call = arguments(original, args, kwargs)
    return [call[name] for name in call], original(*args, **kwargs)[0]


def body_of(text: str) -> Body:
    body = parse_body(text, "run")
    assert body is not None
    return body


def target_for(wrapper, *relies_on: str, known: str = UPSTREAM) -> Target:
    """A target whose part was read in `known`, and whose body was not."""
    fields = ("up.stream:run", wrapper, *relies_on)
    part = part_of(Target(*fields), body_of(known))
    return Target(*fields, parts={part.hash: "1.0"})


HOOK = ("config.hook is None", "timers('run', log_level=0)")


def test_a_contract_is_read_off_the_wrapper():
    contract = derived(wrapper)
    assert (contract.reads, contract.leading) == (("config", "steps"), ())
    given = (contract.items, contract.or_more, contract.takes_all)
    assert given == (("count", "timers"), False, True)
    assert derived(first_wrapper).leading == ("steps",)
    own = derived(own_wrapper)
    assert (own.items, own.or_more, own.takes_all) == (("_", "timers"), True, False)


def test_a_wrapper_that_cannot_be_followed_is_no_wrapper_for_a_new_body():
    target = Target("up.stream:run", puzzling, *HOOK)
    known, why = review(target, body_of(UPSTREAM))
    assert not known
    assert "puzzling reads arguments otherwise than by a constant name" in why


@pytest.mark.parametrize(
    ("wraps", "old", "new", "says"),
    [
        (wrapper, "run(steps, config", "run(steps, settings, config_=0", "no parameter `config`"),
        (wrapper, "run(steps, config, *,", "run(steps, *config,", "no parameter `config`"),
        (wrapper, "run(steps, config, *, quiet=False)", "run(steps, **config)", "no parameter"),
        (wrapper, "def run", "async def run", "is async"),
        (wrapper, "log(count)", "yield count", "is a generator"),
        (yielding, "log(count)", "pass", "is no generator"),
        (wrapper, "def run", "@staticmethod\ndef run", "the decorator `@staticmethod`"),
        (wrapper, "def run", "@cached(3)\ndef run", "the decorator `@cached(3)`"),
        (wrapper, "return count, timers", "return count, timers, 1", "takes `count, timers` from"),
        (wrapper, "return count, timers", "return timers, count", "has `return (timers, count)`"),
        (wrapper, "return count, timers", "return {}", "has `return {}`"),
        (wrapper, "log(count)", "return None", "has `return None`"),
        (wrapper, "log(count)", "return", "has `return`"),
        (wrapper, "    return count, timers", "    pass", "does not end with a return"),
        (first_wrapper, "run(steps, config", "run(config, steps", "not take `steps` as its param"),
        (first_wrapper, "run(steps, config, *,", "run(*, steps, config,", "not take `steps`"),
        (keyword_wrapper, "quiet=False", "silent=False", "no parameter `quiet`"),
        (own_wrapper, "quiet=False", "quiet=True", "parameters that its wrapper does not know"),
    ],
)
def test_a_body_that_does_not_give_what_the_wrapper_takes_has_drifted(wraps, old, new, says):
    text = UPSTREAM.replace(old, new)
    assert text != UPSTREAM
    known, why = review(Target("up.stream:run", wraps, *HOOK), body_of(text))
    assert not known
    assert says in why
    assert "name the patch in only= to accept it" in why


DELEGATING = """
def run(steps, config, *, quiet=False):
    config.hook = None
    if quiet:
        return _quietly(steps)
    elif not steps:
        return None, get_timers()
    else:
        with timing():
            return count, timers

def _quietly(steps):
    if not steps:
        raise ValueError
    return 0, timers
"""


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        ("", "", ""),
        ("return 0, timers", "return timers, 0", "has `return (timers, 0)`"),
        ("return 0, timers", "return 0", "has `return 0`"),
        ("return 0, timers", "return other(steps)", "has `return other(steps)`"),
        ("raise ValueError\n    return 0, timers", "return 3, timers", "does not end with a"),
        ("    else:\n        with t", "    elif config:\n        with t", "not end with a"),
        ("return count, timers", "return 1, timers", "returns no `count`, which its wrapper takes"),
    ],
)
def test_a_result_is_followed_into_the_functions_that_make_it(old, new, says):
    text = DELEGATING.replace(old, new)
    assert bool(old) == (text != DELEGATING)
    known, why = review(Target("up.stream:run", wrapper, "config.hook = None"), body_of(text))
    assert says in why
    assert known is not bool(says)


def test_the_wrappers_of_a_checkpoint_s_reader_fit_bodies_that_nobody_read(megatron):
    for patch_id in ("expert-random-states-shared", "spoilt-checkpoint-ends-well"):
        (target,) = (t for t in patches()[patch_id].targets if "_load_base" in t.qualname)
        path = locate(target.module)
        if path is None:
            pytest.skip("no megatron.training is installed")
        body = read_body(path, target.qualname)
        assert body is not None
        assert unmet(target.wrapper, body) is None
        renamed = body.module.replace(
            "return state_dict, checkpoint_name,", "return checkpoint_name, state_dict,"
        )
        changed = parse_body(renamed, target.qualname)
        assert changed is not None
        assert "where its wrapper takes `" in str(unmet(target.wrapper, changed))


def test_what_only_watches_a_call_is_no_decorator_to_mind():
    text = UPSTREAM.replace("def run", "@nvtx_decorator()\n@_otel_trace_fn('run', 'a.b')\ndef run")
    assert review(target_for(wrapper, *HOOK), body_of(text))[0]


SAME = {
    "elsewhere": ("if count > 3:", "if count > 4:"),
    "a message": ('"there is a hook"', '"one hook too many"'),
    "a statement beside it": ("for step in steps:\n", "log('now')\n    for step in steps:\n"),
    "a type": ("steps, config,", "steps: list, config: Any,"),
    "a parameter more": ("quiet=False", "quiet=False, loud=True"),
    "an annotation": ("timers = get", "timers: Timers = get"),
}
OTHER = {
    "a condition": ("if config.overlap:", "if not config.overlap:"),
    "a weaker condition": ("if config.overlap:", "if config.overlap and quiet:"),
    "a loop": ("    if config.overlap:", "    while config.overlap:"),
    "a setter": ("config.hook = [step.hook for step in steps]", "setattr(config, 'hook', 1)"),
    "a getter": ("log(count)", "log(getattr(config, 'hook'))"),
    "another object": ("log(count)", "other.hook = None"),
    "gone": ("        config.hook = [step.hook for step in steps]\n", ""),
    "twice": ("    for step", "    config.hook = None\n    for step"),
    "a name bound again": ("    for step", "    config = copy(config)\n    for step"),
    "an import of the name": ("    for step", "    from a import timers\n    for step"),
    "a text": ("    for step", "    timers('run').stop()\n    for step"),
    "in a function": ("    for step", "    def later():\n        config.hook = 1\n    for step"),
    "tried": (
        "    for step",
        "    try:\n        config.hook = 1\n    except E:\n        ...\n    for step",
    ),
    "a default": ("steps, config,", "steps, config=None,"),
    "order": (
        '    timers("run", log_level=0).start()\n    for step in steps:\n',
        '    for step in steps:\n        timers("run", log_level=0).start()\n',
    ),
}


@pytest.mark.parametrize("change", SAME)
def test_the_part_is_the_same_where_nothing_of_it_changed(change):
    text = UPSTREAM.replace(*SAME[change])
    assert text != UPSTREAM
    known, why = review(target_for(wrapper, *HOOK), body_of(text))
    assert known, why
    assert "not reviewed, but holds what the patch relies on" in why


@pytest.mark.parametrize("change", OTHER)
def test_a_part_that_nobody_read_has_drifted(change):
    text = UPSTREAM.replace(*OTHER[change])
    assert text != UPSTREAM
    target = target_for(wrapper, *HOOK)
    known, why = review(target, body_of(text))
    assert not known
    part = part_of(target, body_of(text))
    assert f"does something new with what the patch relies on (part {part.hash})" in why


def test_a_return_is_part_of_what_is_relied_on_where_a_fragment_is_one():
    target = target_for(first_wrapper, "return count, timers")
    inner = UPSTREAM.replace("log(count)", "log(lambda: 1)\n    def g():\n        return 3")
    assert review(target, body_of(inner))[0]
    assert not review(target, body_of(UPSTREAM.replace("log(count)", "return 1, 2")))[0]


def test_a_global_name_counts_wherever_it_is_used():
    target = target_for(first_wrapper, "get_timers()")
    assert not review(target, body_of(UPSTREAM.replace("log(count)", "log(get_timers)")))[0]


def test_a_part_reads_as_people_write():
    text = part_of(target_for(wrapper, *HOOK), body_of(UPSTREAM)).text
    assert "parameter config" in text.splitlines()
    assert "if config.overlap > body > assert config.hook is None" in text.splitlines()
    assert "timers('run', log_level=0).start()" in text.splitlines()
    assert "log(count)" not in text


@pytest.mark.parametrize(
    ("since", "label", "status"),
    [
        ("0.16", "0.12.0 to 0.15.3", "unsupported_version"),
        ("0.16", "0.15.3", "unsupported_version"),
        ("0.15.3", "0.12.0 to 0.15.3", None),
        ("0.16", "0.12.0 to 0.16.0", None),
        ("0.16", "main, August 2026", None),
    ],
)
def test_a_body_of_before_the_hazard_is_not_patched_whatever_the_version_says(since, label, status):
    body = body_of(UPSTREAM)
    target = Target("up.stream:run", first_wrapper, reviewed={body.hash: label})
    patch = Patch(id="some-symptom", summary="it hurts", since=since, targets=(target,))
    verdict = judge(patch, {target.address: body}, None, None, named=True)
    assert verdict.status == status
    if status is not None:
        assert verdict.reason == f"run is that of {label}, and the hazard came with {since}"


@dataclass
class OneModule:
    """Sources of which every module has one text."""

    source: str

    def text(self, _):
        return self.source

    def beside(self, module):
        return [module]

    def is_package(self, module):
        return False


@pytest.mark.parametrize(
    ("beside", "status"),
    [
        ("", "drifted"),
        ("def sync_params_before_refit(self): self._disable_forward_pre_hook()", "drifted"),
        (
            "def sync_params_before_refit(self): self.model.start_param_sync(force_sync=True)",
            "fixed_upstream",
        ),
    ],
)
def test_a_repair_beside_the_targets_ends_a_patch(beside, status):
    patch = patches()["nemo-rl-refit-before-gather"]
    (target,) = patch.targets
    owner, _, method = target.qualname.partition(".")
    text = f"""
class {owner}:
    def {method}(self, tasks=None):
        for name in self.megatron_bridge.export_hf_weights([self.model]):
            yield name
    {beside}
"""
    found = {target.address: parse_body(text, target.qualname)}
    assert judge(patch, found, OneModule(text), None, named=False).status == status


def test_hashes_are_the_same_on_every_python():
    # Written down on 3.12; this test runs on the oldest and the newest that we support too.
    body = body_of(UPSTREAM.replace("log(count)", "log(f'{count:>{width}} {1}', *[*range(3)])"))
    assert body.hash == "637a9ca95083"
    assert list(target_for(wrapper, *HOOK).parts) == ["6094bd0cdbe3"]


READ = body_of(UPSTREAM).hash


@pytest.fixture(autouse=True)
def _read(monkeypatch):
    hashes = tuple(each.hash for each in statements_of(body_of(UPSTREAM)))
    monkeypatch.setattr(statements, "accepted", lambda: {READ: hashes})


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        (
            "        if count > 3:",
            "        if count > 4:",
            "    for step in steps:|        count = step(config)|-(1 statement)|"
            "+        if count > 4:|            log(count)|    return (count, timers)",
        ),
        (
            '        assert config.hook is None, "there is a hook"\n',
            "",
            "    timers = get_timers()|    if config.overlap:|-(1 statement)|"
            "        config.hook = [step.hook for step in steps]|"
            "    timers('run', log_level=0).start()",
        ),
        (
            "    for step in steps:\n",
            "    try:\n        start()\n    finally:\n        stop()\n    for step in steps:\n",
            "        config.hook = [step.hook for step in steps]|"
            "    timers('run', log_level=0).start()|+    try:|+        start()|"
            "+    finally:|+        stop()|"
            "    for step in steps:|        count = step(config)",
        ),
        (
            "steps, config, *",
            "steps, config, extra, *",
            "-(1 statement)|+def run(steps, config, extra, *, quiet=False):|"
            "    timers = get_timers()|    if config.overlap:",
        ),
    ],
)
def test_what_is_new_in_a_body_is_shown_without_the_text_of_the_one_that_was_read(old, new, lines):
    assert old in UPSTREAM
    found = change(body_of(UPSTREAM.replace(old, new)), {READ: "1.0 to 1.4"})
    shown = [line[1:] if line.startswith(" ") else line for line in found.lines]
    assert (found.label, shown) == ("1.0 to 1.4", ["@@", *lines.split("|")])


def test_a_body_that_nobody_read_has_nothing_to_be_compared_with():
    assert change(body_of(UPSTREAM), {"0" * 12: "1.0"}) is None


def test_the_nearest_body_that_was_read_is_compared_with():
    near = body_of(UPSTREAM.replace("count > 3", "count > 2"))
    hashes = tuple(each.hash for each in statements_of(near))
    far = tuple("AAAA" for _ in hashes)
    reviewed = {READ: "1.0", "f" * 12: "2.0"}
    with pytest.MonkeyPatch.context() as patching:
        patching.setattr(statements, "accepted", lambda: {READ: far, "f" * 12: hashes})
        found = change(body_of(UPSTREAM), reviewed)
    assert found is not None
    assert (found.label, found.new, found.gone) == ("2.0", 1, 1)
