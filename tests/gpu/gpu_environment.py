"""The environment of `make test-gpu`: on top of a Python that holds torch, from a folder of wheels.

Standard library only: it runs before anything is installed. The environment sees what the given
Python sees, also where that is a virtual environment itself, and no network is asked.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Run by the given Python: what it has, and what torch finds there.
_FACTS = """
import importlib.metadata as md, json, platform, site, sys, sysconfig
found = {"python": platform.python_version(), "torch": None, "devices": 0,
         "paths": [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))],
         "installed": sorted({(d.metadata["Name"] or "").lower().replace("_", "-")
                              for d in md.distributions()})}
try:
    import torch
except ModuleNotFoundError:
    pass
else:
    found |= {"torch": torch.__version__, "cuda": torch.version.cuda,
              "devices": torch.cuda.device_count()}
    if found["devices"]:
        p = torch.cuda.get_device_properties(0)
        found |= {"device": p.name, "memory_gib": p.total_memory / 2**30,
                  "multiprocessors": p.multi_processor_count,
                  "capability": list(torch.cuda.get_device_capability(0)),
                  "nccl": ".".join(map(str, torch.cuda.nccl.version()))}
    try:
        import triton
        found["triton"] = triton.__version__
    except ModuleNotFoundError:
        found["triton"] = None
print(json.dumps(found))
"""
#: Always installed; the others only where the machine lacks them.
_OURS = ("megatron-core", "megatron-idempotent")


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Facts that a Python finds. Example: `look("python3").devices == 1`."""

    facts: dict[str, Any]

    @property
    def devices(self) -> int:
        """Number of GPUs that its torch can use."""
        return int(self.facts["devices"])

    def why_not(self) -> str | None:
        """One line that says why there is nothing to test on, or None."""
        if self.facts["torch"] is None:
            return "no GPU tests: this Python has no torch; name another one with PYTHON="
        if not self.devices:
            return (
                f"no GPU tests: torch {self.facts['torch']} (CUDA {self.facts['cuda']}) finds no "
                "GPU here"
            )
        return None


def look(python: str) -> Machine:
    """Ask a Python for its torch and its GPUs. Errors: `CalledProcessError` if it cannot start."""
    answer = subprocess.run(
        [python, "-c", _FACTS], stdout=subprocess.PIPE, text=True, check=True
    ).stdout
    facts = json.loads(answer.splitlines()[-1])
    facts["driver"] = _driver()
    return Machine(facts=facts)


def _driver() -> str | None:
    ask = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        answer = subprocess.run(ask, capture_output=True, text=True, timeout=30, check=False)
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return answer.stdout.splitlines()[0].strip() if answer.stdout.strip() else None


def make(python: str, machine: Machine, wheels: Path, folder: Path) -> Path:
    """Make the environment in `folder`; the path of its Python.

    A virtual environment of a virtual environment sees the system's packages and not those of the
    one that made it, so the paths of the given Python are named in a file.

    Errors: `FileNotFoundError` where the folder of wheels is empty: run `make wheels` first.
    """
    files = sorted(wheels.glob("*.whl"))
    if not files:
        raise FileNotFoundError(
            f"no wheels in {wheels}; run `make wheels` where there is a network"
        )
    subprocess.run([python, "-m", "venv", "--clear", "--without-pip", str(folder)], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    lines = [f"import site; site.addsitedir({path!r})" for path in machine.facts["paths"]]
    (site / "outer.pth").write_text("\n".join(lines) + "\n", encoding="utf-8")
    installed = set(machine.facts["installed"])
    chosen = [str(f) for f in files if name_of(f) in _OURS or name_of(f) not in installed]
    subprocess.run(
        [python, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-index",
         "--no-deps", "--no-warn-conflicts", "--target", str(site), *chosen],
        check=True,
    )  # fmt: skip
    return (folder / "bin" / "python").absolute()


def versions(wheels: Path) -> dict[str, str]:
    """Return the versions of Megatron and of this package, as their wheels name them."""
    named = {name_of(wheel): wheel.name.split("-")[1] for wheel in wheels.glob("*.whl")}
    return {name: named[name] for name in _OURS if name in named}


def name_of(wheel: Path) -> str:
    """Example: `name_of(Path("pydantic_core-2.0-cp312-none.whl")) == "pydantic-core"`."""
    return re.sub(r"[-_.]+", "-", wheel.name.partition("-")[0]).lower()


def environ(root: Path, device: str) -> dict[str, str]:
    """Return the environment variables that every stage runs with."""
    # The tree, whose tests and benchmarks are run; the package is that of the wheel folder.
    helpers = str(root / "tests" / "gpu")
    path = os.pathsep.join([helpers, *filter(None, [os.environ.get("PYTHONPATH")])])
    return {
        **os.environ,
        "PYTHONPATH": path,
        "MEGATRON_IDEMPOTENT_DEVICE": device,
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1"),
        "PYTHONUNBUFFERED": "1",
    }


if __name__ == "__main__":
    print(json.dumps(look(sys.argv[1] if len(sys.argv) > 1 else sys.executable).facts, indent=1))
