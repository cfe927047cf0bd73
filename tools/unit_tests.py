"""Run Megatron's own unit tests on CPU ranks, stock and patched, and compare their outcomes.

    python tools/unit_tests.py path/to/Megatron-LM [files under tests/unit_tests …]

The tests are read from a checkout; of Megatron itself the installed one runs, so take the tag that
fits it. Many of upstream's tests need a GPU and fail here: with and without patches alike, which is
what is compared. Exit code 1 where an outcome differs. They leak process groups: with more than two
ranks some files start so many threads that a small machine misses the deadline.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from megatron_idempotent.proof.cpu import PROGRAM_PRELOAD, RankError, RankPool, RankTimeout

FILES = (
    "distributed/test_distributed_data_parallel.py",
    "distributed/test_finalize_model_grads.py",
    "distributed/test_grad_sync_with_expert_parallel.py",
    "distributed/test_param_and_grad_buffer.py",
    "distributed/test_reduce_scatter_with_fp32_accumulation.py",
    "pipeline_parallel/test_schedules.py",
    "pipeline_parallel/test_pipeline_layout.py",
    "optimizer/test_clip_grads.py",
    "optimizer/test_optimizer_config.py",
    "optimizer/test_param_group_identifier_keys.py",
    "test_lion_optimizer.py",
    "test_optimizer.py",
    "test_layer_wise_optimizer.py",
    "test_optimizer_param_scheduler.py",
    "test_num_microbatches_calculator.py",
    "test_parallel_state.py",
    "test_training.py",
    "tensor_parallel/test_random.py",
    "transformer/moe/test_routers.py",
    "transformer/moe/test_aux_loss.py",
)


STUCK_S = 20.0


def main() -> int:
    """Run upstream's tests without and with the patches, and print a line per file.
    Return 1 if a test's outcome differs with the patches, else 0.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkout", type=Path)
    parser.add_argument("files", nargs="*", default=FILES)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--deadline-s", type=float, default=240.0, help="for one file")
    arguments = parser.parse_args()
    root = arguments.checkout.resolve()
    differing = 0
    with RankPool(arguments.ranks, preload=(*PROGRAM_PRELOAD, "pytest")) as pool:
        for file in arguments.files:
            if not (root / "tests" / "unit_tests" / file).is_file():
                print(f"{file}: not in this checkout", flush=True)
                continue
            stock, patched = (
                outcomes(pool, arguments.ranks, root, file, applied, arguments.deadline_s)
                for applied in (False, True)
            )
            counts = Counter(result for ranks in stock.values() for result in set(ranks))
            different = sorted(
                test
                for test in stock.keys() | patched.keys()
                if stock.get(test) != patched.get(test)
            )
            differing += len(different)
            print(f"{file}: {dict(counts)}, {len(different)} differ", flush=True)
            for test in different:
                print(
                    f"    {test}: stock {stock.get(test)}, patched {patched.get(test)}", flush=True
                )
    return 1 if differing else 0


def outcomes(
    pool: RankPool, ranks: int, root: Path, file: str, applied: bool, deadline_s: float
) -> dict[str, list[str]]:
    """Run one file of upstream's tests; return the outcomes on each rank by test.

    A test that the deadline cuts off is missing. `root` is the checkout, `file` a path below its
    tests/unit_tests; with `applied` all patches are.
    """
    with tempfile.TemporaryDirectory() as folder:
        try:
            pool.run(
                ranks,
                _run,
                str(root),
                file,
                applied,
                folder,
                timeout_s=deadline_s,
                distributed=False,
            )
        except (RankError, RankTimeout) as error:
            print(
                f"    {file}, {'patched' if applied else 'stock'}: {type(error).__name__}",
                flush=True,
            )
        results: dict[str, list[str]] = {}
        for rank in range(ranks):
            for line in (Path(folder) / str(rank)).read_text().splitlines():
                test, outcome = json.loads(line)
                results.setdefault(test, []).append(outcome)
    return results


class _Recorder:
    """Writes the outcome of each test to a file as soon as pytest reports it, so that a test that
    hangs loses no earlier outcome.
    """

    def __init__(self, path: Path) -> None:
        self._file = path.open("w")

    def pytest_runtest_logreport(self, report: Any) -> None:
        if report.when == "call" or report.outcome != "passed":
            what = report.outcome
            if report.failed and report.longrepr is not None:
                crash = getattr(report.longrepr, "reprcrash", None)
                what = f"failed: {crash.message.splitlines()[0][:80]}" if crash else "failed"
            self._file.write(json.dumps([report.nodeid, what]) + "\n")
            self._file.flush()


def _run(root: str, file: str, applied: bool, folder: str) -> None:
    import datetime
    import functools
    import logging

    import pytest
    import torch

    import megatron_idempotent

    logging.disable(logging.WARNING)
    # A test that waits for a message which never comes fails after this, and the next one runs.
    torch.distributed.init_process_group = functools.partial(
        torch.distributed.init_process_group, timeout=datetime.timedelta(seconds=STUCK_S)
    )
    (recorder := Path(folder) / os.environ["RANK"]).touch()
    os.chdir(root)
    sys.path.insert(0, root)
    if applied:
        megatron_idempotent.apply(strict=True)
    options = ["-q", "-p", "no:cacheprovider", "-p", "no:randomly"]
    if not (Path(root) / "megatron" / "core").is_dir():
        # A framework's conftest.py imports what is not installed here.
        options.append("--noconftest")
    with open(os.devnull, "w") as nowhere:
        sys.stdout = sys.stderr = nowhere
        pytest.main(
            [*options, f"tests/unit_tests/{file}"],
            plugins=[_Recorder(recorder)],
        )


if __name__ == "__main__":
    sys.exit(main())
