"""Puts this file's checkout first on `sys.path`, so that its package is the one imported."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
"""The root folder of the checkout."""

sys.path.insert(0, str(ROOT))
