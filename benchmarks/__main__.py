"""Run benchmarks by name; each module here has a `main()` that prints its result."""

import importlib
import pkgutil
import sys
from pathlib import Path

known = [
    entry.name
    for entry in pkgutil.iter_modules([str(Path(__file__).parent)])
    if not entry.name.startswith("_")
]
names = sys.argv[1:] or known
unknown = sorted(set(names) - set(known))
if unknown:
    sys.exit(f"no benchmark {', '.join(unknown)}: known are {', '.join(known)}")
for name in names:
    print(f"# {name}")
    sys.argv = [name]  # options are for `python -m benchmarks.NAME`
    importlib.import_module(f"benchmarks.{name}").main()
