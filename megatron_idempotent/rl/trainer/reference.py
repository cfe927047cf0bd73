"""Writes the table of all settings in docs/trainer.md, from the configuration's JSON schema.

Regenerate with `python -m megatron_idempotent.rl.trainer.reference docs/trainer.md`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from megatron_idempotent.settings import allowed, schema

from .config import ASYNC, SECTIONS, Config

BEGIN = "<!-- settings: python -m megatron_idempotent.rl.trainer.reference docs/trainer.md -->"
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
        for key, field in schema(Config)["$defs"][section.__name__]["properties"].items():
            shown = default(name, key, field["default"])
            meaning = " ".join(field["description"].split())
            lines.append(f"| `{key}` | {shown} | {allowed(field)} | {meaning} |")
        lines.append("")
    return "\n".join(lines)


def default(section: str, key: str, value: object) -> str:
    """Return how a default is written: the one of both modes, or of each."""
    shown = _shown(value)
    if key in ASYNC.get(section, {}):
        shown += f"; with `--async` {_shown(ASYNC[section][key])}"
    return shown


def _shown(value: object) -> str:
    if value == "":
        return "empty"
    return f"`{str(value).lower() if isinstance(value, bool) else value}`"


def with_current_table(page: str) -> str:
    """Return the page with the current table between its two markers.

    Errors: `ValueError` for a page without them.
    """
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks the markers {BEGIN!r} and {END!r}; put them back")
    return f"{before}{BEGIN}\n\n{settings_table()}\n{END}{after}"


def main(path: Path) -> None:
    """Bring the table in a page up to date."""
    path.write_text(with_current_table(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
