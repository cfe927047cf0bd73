"""The asynchronous trainer against the synchronous one on the same cores, at the same samples.

    python -m benchmarks.async_against_sync [--steps 12] [--tokens 8,32] [--json]

Sync: two ranks that first sample and then train, each on one core. Async: one rank that trains on
one core while an engine samples on the other; and two ranks with an engine on the same two cores.
The result is response tokens trained per second, without set-up and the first steps, and its ratio
to sync. Asynchronous training helps with responses of very different lengths and with slow switches
between sampling and training. Neither occurs here, so this is its worst case.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks._record import options, progress, tell

SIDES = {
    "sync, 2 ranks": ["--ranks", "2", "--set", "rollout.prompts=16"],
    "async, 1 rank + engine": ["--async", "--ranks", "1"],
    "async, 2 ranks + engine": ["--async", "--ranks", "2"],
}
SKIPPED = 4


def write_task(tokens: int, folder: Path) -> Path:
    """Write a file of prompts that ask for an answer of `tokens` tokens, the maximum response
    length; return its path.
    """
    rng = random.Random(0)
    rows = []
    for number in range(200):
        answer = " ".join(rng.choice("abcdefghij") for _ in range(tokens - 1))
        split = "held_out" if number % 8 == 0 else "train"
        rows.append({"prompt": f"say {answer}", "answer": answer, "split": split})
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return data


def speed(arguments: list[str], tokens: int, steps: int, folder: Path) -> float:
    """Run the command `train` with these arguments; return the response tokens trained per second,
    without set-up and the first steps.
    """
    data = write_task(tokens, folder)
    out = folder / f"run-{len(list(folder.iterdir()))}"
    settings = {
        "task.data": data,
        "run.rollouts": steps,
        "run.checkpoint_every": 0,
        "rollout.prompts": 16,
        "rollout.group_size": 8,
        "rollout.max_response_tokens": tokens,
        "optimizer.steps_per_rollout": 1,
        "optimizer.microbatches_per_step": 2,
        "optimizer.chunks_per_step": 1,
        "controller.groups_per_call": 8,
        "controller.order": "oldest",
        "evaluation.every": 0,
        "evaluation.prompts": 1,
        "loss.old_logprobs": "recomputed",
        "loss.kl_coefficient": 0.01,
    }
    options = [part for name, value in settings.items() for part in ("--set", f"{name}={value}")]
    command = [sys.executable, "-m", "megatron_idempotent", "train", "--quiet"]
    subprocess.run(
        [*command, *arguments, *options, "--out", str(out)],
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
    )
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [row for row in rows if row["step"] > SKIPPED]
    seconds = sum(row["timing/train/total_s"] for row in rows)
    return float(sum(row["train/response_tokens"] for row in rows) / seconds)


def main() -> None:
    """Train synchronously and asynchronously for each response length; print tokens per second and
    ratios.
    """
    parser = options(__doc__)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--tokens", default="8,32", help="longest responses")
    asked = parser.parse_args()
    found: dict[int, dict[str, float]] = {}
    for tokens in (int(each) for each in asked.tokens.split(",")):
        with tempfile.TemporaryDirectory() as name:
            row = {}
            for side, arguments in SIDES.items():
                progress(f"{tokens} tokens, {side}")
                row[side] = speed(arguments, tokens, asked.steps, Path(name))
        first = next(iter(row.values()))
        found[tokens] = row | {f"{side} ÷ sync": row[side] / first for side in SIDES}
    tell(found, asked.json)


if __name__ == "__main__":
    main()
