"""The programs in docs/train-step.md, which tests run."""

from __future__ import annotations

import re
from pathlib import Path


def programs(heading: str) -> list[str]:
    """Return those under a heading, in their order."""
    text = (Path(__file__).parents[2] / "docs" / "train-step.md").read_text("utf-8")
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)
