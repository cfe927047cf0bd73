"""The table of all settings in docs/trainer.md, made from the dataclasses and their docstrings.

Regenerate with `python -m megatron_idempotent.trainer.reference docs/trainer.md`.
"""

from __future__ import annotations

import ast
import dataclasses
import sys
from pathlib import Path

from megatron_idempotent.trainer.settings import DEFAULT_FILE, SECTIONS, load_config

BEGIN = "<!-- settings: python -m megatron_idempotent.trainer.reference docs/trainer.md -->"
END = "<!-- end of settings -->"

_SOURCES = ("sections.py", "section_controller.py")


def field_docstrings() -> dict[tuple[str, str], str]:
    """The string under each field of the sections, by class and field name.

    Python drops these strings, so they are read from the source.
    """
    found = {}
    for node in [node for name in _SOURCES for node in _parsed(name)]:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, text in zip(node.body, node.body[1:], strict=False):
            if (
                isinstance(field, ast.AnnAssign)
                and isinstance(field.target, ast.Name)
                and isinstance(text, ast.Expr)
                and isinstance(text.value, ast.Constant)
            ):
                found[node.name, field.target.id] = str(text.value.value)
    return found


def _parsed(name: str) -> list[ast.stmt]:
    return ast.parse(Path(__file__).with_name(name).read_text(encoding="utf-8")).body


def settings_table() -> str:
    """Markdown: one table per section, with the default run's values."""
    docstrings = field_docstrings()
    shipped = load_config(DEFAULT_FILE)
    lines = []
    for name, section in SECTIONS.items():
        lines += [
            f"### `[{name}]`",
            "",
            "| key | default | allowed | meaning |",
            "|---|---|---|---|",
        ]
        for field in dataclasses.fields(section):
            value = getattr(getattr(shipped, name), field.name)
            shown = f"`{str(value).lower() if isinstance(value, bool) else value}`"
            allowed = field.metadata["allowed"].describe()
            if isinstance(value, bool):
                allowed = "true or false"
            meaning = " ".join(docstrings[section.__name__, field.name].split())
            lines.append(
                f"| `{field.name}` | {shown if value != '' else 'empty'} | {allowed} | {meaning} |"
            )
        lines.append("")
    return "\n".join(lines)


def with_current_table(page: str) -> str:
    """The page with the table between its two markers replaced."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks the markers {BEGIN!r} and {END!r}; put them back")
    return f"{before}{BEGIN}\n\n{settings_table()}\n{END}{after}"


def main(path: Path) -> None:
    """Bring a page up to date."""
    path.write_text(with_current_table(path.read_text(encoding="utf-8")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
