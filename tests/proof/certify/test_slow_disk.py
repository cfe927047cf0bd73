"""A slow disk delays each kind of writer until it is released, and nothing but writers."""

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch

from megatron_idempotent.proof.certify.faults import slow_disk

#: Long enough for a writer that nothing delays.
ENOUGH_S = 0.3


def own_thread(write):
    """A thread that starts in the block."""
    threading.Thread(target=write, daemon=True).start()


def executor(write):
    """A call of an executor, whose thread may have started before the block."""
    EXECUTOR.submit(write)


EXECUTOR = ThreadPoolExecutor(1)
EXECUTOR.submit(int).result()


@pytest.mark.parametrize("start", [own_thread, executor])
def test_what_a_save_starts_begins_after_it(tmp_path, start):
    begun = threading.Event()
    with slow_disk(SimpleNamespace(folder=tmp_path)) as disk:
        start(begun.set)
        disk.returned()
        assert not begun.wait(ENOUGH_S)
        disk.release()
        assert begun.wait(10)
        later = threading.Event()  # the save has returned
        start(later.set)
        assert later.wait(10)


@pytest.mark.parametrize(
    "write",
    [lambda path: path.write_bytes(b"state"), lambda path: torch.save({}, path)],
    ids=["open", "torch.save"],
)
def test_a_file_that_an_older_thread_opens_is_written_late(tmp_path, write):
    folder, elsewhere = tmp_path / "folder", tmp_path / "elsewhere"
    folder.mkdir()
    paths, written = queue.Queue(), queue.Queue()

    def work():
        while path := paths.get():
            write(path)
            written.put(path)

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    with slow_disk(SimpleNamespace(folder=folder)) as disk:
        disk.returned()
        paths.put(elsewhere)
        assert written.get(timeout=10) == elsewhere
        paths.put(folder / "file")
        with pytest.raises(queue.Empty):
            written.get(timeout=ENOUGH_S)
        disk.release()
        assert written.get(timeout=10) == folder / "file"
    paths.put(None)
    thread.join(10)
