"""The picture of a timeline, for runs of seconds and of hours."""

import random

import pytest

pytest.importorskip("matplotlib")

from megatron_idempotent.rl.metrics.chart import draw_timeline, timeline_figure
from megatron_idempotent.rl.metrics.timeline import Timeline


def run_of(length_s, *, step_s, groups, kept=200_000):
    """A run with that many groups at once, and a version every `step_s`."""
    draw = random.Random(1)
    timeline = Timeline(capacity=kept, tracks=("train", "rollouts"))
    now, version = 100.0, 0
    while now < 100.0 + length_s:
        for lane in range(groups):
            start = now + step_s * lane / groups
            timeline.span("rollouts", f"group {version * groups + lane}", start, start + step_s)
        wait = step_s * 0.3 * draw.random()
        timeline.span("train", "exposed_generation", now, now + wait)
        timeline.span("train", "policy_training", now + wait, now + 0.9 * step_s)
        timeline.span("train", "sync_weights", now + 0.9 * step_s, now + step_s)
        now, version = now + step_s, version + 1
        timeline.mark("train", f"version {version}", now)
        timeline.count("lag", now, draw.randrange(3))
        timeline.count("ready groups", now, draw.randrange(8))
    return timeline


def texts(panel):
    return [text.get_text() for text in panel.texts]


def rows(figure):
    return [label.get_text() for label in figure.axes[0].get_yticklabels()]


def labels(figure):
    return [panel.get_ylabel() for panel in figure.axes[1:]]


def data_of(stairs):
    return stairs.get_data()


def legend(figure):
    return {text.get_text() for text in figure.axes[0].get_legend().get_texts()}


def test_a_short_run_shows_every_span_lane_and_version():
    figure = timeline_figure(run_of(10.0, step_s=1.0, groups=3))
    assert rows(figure) == ["train", "rollouts"]
    assert labels(figure) == ["rollouts in flight", "lag", "ready groups"]
    assert texts(figure.axes[0]) == [f"v{version}" for version in range(1, 11)]
    assert figure.axes[-1].get_xlabel() == "s since the first event"
    assert legend(figure) == {"exposed_generation", "policy_training", "sync_weights", "group"}
    bars = sum(len(each.get_paths()) for each in figure.axes[0].collections)
    assert bars == 3 * 10 + 3 * 10
    in_flight = figure.axes[1].lines[0].get_ydata()
    assert max(in_flight) == 3
    close = Timeline(tracks=("train",))
    for version, at in ((1, 0.0), (2, 0.1), (3, 5.0), (4, 10.0)):
        close.mark("train", f"version {version}", at)
    shown = texts(timeline_figure(close).axes[0])
    assert shown == ["v1", "v3", "v4"], "one label would cover the other"


def test_a_long_run_is_drawn_in_bins_with_the_lanes_as_a_curve():
    figure = timeline_figure(run_of(36_000.0, step_s=10.0, groups=20))
    assert rows(figure) == ["train"], "twenty lanes would be too thin to see"
    assert labels(figure) == ["rollouts in flight", "lag", "ready groups"]
    assert figure.axes[-1].get_xlabel() == "h since the first event"
    assert legend(figure) == {"exposed_generation", "policy_training", "sync_weights"}
    assert len(texts(figure.axes[0])) <= 20
    drawn = sum(len(panel.patches) + len(panel.collections) for panel in figure.axes)
    assert drawn < 20, "bins, and not one shape per span"
    piled = [(d.baseline[300], d.values[300]) for d in map(data_of, figure.axes[0].patches)]
    assert [bottom for bottom, _ in piled] == pytest.approx([0.9, piled[0][1], piled[1][1]])
    assert piled[-1][1] == pytest.approx(0.1), "the train pump is always in one of its phases"


def test_what_was_counted_is_not_drawn_a_second_time_from_the_spans():
    timeline = run_of(10.0, step_s=1.0, groups=3)
    timeline.span("downloads", "a", 100.0, 102.0)
    timeline.span("downloads", "b", 101.0, 103.0)
    timeline.count("generating groups", 100.0, 3)
    assert labels(timeline_figure(timeline)) == [
        "downloads in flight",
        "generating groups",
        "lag",
        "ready groups",
    ]


def test_what_is_rare_and_short_is_still_to_be_seen():
    timeline = Timeline()
    timeline.span("checkpoint", "checkpoint", 1_000.0, 1_001.0)
    timeline.span("checkpoint", "checkpoint", 36_000.0, 36_001.0)
    timeline.span("train", "policy_training", 0.0, 36_001.0)
    (bars, _) = timeline_figure(timeline).axes[0].collections
    widths = [path.get_extents().width for path in bars.get_paths()]
    assert min(widths) > 10 / 1440, "half a bin of hours"


def test_the_same_phase_has_the_same_colour_in_every_run():
    def colour(phase, *others):
        timeline = Timeline()
        for at, name in enumerate((*others, phase)):
            timeline.span("train", name, at, at + 1)
        found = timeline_figure(timeline).axes[0].collections
        return next(each.get_facecolor().tolist() for each in found if each.get_label() == phase)

    assert colour("policy_training") == colour("policy_training", "a", "sync_weights", "b")


def test_more_phases_than_colours_are_told_as_other():
    timeline = Timeline()
    for number in range(12):
        timeline.span("train", f"phase {chr(97 + number)}", number, number + 1)
    assert "other" in legend(timeline_figure(timeline))
    assert len(legend(timeline_figure(timeline))) == 6


def test_the_picture_says_how_many_events_are_not_in_it():
    timeline = run_of(10.0, step_s=1.0, groups=2, kept=30)
    title = timeline_figure(timeline).axes[0].get_title(loc="left")
    assert f"; {timeline.dropped} older events were dropped" in title
    assert timeline.dropped > 0


@pytest.mark.parametrize("what", ["nothing", "a count", "a mark", "a moment"])
def test_a_run_that_recorded_next_to_nothing_is_a_picture_as_well(tmp_path, what):
    timeline = Timeline()
    if what == "a count":
        timeline.count("lag", 3.0, 1.0)
        timeline.count("loss", 3.0, float("nan"))
    if what == "a mark":
        timeline.mark("rollouts", "group 3 dropped", 3.0)
    if what == "a moment":
        timeline.span("train", "step", 3.0, 3.0)
    draw_timeline(timeline, tmp_path / "timeline.png")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert len(list(tmp_path.iterdir())) == 1
