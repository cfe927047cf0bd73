"""The index of case files that `apply()` reads: current, quick, and no trap for who adds a file."""

from __future__ import annotations

import sys
import zipfile
from importlib.util import find_spec
from pathlib import Path

from starts import started

from megatron_idempotent.patching.base import INDEX, generated, read_index
from megatron_idempotent.patching.catalog import hazards, index_of, patches

NEW = '''"""A hazard that the index does not know."""
from megatron_idempotent.patching import Patch, Target
def wrap(original, *args, **kwargs):
    return original(*args, **kwargs)
PATCH = Patch(
    summary="new", before="99", targets=(Target("{address}", wrap, "{fragment}"),),
)
def reproduce():
    pass
'''


def run(path: Path, program: str, *options: str) -> str:
    """Return what the program prints where the package is at `path`."""
    program = f"import sys; sys.path[:0] = [{str(path)!r}]\n{program}"
    done = started(sys.executable, *options, "-c", program)
    assert done.returncode == 0, done.stderr
    return done.stdout


STATUSES = (
    "import megatron_idempotent as m; r = m.apply(); assert sys.path[0] in m.__file__\n"
    "print({row.id: row.status for row in r})\n"
)


def test_the_index_says_what_the_case_files_say():
    lines = generated(INDEX)
    assert lines == index_of(hazards().values()), "run `python tools/casebook.py` in the repository"
    ids, found = read_index(lines)
    assert ids == list(hazards())
    assert list(found) == list(patches())
    for name, entry in found.items():
        patch = patches()[name]
        for field in ("id", "distribution", "since", "before", "default", "debug", "versions"):
            assert getattr(entry, field) == getattr(patch, field)
        assert [t.address for t in entry.targets] == [t.address for t in patch.targets]
        assert [t.module for t in entry.targets] == [t.module for t in patch.targets]


def test_apply_imports_no_case_file_and_nothing_from_the_standard_library(package):
    # Without `site`, which imports what it needs for an editable install.
    program = (
        "import os; sys.path += %r; before, finders = set(sys.modules), list(sys.meta_path)\n"
        "import megatron_idempotent as m; print(*set(sys.modules) - before); m.apply()\n"
        "print(*set(sys.modules) - before)\n"
        "print(*[type(f).__name__ for f in sys.meta_path if f not in finders])"
    )
    imported, found, added = map(str.split, run(package, program % sys.path, "-S").splitlines())
    assert "megatron_idempotent.patching.api" in found
    others = [name for name in found if not name.startswith("megatron_idempotent")]
    assert others == ["__future__"]
    assert not [name for name in found if ".patches." in name]
    # Importing changes nothing; applying leaves one finder, which waits for Megatron.
    assert not [name for name in imported if ".patches" in name]
    assert added == ["_ImportSentinel"] * (find_spec("megatron") is not None)


def test_a_case_file_that_the_index_lacks_is_found(package):
    cases = package / "megatron_idempotent" / "patches"
    source = NEW.format(address="toy_new:greet", fragment="name")
    (cases / "brand_new.py").write_text(source)
    (package / "toy_new.py").write_text("def greet(name):\n    return name\n")
    assert "'brand-new': " in run(package, STATUSES)
    (cases / "brand_new.py").unlink()
    (cases / "gc_stays_off.py").unlink()
    doctor = "from megatron_idempotent.cli.doctor import doctor; doctor(as_json=False)"
    statuses, _, said = run(package, STATUSES + doctor).partition("\n")
    assert "gc-stays-off" not in statuses
    assert "patches/gc_stays_off.py is missing, and the index lists it" in said


def test_a_case_file_that_says_something_else_is_a_failure_that_names_the_remedy(package):
    path = package / "megatron_idempotent" / "patches" / "expert_seed_collides.py"
    path.write_text(path.read_text().replace('since="0.13"', 'since="0.12"'))
    program = (
        "from megatron_idempotent.patching.catalog import load\n"
        "try:\n    load('expert-seed-collides')\nexcept RuntimeError as error:\n    print(error)"
    )
    assert "run `python tools/casebook.py` in the repo" in run(package, program)


def test_the_index_is_read_from_a_zip_file_too(package, tmp_path):
    archive = tmp_path / "package.zip"
    with zipfile.ZipFile(archive, "w") as file:
        for path in package.rglob("*"):
            file.write(path, path.relative_to(package))
    program = (
        STATUSES + "from megatron_idempotent.patching.catalog import load\n"
        "assert 'package.zip' in load('gc-stays-off').targets[0].wrapper.__code__.co_filename"
    )
    assert run(archive, program) == run(package, STATUSES)
