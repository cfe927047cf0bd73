"""A tag publishes what `make dist` left, with its SBOM, by actions that cannot change."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))
RELEASE = (ROOT / ".github" / "workflows" / "release.yml").read_text("utf-8")


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_to_commits(path):
    used = re.findall(r"uses: (\S+)", path.read_text("utf-8"))
    assert [each for each in used if not re.fullmatch(r"[\w.-]+/[\w./-]+@[0-9a-f]{40}", each)] == []


def test_everything_is_attested_and_the_sbom_as_the_wheels():
    subjects = re.findall(r"subject-path: (.+)", RELEASE)
    assert subjects == ["dist/*", "dist/*.whl"]
    assert "sbom-path: ${{ steps.sbom.outputs.path }}" in RELEASE
    assert 'echo "path=$(echo dist/*.cdx.json)" >> "$GITHUB_OUTPUT"' in RELEASE


def test_the_index_gets_wheel_and_sdist_alone_and_the_release_on_github_all():
    (published,) = re.findall(r"uv publish --trusted-publishing always (.+)", RELEASE)
    assert published.split() == ["dist/*.whl", "dist/*.tar.gz"]
    assert 'gh release create "$GITHUB_REF_NAME" dist/* ' in RELEASE


def test_make_dist_writes_the_sbom_under_the_wheels_name():
    session = (ROOT / "noxfile.py").read_text("utf-8")
    assert 'f"dist/megatron_idempotent-{version}.cdx.json"' in session


def test_a_job_may_write_only_what_it_has_to():
    jobs = RELEASE.partition("\njobs:\n")
    assert "\npermissions: {}\n" in jobs[0]
    written = re.findall(r"^  (\w+):$|^      ([\w-]+): write$", jobs[2], re.MULTILINE)
    assert [job or right for job, right in written] == [
        *("build", "publish", "id-token", "attestations", "attach", "contents"),
    ]
