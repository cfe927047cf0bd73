"""Runs the CI matrix: proofs of hazards, and tests, on every Megatron release and pinned commit.

The releases and commits are tables in pyproject.toml. Environments are made with uv, which finds or
downloads the Python version for which a release has a wheel.
"""

import itertools
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import nox
import uv

nox.options.sessions = ["matrix"]

PROJECT = nox.project.load_toml("pyproject.toml")
TABLE = PROJECT["tool"]["megatron-idempotent"]
RELEASES = {release["megatron"]: release for release in TABLE["releases"]}
NEWEST = list(RELEASES)[-1]
TORCHES = {each["torch"]: each for each in TABLE["torches"]}
COMMITS = {commit["name"]: commit for commit in TABLE["commits"]}
UPSTREAM = "https://github.com/NVIDIA/Megatron-LM"
#: Packages that also patch Megatron, and the dependencies that they and the frameworks in
#: TABLE["sources"] import.
NEIGHBOURS = (
    *("liger-kernel==0.8.5", "mcore-bridge==1.6.5", "peft>=0.11,<0.21"),
    *("defusedxml>=0.7", "nvidia-ml-py>=12.570"),
)
WORK = Path(".nox")
PROVEN = WORK / "proven"
LAYOUTS = WORK / "layouts"
#: The tests of a release. tests/parity/test_hazards.py is left out, because `prove` does the same
#: and writes its findings to a file.
SUITES = (
    *("tests/patches", "tests/window", "tests/step", "tests/logprobs", "tests/rl/hf"),
    *("tests/parity", "tests/packaging/test_by_value.py"),
    "tests/patching/test_case_files.py",
    "--ignore=tests/parity/test_hazards.py",
    "--ignore=tests/parity/test_right_programs.py",
    "--ignore-glob=tests/step/test_fsdp*",  # without Megatron; the session `fsdp` runs them
    *("--full", "-m", "not exhaustive"),
)
SUITES_OF_COMMITS = (
    *("tests/parity", "tests/patching/fuzz/test_pinned.py"),
    *("tests/patches/test_newer_megatron.py", "tests/patches/test_megatron_fsdp.py"),
    "tests/patches/test_train_interrupted.py::"
    "test_the_caller_s_finalize_function_is_called_in_every_train",
    "--full",
    "--ignore=tests/parity/test_hazards.py",
    "--ignore=tests/parity/test_right_programs.py",
)
#: The verdicts of `prove` that are not failures.
PASSED = ("proven", "documented", "not_applicable")
#: Arguments of `certify` for the layouts of docs/state.md.
STATES = [*("--layout", "dp2-bf16-distopt"), *("--layout", "ep2-fp16-distopt")]
#: Arguments of `certify` for a plain model on 1 to 4 ranks, with both kinds of loss.
FSDP2 = [
    *("--layout", "fsdp2", "--layout", "dp2-fsdp2", "--layout", "dp3-fsdp2"),
    *("--layout", "dp4-fsdp2", "--layout", "dp2-fsdp2-sequences"),
]
#: Arguments of `certify` for layouts that differ only in the number of replicas, on which steps
#: must be bit-identical.
BITS = [
    argument
    for kind in ("", "-moe", "-mtp", "-moe-mtp-tied", "-distopt", "-bf16", "-sequences")
    for replicas in (1, 2, 4)
    for argument in ("--layout", f"dp{replicas}{kind}")
] + [
    argument
    for kind in ("tp2", "pp2", "vpp2", "cp2", "cp2-moe")
    for replicas in (1, 2)
    for argument in ("--layout", f"dp{replicas}-{kind}")
]
#: The tests of a release that the session `gate` runs, in addition to the proofs of all hazards.
GATE = ("tests/patching/test_case_files.py",)
# Megatron 0.15 builds a CUDA extension when it is imported. Without a GPU torch cannot choose its
# architecture, and the import fails on machines with a CUDA compiler.
ENVIRON = {"TORCH_CUDA_ARCH_LIST": "8.0"}
#: The number of sessions that run at once. Each keeps about one core busy: its ranks mostly wait.
JOBS = int(os.environ.get("MATRIX_JOBS") or os.cpu_count() or 1)


@nox.session(venv_backend="none")
@nox.parametrize("megatron", list(RELEASES))
def release(session: nox.Session, megatron: str) -> None:
    """Test one release: `nox -s "release(megatron='0.16.1')" -- [pytest arguments]`."""
    version = RELEASES[megatron]["python"]
    if _run_release(session, megatron, version, WORK / f"release-{megatron}"):
        _prove(session, WORK / f"release-{megatron}", PROVEN / f"{megatron}.json")


@nox.session(venv_backend="none")
@nox.parametrize("version", RELEASES[NEWEST]["also"])
def newest(session: nox.Session, version: str) -> None:
    """Test the newest release of Megatron on another Python: `nox -s "newest(version='3.13')"`."""
    folder = WORK / f"python-{version}"
    if _run_release(session, NEWEST, version, folder):
        _prove(session, folder, folder / "proven.json")


@nox.session(venv_backend="none")
@nox.parametrize(
    ("torch", "version"), [(t, each) for t in TORCHES for each in TORCHES[t].get("suites", ())]
)
def older(session: nox.Session, torch: str, version: str) -> None:
    """Test the newest release of Megatron with an older torch.

    `nox -s "older(torch='2.11.0', version='3.12')"`
    """
    folder = WORK / f"older-{torch}-{version}"
    if _run_release(session, NEWEST, version, folder, torch=torch):
        _prove(session, folder, folder / "proven.json")


@nox.session(venv_backend="none")
def untried(session: nox.Session) -> None:
    """Test the newest Megatron release with the newest torch of all, even above our bound."""
    folder = WORK / "untried"
    version = RELEASES[NEWEST]["python"]
    if _run_release(
        session, NEWEST, version, folder, torch="", suites=("tests/proof/cpu", *SUITES)
    ):
        _prove(session, folder, folder / "proven.json")


@nox.session(venv_backend="none")
@nox.parametrize("torch", [*TORCHES, TABLE["torch"]])
def fsdp(session: nox.Session, torch: str) -> None:
    """Test FSDPTrainStep on one torch: `nox -s "fsdp(torch='2.9.1')" -- [pytest arguments]`."""
    version = RELEASES[NEWEST]["python"]
    folder = WORK / f"fsdp-{torch}"
    deselected = TORCHES.get(torch, {}).get("deselect", ())
    wanted = " and ".join(["fsdp", *(f"not {name}" for name in deselected)])
    _run_release(session, NEWEST, version, folder, torch=torch, suites=("tests/step", "-k", wanted))


@nox.session(venv_backend="none")
@nox.parametrize("version", TABLE["patching"])
def patching(session: nox.Session, version: str) -> None:
    """Test patching/, and the import hook that the command `hook install` adds to an environment.
    The tests run without torch and Megatron.

    The oldest Python is tested with the oldest allowed packages:
    `nox -s "patching(version='3.10')"`.
    """
    folder = WORK / f"patching-{version}"
    python = _environment(session, version, folder)
    groups = nox.project.dependency_groups(PROJECT, "patching")
    bounds = PROJECT["project"]["dependencies"] if version == TABLE["patching"][0] else []
    oldest = [each.replace(">=", "==") for each in bounds]
    _install(session, python, "-e", ".", *groups, *oldest)
    cache = f"cache_dir={folder / 'pytest'}"
    doors = [f"tests/cli/test_{name}.py" for name in ("doors", "hook")]
    chosen = session.posargs or ["tests/patching", *doors]
    session.run(str(python), "-m", "pytest", "-o", cache, *chosen, external=True)


@nox.session(venv_backend="none")
def dist(session: nox.Session) -> None:
    """Build and check wheel and sdist; install each on every Python of pyproject.toml's
    classifiers.

    They stay in dist/, with an SBOM of the packages that an installation of the wheel includes.
    `tests/packaging/test_wheel.py` tests their contents.
    """
    shutil.rmtree("dist", ignore_errors=True)
    tools = _environment(session, RELEASES[NEWEST]["python"], WORK / "dist")
    _install(session, tools, "build>=1.2", "twine>=6", "cyclonedx-bom>=7")
    session.run(str(tools), "-m", "build", "--outdir", "dist", external=True)
    built = sorted(map(str, Path("dist").iterdir()))
    (version,) = (Path(each).name.split("-")[1] for each in built if each.endswith(".whl"))
    session.run(str(tools), "-m", "twine", "check", "--strict", *built, external=True)
    prefix = "Programming Language :: Python :: 3."
    minors = [each for each in PROJECT["project"]["classifiers"] if each.startswith(prefix)]
    for number, package in itertools.product([each.rpartition(".")[2] for each in minors], built):
        kind = "wheel" if package.endswith(".whl") else "sdist"
        folder = (WORK / f"dist-3.{number}-{kind}").absolute()
        shutil.rmtree(folder, ignore_errors=True)
        python = _environment(session, f"3.{number}", folder)
        _install(session, python, str(Path(package).absolute()))
        command = [str(python.absolute()), "-I", "-m", "megatron_idempotent"]
        for asked in (["doctor"], ["explain", "no-sync-func-reentry"]):
            # In another folder: in this one, Python would import the checkout.
            with session.chdir(folder):
                session.run(*command, *asked, external=True, silent=True)
    # CycloneDX omits a version that the build computes, and does not find the readme: give it a
    # pyproject.toml with the version and without the readme.
    project = WORK / "dist" / "pyproject.toml"
    dynamic, said = 'dynamic = ["version", "readme"]', Path("pyproject.toml").read_text()
    project.write_text(said.replace(dynamic, f'version = "{version}"'))
    sbom = Path("dist", f"megatron_idempotent-{version}.cdx.json")
    session.run(
        *(str(tools.with_name("cyclonedx-py")), "environment"),
        *("--pyproject", str(project), "--mc-type", "library", "--output-reproducible"),
        *("--output-file", str(sbom)),
        str(WORK / f"dist-{RELEASES[NEWEST]['python']}-wheel" / "bin" / "python"),
        external=True,
    )  # fmt: skip
    whose = json.loads(sbom.read_text())["metadata"]["component"]
    if (whose["name"], whose.get("version")) != (PROJECT["project"]["name"], version):
        session.error(f"the wheel is of {version}, and its SBOM of {whose}: see {project}")


def _environment(session: nox.Session, version: str, folder: Path) -> Path:
    python = folder / "bin" / "python"
    if not python.exists():
        command = [uv.find_uv_bin(), "venv", "--quiet", "--python", version, str(folder)]
        session.run(*command, external=True)
    return python


def _install(session: nox.Session, python: Path, *packages: str) -> None:
    command = [uv.find_uv_bin(), "pip", "install", "--quiet", "--python", str(python), *packages]
    session.run(*command, external=True)


def _run_release(
    session: nox.Session,
    megatron: str,
    version: str,
    folder: Path,
    *,
    torch: str = TABLE["torch"],
    suites: tuple[str, ...] = SUITES,
) -> bool:
    """Run the tests with one release of Megatron, in an environment of its own. Return True if the
    caller shall also run `megatron-idempotent prove` in that environment.

    They are not if the command line selects tests.
    """
    python = _release(session, megatron, version, folder, torch)
    cache = f"cache_dir={folder / 'pytest'}"
    gate_only = session.posargs == ["gate"]
    chosen = GATE if gate_only else session.posargs or suites
    session.run(str(python), "-m", "pytest", "-o", cache, *chosen, env=ENVIRON, external=True)
    return gate_only or not session.posargs


def _release(
    session: nox.Session, megatron: str, version: str, folder: Path, torch: str = TABLE["torch"]
) -> Path:
    """Make an environment with one release; return its Python.

    An empty `torch` installs the newest torch on the package index.
    """
    wants = RELEASES[megatron]
    python = _environment(session, version, folder)
    core, extra = (
        ("megatron-core[training]", "[trainer]")
        if wants["training"]
        else ("megatron-core", "[controller]")
    )
    more = TORCHES.get(torch, {}).get("requires", ())
    packages = [f"{core}=={megatron}", *wants["requires"], *more]
    if torch:
        packages.append(f"torch=={torch}")
    else:
        (unbound := folder / "unbound.txt").write_text("torch\n")
        packages += ["--upgrade-package", "torch", "--overrides", str(unbound)]
    groups = nox.project.dependency_groups(PROJECT, "test")
    _install(session, python, *packages, "-e", f".{extra}", *groups)
    return python


def _prove(session: nox.Session, folder: Path, findings: Path) -> None:
    findings.parent.mkdir(parents=True, exist_ok=True)
    command = [str(folder / "bin" / "megatron-idempotent"), "prove", "--json"]
    with open(findings, "w") as file:
        # Separate stdout, because importing some releases prints warnings to stderr.
        session.run(*command, env=ENVIRON, external=True, stdout=file, stderr=sys.stderr)


@nox.session(venv_backend="none")
def matrix(session: nox.Session) -> None:
    """Test every release, and the newest one on each Python and torch; write logs to .nox/.

    This includes the sessions `fsdp` and `patching`. As many sessions run at once as there are
    cores, or MATRIX_JOBS.
    """
    others = [f"newest(version='{version}')" for version in RELEASES[NEWEST]["also"]]
    for torch, wants in TORCHES.items():
        pythons = wants.get("suites", ())
        others += [f"older(torch='{torch}', version='{version}')" for version in pythons]
    if not session.posargs:
        others += [f"fsdp(torch='{torch}')" for torch in (*TORCHES, TABLE["torch"])]
        others += [f"patching(version='{version}')" for version in TABLE["patching"]]
    _run_all(session, [*_releases(RELEASES), *others], session.posargs)
    if not session.posargs:
        _write_down(session, PROVEN)


@nox.session(venv_backend="none")
def gate(session: nox.Session) -> None:
    """Run the tests in `GATE` and prove all hazards on the older Megatrons that .ci/run checks."""
    _run_all(session, _releases(TABLE["gate"]), session.posargs or ["gate"])


def _write_down(session: nox.Session, proven: Path) -> None:
    command = [sys.executable, "tools/casebook.py", "--proven", str(proven)]
    session.run(*command, external=True)


def _releases(releases: Iterable[str]) -> list[str]:
    return [f"release(megatron='{megatron}')" for megatron in releases]


def _run_all(session: nox.Session, names: list[str], arguments: list[str]) -> None:
    WORK.mkdir(exist_ok=True)
    with ThreadPoolExecutor(JOBS) as pool:
        results = list(pool.map(_in_a_process, names, [arguments] * len(names)))
    for name, code, seconds, last in results:
        session.log(f"{name:40} {'passed' if code == 0 else 'FAILED':7} {seconds:5.0f} s  {last}")
    failed = [name for name, code, _, _ in results if code]
    for name in failed:
        print(_log(name).read_text()[-8000:])
    if failed:
        logs = ", ".join(str(_log(name)) for name in failed)
        session.error(f"{', '.join(failed)} failed: see {logs}")


@nox.session(venv_backend="none")
@nox.parametrize("name", list(COMMITS))
def commit(session: nox.Session, name: str) -> None:
    """Test a pinned commit: `nox -s "commit(name='main')" -- [pytest arguments]`.

    The sources come from a clone that MEGATRON_LM names, or from the network. The session also
    fails if the refused patches are not exactly those in the table of pyproject.toml.
    """
    _run_commit(session, name, COMMITS[name])


@nox.session(venv_backend="none")
@nox.parametrize("branch", ["main", "dev"])
def head(session: nox.Session, branch: str) -> None:
    """Test the newest commit of a branch of Megatron-LM, like a pinned commit."""
    commit = _newest_commit(session, branch)
    _run_commit(session, branch, COMMITS[branch] | {"commit": commit})


def _newest_commit(session: nox.Session, branch: str) -> str:
    """Return the id of the newest commit of a branch of Megatron-LM: in the first clone that
    MEGATRON_LM names, or else on GitHub.
    """
    where = os.environ.get("MEGATRON_LM", "").split(os.pathsep)[0] or UPSTREAM
    listed = session.run("git", "ls-remote", where, branch, "HEAD", external=True, silent=True)
    commits = {name: commit for commit, name in map(str.split, str(listed).splitlines())}
    commit = commits.get(f"refs/heads/{branch}") or commits["HEAD"]
    session.log(f"{branch} is at {commit}")
    return commit


def _run_commit(session: nox.Session, name: str, wants: dict) -> None:
    folder = WORK / "commits"
    python, env, tree = _commit(session, wants, folder)
    ours = [str(python), "-m", "megatron_idempotent"]
    refused = _refused(ours, tree)
    chosen = session.posargs or SUITES_OF_COMMITS
    cache = f"cache_dir={folder / 'pytest'}"
    # Disable refused patches: tests call `apply()` in strict mode, which raises for them.
    without = {"MEGATRON_IDEMPOTENT_DISABLE": ",".join(refused)}
    others = " and ".join(f"not {name}" for name in wants.get("deselect", ()))
    command = [str(python), "-m", "pytest", "-o", cache, "-k", others, *chosen]
    session.run(*command, env=env | without, external=True)
    wrong = []
    if not session.posargs:
        (folder / "proven").mkdir(exist_ok=True)
        findings = folder / "proven" / f"{name}.json"
        with open(findings, "w") as file:
            session.run(
                *(*ours, "prove", "--json"),
                env=env,
                external=True,
                success_codes=[0, 1],  # `_unexpected` reports failures that are not known
                stdout=file,
                stderr=sys.stderr,
            )
        wrong = _unexpected(findings, wants)
    # Last, so that the tests of the other patches have run in any case.
    if sorted(refused) != sorted(wants.get("refused", ())):
        subprocess.run([*ours, "drift", "--diff", str(tree)])
        wrong.append(f"refuses {refused}, known are {wants.get('refused')}")
    if wrong:
        session.error("\n".join([f"{wants['commit'][:12]}:", *wrong]))


def _unexpected(findings: Path, wants: dict) -> list[str]:
    """Return a description of each hazard whose proof failed, or succeeded, unexpectedly.

    `wants` is the commit's entry in pyproject.toml, with its `unproven` and `refused` hazards.
    """
    rows = {row["id"]: row for row in json.loads(findings.read_text())}
    failed = {id for id, row in rows.items() if row["verdict"] not in PASSED}
    unproven = set(wants.get("unproven", ()))
    lines = [
        f"{id} is {rows[id]['verdict']}: stock {rows[id]['stock']}, patched {rows[id]['patched']}"
        for id in sorted(failed - unproven - set(wants.get("refused", ())))
    ]
    proven = sorted(unproven - failed)
    return lines + [f"{id} is `unproven` in pyproject.toml, and its proof held" for id in proven]


def _commit(session: nox.Session, wants: dict, folder: Path) -> tuple[Path, dict[str, str], Path]:
    """Prepare an environment and the sources of a Megatron commit. Return the Python, the
    environment variables and the source folder.
    """
    python = _with_newest(session, folder / "python")
    tree = _sources(session, wants, folder, python)
    beside = [_unpacked(session, each, folder) for each in wants.get("beside", ())]
    # The sources precede the installed release, of which only the dependencies are used.
    path = os.pathsep.join(map(str, [Path.cwd(), tree, *beside]))
    return python, {**ENVIRON, "PYTHONPATH": path}, tree


@nox.session(venv_backend="none")
@nox.parametrize("where", ["pinned", "newest"])
def repairs(session: nox.Session, where: str) -> None:
    """Prove upstream/'s repairs on Megatron's main: `nox -s "repairs(where='pinned')" -- [ID]…`.

    Pinned is the commit of main in pyproject.toml. The sources come from a clone that MEGATRON_LM
    names, or from the network.
    """
    wants = COMMITS["main"] | {"packages": ["megatron", "tests"]}
    if where == "newest":
        wants["commit"] = _newest_commit(session, "main")
    folder = WORK / "commits"
    python = _with_newest(session, folder / "python")
    tree = _unpacked(session, wants, folder)
    for how in ((), ("--together",)):
        command = [str(python), "tools/repairs.py", "prove", str(tree), *session.posargs]
        session.run(*command, "--all", *how, env=ENVIRON, external=True)


@nox.session(venv_backend="none")
def downstream(session: nox.Session) -> None:
    """Run tests/downstream on RL frameworks' sources: `nox -s downstream -- [pytest arguments]`.

    The sources come from the clones that MEGATRON_LM names, separated by colons, or from the
    network. If all tests of a recipe pass, the recipe's page gets today's date; not if arguments
    choose tests.
    """
    spread = ["-n", str(JOBS + 1), "--dist", "worksteal"]
    more = [*NEIGHBOURS, "nbclient>=0.10", "ipykernel>=6"]
    report = WORK / "downstream.xml"
    spread.append(f"--junitxml={report}")
    try:
        _downstream(session, "python", spread, ["tests/downstream"], *more)
    finally:
        if report.exists() and not session.posargs:
            session.run(sys.executable, "tools/recipe_dates.py", str(report), external=True)


@nox.session(venv_backend="none")
def entries(session: nox.Session) -> None:
    """Test the frameworks' own entry points, with the packages that they import.

    `nox -s entries -- [pytest arguments]`. Tests run one at a time, because each starts a Ray node
    or ranks.
    """
    tests = [f"tests/downstream/test_framework_{what}.py" for what in ("doors", "entries")]
    _downstream(session, "entries", ["-n", "0"], tests, *TABLE["entries"])


def _downstream(
    session: nox.Session, environment: str, options: list[str], tests: list[str], *more: str
) -> None:
    """Run `tests` on RL frameworks' sources, in an environment with the packages `more`."""
    folder = WORK / "commits"
    python = _with_newest(session, folder / environment, *more)
    env = {**ENVIRON, "OMP_NUM_THREADS": "1"}
    for source in TABLE["sources"]:
        tree = _unpacked(session, source, folder)
        env |= {name: str(tree / inside) for name, inside in source["variables"].items()}
    cache = f"cache_dir={folder / 'pytest'}"
    command = [str(python), "-m", "pytest", "--full", "-o", cache, *options]
    session.run(*command, *(session.posargs or tests), env=env, external=True)


@nox.session(venv_backend="none")
def layouts(session: nox.Session) -> None:
    """Certify layouts of ranks for docs/layouts.md: `nox -s layouts -- [release or commit]...`.

    It checks steps in one call and in three, all checks of `TrainStep`, and equal bits on any
    number of replicas; on the newest release also FSDP2.
    """
    steps, bits = ["--check", "split-step"], ["--check", "same-bits"]
    for name in session.posargs or (*TABLE["gate"], NEWEST, "nemo-rl", "main"):
        judgements = {
            "Megatron": ["--grid", *steps],
            "Window": ["--grid", *steps],
            "SplitStep": ["--grid"],
            "OrderStable": [*BITS, *bits],
            **({"FSDPSplitStep": FSDP2} if name == NEWEST else {}),
        }
        _certify(session, name, LAYOUTS, "adapters", judgements)
    session.run(sys.executable, "-m", "benchmarks._layouts", str(LAYOUTS), external=True)


@nox.session(venv_backend="none")
def states(session: nox.Session) -> None:
    """Certify saved states for docs/state.md: `nox -s states -- [release or commit]...`."""
    core = ("DPReshardable", "Persistent", "FullyReshardable", "ModelSpace", "OnHost", "LowRank")
    for name in session.posargs or ("0.16.1", "0.18.2", NEWEST):
        training = RELEASES.get(name, {}).get("training", True)
        adapters = (*core, "Training", "TrainingFully", "Legacy") if training else core
        judgements = {adapter: ["--state", "--declared", *STATES] for adapter in adapters}
        _certify(session, name, WORK / "states", "checkpoints", judgements)
    session.run(sys.executable, "-m", "benchmarks._states", str(WORK / "states"), external=True)


def _certify(
    session: nox.Session, name: str, folder: Path, module: str, judgements: dict[str, list[str]]
) -> None:
    """Run `certify` on a release or commit; write the results to FOLDER/NAME/ADAPTER.json.

    `judgements` are the arguments for each adapter in `module`.
    """
    if name in RELEASES:
        python = _release(session, name, RELEASES[name]["python"], WORK / f"release-{name}")
        env = ENVIRON
    else:
        python, env, _ = _commit(session, COMMITS[name], WORK / "commits")
    (folder / name).mkdir(parents=True, exist_ok=True)
    for adapter, given in judgements.items():
        judged = f"megatron_idempotent.proof.certify.{module}:{adapter}"
        with open(folder / name / f"{adapter}.json", "w") as file:
            command = [
                str(python),
                "-m",
                "megatron_idempotent",
                "certify",
                judged,
                *given,
                "--json",
            ]
            codes = (0, 1)  # 1 if a check failed, which the page then shows
            options = {"stdout": file, "stderr": sys.stderr, "success_codes": codes}
            session.run(*command, env=env, external=True, **options)


def _refused(ours: list[str], tree: Path) -> list[str]:
    """Return the ids of the patches that `apply()` would refuse on a source tree, because the code
    that they patch has changed.
    """
    done = subprocess.run([*ours, "drift", "--json", str(tree)], stdout=subprocess.PIPE, text=True)
    rows = json.loads(done.stdout)
    return [row["id"] for row in rows if row["standing"] == "drifted"]


def _with_newest(session: nox.Session, folder: Path, *more: str) -> Path:
    newest = RELEASES[NEWEST]
    python = _environment(session, newest["python"], folder)
    core = f"megatron-core[training]=={NEWEST}"
    packages = [f"torch=={TABLE['torch']}", core, *newest["requires"]]
    groups = nox.project.dependency_groups(PROJECT, "test")
    _install(session, python, *packages, "-e", ".[trainer]", *groups, *more)
    return python


def _sources(session: nox.Session, wants: dict, folder: Path, python: Path) -> Path:
    tree = _unpacked(session, wants, folder)
    if "patch" in wants:
        tree = _patched(session, tree, wants["patch"], folder)
    # Megatron compiles this helper when it starts from a checkout; copy the wheel's instead.
    datasets = Path("megatron") / "core" / "datasets"
    (installed,) = python.parents[1].glob("lib/python*/site-packages")
    for library in (installed / datasets).glob("helpers_cpp*.so"):
        shutil.copy2(library, tree / datasets)
    (tree / datasets / "Makefile").write_text("all:\n\ttrue\n")
    return tree


def _unpacked(session: nox.Session, wants: dict, folder: Path) -> Path:
    """Extract packages of a commit, by default `megatron`, and return the folder with them.

    `wants` is the commit's entry in pyproject.toml.
    """
    revision, packages = wants["commit"], wants.get("packages", ["megatron"])
    clone = _clone(session, revision, wants.get("repository", UPSTREAM), folder)
    tree = (folder / revision).absolute()
    if not (tree / packages[-1]).exists():
        tree.mkdir(parents=True, exist_ok=True)
        archive = (folder / f"{revision}.tar").absolute()
        command = ["git", "-C", str(clone), "archive", "-o", str(archive), revision, *packages]
        session.run(*command, external=True)
        session.run("tar", "-xf", str(archive), "-C", str(tree), external=True)
        archive.unlink()
    return tree


def _patched(session: nox.Session, tree: Path, patch: dict, folder: Path) -> Path:
    """Copy Megatron's sources, apply a framework's patch file to the copy, and return the copy."""
    copy = tree.with_name(f"{tree.name}-{patch['commit']}")
    if not copy.exists():
        clone = _clone(session, patch["commit"], patch["repository"], folder)
        what = f"{patch['commit']}:{patch['path']}"
        text = subprocess.check_output(["git", "-C", str(clone), "show", what])
        half = copy.with_name(f"{copy.name}.part")
        shutil.copytree(tree, half)
        subprocess.run(["patch", "--strip=1", "--silent"], cwd=half, input=text, check=True)
        half.rename(copy)
    return copy


def _clone(session: nox.Session, revision: str, repository: str, folder: Path) -> Path:
    """Return a git clone that has the commit: one that MEGATRON_LM names, or a new one."""
    ours = (folder / f"{revision}.git").absolute()
    given = filter(None, os.environ.get("MEGATRON_LM", "").split(os.pathsep))
    for clone in (*map(Path, given), ours):
        asked = ["git", "-C", str(clone), "cat-file", "-e", f"{revision}^{{commit}}"]
        if subprocess.run(asked, stderr=subprocess.DEVNULL).returncode == 0:
            return clone.absolute()
    # A full fetch of the commit: a partial clone would fetch each file separately when it is read.
    session.run("git", "init", "--quiet", "--bare", str(ours), external=True)
    fetch = ["git", "-C", str(ours), "fetch", "--quiet", "--depth=1", repository, revision]
    session.run(*fetch, external=True)
    return ours


@nox.session(venv_backend="none")
def pins(session: nox.Session) -> None:
    """Test every pinned commit: check its drift, run the parity tests, and prove each hazard."""
    _with_newest(session, WORK / "commits" / "python")  # the environment that all commits share
    _run_all(session, [f"commit(name='{name}')" for name in COMMITS], session.posargs)
    if not session.posargs:
        _write_down(session, WORK / "commits" / "proven")


def _log(name: str) -> Path:
    kind, _, values = name.partition("(")
    return WORK / f"{'-'.join([kind, *values.split(chr(39))[1::2]])}.log"


def _in_a_process(name: str, arguments: list[str]) -> tuple[str, int, float, str]:
    started = time.monotonic()
    log = _log(name)
    command = [sys.executable, "-m", "nox", "--session", name, "--", *arguments]
    with log.open("w") as file:
        code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT).returncode
    summary = [
        line for line in log.read_text().splitlines() if " passed" in line or " failed" in line
    ]
    return name, code, time.monotonic() - started, summary[-1] if summary else ""


@nox.session(venv_backend="none")
def drift(session: nox.Session) -> None:
    """Compare all release wheels, and source trees given as arguments, with patches' case files."""
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
