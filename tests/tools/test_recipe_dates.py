"""A recipe's page says when the framework's own code last passed, and only if all of it did."""

from __future__ import annotations

import pytest
import recipe_dates

COMMIT = "1dda039b9c6311889a9c9a26040677e1254814f9"
WRITTEN = f"Written for [roll at 1](https://github.com/a/roll/tree/{COMMIT}), and run."
PAGE = f"# roll\n\n{WRITTEN}\n\n## x\n"
REPORT = """<testsuites><testsuite timestamp="{day}T02:17:00+00:00">
<testcase classname="tests.downstream.test_recipes" name="test_the_door[roll-failed-window]"/>
<testcase classname="tests.downstream.test_recipes" name="test_a_page[roll]">{outcome}</testcase>
<testcase classname="tests.downstream.test_roll_adapter" name="test_steps"><skipped/></testcase>
<testcase classname="tests.downstream.test_rollouts" name="test_it_rolled_out"><failure/></testcase>
<testcase classname="tests.downstream.test_verl" name="test_scroll"><error/></testcase>
</testsuite></testsuites>"""


@pytest.fixture
def recipes(tmp_path, monkeypatch):
    """A folder of recipes: ROLL's, one whose tests did not run, and the list of all."""
    for name in ("roll", "slime", "index"):
        (tmp_path / f"{name}.md").write_text(PAGE)
    monkeypatch.setattr(recipe_dates, "RECIPES", tmp_path)
    return tmp_path


def run(folder, day, outcome=""):
    (folder / "report.xml").write_text(REPORT.format(day=day, outcome=outcome))
    recipe_dates.main(folder / "report.xml")
    return (folder / "roll.md").read_text()


def test_a_page_has_the_day_and_the_commit_of_its_last_pass(recipes, capsys):
    for day in ("2026-11-21", "2026-11-28"):
        line = f"\nLast passed on {day}, at 1dda039b9c.\n"
        assert run(recipes, day) == PAGE.replace("and run.\n", f"and run.\n{line}")
    page = (recipes / "roll.md").read_text()
    assert run(recipes, "2026-12-05", "<failure/>") == page
    assert capsys.readouterr().out.splitlines() == [
        *["roll: 2 of 2 tests passed"] * 2,
        "roll: 1 of 2 tests passed",
    ]
    assert [(recipes / f"{name}.md").read_text() for name in ("slime", "index")] == [PAGE] * 2


def test_a_page_without_its_commit_is_refused():
    with pytest.raises(ValueError, match="Written for"):
        recipe_dates.with_date("# roll\n", "2026-11-28")
