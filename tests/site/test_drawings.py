"""Drawings of the pages can be read on a phone, in light and in dark, and by a screen reader."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

import pytest

DOCS = Path(__file__).parents[2] / "docs"
DRAWINGS = sorted((DOCS / "assets").glob("*.svg"))
#: CSS pixels that a page leaves to a drawing on a screen of 390.
PHONE = 358
SMALLEST = 12
#: WCAG 2.1 wants 3 : 1 of graphics and large text.
CONTRAST = 3
#: The theme's page in light and in dark.
PAGES = ("#ffffff", "#1e2129")


def luminance(colour: str) -> float:
    digits = colour.lstrip("#")
    digits = "".join(digit * 2 for digit in digits) if len(digits) == 3 else digits
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [p / 12.92 if p <= 0.03928 else ((p + 0.055) / 1.055) ** 2.4 for p in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.name)
def test_no_text_is_small_on_a_phone(path):
    drawing = path.read_text(encoding="utf-8")
    width = float(ElementTree.fromstring(drawing).attrib["viewBox"].split()[2])
    sizes = [float(each) for each in re.findall(r'font-size="([\d.]+)"', drawing)]
    assert sizes
    assert min(sizes) * PHONE / width >= SMALLEST


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.name)
def test_what_is_drawn_on_the_page_stands_out_in_light_and_in_dark(path):
    # White text stands on boxes of the drawing, which are coloured.
    colours = set(re.findall(r'"(#[0-9a-f]{3,6})"', path.read_text(encoding="utf-8")))
    boxes = {"#00796b", "#5f6b73"}
    assert all(contrast("#fff", box) > CONTRAST for box in boxes & colours)
    for colour in colours - boxes - {"#fff"}:
        assert min(contrast(colour, page) for page in PAGES) > CONTRAST, colour


@pytest.mark.parametrize("path", DRAWINGS, ids=lambda path: path.name)
def test_a_page_says_in_words_what_a_drawing_shows(path):
    pages = "".join(page.read_text(encoding="utf-8") for page in DOCS.glob("*.md"))
    told = re.search(rf"!\[([^\]]*)\]\(assets/{re.escape(path.name)}\)", pages)
    assert told, f"no page shows {path.name}"
    assert len(told[1].split()) > 10
