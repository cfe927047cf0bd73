"""What gets installed: one top-level name, with everything in it, from a wheel and an sdist."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    tomllib = pytest.importorskip("tomli")

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def run(*command: str, cwd: Path, **environ: str) -> str:
    result = subprocess.run(
        command, capture_output=True, text=True, cwd=cwd, env={**os.environ, **environ}, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from it."""
    source = tmp_path_factory.mktemp("source")
    # A copy, because building leaves traces in the tree; what git ignores is no part of it.
    listed = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT)
    for name in listed.splitlines():
        if (ROOT / name).is_file():
            (source / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, source / name)
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), cwd=source)
    return out


@pytest.fixture(scope="module")
def installed(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder into which the wheel was installed, and nothing else."""
    target = tmp_path_factory.mktemp("site")
    (wheel,) = built.glob("*.whl")
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    run(*pip, "--no-deps", "--no-index", "--target", str(target), str(wheel), cwd=target)
    return target


def packages_on_disk() -> set[str]:
    inside = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in (ROOT / "megatron_idempotent").rglob("__init__.py")
    }
    return inside | {"megatron_idempotent.patches"}


def test_the_packages_in_pyproject_are_the_packages_on_disk():
    assert set(PROJECT["tool"]["setuptools"]["packages"]) == packages_on_disk()


def test_the_wheel_installs_exactly_one_top_level_name(installed):
    names = {entry.name for entry in installed.iterdir()} - {"bin", "__pycache__"}
    (metadata,) = (name for name in names if name.endswith(".dist-info"))
    assert names - {metadata} == {"megatron_idempotent"}
    assert not (installed / "patches").exists()


def test_the_wheel_has_every_module_and_data_file(built):
    (wheel,) = built.glob("*.whl")
    inside = set(zipfile.ZipFile(wheel).namelist())
    tracked = run("git", "ls-files", "megatron_idempotent", "patches", cwd=ROOT).splitlines()
    expected = {
        f"megatron_idempotent/{name}" if name.startswith("patches/") else name for name in tracked
    }
    assert expected - inside == set()
    assert "megatron_idempotent/py.typed" in inside
    assert any(name.endswith("licenses/LICENSE") for name in inside)
    assert any(name.endswith("entry_points.txt") for name in inside)


def test_the_sdist_has_what_the_wheel_is_built_from(built):
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {"pyproject.toml", "README.md", "LICENSE", "patches/__init__.py"} <= names


def test_the_installed_wheel_finds_its_case_files(installed):
    # -S -I: neither this environment's site-packages nor its editable install.
    program = (
        f"import sys; sys.path.insert(0, {str(installed)!r})\n"
        "import megatron_idempotent\n"
        "print(megatron_idempotent.__file__)\n"
        "megatron_idempotent.apply()\n"
        "from megatron_idempotent.engine.catalogue import hazards\n"
        "print(*hazards())\n"
    )
    output = run(sys.executable, "-S", "-I", "-c", program, cwd=installed)
    where, ids = output.splitlines()
    assert Path(where).parent.parent == installed
    files = {path.stem for path in (ROOT / "patches").glob("*.py")}
    expected = {name.replace("_", "-") for name in files if not name.startswith("_")}
    assert set(ids.split()) == expected


def test_patches_under_another_name_say_what_to_do():
    program = "import sys; sys.path.insert(0, '.')\nimport patches\n"
    result = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False
    )
    assert result.returncode == 1
    assert "ImportError: 'patches' is the source folder of megatron_idempotent.patches" in (
        result.stderr
    )
    assert "Install the project and import megatron_idempotent.patches" in result.stderr


def test_the_base_install_needs_neither_torch_nor_megatron():
    names = {dependency.partition(">=")[0] for dependency in PROJECT["project"]["dependencies"]}
    assert names == {"wrapt", "packaging"}
