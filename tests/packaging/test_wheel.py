"""Installs a wheel, an sdist or a bare tree: each brings one copy of everything."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from email import message_from_bytes
from email.message import Message
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

pytestmark = pytest.mark.full

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
#: What building adds to the sdist.
GENERATED = {"PKG-INFO", "setup.cfg"}


def run(*command: str, cwd: Path, code: int = 0, **environ: str) -> str:
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env={**os.environ, **environ}, check=False
    )
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout + result.stderr


def tracked() -> set[str]:
    """The project's files: what git lists, or in an sdist all that is there."""
    if (ROOT / ".git").exists():
        # With what is about to be added, as the files of a change under test are.
        listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
        return {name for name in listed.splitlines() if (ROOT / name).is_file()}
    ignored = (".venv", ".nox", "__pycache__", ".egg-info", ".pytest_cache", "build", "dist")
    found = (path.relative_to(ROOT) for path in ROOT.rglob("*") if path.is_file())
    return {
        str(path)
        for path in found
        if str(path) not in GENERATED and not any(part.endswith(ignored) for part in path.parts)
    }


@pytest.fixture(scope="module")
def tree(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source tree, because building leaves traces in one."""
    source = tmp_path_factory.mktemp("source")
    for name in tracked():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, source / name)
    return source


def build(what: str, source: Path, out: Path) -> Path:
    """Build with the project's backend, as `pip` and `python -m build` do."""
    program = f"from setuptools import build_meta; build_meta.build_{what}({str(out)!r})"
    run(sys.executable, "-c", program, cwd=source)
    (found,) = out.iterdir()
    return found


@pytest.fixture(scope="module")
def sdist(tree: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("sdist", tree, tmp_path_factory.mktemp("sdist"))


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sdist."""
    unpacked = tmp_path_factory.mktemp("unpacked")
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (source,) = unpacked.iterdir()
    return build("wheel", source, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds what the wheel installs, and nothing else."""
    target = tmp_path_factory.mktemp("site")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(target)
    return target


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {
            name: archive.read(name) for name in archive.namelist() if not name.endswith("/RECORD")
        }


def test_the_sdist_is_what_git_tracks(sdist):
    with tarfile.open(sdist) as archive:
        names = {entry.name.partition("/")[2] for entry in archive if entry.isfile()}
    names = {name for name in names if not name.startswith("megatron_idempotent.egg-info/")}
    assert names - GENERATED == tracked() - GENERATED


def test_the_wheel_has_every_module_and_data_file_under_one_name(wheel, tree, tmp_path):
    inside = contents(wheel)
    expected = {
        f"megatron_idempotent/{name}" if name.startswith("patches/") else name
        for name in tracked()
        if name.startswith(("megatron_idempotent/", "patches/"))
    }
    metadata = {name for name in inside if ".dist-info/" in name}
    assert inside.keys() - metadata == expected
    assert any(name.endswith("licenses/LICENSE") for name in metadata)
    assert any(name.endswith("entry_points.txt") for name in metadata)
    assert contents(build("wheel", tree, tmp_path)) == inside, "from the tree, not from the sdist"


def test_the_tools_of_maintainers_are_in_the_sdist_and_not_in_the_wheel(sdist, wheel):
    tools = {path.name for path in (ROOT / "tools").glob("*.py")}
    assert "casebook.py" in tools
    with tarfile.open(sdist) as archive:
        unpacked = {Path(entry.name) for entry in archive}
    assert {path.name for path in unpacked if path.parent.name == "tools"} >= tools
    assert not tools & {Path(name).name for name in contents(wheel)}


def metadata(wheel: Path) -> Message:
    (name,) = (name for name in contents(wheel) if name.endswith(".dist-info/METADATA"))
    return message_from_bytes(contents(wheel)[name])


@pytest.mark.exhaustive
def test_a_bump_is_one_line_and_a_run_of_the_casebook(tree, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(tree, source, ignore=shutil.ignore_patterns("*.egg-info", "build"))
    package = source / "megatron_idempotent" / "__init__.py"
    text, places = re.subn(
        r'(?m)^__version__ = ".+"$', '__version__ = "9.8.7"', package.read_text()
    )
    assert places == 1
    package.write_text(text)
    run(sys.executable, "tools/casebook.py", cwd=source)
    assert "\nversion: 9.8.7\n" in (source / "CITATION.cff").read_text()
    wheel = build("wheel", source, tmp_path / "wheel")
    assert wheel.name.startswith("megatron_idempotent-9.8.7-")
    assert metadata(wheel)["Version"] == "9.8.7"
    # From the archive itself, of which nothing is installed.
    program = (
        f"import sys; sys.path.insert(0, {str(wheel)!r})\n"
        "import megatron_idempotent; print(megatron_idempotent.__version__)"
    )
    assert run(sys.executable, "-S", "-I", "-c", program, cwd=tmp_path) == "9.8.7\n"
    assert run(sys.executable, "-m", "megatron_idempotent", "--version", cwd=source).endswith(
        " 9.8.7\n"
    )


def test_each_link_of_the_readme_on_the_index_leads_to_a_file_of_the_tag(wheel):
    said = metadata(wheel)
    assert said["Description-Content-Type"] == "text/markdown"
    readme = said.get_payload()
    there = re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", readme)
    here = re.findall(r"!?\[[^\]]*\]\(([^)\s]+)\)", (ROOT / "README.md").read_text("utf-8"))
    assert len(there) == len(here)
    assert all(link.startswith("https://") for link in there), there
    repository = PROJECT["project"]["urls"]["Repository"]
    tag = f"v{said['Version']}/"
    moved = [link for link in there if link not in here]
    assert len(moved) == len([link for link in here if not link.startswith("https://")])
    for link in moved:
        kind, path = link.removeprefix(f"{repository}/").split("/", 1)
        assert kind == ("raw" if path.endswith(".png") else "blob")
        assert (ROOT / path.removeprefix(tag).partition("#")[0]).exists(), link
        assert path.startswith(tag)


def test_the_installed_wheel_finds_its_case_files(installed):
    # -S -I: neither this environment's site-packages nor its editable install.
    program = (
        f"import sys; sys.path.insert(0, {str(installed)!r})\n"
        "import megatron_idempotent\n"
        "print(megatron_idempotent.__file__)\n"
        "megatron_idempotent.apply()\n"
        "from megatron_idempotent.patching.catalog import hazards\n"
        "print(*hazards())\n"
    )
    output = run(sys.executable, "-S", "-I", "-c", program, cwd=installed)
    where, ids = output.splitlines()
    assert Path(where).parent.parent == installed
    files = {path.stem for path in (ROOT / "patches").rglob("*.py")}
    expected = {name.replace("_", "-") for name in files if not name.startswith("_")}
    assert set(ids.split()) == expected


BARE = """
import sys

import megatron_idempotent
from megatron_idempotent.patches import _case

package = sys.modules["megatron_idempotent.patches"]
assert megatron_idempotent.patches is package
print(*package.__path__, _case.__file__, megatron_idempotent.__path__[0], sep="\\n")
megatron_idempotent.apply()
assert not {"patches", "_case"} & set(sys.modules)
"""


def test_a_bare_tree_on_the_path_runs_with_its_own_case_files(tree, tmp_path):
    """Though this environment has an editable install of another tree."""
    command = (sys.executable, "-m", "megatron_idempotent", "explain")
    listed = run(*command, cwd=tmp_path, PYTHONPATH=str(tree))
    assert "no-sync-func-reentry" in listed
    folder, file, inside = run(
        sys.executable, "-c", BARE, cwd=tmp_path, PYTHONPATH=str(tree)
    ).splitlines()
    assert Path(folder) == tree / "patches"
    assert Path(file) == tree / "patches" / "_case.py"
    assert Path(inside) == tree / "megatron_idempotent"


def test_a_package_without_case_files_says_what_to_do(tree, tmp_path):
    shutil.copytree(tree / "megatron_idempotent", tmp_path / "megatron_idempotent")
    (tmp_path / "patches").mkdir()
    (tmp_path / "patches" / "__init__.py").write_text("somebody = 'else'\n")
    program = f"import sys; sys.path.insert(0, {str(tmp_path)!r}); import megatron_idempotent"
    said = run(sys.executable, "-S", "-c", program, cwd=tmp_path, code=1).splitlines()[-1]
    assert said.startswith("ImportError: megatron_idempotent.patches is neither installed nor")
    assert "pip install megatron-idempotent" in said


def test_patches_under_another_name_say_what_to_do():
    program = "import sys; sys.path.insert(0, '.')\nimport patches\n"
    said = run(sys.executable, "-c", program, cwd=ROOT, code=1)
    assert "ImportError: 'patches' is the source folder of megatron_idempotent.patches" in said
    assert "Install the project and import megatron_idempotent.patches" in said


def test_the_base_install_needs_neither_torch_nor_megatron():
    names = {dependency.partition(">=")[0] for dependency in PROJECT["project"]["dependencies"]}
    assert names == {"wrapt", "packaging"}


WITHOUT_TORCH = """
import importlib, json, sys
sys.path.insert(0, sys.argv[1])
found = {}
for package in sys.argv[2:]:
    try:
        module = importlib.import_module(package)
    except ModuleNotFoundError as error:
        found[package] = [str(error), error.name]
        continue
    for name in module.__all__:
        try:
            getattr(module, name)
        except ModuleNotFoundError as error:
            found[f"{package}.{name}"] = [str(error), error.name]
print(json.dumps(found))
"""


def test_without_torch_every_public_name_says_what_brings_it_or_works(installed):
    rooms = ("controller", "hf", "engines", "sync", "weights", "workers")
    packages = ["megatron_idempotent", "megatron_idempotent.proof.cpu"]
    packages += [f"megatron_idempotent.rl.{room}" for room in rooms]
    command = (sys.executable, "-S", "-I", "-c", WITHOUT_TORCH, str(installed), *packages)
    found = json.loads(run(*command, cwd=installed))
    for name, (message, missing) in found.items():
        assert missing in ("torch", "megatron", "numpy", "pydantic"), name
        assert message.startswith(f"{name} needs {missing}, which is not installed: ")
        extra = "controller" if missing == "pydantic" else "trainer"
        assert f"pip install 'megatron-idempotent[{extra}]'" in message
    asked = {"TrainStep", "token_logprobs", "seed_all", "rl.controller.Controller"}
    assert {f"megatron_idempotent.{name}" for name in asked} <= found.keys()
    assert "megatron_idempotent.rl.workers.EmbeddedRanks" not in found, "it needs neither"
