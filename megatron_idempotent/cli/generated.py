"""Replaces lines of the files in `patches/_generated/`; the comment that begins each one stays."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron_idempotent.patching.base import generated_folder

#: The folder, in a checkout or as it is installed.
FOLDER = Path(generated_folder())


def content(folder: Path, name: str) -> list[str]:
    """Return the lines of a file in the folder, without comments."""
    lines = (folder / name).read_text(encoding="ascii").splitlines()
    return [line for line in lines if not line.startswith("#")]


def write(folder: Path, name: str, lines: Iterable[str]) -> None:
    """Put these lines below the comment of a file in the folder, in place of its own."""
    text = (folder / name).read_text(encoding="ascii")
    comment = [line for line in text.splitlines() if line.startswith("#")]
    rewrite(folder / name, "".join(f"{line}\n" for line in (*comment, *lines)))


def rewrite(path: Path, text: str) -> None:
    """Give a file this text; a file that has it is not touched, because make reads its time."""
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    # An interrupted write must not leave half a file: write another one, and rename it.
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
