"""Gives the package index a README whose links lead to the repository at the tag of the version.

On the index no other file lies beside it. It lists the packages, too: `patches/` lies beside the
others, and goes inside. All else that a build takes is in pyproject.toml.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

HERE = Path(__file__).parent
REPOSITORY = "https://github.com/megatron-idempotent/megatron-idempotent"
SOURCE = (HERE / "megatron_idempotent" / "__init__.py").read_text("utf-8")
(TAG,) = re.findall(r'(?m)^__version__ = "(.+)"$', SOURCE)


def absolute(link: re.Match[str]) -> str:
    """Return a Markdown link with the relative path replaced by the file's URL on GitHub, at this
    version's tag.
    """
    text, path = link.groups()
    return f"{text}({REPOSITORY}/{'raw' if text.startswith('!') else 'blob'}/v{TAG}/{path})"


setup(
    packages=[
        *find_packages(HERE, include=["megatron_idempotent*"]),
        *(f"megatron_idempotent.{name}" for name in find_packages(HERE, include=["patches*"])),
    ],
    long_description=re.sub(
        r"(!?\[[^\]]*\])\((?!https?:|#)([^)\s]+)\)",
        absolute,
        (HERE / "README.md").read_text("utf-8"),
    ),
    long_description_content_type="text/markdown",
)
