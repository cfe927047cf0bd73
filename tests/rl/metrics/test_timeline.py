"""The timeline and its trace, held against the rules of the trace event format."""

import json
import math
from collections import defaultdict

import pytest

from megatron_idempotent.rl.metrics.timeline import Timeline


def written(timeline, tmp_path):
    path = tmp_path / "timeline.json"
    timeline.write(path)
    trace = json.loads(path.read_text(), parse_constant=pytest.fail)
    check_rules(trace)
    return trace


def check_rules(trace):
    """Check what the format asks of the events that are used, and what viewers need to name
    them."""
    assert trace["displayTimeUnit"] in ("ms", "ns")
    threads, processes, slices = set(), set(), defaultdict(list)
    for event in trace["traceEvents"]:
        assert type(event["pid"]) is int
        assert type(event["ts"]) is int
        assert event["ts"] >= 0
        assert isinstance(event["name"], str)
        if event["ph"] == "M":
            known = {"process_name": processes, "thread_name": threads}.get(event["name"])
            key = event["pid"] if known is processes else (event["pid"], event.get("tid"))
            if known is None:
                assert event["name"] in ("process_sort_index", "thread_sort_index")
                assert type(event["args"]["sort_index"]) is int
            else:
                assert isinstance(event["args"]["name"], str)
                assert key not in known, "named twice"
                known.add(key)
        elif event["ph"] == "X":
            assert type(event["dur"]) is int
            assert event["dur"] >= 0
            slices[event["pid"], event["tid"]].append(event)
        elif event["ph"] == "i":
            assert event["s"] in ("g", "p", "t")
            assert (event["pid"], event["tid"]) not in processes
        else:
            assert event["ph"] == "C"
            assert all(type(value) in (int, float) for value in event["args"].values())
    used = [event for event in trace["traceEvents"] if event["ph"] != "M"]
    assert {event["pid"] for event in used} <= processes
    assert {(event["pid"], event["tid"]) for event in used if "tid" in event} <= threads
    tids = [tid for _, tid in threads]
    assert len(tids) == len(set(tids)), "a thread id is of one process"
    assert not set(tids) & processes, "such a thread counts as its process's main one"
    for events in slices.values():
        assert_nested(events)


def assert_nested(events):
    open_ends = []
    for event in events:
        start, end = event["ts"], event["ts"] + event["dur"]
        while open_ends and open_ends[-1] <= start:
            open_ends.pop()
        assert not open_ends or end <= open_ends[-1], "complete events of a thread cross"
        open_ends.append(end)


def names(trace, what="thread_name"):
    """Names of threads or processes, by id, in the order in which a viewer sorts them."""
    key = "tid" if what == "thread_name" else "pid"
    order = {
        event[key]: event["args"]["sort_index"]
        for event in trace["traceEvents"]
        if event["name"] == what.replace("name", "sort_index")
    }
    found = {
        event[key]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == what
    }
    return {each: found[each] for each in sorted(found, key=order.__getitem__)}


def events(trace, ph):
    return [event for event in trace["traceEvents"] if event["ph"] == ph]


def test_times_are_microseconds_from_the_first_event(tmp_path):
    timeline = Timeline()
    assert events(written(timeline, tmp_path), "X") == []
    timeline.span("train", "finish", 101.5, 101.75, {"version": 3})
    timeline.count("ready groups", 100.0, 4)
    timeline.mark("train", "version 4", 101.75)
    trace = written(timeline, tmp_path)
    (span,) = events(trace, "X")
    assert (span["ts"], span["dur"], span["args"]) == (1_500_000, 250_000, {"version": 3})
    assert events(trace, "C")[0] | {"ts": 0, "args": {"value": 4}} == events(trace, "C")[0]
    assert events(trace, "i")[0]["ts"] == 1_750_000
    assert events(trace, "i")[0]["tid"] == span["tid"]


def test_numbered_tracks_stand_together_and_in_order_and_inner_spans_stay_on_theirs(tmp_path):
    timeline = Timeline(tracks=("train", "rollouts"))
    for number in (10, 2, 1):
        timeline.span(f"rollouts {number}", f"group {number}", 0, 2)
    # Recorded as they end: the inner one comes first.
    timeline.span("train", "inner", 1, 2)
    timeline.span("train", "wait", 0, 2)
    timeline.mark("rollouts 2", "group 7 dropped", 3)
    trace = written(timeline, tmp_path)
    threads = names(trace)
    assert list(threads.values()) == ["train", "rollouts 1", "rollouts 2", "rollouts 10"]
    assert {event["name"]: threads[event["tid"]] for event in events(trace, "X")} == {
        "group 1": "rollouts 1",
        "group 2": "rollouts 2",
        "group 10": "rollouts 10",
        "inner": "train",
        "wait": "train",
    }
    assert threads[events(trace, "i")[0]["tid"]] == "rollouts 2"


def test_tracks_have_the_order_that_was_asked_for_whatever_was_recorded_first(tmp_path):
    def tracks(order):
        timeline = Timeline(tracks=("train", "never used", "rollouts"))
        for name in order:
            timeline.span(name, "x", 0, 1)
        return list(names(written(timeline, tmp_path)).values())

    given = ["sync", "checkpoint", "rollouts", "train", "ranks", "evaluation", "buffer"]
    expected = ["train", "rollouts", "buffer", "checkpoint", "evaluation", "ranks", "sync"]
    assert tracks(given) == tracks(given[::-1]) == expected


def test_only_the_newest_events_are_kept_and_the_file_says_how_many_are_not(tmp_path):
    timeline = Timeline(capacity=10)
    for number in range(25):
        timeline.span("train", str(number), number, number + 1)
    assert timeline.dropped == 15
    trace = written(timeline, tmp_path)
    assert [event["name"] for event in events(trace, "X")] == [str(n) for n in range(15, 25)]
    assert trace["otherData"]["dropped_events"] == 15
    with pytest.raises(ValueError, match="capacity is 0; allowed: 1 event or more"):
        Timeline(capacity=0)


def test_numbers_that_json_does_not_have_do_not_break_the_file(tmp_path):
    timeline = Timeline()
    timeline.count("lag", 0.0, math.nan)
    timeline.count("lag", 1.0, 2.0)
    timeline.span("train", "step", 0, 1, {"loss": math.inf, "groups": (1, 2), "ok": True})
    trace = written(timeline, tmp_path)
    assert [event["args"] for event in events(trace, "C")] == [{"value": 2.0}]
    assert events(trace, "X")[0]["args"] == {"loss": "inf", "groups": "(1, 2)", "ok": True}


def test_a_span_that_ends_before_it_starts_is_refused():
    with pytest.raises(ValueError, match=r"'finish' of track 'train' is from 2.0 s to 1.0 s"):
        Timeline().span("train", "finish", 2.0, 1.0)


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path):
    class Unprintable:
        def __str__(self):
            raise RuntimeError("no text")

    timeline = Timeline()
    timeline.span("train", "step", 0, 1)
    timeline.write(tmp_path / "timeline.json")
    before = (tmp_path / "timeline.json").read_bytes()
    timeline.span("train", "step", 1, 2, {"batch": Unprintable()})
    with pytest.raises(RuntimeError, match="no text"):
        timeline.write(tmp_path / "timeline.json")
    assert [each.name for each in tmp_path.iterdir()] == ["timeline.json"]
    assert (tmp_path / "timeline.json").read_bytes() == before
