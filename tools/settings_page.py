"""Writes the tables of the trainer's settings into docs/settings.md.

The tables come from the classes of `rl/trainer/config.py`.
"""

from __future__ import annotations

from _checkout import ROOT

from megatron_idempotent.rl.trainer.config import SECTIONS, default
from megatron_idempotent.settings import allowed, schema

PAGE = ROOT / "docs" / "settings.md"
BEGIN = "<!-- settings: python tools/settings_page.py -->"
END = "<!-- end of settings -->"


def settings_table() -> str:
    """Return a Markdown table per section, with the defaults of both modes."""
    lines = []
    for name, section in SECTIONS.items():
        lines += [
            f"### `[{name}]`",
            "",
            "| key | default | allowed | meaning |",
            "|---|---|---|---|",
        ]
        for key, field in schema(section)["properties"].items():
            meaning = " ".join(field["description"].split())
            lines.append(f"| `{key}` | {default(field)} | {allowed(field)} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def with_current_table(page: str) -> str:
    """Return the page with the current tables between its two markers.

    Raises:
        ValueError: the page lacks a marker.
    """
    head, begin, tail = page.partition(BEGIN)
    _, end, end_of_page = tail.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks the markers {BEGIN!r} and {END!r}; put them back")
    return f"{head}{BEGIN}\n\n{settings_table()}\n{END}{end_of_page}"


if __name__ == "__main__":
    PAGE.write_text(with_current_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
