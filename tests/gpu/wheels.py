"""Fill a folder with the wheels that a GPU machine without a network needs; `make wheels` runs it.

    python tests/gpu/wheels.py [--to build/wheels] [--python 3.12] [--limit-mb 50]

`wheels.txt` lists them; ours is built from the tree. Fails where the folder outgrows the limit, or
holds torch, triton or a wheel of NVIDIA's: those are the machine's own.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
#: glibc 2.28 and older, which any machine with CUDA 12 has.
PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_24_x86_64", "manylinux_2_17_x86_64",
             "manylinux2014_x86_64", "manylinux_2_12_x86_64", "manylinux_2_5_x86_64")  # fmt: skip
#: Prefixes of what has to come from the machine.
ITS_OWN = ("torch", "triton", "nvidia")
MB = 1_000_000


def requirements(text: str) -> list[str]:
    """The lines of wheels.txt that name something."""
    lines = (line.partition("#")[0].strip() for line in text.splitlines())
    return [line for line in lines if line]


def refused(folder: Path, limit_mb: float) -> str | None:
    """Why the folder may not travel, or None."""
    wheels = sorted(folder.glob("*.whl"))
    foreign = [wheel.name for wheel in wheels if wheel.name.startswith(ITS_OWN)]
    if foreign:
        return f"{', '.join(foreign)}: torch, triton and NVIDIA's wheels are the machine's own"
    size_mb = sum(wheel.stat().st_size for wheel in wheels) / MB
    if size_mb >= limit_mb:
        return f"{len(wheels)} wheels are {size_mb:.1f} MB; allowed: below {limit_mb:g} MB"
    return None


def main() -> int:
    """Fetch, build, list, check; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--to", type=Path, default=ROOT / "build" / "wheels")
    parser.add_argument("--python", default="3.12", help="of the GPU machine")
    parser.add_argument("--limit-mb", type=float, default=50.0)
    asked = parser.parse_args()
    asked.to.mkdir(parents=True, exist_ok=True)
    for old in asked.to.glob("*.whl"):
        old.unlink()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    wanted = requirements((HERE / "wheels.txt").read_text(encoding="utf-8"))
    platforms = [part for name in PLATFORMS for part in ("--platform", name)]
    subprocess.run(
        [*pip, "download", "--quiet", "--no-deps", "--only-binary", ":all:", "--implementation",
         "cp", "--python-version", asked.python, *platforms, "--dest", str(asked.to), *wanted],
        check=True,
    )  # fmt: skip
    # What an earlier build left there would go into this wheel too.
    for left in (ROOT / "build" / "lib", *(ROOT / "build").glob("bdist.*")):
        shutil.rmtree(left, ignore_errors=True)
    subprocess.run(
        [*pip, "wheel", "--quiet", "--no-deps", "--wheel-dir",
         str(asked.to), str(ROOT)],
        check=True,
    )  # fmt: skip
    wheels = sorted(asked.to.glob("*.whl"), key=lambda wheel: -wheel.stat().st_size)
    for wheel in wheels:
        print(f"{wheel.stat().st_size / MB:8.2f} MB  {wheel.name}")
    total = sum(wheel.stat().st_size for wheel in wheels) / MB
    print(f"{total:8.2f} MB  {len(wheels)} wheels in {asked.to}")
    why = refused(asked.to, asked.limit_mb)
    if why is not None:
        print(f"{asked.to}: {why}", file=sys.stderr)
    return 0 if why is None else 1


if __name__ == "__main__":
    sys.exit(main())
