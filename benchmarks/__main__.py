"""Run benchmarks by name: `python -m benchmarks [NAME ...] [--device cuda]`.

Each module here has a `main()` that prints its result. Other options are for
`python -m benchmarks.NAME`. With a device, and without names, it is those that take one.
"""

import argparse
import importlib
import pkgutil
import sys
from pathlib import Path

from megatron_idempotent.cpu.errors import NoDeviceError
from megatron_idempotent.cpu.gpu import DEVICES

HERE = Path(__file__).parent
known = [
    entry.name for entry in pkgutil.iter_modules([str(HERE)]) if not entry.name.startswith("_")
]
#: Those that say so in their own documentation.
on_device = [name for name in known if "[--device" in (HERE / f"{name}.py").read_text("utf-8")]
parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n")[0])
parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
parser.add_argument("--device", choices=DEVICES, help=f"for {', '.join(on_device)}")
asked = parser.parse_args()
unknown = sorted(set(asked.names) - set(known))
if unknown:
    sys.exit(f"no benchmark {', '.join(unknown)}: known are {', '.join(known)}")
names = asked.names or (known if asked.device is None else on_device)
for name in names:
    if asked.device is not None and name not in on_device:
        sys.exit(f"{name} takes no --device; those that do are {', '.join(on_device)}")
    print(f"# {name}", flush=True)
    sys.argv = [name, *(["--device", asked.device] if asked.device else [])]
    try:
        importlib.import_module(f"benchmarks.{name}").main()
    except NoDeviceError as error:
        sys.exit(str(error))
