"""Functions on several ranks: results, failures, hangs, and what remains after them."""

import contextlib
import gc
import importlib.util
import inspect
import multiprocessing
import os
import re
import signal
import socket
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from importlib import metadata
from pathlib import Path

import pytest
import tomllib
import torch
import torch.distributed as dist
from ranks import built, on_ranks
from starts import started

import megatron_idempotent
from megatron_idempotent.lazy import untried_torch
from megatron_idempotent.proof import cpu
from megatron_idempotent.proof.cpu import launcher
from megatron_idempotent.proof.cpu import pool as pool_module
from megatron_idempotent.proof.cpu.errors import RankFailure

pytestmark = pytest.mark.full

PROJECT = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
NEWEST = PROJECT["tool"]["megatron-idempotent"]["torch"]


def rank_and_sum(offset, scale=1):
    total = torch.tensor([float(dist.get_rank() + offset)], device="cuda")
    dist.all_reduce(total)
    return dist.get_rank(), total * scale, os.environ["LOCAL_RANK"], os.environ["WORLD_SIZE"]


def fail_on(rank):
    if dist.get_rank() == rank:
        raise ValueError(f"bad sample on {rank}")
    dist.barrier()


def fail_everywhere():
    raise KeyError(os.environ["RANK"])


def leave():
    sys.exit(3)


def hang_on(rank):
    if dist.get_rank() == rank:
        wait_for_ever()
    dist.barrier()


def say_and_close(pipe):
    pipe.sendall(b"rank " + os.environ["RANK"].encode())
    if os.environ["RANK"] == "1":  # it lives on until the end of rank 0's pipe was seen
        pipe.settimeout(20)
        assert pipe.recv(100) == b"seen"
    pipe.close()
    return True


def wait_for_ever():
    while True:
        time.sleep(0.1)


def work_for(seconds):
    """Use a processor for so long, the same one on all ranks."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass
    dist.barrier()


def die_or_wait():
    rank = int(os.environ["RANK"])
    if rank == 1:
        os._exit(5)
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    wait_for_ever()


def leave_traces():
    import megatron.core.parallel_state as parallel_state

    parallel_state.initialize_model_parallel()
    os.environ["LEFT_BEHIND"] = "1"
    torch.set_default_dtype(torch.float64)


def patched():
    return {row.status for row in megatron_idempotent.report()} & {"applied"} != set()


def find_traces():
    import megatron.core.parallel_state as parallel_state

    return (
        parallel_state.model_parallel_is_initialized(),
        os.environ.get("LEFT_BEHIND"),
        torch.get_default_dtype() is torch.float32,
    )


def seen_variable():
    return os.environ.get("SEEN_VARIABLE")


def without_group():
    return dist.is_initialized()


def rendezvous_by_environment():
    dist.init_process_group("nccl", device_id=None)
    return dist.get_backend(), dist.get_world_size()


def send_and_free(batched):
    """Return what arrives of a tensor whose memory is released while it is being sent."""
    megabytes = 16
    tensor = torch.full((megabytes << 18,), 7.0)
    if dist.get_rank() == 1:
        tensor.zero_()
        time.sleep(0.3)  # so that the other side has freed its memory before we read
        dist.recv(tensor, 0)
        return bool((tensor == 7.0).all())
    if batched:
        [handle] = dist.batch_isend_irecv([dist.P2POp(dist.isend, tensor, 1)])
    else:
        handle = dist.isend(tensor, dst=1)
    tensor.data = torch.empty(1)  # as deallocate_output_tensor does
    overwritten = [torch.zeros(megabytes << 18) for _ in range(4)]
    handle.wait()
    return len(overwritten) == 4


def unpicklable():
    return lambda: None


def wrong_sum_on(rank):
    values = [1, 2, 3 + (dist.get_rank() == rank)]
    assert sum(values) == 6, "a sum"
    dist.barrier()


def test_results_come_in_order_of_rank_and_collectives_are_real(megatron_ranks):
    results = megatron_ranks(2, rank_and_sum, 10, scale=2)
    assert [(rank, float(total), local, world) for rank, total, local, world in results] == [
        (0, 42.0, "0", "2"),
        (1, 42.0, "1", "2"),
    ]


def test_an_exception_names_its_rank_type_message_and_line(megatron_ranks):
    with pytest.raises(cpu.RankError, match="rank 1: ValueError: bad sample on 1") as caught:
        megatron_ranks(2, fail_on, 1)
    error = caught.value
    assert (error.rank, error.exception_type) == (1, "ValueError")
    assert error.message == "bad sample on 1"
    assert 'raise ValueError(f"bad sample on {rank}")' in error.traceback


def test_an_assertion_shows_its_values_and_the_peers_a_line_each(
    megatron_ranks, monkeypatch, pytestconfig
):
    with pytest.raises(cpu.RankError) as caught:
        megatron_ranks(3, wrong_sum_on, 1)
    failed, *peers = str(caught.value).split("\n\n")
    assert failed.startswith("rank 1: AssertionError: a sum\nTraceback ")
    assert failed.endswith("a sum\nassert 7 == 6\n +  where 7 = sum([1, 2, 4])")
    assert "launcher.py" not in failed
    *told, hint, how = peers[0].splitlines()
    assert len(told) == 2
    for line in told:
        assert re.fullmatch(rf"rank [02]: .*(peer|pipe).* at {re.escape(__file__)}:\d+", line), line
        assert len(line) < 100 + len(__file__)
    assert hint == "(a line each: `full` of this error has all of it)"
    assert how == "(pytest --full-trace shows it)"
    assert caught.value.full.count("Traceback") == 3
    monkeypatch.setattr(pytestconfig.option, "fulltrace", True)
    with pytest.raises(cpu.RankError) as caught:
        megatron_ranks(3, wrong_sum_on, 1)
    assert str(caught.value).count("Traceback") == 3


def test_a_rank_that_died_comes_before_the_peers_that_were_heard_first():
    lost = "[/pytorch/gloo/transport/tcp/pair.cc:545] Connection closed by peer [::1]:5. Advice."
    place = 'File "/mine/loop.py", line 7, in step\n  File "/x/site-packages/torch/c10d.py", line 9'
    stack = (
        'Thread 0x1 (most recent call first):\n  File "/mine/wait.py", line 3 in hold\n  File "b"'
    )
    peers = [
        RankFailure(rank=rank, exception_type=kind, message=lost, traceback=place)
        for rank, kind in ((0, "RuntimeError"), (2, "torch.distributed.DistBackendError"))
    ]
    dead = RankFailure(rank=1, exception_type="", message="ended", traceback="", exit_code=-9)
    error = cpu.RankError([*peers, dead], {3: stack})
    assert (error.rank, [each.rank for each in error.failures]) == (1, [1, 0, 2])
    assert str(error).splitlines()[:5] == [
        "rank 1 died with signal SIGKILL",
        "",
        "rank 0: RuntimeError: Connection closed by peer [::1]:5 at /mine/loop.py:7",
        "rank 2: torch.distributed.DistBackendError: Connection closed by peer [::1]:5"
        " at /mine/loop.py:7",
        "rank 3 was still running and has been ended at /mine/wait.py:3",
    ]
    assert (
        replace(dead, traceback=stack).folded
        == "rank 1 died with signal SIGKILL at /mine/wait.py:3"
    )
    assert stack in error.full
    other = RankFailure(rank=2, exception_type="KeyError", message="'x'", traceback="its own")
    assert "its own" in str(cpu.RankError([dead, other], {})), "another fault is told in full"


def test_assertions_are_rewritten_where_pytest_left_no_byte_code(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def check(found):\n    assert found == 2\n")
    finder = pool_module.RewritingFinder({"mine": str(file)})
    spec = finder.find_spec("mine")
    assert finder.find_spec("os") is None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(AssertionError, match="assert 1 == 2"):
        module.check(1)


def look_up_without_files():
    class Local:
        """Nobody has asked for its source."""

    def refuse(*_, **__):
        raise AssertionError("it is read again")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metadata, "distributions", refuse)
        metadata.entry_points(group="torch.distributed.backends")
        with pytest.raises(AssertionError, match="read again"):
            metadata.entry_points(group="pytest11")
        patch.setattr(inspect, "getsourcelines", refuse)
        arguments = sys.modules["megatron.training.arguments"]
        assert inspect.getsource(arguments.TransformerConfig).startswith("@dataclass")
        with pytest.raises(AssertionError, match="read again"):
            inspect.getsource(Local)


def test_what_is_the_same_on_all_ranks_is_looked_up_before_they_are_forked(megatron_ranks):
    megatron_ranks(1, look_up_without_files, distributed=False)


def read_by_apply():
    opened = []
    sys.addaudithook(lambda event, values: event == "open" and opened.append(str(values[0])))
    megatron_idempotent.apply()
    megatron_idempotent.revert()
    megatron_idempotent.apply()
    (folder,) = importlib.util.find_spec("megatron.core").submodule_search_locations
    return [path for path in opened if path.startswith(os.path.dirname(folder))]


def test_apply_reads_no_file_of_megatron_again_on_each_rank(megatron_ranks):
    assert megatron_ranks(1, read_by_apply, distributed=False) == [[]]


def names_and_pages():
    pages = {id(name) // 4096 for name in sys.modules}
    return len(sys.modules), len(pages), gc.get_threshold()


def test_the_names_of_all_modules_are_on_few_memory_pages_of_a_rank(megatron_ranks):
    ((names, pages, thresholds),) = megatron_ranks(1, names_and_pages, distributed=False)
    assert pages < names / 10
    assert thresholds == gc.get_threshold(), "those of the imports are over"


def test_a_rank_that_wakes_up_takes_no_processor_from_another_one(megatron_ranks):
    assert megatron_ranks(1, os.sched_getscheduler, 0, distributed=False) == [os.SCHED_BATCH]


PROMPT = """
import copy
import sys
from dataclasses import dataclass
from megatron_idempotent.proof import cpu

SCALE = 3

@dataclass
class Point:
    x: int

def scaled(x):
    return x * SCALE

def run(point):
    return Point(scaled(point.x))

pool = cpu.RankPool(1, preload=("torch",))
(point,) = pool.run(1, run, Point(2), distributed=False)
assert point == Point(6) and type(point) is Point, point
(same,) = pool.run(1, copy.copy, point, distributed=False)
assert same == point and type(same) is Point, same
sys.modules["cloudpickle"] = None
try:
    pool.run(1, run, Point(2), distributed=False)
except ModuleNotFoundError as error:
    print(error)
"""


@pytest.mark.parametrize(
    "typed", ["at a prompt", pytest.param("after -c", marks=pytest.mark.exhaustive)]
)
def test_a_function_that_no_file_has_runs_on_ranks_by_value(typed):
    arguments = {"input": PROMPT} if typed == "at a prompt" else {}
    command = [sys.executable, *(["-"] if arguments else ["-c", PROMPT])]
    said = subprocess.run(command, capture_output=True, text=True, timeout=120, **arguments)
    assert said.returncode == 0, said.stderr
    assert "needs cloudpickle, which is not installed: " in said.stdout
    assert "pip install 'megatron-idempotent[notebook]'" in said.stdout


def test_all_failing_ranks_are_listed(megatron_ranks):
    with pytest.raises(cpu.RankError) as caught:
        megatron_ranks(2, fail_everywhere)
    assert sorted((f.rank, f.exception_type, f.message) for f in caught.value.failures) == [
        (0, "KeyError", "'0'"),
        (1, "KeyError", "'1'"),
    ]


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (leave, "rank 0: SystemExit: 3"),
        (unpicklable, "rank 0: .*lambda"),  # a result that cannot travel
    ],
)
def test_other_ends_are_failures_of_their_rank(megatron_ranks, function, said):
    with pytest.raises(cpu.RankError, match=said):
        megatron_ranks(1, function)


def test_a_hang_shows_the_stacks_of_all_ranks_and_ends_them(megatron_ranks):
    start = time.perf_counter()
    with pytest.raises(cpu.RankTimeout, match="within 1 s") as caught:
        megatron_ranks(2, hang_on, 1, timeout_s=1.0, patience=30.0)
    assert time.perf_counter() - start < 10.0
    assert "barrier" in caught.value.stacks[0]
    assert "wait_for_ever" in caught.value.stacks[1]
    assert "wait_for_ever" in str(caught.value)
    assert megatron_ranks(2, rank_and_sum, 0)[1][0] == 1


def tells_of_waiting():
    """Say if the kernel counts it; one that does not has no such file, or zeros in it."""
    counts = Path("/proc/self/schedstat")
    return counts.exists() and counts.read_text().split()[0] != "0"


@pytest.mark.skipif(not tells_of_waiting(), reason="the kernel does not count it")
def test_a_busy_machine_is_no_hang(megatron_ranks):
    # Two ranks on one processor take above twice as long.
    with pytest.raises(cpu.RankTimeout):
        megatron_ranks(2, work_for, 0.5, timeout_s=0.8)
    megatron_ranks(2, work_for, 0.5, timeout_s=0.8, patience=30.0)
    with pytest.raises(cpu.RankTimeout):
        megatron_ranks(2, work_for, 5.0, timeout_s=0.8, patience=2.0)


def test_ranks_that_die_are_reported_before_the_deadline(megatron_ranks):
    start = time.perf_counter()
    with pytest.raises(cpu.RankError) as caught:
        megatron_ranks(3, die_or_wait, timeout_s=60.0)
    assert time.perf_counter() - start < 20.0
    assert {each.rank: each.exit_code for each in caught.value.failures} == {1: 5, 2: -9}
    assert "rank 1 died with exit code 5" in str(caught.value)
    assert "rank 2 died with signal SIGKILL" in str(caught.value)
    assert "wait_for_ever" in caught.value.still_running[0]


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="no /proc tells of signals")
def test_stacks_are_read_when_a_rank_has_written_all_of_them():
    # A full pipe holds the program in the midst of its stacks, as a busy machine does.
    program = (
        "import faulthandler, os, signal, sys\n"
        "faulthandler.register(signal.SIGUSR1, file=sys.stdout)\n"
        "os.set_blocking(1, False)\n"
        "written = os.write(1, b'x' * (1 << 20))\n"
        "os.set_blocking(1, True)\n"
        "sys.stderr.write(f'{written}\\n')\n"
        "sys.stdin.read()\n"  # until this test is over, however it ends
    )
    pipes = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.PIPE)
    with subprocess.Popen([sys.executable, "-c", program], **pipes) as process:
        filled = int(process.stderr.readline())
        assert not launcher.is_dumping(process.pid)
        os.kill(process.pid, signal.SIGUSR1)
        time.sleep(0.1)
        assert launcher.is_dumping(process.pid)
        os.read(process.stdout.fileno(), filled)
        give_up_s = time.monotonic() + 20.0
        while launcher.is_dumping(process.pid) and time.monotonic() < give_up_s:
            time.sleep(0.01)
        stacks = os.read(process.stdout.fileno(), 1 << 16).decode()
    assert stacks.endswith(" in <module>\n")
    assert not launcher.is_dumping(process.pid)


def test_each_call_finds_everything_as_it_is_after_the_import(megatron_ranks):
    megatron_ranks(2, leave_traces)
    assert megatron_ranks(2, find_traces) == [(False, None, True)] * 2


def test_ranks_may_have_the_patches_from_their_start(megatron_ranks):
    for already in (False, True, False, True):
        assert megatron_ranks(2, patched, already_applied=already) == [already] * 2
    with pytest.raises(cpu.RankError, match="KeyError"):
        megatron_ranks(2, fail_everywhere, already_applied=True)


@pytest.mark.parametrize("marked", [False, pytest.param(True, marks=pytest.mark.patched)])
def test_ranks_of_a_marked_test_have_them_too(megatron_ranks, marked):
    assert megatron_ranks(2, patched) == [marked] * 2


@pytest.mark.patched
@on_ranks(1)
def test_where_ranks_have_them_no_model_is_taken_for_stock():
    for others in ({"applied": False}, {"only": ["unscaled-twice"]}, {"exclude": ["timers"]}):
        with pytest.raises(AssertionError, match="the rank has all patches"):
            built(**others)


@pytest.mark.parametrize("already_applied", [False, True])
def test_each_rank_has_a_pipe_of_its_own_whose_end_is_seen(megatron_ranks, already_applied):
    pipes = [socket.socketpair() for _ in range(2)]
    theirs = [end for _, end in pipes]

    def read():
        for rank, (ours, _) in enumerate(pipes):
            with ours:
                ours.settimeout(20)
                assert ours.recv(100) == b"rank %d" % rank
                if rank == 1:
                    ours.sendall(b"seen")
                assert ours.recv(100) == b""  # neither the launcher nor a peer holds it

    with ThreadPoolExecutor(1) as reader:
        reading = reader.submit(read)
        alive = megatron_ranks(
            2, say_and_close, pipes=theirs, distributed=False, already_applied=already_applied
        )
        reading.result()
    assert alive == [True, True]
    with pytest.raises(ValueError, match="1 pipes, and there are 2 ranks"):
        megatron_ranks(2, say_and_close, pipes=theirs[:1])


def test_the_callers_present_environment_is_the_ranks(megatron_ranks, monkeypatch):
    monkeypatch.setenv("SEEN_VARIABLE", "yes")
    assert megatron_ranks(1, seen_variable) == ["yes"]
    monkeypatch.delenv("SEEN_VARIABLE")
    assert megatron_ranks(1, seen_variable) == [None]


@pytest.mark.parametrize("batched", [False, True])
def test_a_tensor_may_be_freed_while_it_is_being_sent(megatron_ranks, batched):
    assert megatron_ranks(2, send_and_free, batched) == [True, True]


def test_a_program_may_initialise_torch_distributed_itself(megatron_ranks):
    assert megatron_ranks(2, without_group, distributed=False) == [False, False]
    assert megatron_ranks(2, rendezvous_by_environment, distributed=False) == [("gloo", 2)] * 2


def say(word):
    print(word, flush=True)


def hashed(text):
    return hash(text)


def test_strings_have_other_hashes_in_the_other_pool_which_ends_with_its_own():
    with cpu.RankPool(1, preload=("torch",)) as pool:
        other = pool.hashing_differently()
        hashes = [ranks.run(1, hashed, "a name", distributed=False) for ranks in (pool, other)]
        assert hashes[0] != hashes[1]
        assert pool.hashing_differently() is other
        (launcher_pid,) = other.run(1, os.getppid, distributed=False)
    with pytest.raises(ProcessLookupError):
        os.kill(launcher_pid, 0)


def test_what_ranks_print_can_be_kept_out_and_an_untried_torch_is_told_once(capfd, mocker, caplog):
    mocker.patch.object(pool_module, "untried_torch", return_value="torch 99 is newer")
    with cpu.RankPool(1, preload=("torch",), stdout=2, device="cpu") as pool:
        for _ in range(2):
            pool.run(1, say, "chatter", distributed=False)
    out, err = capfd.readouterr()
    assert "chatter" not in out
    assert "chatter" in err
    assert caplog.messages == ["torch 99 is newer"]


NEWER_TORCH = """
import torch

ASKED = {
    torch.cuda.CUDAGraph: "is replaced, too",
    torch.cuda.memory_usage.gone: "raises",
}
"""


def test_a_start_that_fails_names_what_the_runtime_emulates_there(tmp_path, monkeypatch):
    (tmp_path / "newer_torch.py").write_text(NEWER_TORCH)
    monkeypatch.syspath_prepend(tmp_path)
    with cpu.RankPool(1, preload=("newer_torch",), device="cpu") as pool:
        failed = (
            r"could not be started: AttributeError: .*'gone'; .* emulates torch.cuda.memory_usage"
        )
        ours, theirs = socket.socketpair()
        with ours, pytest.raises(RuntimeError, match=failed):
            pool.run(1, say_and_close, pipes=[theirs])
        assert theirs.fileno() == -1


def of_preloaded():
    """Return where one preloaded module is from, and what an assertion of the other one says."""
    place = sys.modules["placed"].PLACE
    try:
        sys.modules["asserting"].check(3)
    except AssertionError as error:
        return place, str(error)


def test_the_launcher_imports_what_its_caller_would(tmp_path, monkeypatch):
    for place in ("installed", "checkout"):
        (tmp_path / place).mkdir()
        (tmp_path / place / "placed.py").write_text(f"PLACE = {place!r}\n")
        (tmp_path / place / "asserting.py").write_text("def check(x):\n    assert x is None\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "installed"))
    monkeypatch.syspath_prepend(tmp_path / "checkout")
    pytest.register_assert_rewrite("asserting")
    importlib.import_module("asserting")
    try:
        with cpu.RankPool(1, preload=("torch", "placed", "asserting")) as pool:
            ((place, complaint),) = pool.run(1, of_preloaded, distributed=False)
    finally:
        del sys.modules["asserting"]
    assert place == "checkout"
    assert complaint == "assert 3 is None", "with its values"


@pytest.mark.parametrize(
    ("torch", "untried"),
    [("2.6.0", False), (NEWEST, False), (f"{NEWEST}+cpu", False), ("99.0.1", True)],
)
def test_a_torch_that_no_rank_has_run_on_is_named_with_the_pin(torch, untried):
    said = untried_torch(torch)
    assert (said is not None) == untried
    if said is not None:
        major, minor, _ = NEWEST.split(".")
        assert said.startswith("torch 99.0.1 is newer than any that ranks were run on")
        assert said.endswith(f"pip install 'torch<{major}.{int(minor) + 1}'")


def test_what_ranks_cannot_run_is_refused_with_the_reason(megatron_ranks):
    def closure():
        return None

    for ranks, function, said in (
        (1, lambda: None, "define it at the top of a module"),
        (1, closure, "define it at the top of a module"),
        (9, find_traces, "between 1 and this pool's max_world_size 4, found 9"),
    ):
        with pytest.raises(ValueError, match=said):
            megatron_ranks(ranks, function)


def test_functions_of_files_with_the_same_name_are_told_apart(megatron_ranks, tmp_path):
    answers = []
    for number in (1, 2):
        folder = tmp_path / str(number)
        folder.mkdir()
        path = folder / "module_of_the_same_name.py"
        path.write_text(f"def answer():\n    return {number}\n", encoding="utf-8")
        spec = importlib.util.spec_from_file_location("module_of_the_same_name", path)
        module = importlib.util.module_from_spec(spec)
        sys.modules["module_of_the_same_name"] = module
        spec.loader.exec_module(module)
        answers += megatron_ranks(1, module.answer)
    del sys.modules["module_of_the_same_name"]
    assert answers == [1, 2]


def test_a_script_without_a_guard_is_told_so_instead_of_starting_ranks_without_end(tmp_path):
    script = tmp_path / "unguarded.py"
    script.write_text(
        "from megatron_idempotent.proof.cpu.pool import RankPool\n"
        "def nothing(): pass\n"
        'RankPool(1, preload=("torch",)).run(1, nothing, distributed=False)\n',
        encoding="utf-8",
    )
    run = started(sys.executable, script)
    assert run.returncode == 1
    *_, last = [line for line in run.stderr.splitlines() if "RuntimeError" in line]
    assert "unguarded.py starts ranks while a rank imports it" in last
    assert 'under `if __name__ == "__main__":`' in last


def test_a_rank_may_spawn_a_process_where_a_script_has_called_it(tmp_path):
    script = tmp_path / "spawns.py"
    script.write_text(
        "import multiprocessing\n"
        "from megatron_idempotent.proof.cpu.pool import RankPool\n"
        "def ended_with(code):\n"
        "    process = multiprocessing.get_context('spawn').Process(target=exit, args=(code,))\n"
        "    process.start()\n"
        "    process.join()\n"
        "    return process.exitcode\n"
        'if __name__ == "__main__":\n'
        '    with RankPool(1, preload=("torch",)) as pool:\n'
        "        print(pool.run(1, ended_with, 7, distributed=False))\n",
        encoding="utf-8",
    )
    run = started(sys.executable, script)
    assert run.stdout == "[7]\n", run.stderr


SCRIPT = """
import os, signal, sys, time
from megatron_idempotent.proof.cpu.pool import RankPool

def write_pid_and_wait(folder):
    open(os.path.join(folder, f"{os.environ['RANK']}-{os.getpid()}"), "w").close()
    time.sleep(600)

if __name__ == "__main__":
    # A shell starts background jobs with SIGINT ignored, and children inherit that.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with RankPool(2, preload=("torch",)) as pool:
        how = {"timeout_s": 600, "distributed": False, "already_applied": sys.argv[2] == "patched"}
        pool.run(2, write_pid_and_wait, sys.argv[1], **how)
"""


@pytest.mark.parametrize(
    ("how", "start"),
    [
        pytest.param(signal.SIGINT, "stock", marks=pytest.mark.exhaustive),
        pytest.param(signal.SIGKILL, "stock", marks=pytest.mark.exhaustive),
        (signal.SIGKILL, "patched"),
    ],
)
def test_no_rank_outlives_its_caller(tmp_path, how, start):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT, encoding="utf-8")
    folder = tmp_path / "pids"
    folder.mkdir()
    command = [sys.executable, str(script), str(folder), start]
    caller = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        wait_until(lambda: len(list(folder.iterdir())) == 2, 120.0)
    finally:
        caller.send_signal(how)
        caller.wait(20.0)
    pids = [int(path.name.split("-")[1]) for path in folder.iterdir()]
    wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), 10.0)


def start_others_and_end(folder, how):
    """Start a server as checkpoints do, and a process of another session; end in a way."""
    server = multiprocessing.get_context("fork").Manager()
    other = subprocess.Popen(["sleep", "600"], start_new_session=True)
    for name, pid in (("server", server._process.pid), ("other", other.pid)):
        Path(folder, f"{name}-{pid}").touch()
    if how == "hangs":
        wait_for_ever()
    if how != "returns":
        os.kill(os.getpid() if how == "is killed" else os.getppid(), signal.SIGKILL)
        wait_for_ever()


def pids_in(folder):
    return {name: int(pid) for name, pid in (path.name.split("-") for path in folder.iterdir())}


@pytest.mark.parametrize("start", ["stock", "patched"])
@pytest.mark.parametrize("how", ["returns", "is killed", "hangs"])
def test_what_a_rank_has_started_ends_with_it(megatron_ranks, tmp_path, how, start):
    options = {"timeout_s": 2.0, "distributed": False, "already_applied": start == "patched"}
    with contextlib.suppress(cpu.RankError, cpu.RankTimeout):
        megatron_ranks(1, start_others_and_end, tmp_path, how, **options)
    pids = pids_in(tmp_path)
    assert len(pids) == 2
    assert not [name for name, pid in pids.items() if Path(f"/proc/{pid}").exists()]


def test_what_a_rank_has_started_ends_with_a_launcher_that_was_killed(tmp_path):
    with pool_module.RankPool(1, preload=("torch",)) as pool:
        options = {"timeout_s": 60.0, "distributed": False}
        start = time.perf_counter()
        with pytest.raises(cpu.errors.LauncherLost, match="exit code -9"):
            pool.run(1, start_others_and_end, tmp_path, "kills its launcher", **options)
    assert time.perf_counter() - start < 30.0  # its end was seen, though the server had its pipes
    pids = pids_in(tmp_path)
    assert len(pids) == 2
    wait_until(lambda: {state_of(pid) for pid in pids.values()} == {"Z"}, 10.0)


def session_and_groups():
    return os.getsid(0), os.getpgrp(), os.getpgid(os.getppid())


def test_ranks_are_in_the_session_of_their_caller_and_out_of_reach_of_its_ctrl_c(megatron_ranks):
    """Linux shares processors out among sessions: for another session it takes one from a rank that
    holds a lock.
    """
    for options in ({}, {"already_applied": True}):
        ranks = megatron_ranks(2, session_and_groups, distributed=False, **options)
        assert {session for session, *_ in ranks} == {os.getsid(0)}
        assert os.getpgrp() not in {group for _, *groups in ranks for group in groups}
        assert ranks[0][1] != ranks[1][1]


IN_A_TERMINAL = """
import os, termios
from megatron_idempotent.proof.cpu.pool import RankPool

def asks_the_terminal():
    print("a rank writes", flush=True)
    with open("/dev/tty", "rb", buffering=0) as terminal:
        try:
            return terminal.read(1)
        except OSError as error:
            return error.strerror

if __name__ == "__main__":
    attributes = termios.tcgetattr(1)
    attributes[3] |= termios.TOSTOP  # stop what writes in the background
    termios.tcsetattr(1, termios.TCSANOW, attributes)
    with RankPool(1, preload=()) as pool:
        print(pool.run(1, asks_the_terminal, distributed=False, timeout_s=20.0))
"""


def test_a_rank_writes_to_its_callers_terminal_and_gets_an_error_if_it_reads_from_it(tmp_path):
    script = tmp_path / "script.py"
    script.write_text(IN_A_TERMINAL, encoding="utf-8")
    program = f"import pty; pty.spawn([{sys.executable!r}, {str(script)!r}])"
    run = started(sys.executable, "-c", program)
    assert "a rank writes" in run.stdout, run.stdout + run.stderr
    assert "['Input/output error']" in run.stdout


def state_of(pid):
    status = Path(f"/proc/{pid}/stat")
    return status.read_text().rpartition(")")[2].split()[0] if status.exists() else "Z"


def wait_until(condition, timeout_s):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@on_ranks(2)
def test_groups_of_a_rank_share_one_device_of_gloo_and_so_one_thread():
    def loops():
        tasks = Path("/proc/self/task").glob("*/comm")
        return sum(path.read_text().startswith("gloo_tcp_loop") for path in tasks)

    wait_until(lambda: loops() == 1, 30)
    groups = [dist.new_group([0, 1]) for _ in range(8)]
    for group in groups:
        value = torch.ones(3)
        dist.all_reduce(value, group=group)
        assert value.tolist() == [2.0] * 3
    assert loops() == 1
    if child := os.fork():  # a fork takes no thread along
        assert os.waitpid(child, 0) == (child, 0)
        return
    try:
        alone = dist.ProcessGroupGloo(dist.HashStore(), 0, 1, timeout=timedelta(seconds=60))
        alone.barrier().wait()
        wait_until(lambda: loops() == 1, 30)  # the thread gives itself its name
        os._exit(0)
    finally:
        os._exit(1)
