"""Report of a GPU run: one JSON, written after each stage, and one Markdown table made of it."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

#: What one GPU without Transformer Engine and vLLM cannot show, and why.
LEFT_OUT = {
    "collectives of NCCL between ranks": "two GPUs: NCCL refuses two ranks on one. Ranks that "
    "share one go over gloo and host memory",
    "weights broadcast by NCCL (ProcessGroupSender)": "two GPUs",
    "tests/step/test_fsdp*": "two GPUs: FSDP2's collectives pass by the staging of shared GPUs",
    "tests/rl/engines_vllm, tests/rl/trainer/test_vllm.py": "vLLM",
    "FP8 layers, fused attention, the GroupedMLP of experts": "Transformer Engine",
    "OptimizerCudaGraphWrapper on Megatron's own optimizer": "Transformer Engine's capturable Adam",
}
NAMES = {"json": "report.json", "markdown": "report.md"}
_GOOD = ("passed", "skipped", "ok", "proven", "documented", "not_applicable")


class Report:
    """A folder's report; stages of an earlier call on the same machine are kept.

    Example:
        report = Report(Path("build/gpu"), facts, dry=False)
        report.stage("doctor", outcome="passed", seconds=0.4, rows=[])
    """

    def __init__(self, folder: Path, machine: dict[str, Any], *, dry: bool) -> None:
        self._folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self.found: dict[str, Any] = {
            "dry": dry,
            "machine": {k: v for k, v in machine.items() if k not in ("paths", "installed")},
            "stages": {},
            "left_out": LEFT_OUT,
        }
        path = folder / NAMES["json"]
        if path.exists():
            before = json.loads(path.read_text(encoding="utf-8"))
            if (before["dry"], before["machine"]) == (dry, self.found["machine"]):
                self.found["stages"] = before["stages"]
        self.write()

    def stage(self, name: str, **found: Any) -> None:
        """Take what a stage found: `outcome`, `seconds`, `budget_s`, `rows`, `said`."""
        self.found["stages"][name] = found
        self.write()

    def write(self) -> None:
        """Write both files, each complete at any time."""
        self.found["written"] = datetime.datetime.now(datetime.timezone.utc).isoformat()[:19]
        for kind, text in (
            ("json", json.dumps(self.found, indent=1)),
            ("markdown", markdown(self.found)),
        ):
            path = self._folder / NAMES[kind]
            part = path.with_name(f"{path.name}.part")
            part.write_text(text, encoding="utf-8")
            part.replace(path)

    @property
    def failed(self) -> list[str]:
        """Stages that were not good."""
        return [n for n, each in self.found["stages"].items() if each["outcome"] != "passed"]


def markdown(found: dict[str, Any]) -> str:
    """The report as a table per stage."""
    machine = found["machine"]
    title = "A dry run, without a GPU" if found["dry"] else f"{machine.get('device', 'A GPU')}"
    lines = [f"# {title}", "", f"Written {found['written']} UTC.", ""]
    if found["dry"]:
        lines += ["Its numbers are a busy CPU's, in the smallest size: they say nothing.", ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {name} | {_cell(value)} |" for name, value in machine.items()]
    for name, stage in found["stages"].items():
        lines += ["", f"## {name}: {stage['outcome']}, {stage['seconds']:.0f} s", ""]
        if stage.get("said"):
            lines += ["```", *stage["said"].splitlines()[-30:], "```", ""]
        lines += _table(stage["rows"])
    lines += ["", "## Left out", "", "| what | needs |", "|---|---|"]
    lines += [f"| {what} | {why} |" for what, why in found["left_out"].items()]
    return "\n".join(lines) + "\n"


def _table(rows: list[dict[str, Any]]) -> list[str]:
    if not rows:
        return []
    columns = list(dict.fromkeys(name for row in rows for name in row))
    head = [f"| {' | '.join(columns)} |", f"|{'---|' * len(columns)}"]
    return head + [f"| {' | '.join(_cell(row.get(c, '')) for c in columns)} |" for row in rows]


def _cell(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    text = str(value).replace("|", "\\|").strip()
    return text.splitlines()[-1][:200] if text else ""


def all_good(rows: list[dict[str, Any]]) -> bool:
    """Return whether no row of a stage tells of a failure, or of a number that misses its aim."""
    return all(row.get("outcome", row.get("verdict", "ok")) in _GOOD for row in rows)
