"""Run benchmarks by name: `python -m benchmarks [NAME ...] [--device cuda] [--json FOLDER]`.

Each module here has a `main()` that prints its result. A benchmark's other options are available
with `python -m benchmarks.NAME`. With `--device` and without names, only the benchmarks that accept
`--device` run. With `--json` each result is also written to FOLDER/NAME.json, with a description of
the machine and the time, for `python -m benchmarks.page FOLDER`. `--busy` marks the results as
measured while the machine ran other programs.
"""

import argparse
import importlib
import pkgutil
import sys
from pathlib import Path

from benchmarks._record import captured, machine, record, tell
from megatron_idempotent.proof.cpu.errors import NoDeviceError
from megatron_idempotent.proof.cpu.gpu import DEVICES

HERE = Path(__file__).parent
known = [
    entry.name
    for entry in pkgutil.iter_modules([str(HERE)])
    if not entry.name.startswith("_") and entry.name != "page"
]
#: The benchmarks whose docstrings mention `--device`.
on_device = [name for name in known if "[--device" in (HERE / f"{name}.py").read_text("utf-8")]
parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__.split("\n")[0])
parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}")
parser.add_argument("--device", choices=DEVICES, help=f"for {', '.join(on_device)}")
parser.add_argument("--json", type=Path, metavar="FOLDER", help="for NAME.json of each")
parser.add_argument("--busy", action="store_true", help="marks a run beside other work, for --json")
asked = parser.parse_args()
unknown = sorted(set(asked.names) - set(known))
if unknown:
    sys.exit(f"no benchmark {', '.join(unknown)}: known are {', '.join(known)}")
names = asked.names or (known if asked.device is None else on_device)
for name in names:
    if asked.device is not None and name not in on_device:
        sys.exit(f"{name} takes no --device; those that do are {', '.join(on_device)}")
    print(f"# {name}", flush=True)
    arguments = ["--device", asked.device] if asked.device else []
    if asked.json is not None:
        arguments.append("--json")
    sys.argv = [name, *arguments]
    try:
        module = importlib.import_module(f"benchmarks.{name}")
        if asked.json is None:
            module.main()
        else:
            before = machine(busy=asked.busy)
            result = captured(name, module.main)
            record(asked.json, name, before, arguments, result)
            tell(result)
    except (NoDeviceError, ValueError) as error:
        sys.exit(str(error))
