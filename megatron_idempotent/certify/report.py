"""Writes the verdict on an adapter: as a table, as JSON, and as JUnit's XML."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from xml.etree import ElementTree

from megatron_idempotent.patching.table import render

from .checks import CHECKS
from .run import Result

_MARKS = {"passed": "ok", "failed": "FAILED", "declared": "declared"}


def as_table(results: Sequence[Result]) -> str:
    """Return checks times layouts, the fewer in columns, and then each fault in one line."""
    layouts = list(dict.fromkeys(each.layout for each in results))
    marks = {(each.check, each.layout): _MARKS.get(each.verdict, "-") for each in results}
    checks = [name for name in CHECKS if any(each.check == name for each in results)]
    if len(layouts) > len(checks):
        parts = {
            layout: max(each.of_bound for each in results if each.layout == layout)
            for layout in layouts
        }
        header: tuple[str, ...] = ("layout", *checks, "largest part of a bound")
        rows = [
            (layout, *(marks.get((name, layout), "") for name in checks), f"{parts[layout]:.2g}")
            for layout in layouts
        ]
    else:
        header = ("check", *layouts, "it demands that")
        rows = [
            (name, *(marks.get((name, layout), "") for layout in layouts), CHECKS[name].summary)
            for name in checks
        ]
    lines = [render(header, rows)]
    for each in results:
        if each.verdict in ("failed", "declared"):
            lines.append(f"{each.layout}, {each.check}, {each.verdict}: {each.fault}")
            hazards = CHECKS[each.check].hazards
            if each.verdict == "failed" and hazards:
                asked = " or ".join(f"`megatron-idempotent explain {name}`" for name in hazards)
                lines.append(f"    It may be a hazard of Megatron: {asked}.")
    lines.append(summary(results))
    return "\n".join(lines)


def summary(results: Sequence[Result]) -> str:
    """Return the verdict in one line."""
    number = {word: sum(each.verdict == word for each in results) for word in _MARKS}
    skipped = len(results) - sum(number.values())
    seconds = sum(each.seconds for each in results)
    return (
        f"{number['passed']} passed, {number['failed']} failed, {number['declared']} declared, "
        f"{skipped} not made, in {seconds:.0f} s"
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
