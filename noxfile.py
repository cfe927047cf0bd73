"""The CI matrix: the hazards, the patches and the parity suite on every Megatron release.

The releases are a table in pyproject.toml. Environments are made with uv, because it finds, or
fetches, the Python that each release has a wheel for.
"""

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox
import uv

nox.options.sessions = ["matrix"]

PROJECT = nox.project.load_toml("pyproject.toml")
TABLE = PROJECT["tool"]["megatron-idempotent"]
RELEASES = {release["megatron"]: release for release in TABLE["releases"]}
WORK = Path(".nox")
PROVEN = WORK / "proven"
#: tests/parity/test_hazards.py is what `prove` does, and that writes down what it found.
SUITES = (
    *("tests/patches", "tests/step", "tests/logprobs", "tests/models", "tests/parity"),
    "tests/engine/test_case_files.py",
    "--ignore=tests/parity/test_hazards.py",
    "--ignore-glob=tests/step/test_fsdp*",  # there is no Megatron in it
    *("-m", "not exhaustive"),
)
#: What the gate runs of them; it proves every hazard, too.
GATE = ("tests/engine/test_case_files.py",)
#: A release spends its time in one core: ranks wait for each other.
JOBS = int(os.environ.get("MATRIX_JOBS") or os.cpu_count() or 1)


@nox.session(venv_backend="none")
@nox.parametrize("megatron", list(RELEASES))
def release(session: nox.Session, megatron: str) -> None:
    """One release: `nox -s "release(megatron='0.16.1')" -- [pytest arguments]`."""
    wants = RELEASES[megatron]
    folder = WORK / f"release-{megatron}"
    python = folder / "bin" / "python"
    run_uv = [uv.find_uv_bin()]
    if not python.exists():
        session.run(
            *run_uv, "venv", "--quiet", "--python", wants["python"], str(folder), external=True
        )
    core, extra = (
        ("megatron-core[training]", "[trainer]") if wants["training"] else ("megatron-core", "")
    )
    packages = [f"torch=={TABLE['torch']}", f"{core}=={megatron}", *wants["requires"]]
    groups = nox.project.dependency_groups(PROJECT, "test")
    session.run(
        *run_uv, "pip", "install", "--quiet", "--python", str(python),
        *packages, "-e", f".{extra}", *groups, external=True,
    )  # fmt: skip
    # 0.15 builds a CUDA extension while it is imported; without a device torch finds no
    # architecture to build it for, and the import fails where a CUDA compiler is installed.
    env = {"TORCH_CUDA_ARCH_LIST": "8.0"}
    cache = f"cache_dir={folder / 'pytest'}"
    gate_only = session.posargs == ["gate"]
    chosen = GATE if gate_only else session.posargs or SUITES
    session.run(str(python), "-m", "pytest", "-o", cache, *chosen, env=env, external=True)
    if session.posargs and not gate_only:
        return
    PROVEN.mkdir(parents=True, exist_ok=True)
    command = [str(folder / "bin" / "megatron-idempotent"), "prove", "--json"]
    with open(PROVEN / f"{megatron}.json", "w") as findings:
        # nox would send both to one file, and releases warn while they are imported.
        session.run(*command, env=env, external=True, stdout=findings, stderr=sys.stderr)


@nox.session(venv_backend="none")
def matrix(session: nox.Session) -> None:
    """Every release, as many at once as there are cores (MATRIX_JOBS); logs in .nox/."""
    _run_all(session, list(RELEASES), session.posargs)
    if not session.posargs:
        command = [sys.executable, "-m", "megatron_idempotent.casebook", "--proven", str(PROVEN)]
        session.run(*command, external=True)


@nox.session(venv_backend="none")
def gate(session: nox.Session) -> None:
    """The releases that .ci/run runs beside the newest one."""
    _run_all(session, TABLE["gate"], session.posargs or ["gate"])


def _run_all(session: nox.Session, releases: list[str], arguments: list[str]) -> None:
    WORK.mkdir(exist_ok=True)
    with ThreadPoolExecutor(JOBS) as pool:
        results = list(pool.map(_in_a_process, releases, [arguments] * len(releases)))
    for name, code, seconds, last in results:
        session.log(f"{name:8} {'passed' if code == 0 else 'FAILED':7} {seconds:5.0f} s  {last}")
    failed = [name for name, code, _, _ in results if code]
    for name in failed:
        print((WORK / f"{name}.log").read_text()[-8000:])
    if failed:
        session.error(f"failed on {', '.join(failed)}: see {WORK}/<release>.log")


def _in_a_process(megatron: str, arguments: list[str]) -> tuple[str, int, float, str]:
    started = time.monotonic()
    log = WORK / f"{megatron}.log"
    name = f"release(megatron='{megatron}')"
    command = [sys.executable, "-m", "nox", "--session", name, "--", *arguments]
    with log.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
    summary = [
        line for line in log.read_text().splitlines() if " passed" in line or " failed" in line
    ]
    return megatron, code, time.monotonic() - started, summary[-1] if summary else ""


@nox.session(venv_backend="none")
def drift(session: nox.Session) -> None:
    """All release wheels, and the source trees given as arguments, against the case files."""
    wheels = WORK / "wheels"
    pythons = {name.rpartition(".")[0]: wants["python"] for name, wants in RELEASES.items()}
    for megatron in (*TABLE["read"], *RELEASES):
        if not list(wheels.glob(f"megatron_core-{megatron}-*.whl")):
            session.run(
                sys.executable, "-m", "pip", "download", "--quiet", "--no-deps",
                "--only-binary", ":all:", "--python-version", pythons[megatron.rpartition(".")[0]],
                "--dest", str(wheels), f"megatron-core=={megatron}",
            )  # fmt: skip
    command = str(Path(sys.executable).parent / "megatron-idempotent")
    session.run(command, "drift", str(wheels), *session.posargs, external=True)
