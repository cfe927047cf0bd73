"""Puts the checkout of this file first on the path, so that its own package is imported."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The checkout."""

sys.path.insert(0, str(ROOT))
