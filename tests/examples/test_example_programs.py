"""The programs and the notebook of examples/ say what they promise, on this session's ranks."""

import asyncio
import importlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from starts import started

from megatron_idempotent.hook import PACKAGES
from megatron_idempotent.patching.releases import installed
from megatron_idempotent.proof import cpu

pytestmark = pytest.mark.full

EXAMPLES = Path(__file__).parents[2] / "examples"
found = installed("megatron-core")
if found is None:
    pytest.skip("the programs run Megatron", allow_module_level=True)
#: By program: the lines that it prints. The ranks of this session serve, which costs no start.
SAID = {
    "train_twice": [
        "stock:   AssertionError: When overlap_grad_reduce is True, config.no_sync_func must be "
        "None; a custom no_sync_func is not supported when overlapping grad-reduce",
        "patched: three calls of train(2) have the same bits as one of train(6)",
    ],
    "packed_logprobs": ["both ranks have the same bits"],
}
#: An engine has eight methods.
LONGEST = {"sglang_engine": 200}


@pytest.fixture
def program(monkeypatch, megatron_rank_pool):
    """`program(name)` imports a program, whose ranks are those of this session."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(cpu, "run_ranks", megatron_rank_pool.run)
    return importlib.import_module


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.stem)
def test_a_program_is_a_page_long_and_in_the_documentation(path):
    assert len(path.read_text("utf-8").splitlines()) <= LONGEST.get(path.stem, 80)
    pages = ("index.md", "recipes/index.md", "rollouts.md", "train-step.md")
    docs = "".join((EXAMPLES.parent / "docs" / page).read_text("utf-8") for page in pages)
    assert f"../examples/{path.name})" in docs


def test_no_program_has_the_name_of_a_package_that_others_beside_it_import():
    # A program's own folder comes first on its path.
    assert not PACKAGES & {path.stem for path in EXAMPLES.glob("*.py")}


def test_the_test_of_ones_own_train_needs_no_plugin_but_ours():
    test = EXAMPLES / "test_your_train.py"
    without = ("-p", "no:rerunfailures", "-p", "no:xdist", "-p", "no:hypothesispytest")
    done = started(sys.executable, "-m", "pytest", "--collect-only", "-q", *without, test)
    assert done.returncode == 0, done.stderr
    assert "3 tests collected" in done.stdout


@pytest.mark.parametrize("name", SAID)
def test_a_program_says_what_it_promises(name, program, capsys):
    if name == "train_twice" and found.release < (0, 17):
        pytest.skip("wheels before 0.17 carry no megatron.training")
    program(name).main()
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line in SAID[name]] == SAID[name], lines
    for line in lines[:-1] if name == "packed_logprobs" else ():
        shared, alone = (float(word) for word in line.split() if "." in word)
        assert abs(shared - alone) < 2e-4  # four decimals are printed


def test_a_split_step_has_one_norm(program, capsys):
    program("split_step").main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert len({line.split()[-1] for line in lines}) == 1


def test_the_step_of_the_guide_runs_as_it_stands(program, monkeypatch, tmp_path):
    page = (EXAMPLES.parent / "docs" / "train-step.md").read_text("utf-8")
    (block,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "step_of_the_guide.py").write_text(block)
    monkeypatch.syspath_prepend(tmp_path)
    first, second = cpu.run_ranks(2, program("step_of_the_guide").train)
    assert first == second
    assert 4 < first < 6


def test_staged_weights_draw_no_token_before_the_switch(program, capsys):
    program("weight_sync").main()
    _, *lines = capsys.readouterr().out.splitlines()
    found = [re.fullmatch(r"(.*?) +\d+ of version (\d), (\S+) off", line) for line in lines]
    told = [each.group(1, 2) for each in found]
    way = ("under way", "0"), ("under way", "1")
    assert told == [("before", "0"), ("staged", "0"), *way, ("after", "1")]
    # Some ten products of up to 128 terms, of magnitudes up to ten: each is off by at most n·eps.
    bound = 10 * 128 * 2**-23 * 10
    for each in found:
        assert (float(each[3]) < bound) == (each[2] == "1"), each[0]


def test_an_engine_that_shares_a_url_with_its_trainer_has_its_bits(
    program, capsys, tmp_path, monkeypatch
):
    pytest.importorskip("transformers")
    pytest.importorskip("zstandard")
    module = program("weight_bucket")

    class Late:
        """Has the engine in this process, which has imported all: the trainer is in a rank's."""

        def __init__(self, command, **_):
            assert command[1].endswith("weight_bucket.py")
            self.url = command[-1]

        def communicate(self, timeout):
            asyncio.run(module.serve(self.url))
            return "", None

    monkeypatch.setattr(module.subprocess, "Popen", Late)
    module.main(str(tmp_path))
    lines = capsys.readouterr().out.splitlines()
    sent = [re.fullmatch(r"version \d: (\d+) of (\d+) bytes sent", line) for line in lines]
    shares = [int(each[1]) / int(each[2]) for each in sent if each]
    # Anchors have everything; of float32, Adam changes nearly every element, but not every byte.
    assert [share == 1 for share in shares] == [True, False, False, False, True, False]
    bits = {line.split()[1]: line.split()[-1] for line in lines if "bits: " in line}
    assert bits["trainer's"] == bits["engine's"]
    assert any(line.startswith("engine: version 6 from 2 updates (the anchor") for line in lines)


@pytest.mark.parametrize("module", ["fsspec", "zstandard"])
def test_without_its_extra_the_bucket_s_program_starts_no_rank(module, program, monkeypatch):
    started = []
    monkeypatch.setattr(cpu, "run_ranks", lambda *_: started.append("ranks"))
    monkeypatch.setattr(subprocess, "Popen", lambda *_, **__: started.append("an engine"))
    monkeypatch.setitem(sys.modules, module, None)  # as if it were not installed
    with pytest.raises(ModuleNotFoundError, match=rf"{module}, .* 'megatron-idempotent\[bucket\]'"):
        program("weight_bucket").main("/tmp/a-bucket")
    assert started == []


def test_the_test_of_a_train_of_ones_own_passes(program, megatron_ranks):
    # `pytest examples/test_your_train.py` runs it; tests/proof/cpu has the plugin by itself.
    test = program("test_your_train").test_several_calls_have_the_bits_of_one
    (mark,) = test.pytestmark
    *_, most = mark.args[1]
    test(megatron_ranks, most)


LINE = re.compile(
    r"version (\d+)  train/reward (\S+)  train/staleness_mean (\S+)  train/staleness_max (\S+)  "
    r"rollouts/inflight_mean (\S+)"
)


def test_the_asynchronous_program_learns_and_keeps_to_its_bound_on_staleness(
    program, monkeypatch, megatron_rank_pool
):
    pytest.importorskip("transformers")
    pytest.importorskip("pydantic")
    said = []
    main = program("asynchronous").main
    with monkeypatch.context() as patch:
        patch.setattr("builtins.print", lambda *words, sep: said.append(sep.join(words)))
        asyncio.run(asyncio.wait_for(main(megatron_rank_pool), 300))
    found = [LINE.fullmatch(line) for line in said]
    assert all(found), said
    rows = [tuple(map(float, line.groups())) for line in found]
    assert [version for version, *_ in rows] == list(range(1, 17))
    rewards = [reward for _, reward, *_ in rows]
    # A random token of eight is the prompt's in 1 of 8 cases: the mean of a step's 256 tokens has a
    # standard deviation of 0.02, so that 0.25 is six of them away, from either side.
    assert rewards[0] < 0.25 < rewards[-1], rewards
    assert max(most for *_, most, _ in rows) == 1, "no group was drawn while an older step trained"
    assert any(generating > 0 for *_, generating in rows[1:])


def test_the_notebook_trains_and_draws_the_learning_curve_and_the_timeline(
    tmp_path, monkeypatch, megatron_rank_pool
):
    for name in ("pydantic", "transformers", "matplotlib", "tomli_w"):
        pytest.importorskip(name)
    from megatron_idempotent.rl.trainer import async_run, main

    run_controller, run = async_run.run_controller, subprocess.run
    trainings = []

    def train(command, **options):
        """Run the command in this process, on ranks that need not import everything again."""
        if command[:4] != [sys.executable, "-m", "megatron_idempotent", "train"]:
            return run(command, **options)  # matplotlib lists the fonts of a new machine
        trainings.append(main.main(command[4:]))

    cells = json.loads((EXAMPLES / "curves.ipynb").read_text(encoding="utf-8"))["cells"]
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # which the command sets
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "run", train)
    monkeypatch.setattr(
        async_run, "run_controller", lambda *job: run_controller(*job, pool=megatron_rank_pool)
    )
    monkeypatch.setitem(sys.modules, "IPython", None)
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    exec(code, {})
    assert trainings
    assert not any(trainings)
    drawn = sorted(path.name for path in tmp_path.glob("*/run/*.png"))
    assert drawn == ["curves.png", "learning-curve.png", "timeline.png"]
    for path in tmp_path.glob("*/run/*.png"):
        assert path.read_bytes().startswith(b"\x89PNG"), path
