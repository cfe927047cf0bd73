"""Python imports this at the start of each process that has this folder on its path."""

import os
import sys
from pathlib import Path

if "RECOVERY_KILLS" in os.environ:
    sys.path.append(str(Path(__file__).parents[1]))

    import kill_points

    kill_points.watch()
