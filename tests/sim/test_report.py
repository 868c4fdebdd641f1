"""The report: JSON there and back, what a terminal shows, and a page that is well-formed, closed and escapes everything."""

from __future__ import annotations

import json
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.protocol.errors import ShoalError
from shoal.sim.charts import Band, Scale, Segment, bars, lines, matrix, plain, rows, size, thinned, unbroken
from shoal.sim.report import Report
from shoal.sim.report_page import ROWS_MAX, page

from .example_report import a_report

HOSTILE = "</title><script>alert(1)</script>\"'&<b>"


# --- JSON and text ----------------------------------------------------------------------------------------------------


def test_there_and_back_through_json():
    report = a_report()
    assert Report.from_dict(json.loads(json.dumps(report.to_dict(), allow_nan=False))) == report


def test_numbers_that_are_none_are_json_all_the_same():
    report = a_report(loss_last=math.nan, series={"loss": {"p0": [[0.0, math.inf], [1.0, 2.0]]}})
    tree = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    assert tree["loss_last"] is None
    assert tree["series"]["loss"]["p0"] == [[0.0, None], [1.0, 2.0]]
    assert page(Report.from_dict(tree))


def test_another_versions_report_is_refused_with_the_keys_that_differ():
    tree = a_report().to_dict()
    del tree["trace_hash"]
    tree["colour"] = 1
    with pytest.raises(ShoalError) as caught:
        Report.from_dict(tree)
    assert "colour, trace_hash" in caught.value.values


def test_ok_means_no_violation_no_error_and_nothing_unmet():
    assert a_report().ok
    assert not a_report(violations=[{"invariant": 1, "at_s": 3.0, "peer": "p0", "text": "x"}]).ok
    assert not a_report(errors=["boom"]).ok
    assert not a_report(unmet=["too slow"]).ok


def test_the_summary_has_the_hash_and_not_the_curves():
    summary = a_report().summary()
    assert summary["trace_hash"] == "ab" * 32 and summary["ok"] is True
    assert not {"series", "spans", "membership", "bytes_by_link"} & summary.keys()


def test_the_terminal_sees_every_violation_and_the_last_line_of_an_error():
    violation = {"invariant": 2, "at_s": 3.25, "peer": "", "text": "a dot twice"}
    text = a_report(
        violations=[violation], errors=["task died\nTraceback\n  file\nKeyError: 1"], unmet=["slow"]
    ).describe()
    assert "invariant 2 at 3.250 s, all: a dot twice" in text
    assert "task died: KeyError: 1" in text and "Traceback" not in text
    assert "UNMET      slow" in text and "shoal sim lan --seed 7" in text


def test_an_empty_simulation_can_be_described_and_drawn():
    empty = a_report(0, fault_count=0, series={}, wall_seconds=0.0, loss_first=None, loss_last=None, reward_last=None)
    assert "nobody honest runs" in empty.describe()
    assert "There are no peers." in page(empty)


def test_files_are_whole_or_not_there(tmp_path):
    written = a_report().write(str(tmp_path / "deep" / "er"))  # a text or a Path
    assert [p.name for p in written] == ["report.json", "report.html"]
    assert sorted(p.name for p in (tmp_path / "deep" / "er").iterdir()) == ["report.html", "report.json"]
    assert Report.from_dict(json.loads(written[0].read_text())) == a_report()


def test_a_folder_that_cannot_be_written_is_an_error_in_three_parts(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ShoalError) as caught:
        a_report().write(tmp_path / "file")
    assert "expected a folder" in caught.value.values and "--report" in caught.value.todo


# --- the page ---------------------------------------------------------------------------------------------------------


class Reader(HTMLParser):
    """Tags with their attributes; checks that they are closed in order."""

    VOID = {"meta", "br", "rect", "path"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)
        assert not self.open, self.open

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag):
        assert self.open and self.open.pop() == tag, f"</{tag}>"


def svgs(html: str) -> list[ET.Element]:
    return [ET.fromstring(text) for text in re.findall(r"<svg.*?</svg>", html, re.S)]


def test_the_page_is_closed_and_loads_nothing():
    html = page(a_report())
    tags = Reader(html).tags
    assert [t for t, _ in tags].count("svg") == 9
    assert not [a for _, attributes in tags for a in attributes if a in ("src", "href", "srcset", "onload", "onclick")]
    assert not re.search(r"https?://|@import|url\(", html)
    assert "default-src 'none'" in html


def test_every_chart_over_time_marks_every_fault():
    faults = 5
    drawn = svgs(page(a_report(fault_count=faults)))
    banded = [s for s in drawn if s.findall("g[@class='band']")]
    assert len(banded) == 7
    for chart in banded:
        assert len(chart.findall("g[@class='band']")) == faults
    # The other two have no time axis: they mark the peers.
    assert [len(s.findall("path[@class='mark']")) for s in drawn if s not in banded] == [3, 3]


def test_nothing_from_outside_is_markup():
    report = a_report(
        1,
        peers=[{"name": HOSTILE, "peer_id": HOSTILE}],
        scenario=HOSTILE,
        replay=HOSTILE,
        errors=[HOSTILE],
        unmet=[HOSTILE],
        violations=[{"invariant": 1, "at_s": 0.0, "peer": HOSTILE, "text": HOSTILE}],
        faults=[{"kind": HOSTILE, "who": [HOSTILE], "at_s": 1.0, "until_s": 2.0}],
        series={"loss": {HOSTILE: [[0.0, 1.0], [1.0, 2.0]]}},
        spans=[[HOSTILE, HOSTILE, 0.0, 5.0, 1]],
        membership=[[0.0, HOSTILE, HOSTILE, HOSTILE]],
        bytes_sent={HOSTILE: 3},
        bytes_by_link=[[HOSTILE, HOSTILE, 3]],
    )
    html = page(report)
    tags = [tag for tag, _ in Reader(html).tags]
    assert tags.count("script") == 1 and "b" not in tags
    assert html.count("<script>") == 1
    assert len(svgs(html)) >= 5


def test_sixty_four_peers_and_a_thousand_faults_stay_a_page_that_a_browser_opens():
    report = a_report(64, fault_count=1000)
    html = page(report)
    assert len(html) < 4_000_000
    assert f"and {1000 - ROWS_MAX} more" in html
    assert len(svgs(html)) == 9


def test_one_seed_one_page():
    assert page(a_report()) == page(a_report())


# --- charts -----------------------------------------------------------------------------------------------------------


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_few_and_inside(low, span):
    scale = Scale(low, low + span, 0.0, 100.0)
    ticks = scale.ticks()
    assert len(ticks) <= 10
    for tick in ticks:
        assert -1 <= scale(tick) <= 101


@given(st.floats(1e-9, 1e9), st.floats(60, 1e12))
def test_ticks_of_a_log_axis_are_powers_of_ten(low, ratio):
    scale = Scale(low, low * ratio, 0.0, 100.0, log=True)
    assert 1 <= len(scale.ticks()) <= 13
    assert all(re.fullmatch(r"1e[+-]\d+", f"{t:.0e}") for t in scale.ticks())


@given(st.lists(st.floats(-1e6, 1e6), min_size=1, max_size=3000))
def test_thinning_keeps_order_and_extremes(values):
    points = [(float(k), v) for k, v in enumerate(values)]
    kept = thinned(points, 100)
    assert len(kept) <= 102
    assert kept == sorted(kept)
    assert {max(values), min(values)} <= {v for _, v in kept}


def test_a_line_is_cut_where_the_process_was_down():
    points = [(float(t), 1.0) for t in [0, 1, 2, 30, 31]]
    assert [len(run) for run in unbroken(points)] == [3, 2]
    assert unbroken([]) == [[]] and unbroken(points[:1]) == [points[:1]]


def test_a_series_without_numbers_is_said_to_be_empty():
    assert "Nobody said anything" in lines({"p0": [[0.0, math.nan]]}, until=1.0, colours={})


def test_a_constant_series_has_an_axis():
    assert ET.fromstring(lines({"p0": [[0.0, 0.0], [9.0, 0.0]]}, until=9.0, colours={"p0": "red"})) is not None


def test_faults_after_the_end_are_not_drawn_and_open_ones_reach_it():
    bands = [
        Band(at=50.0, until=None, label="late", tag="1"),
        Band(at=2.0, until=None, label="open", tag="2"),
        Band(at=1.0, until=3.0, label="closed", tag="3"),
    ]
    chart = ET.fromstring(rows([], ["p0"], until=10.0, bands=bands))
    assert [g.findtext("title") for g in chart.findall("g[@class='band']")] == ["closed", "open"]
    assert len(chart.findall("rect[@class='shade']")) == 1


def test_segments_too_narrow_to_see_are_left_out_without_a_hole():
    parts = [Segment(row="p0", start=k / 1e4, end=(k + 1) / 1e4, css="train", label="x") for k in range(100_000)]
    drawn = ET.fromstring(rows(parts, ["p0"], until=10.0)).findall("rect")
    assert len(drawn) < 3000
    edges = [(float(r.get("x", "")), float(r.get("width", ""))) for r in drawn]
    assert all(b[0] - (a[0] + a[1]) < 0.3 for a, b in zip(edges, edges[1:]))


def test_a_matrix_of_a_thousand_peers_shares_its_cells():
    names = [f"p{k}" for k in range(1000)]
    cells = {(names[k], names[(k + 1) % 1000]): 5.0 for k in range(1000)}
    text = matrix(cells, names, unit=size, marks={"p3": "killed"})
    chart = ET.fromstring(text)
    assert len(chart.findall("rect")) <= 64 * 64
    assert "p0-p15 to p0-p15: 75 B" in text


def test_bars_without_traffic():
    assert ET.fromstring(bars({"p0": 0.0}, unit=size, colours={}, marks={})) is not None


@pytest.mark.parametrize(("value", "said"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2.5e12, "2.5e+03 GB")])
def test_sizes(value, said):
    assert size(value) == said


def test_plain_figures():
    assert plain(0.5) == "0.5" and plain(12345678) == "1.23e+07"
