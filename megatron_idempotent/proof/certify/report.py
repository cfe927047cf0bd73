"""Writes the verdict on an adapter: as a table, as JSON, and as JUnit's XML."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from xml.etree import ElementTree

from megatron_idempotent.patching.catalog import hazards
from megatron_idempotent.patching.record import Hazard
from megatron_idempotent.patching.table import render

from .checks import CHECKS
from .layouts import layout
from .run import Result

_MARKS = {"passed": "ok", "failed": "FAILED", "declared": "declared"}


def as_table(results: Sequence[Result]) -> str:
    """Return checks times layouts, the fewer in columns, and then each fault in one line."""
    layouts = list(dict.fromkeys(each.layout for each in results))
    marks = {(each.check, each.layout): _MARKS.get(each.verdict, "-") for each in results}
    checks = [name for name in CHECKS if any(each.check == name for each in results)]
    if len(layouts) > len(checks):
        parts = {
            name: max(each.of_bound for each in results if each.layout == name) for name in layouts
        }
        header: tuple[str, ...] = ("layout", *checks, "largest part of a bound")
        rows = [
            (place, *(marks.get((name, place), "") for name in checks), f"{parts[place]:.2g}")
            for place in layouts
        ]
    else:
        header = ("check", *layouts, "it demands that")
        rows = [
            (name, *(marks.get((name, place), "") for place in layouts), CHECKS[name].summary)
            for name in checks
        ]
    lines = [render(header, rows)]
    for each in results:
        if each.verdict in ("failed", "declared"):
            lines.append(f"{each.layout}, {each.check}, {each.verdict}: {each.fault}")
            names = suspects(each) if each.verdict == "failed" else []
            if names:
                asked = " or ".join(f"`megatron-idempotent explain {name}`" for name in names)
                lines.append(f"    It may be a known hazard: {asked}.")
    lines.append(summary(results))
    return "\n".join(lines)


def suspects(result: Result) -> list[str]:
    """Return the hazards that a fault may come from: by its own words, and not by its check alone.

    An exception is one that a hazard's reproduction raises on stock. A wrong gradient says nothing
    of where it comes from: it may be any of those of the check that are silent.
    """
    found = hazards()
    raised = _RAISED.search(result.fault)
    if raised is None:
        words = layout(result.layout).flags
        silent = [name for name in CHECKS[result.check].hazards if _is_silent(found[name])]
        return [name for name in silent if name not in _ONLY or words & _ONLY[name]]
    told = f"{raised['kind']}: {raised['said']}"
    matching = [name for name, each in found.items() if _says(each, told)]
    # A framework's own loop has Megatron's text; its own hazard is the nearer one.
    path = f"/{raised['file']}"
    theirs = {name: _package(found[name]) for name in matching}
    own = [name for name, package in theirs.items() if f"/{package}/" in path]
    nearer = [name for name in own if theirs[name] != _MEGATRON]
    return nearer or [name for name, package in theirs.items() if package == _MEGATRON]


_RAISED = re.compile(r"(?P<kind>\w+) in (?P<file>\S.*?):\d+ \(\S+\): ?(?P<said>.*)")
#: Where reproductions find a wrong number, they raise this themselves; no framework does.
_OURS = "RuntimeError"
_MEGATRON = "megatron"
_PACKAGES = {
    "megatron_core": _MEGATRON,
    "megatron_bridge": "megatron/bridge",
    "ms_swift": "swift",
}
#: Hazards that are none in other layouts than those with one of these words.
_ONLY = {"grad-scale-func": frozenset({"fp16", "moe", "mtp"})}


def _on_stock(hazard: Hazard) -> str:
    """Return the pattern of what the hazard's reproduction raises without the patch, or ""."""
    return str(getattr(hazard, "stock_error", ""))


def _is_silent(hazard: Hazard) -> bool:
    kind, colon, _ = _on_stock(hazard).partition(":")
    return not colon or kind == _OURS


def _says(hazard: Hazard, told: str) -> bool:
    pattern = _on_stock(hazard)
    only_a_type = re.fullmatch(r"\^?\w+:? ?\$?", pattern) is not None
    return bool(pattern) and not only_a_type and re.search(pattern, told) is not None


def _package(hazard: Hazard) -> str:
    name = str(getattr(hazard, "distribution", "")).replace("-", "_")
    return _PACKAGES.get(name, name)


def summary(results: Sequence[Result]) -> str:
    """Return the verdict in one line."""
    number = {word: sum(each.verdict == word for each in results) for word in _MARKS}
    skipped = len(results) - sum(number.values())
    seconds = sum(each.seconds for each in results)
    return (
        f"{number['passed']} passed, {number['failed']} failed, {number['declared']} declared, "
        f"{skipped} not made, in {seconds:.0f} s"
        + "".join(f"; --seed {seed} draws the same" for seed in {each.seed for each in results})
    )


def as_json(results: Sequence[Result]) -> str:
    """Return the results as a JSON list of objects with the fields of `Result`."""
    return json.dumps([asdict(each) for each in results], indent=2)


def as_junit(adapter: str, results: Sequence[Result]) -> str:
    """Return the results as a JUnit test suite, with a test case per layout and check."""
    suite = ElementTree.Element(
        "testsuite",
        name=adapter,
        tests=str(len(results)),
        failures=str(sum(each.verdict == "failed" for each in results)),
        skipped=str(sum(each.verdict not in ("failed", "passed") for each in results)),
        time=f"{sum(each.seconds for each in results):.3f}",
    )
    properties = ElementTree.SubElement(suite, "properties")
    for seed in {each.seed for each in results}:
        ElementTree.SubElement(properties, "property", name="seed", value=str(seed))
    for each in results:
        case = ElementTree.SubElement(
            suite,
            "testcase",
            classname=f"{adapter}.{each.layout}",
            name=each.check,
            time=f"{each.seconds:.3f}",
        )
        if each.verdict == "failed":
            ElementTree.SubElement(case, "failure", message=each.fault)
        elif each.verdict != "passed":
            said = f"{each.verdict}: {each.fault}" if each.fault else each.verdict
            ElementTree.SubElement(case, "skipped", message=said)
    return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True)
