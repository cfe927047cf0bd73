"""`prove`: run the hazards and print what they did."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict

from megatron_idempotent.engine.catalogue import hazards
from megatron_idempotent.engine.table import render
from megatron_idempotent.proof import Finding
from megatron_idempotent.proof import prove as findings_of


def prove(ids: Sequence[str] | None, *, as_json: bool, device: str | None) -> int:
    """Print a finding per hazard as it comes; 1 where a release and its case file disagree.

    Raises:
        UnknownPatchError: an id that no case file has.
        NoDeviceError: there is no GPU, and the device is "cuda".
    """
    total = len(hazards() if ids is None else set(ids))
    findings: list[Finding] = []
    for finding in findings_of(ids, device=device):
        findings.append(finding)
        if not as_json and sys.stderr.isatty():
            print(f"\r{len(findings)}/{total} {finding.id:<40}", end="", file=sys.stderr)
    if as_json:
        print(json.dumps([asdict(finding) for finding in findings], indent=2))
    else:
        if sys.stderr.isatty():
            print("\r" + " " * 60 + "\r", end="", file=sys.stderr)
        rows = [
            (f.id, f.verdict, f"{f.seconds:.1f}", f.patched[:40], f.stock.split("\n")[0])
            for f in findings
        ]
        print(render(("hazard", "verdict", "seconds", "patched", "stock"), rows))
        for finding in findings:
            if finding.failed and finding.neighbour not in ("-", "ok"):
                print(f"\n{finding.id}, the right program beside it: {finding.neighbour}")
    return 1 if any(finding.failed for finding in findings) else 0
