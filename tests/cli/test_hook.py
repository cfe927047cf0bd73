"""`hook install` brings patches into each Python of an environment, and breaks none of them."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest
from starts import IMPORTS, LOADED, ROOT, started

from megatron_idempotent.cli.hook import PTH, PTH_LINE
from megatron_idempotent.cli.main import main

pytestmark = pytest.mark.full

PACKAGES = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}/site-packages"
#: What an editable install of this tree writes, with all that is installed here.
ON_THE_PATH = f"{ROOT}\n{sysconfig.get_path('purelib')}\n"


def installed(folder: Path) -> Path:
    """Give an environment this package and the hook; return its Python."""
    (folder / PACKAGES / "a_checkout.pth").write_text(ON_THE_PATH)
    assert main(["hook", "install", "--into", str(folder / PACKAGES)]) == 0
    return folder / "bin" / "python"


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a venv of its own that finds this package, and has the hook."""
    folder = tmp_path_factory.mktemp("hooked")
    venv.create(folder, with_pip=False)
    return installed(folder)


@pytest.fixture(scope="module")
def prefix(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the Python of a prefix that is no venv, as conda lays one out, with the hook."""
    folder = tmp_path_factory.mktemp("prefix")
    (folder / PACKAGES).mkdir(parents=True)
    (folder / "bin").mkdir()
    (folder / "conda-meta").mkdir()
    (folder / "conda-meta" / "history").touch()
    library = Path(sysconfig.get_path("stdlib"))
    for each in [*library.iterdir(), *library.parent.glob("libpython*")]:
        if each.name != "site-packages":
            (folder / PACKAGES).parents[0 if each.parent == library else 1].joinpath(
                each.name
            ).symlink_to(each)
    shutil.copy(Path(sys.executable).resolve(), folder / "bin" / "python")
    return installed(folder)


def shown(python: Path, *arguments: object, **given: str) -> str:
    """Run a Python that writes nothing on standard error; return its output."""
    done = started(python, *arguments, cwd="/", **given)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


#: Names the modules and the finders of this package.
FOUND = f"""{LOADED}
print(*["Hook" for each in sys.meta_path if type(each).__name__ == "MegatronIdempotentHook"])
"""


@pytest.mark.parametrize(
    ("options", "value", "waits"),
    [
        ((), None, False),
        ((), "", False),
        ((), "0", False),
        ((), " Off ", False),
        ((), "1", True),
        ((), "TRUE", True),
        ((), "maybe", True),
        (("-I",), "1", True),
        (("-E",), "1", True),
        (("-S",), "1", False),
    ],
)
def test_the_hook_waits_for_megatron_and_loads_nothing(elsewhere, options, value, waits):
    given = {} if value is None else {"MEGATRON_IDEMPOTENT": value}
    assert shown(elsewhere, *options, "-c", FOUND, **given).split() == ["Hook"] * waits


@pytest.mark.exhaustive  # seconds of imports; the test above has what is loaded at a start
def test_a_server_that_imports_torch_and_transformers_has_the_finder_alone(elsewhere):
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    program = f"import torch.distributed, transformers, http.server\n{FOUND}"
    found = shown(elsewhere, "-W", "ignore", "-c", program, MEGATRON_IDEMPOTENT="1")
    assert found.split() == ["Hook"]


CHILD = f"""
import multiprocessing, sys
def told():
    exec({IMPORTS!r})
if __name__ == "__main__":
    child = multiprocessing.get_context(sys.argv[1]).Process(target=told)
    child.start()
    child.join()
"""


@pytest.mark.parametrize("way", ["-c", "-m", "zipapp", "fork", "spawn", "forkserver"])
def test_the_first_import_of_megatron_applies_however_the_process_starts(elsewhere, tmp_path, way):
    (tmp_path / "named.py").write_text(IMPORTS)
    (tmp_path / "child.py").write_text(CHILD)
    with zipfile.ZipFile(tmp_path / "app.pyz", "w") as app:
        app.writestr("__main__.py", IMPORTS)
    arguments = {
        "-c": ("-c", IMPORTS),
        "-m": ("-m", "named"),
        "zipapp": (tmp_path / "app.pyz",),
    }.get(way, (tmp_path / "child.py", way))
    on = {"PYTHONPATH": str(tmp_path), "MEGATRON_IDEMPOTENT": "1"}
    assert shown(elsewhere, *arguments, **on) == "True\n"


def test_a_value_without_a_meaning_is_told_once_where_megatron_is_imported(elsewhere):
    program = f"{IMPORTS}\nimport megatron"
    done = started(elsewhere, "-c", program, MEGATRON_IDEMPOTENT="maybe")
    said = [line for line in done.stderr.splitlines() if line.startswith("megatron-idempotent: ")]
    assert done.returncode == 1
    assert said == [
        "megatron-idempotent: no patch is in place: ValueError: MEGATRON_IDEMPOTENT='maybe' is "
        "neither on nor off: set it to 1 or 0"
    ]


@pytest.mark.parametrize("name", ["aa_distutils-precedence.pth", "zzz_distutils-precedence.pth"])
def test_the_hook_works_beside_that_of_setuptools_in_both_orders(elsewhere, name):
    packages = elsewhere.parents[1] / PACKAGES
    theirs = Path(sysconfig.get_path("purelib"))
    if not (theirs / "distutils-precedence.pth").exists():
        pytest.skip("`pip install setuptools`")
    (packages / "_distutils_hack").symlink_to(theirs / "_distutils_hack")
    copy = shutil.copy(theirs / "distutils-precedence.pth", packages / name)
    program = f"{FOUND}\nprint(*[type(each).__name__ for each in sys.meta_path])\n{IMPORTS}"
    try:
        found = shown(elsewhere, "-c", program, MEGATRON_IDEMPOTENT="1").split()
    finally:
        copy.unlink()
        (packages / "_distutils_hack").unlink()
    assert found[0] == "Hook"
    assert "DistutilsMetaFinder" in found
    assert found[-1] == "True"


def test_a_prefix_of_conda_s_layout_has_the_hook_beside_one_in_the_user_s_folder(prefix, tmp_path):
    where = "import sys, sysconfig; print(sys.prefix, sysconfig.get_path('purelib'))"
    folder = prefix.parents[1]
    assert shown(prefix, "-c", where).split() == [str(folder), str(folder / PACKAGES)]
    user = tmp_path / PACKAGES
    user.mkdir(parents=True)
    (user / PTH).write_text(PTH_LINE)
    given = {"PYTHONUSERBASE": str(tmp_path), "MEGATRON_IDEMPOTENT": "1"}
    assert shown(prefix, "-c", FOUND, **given).split() == ["Hook"]
    assert shown(prefix, "-c", IMPORTS, **given) == "True\n"
    # Python reads the user's folder first, where this package is not on the path yet.
    (folder / PACKAGES / PTH).unlink()
    assert shown(prefix, "-c", IMPORTS, **given) == "True\n"


def test_where_the_package_has_gone_an_import_of_megatron_says_so_in_one_line(elsewhere):
    checkout = elsewhere.parents[1] / PACKAGES / "a_checkout.pth"
    checkout.unlink()
    try:
        assert shown(elsewhere, "-c", "pass", MEGATRON_IDEMPOTENT="1") == ""
        done = started(elsewhere, "-I", "-c", f"{IMPORTS}{IMPORTS}", MEGATRON_IDEMPOTENT="1")
    finally:
        checkout.write_text(ON_THE_PATH)
    assert done.returncode == 0
    assert done.stderr == (
        f"megatron-idempotent: no patches by {PTH}: No module named 'megatron_idempotent'\n"
    )


def test_the_hook_is_shown_repaired_and_removed(elsewhere, capsys):
    packages = elsewhere.parents[1] / PACKAGES
    into = ["--into", str(packages)]
    assert main(["hook", "status", *into]) == 0
    (packages / PTH).write_text("import os\n")
    assert main(["hook", "status", *into]) == 1
    assert "is of another version" in capsys.readouterr().out
    before = os.umask(0o077)
    assert main(["hook", "install", *into]) == 0
    os.umask(before)
    assert sorted(packages.glob("zz_*")) == [packages / PTH]
    assert (packages / PTH).stat().st_mode & 0o777 == 0o644
    capsys.readouterr()
    assert main(["hook", "remove", *into]) == main(["hook", "remove", *into]) == 0
    hook = elsewhere.parents[1] / PACKAGES / PTH
    assert capsys.readouterr().out == f"{hook} is removed\nnothing to remove: no {hook}\n"
    assert main(["hook", "status", *into]) == 1
    assert shown(elsewhere, "-c", FOUND, MEGATRON_IDEMPOTENT="1").split() == []
    assert main(["hook", "install", *into]) == 0


def test_a_folder_that_cannot_be_written_is_named(tmp_path, capsys):
    assert main(["hook", "install", "--into", str(tmp_path / "none")]) == 2
    assert "No such file or directory; give a folder" in capsys.readouterr().err


def test_the_command_run_of_earlier_versions_names_the_hook(capsys):
    with pytest.raises(SystemExit, match="2"):
        main(["run", "--", "torchrun", "train.py"])
    error = capsys.readouterr().err
    assert "there is no command 'run'. `megatron-idempotent hook install`" in error
    assert "MEGATRON_IDEMPOTENT=1 before the command" in error


@pytest.mark.parametrize(
    ("options", "value", "said"),
    [
        ((), "1", "is in place: a Python that reads it and has MEGATRON_IDEMPOTENT=1"),
        (("-I",), "1", "is in place: "),
        ((), "0", "here it is 0"),
        ((), None, "here it is unset"),
        (("-S",), "1", "was started with -S, with which it reads no hook"),
    ],
)
def test_doctor_says_what_brings_patches_into_this_python(elsewhere, options, value, said):
    given = {} if value is None else {"MEGATRON_IDEMPOTENT": value}
    given["PYTHONPATH"] = str(ROOT)
    program = "from megatron_idempotent.cli.hook import hook_here; print(hook_here())"
    assert said in shown(elsewhere, *options, "-c", program, **given)


def test_doctor_says_where_a_hook_is_missing_or_is_not_read(monkeypatch, tmp_path, capsys):
    def told(value: str | None) -> str:
        monkeypatch.delenv("MEGATRON_IDEMPOTENT", raising=False)
        if value is not None:
            monkeypatch.setenv("MEGATRON_IDEMPOTENT", value)
        main(["doctor"])
        return capsys.readouterr().out

    monkeypatch.setattr("site.getsitepackages", list)
    monkeypatch.setattr("site.getusersitepackages", lambda: str(tmp_path / "user"))
    monkeypatch.setattr("site.ENABLE_USER_SITE", False)
    monkeypatch.setattr(sysconfig, "get_path", lambda name: str(tmp_path))
    assert "hook install" not in told(None)
    assert "hook install" not in told("0")
    assert f"no hook in {tmp_path}: `megatron-idempotent hook install`" in told("1")
    (tmp_path / "user").mkdir()
    (tmp_path / "user" / PTH).write_text(PTH_LINE)
    assert f"{tmp_path / 'user' / PTH} is not read here: " in told("1")
    (tmp_path / PTH).write_text(PTH_LINE)
    assert f"{tmp_path / PTH} is in place" in told("1")
