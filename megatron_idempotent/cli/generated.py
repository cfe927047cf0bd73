"""Replaces the lines of files in `patches/_generated/`, except for the comment at the top."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from megatron_idempotent.patching.base import generated_folder

#: The path of `patches/_generated/`, in a checkout or installed.
FOLDER = Path(generated_folder())


def content(folder: Path, name: str) -> list[str]:
    """Return the lines of a generated file, without comments."""
    lines = (folder / name).read_text(encoding="ascii").splitlines()
    return [line for line in lines if not line.startswith("#")]


def write(folder: Path, name: str, lines: Iterable[str]) -> None:
    """Replace the lines of a generated file; its lines that begin with `#` stay, at its top."""
    text = (folder / name).read_text(encoding="ascii")
    comment = [line for line in text.splitlines() if line.startswith("#")]
    rewrite(folder / name, "".join(f"{line}\n" for line in (*comment, *lines)))


def rewrite(path: Path, text: str) -> None:
    """Write `text` to a file, unless the file has this text already.
    The file's modification time, which make compares, then stays.
    """
    if path.exists() and path.read_text(encoding="utf-8") == text:
        return
    # A new file is written and renamed, so that an interrupted write leaves the old one.
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)
