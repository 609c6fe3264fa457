"""Charts: missing minutes stay gaps, text is escaped, and screen readers can read the figures."""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta
from xml.etree import ElementTree

import pytest

from outbox_app.admin.charts import Line, _round_up, chart, job_charts, number
from outbox_app.monitoring.series import Series

START = datetime(2026, 1, 31, 12, 0, tzinfo=UTC)


def drawn(*lines, steps=4):
    starts = [START + timedelta(minutes=each) for each in range(steps)]
    return ElementTree.fromstring(chart("outbox-x", "Ready & waiting", starts, lines))


def runs(tree, number=1):
    picture = tree.find("svg")
    return [
        each.get("points") for each in picture.findall(f"polyline[@class='outbox-line-{number}']")
    ]


def heights(points):
    return [float(point.split(",")[1]) for point in points.split()]


def test_a_line_goes_from_the_floor_to_the_top():
    [points] = runs(drawn(Line("ready", [0, 5, 10, 5])))
    floor, middle, top, again = heights(points)
    assert floor == 78
    assert top == 10
    assert middle == again == (floor + top) / 2


def test_where_nobody_took_a_figure_there_is_a_hole_and_no_zero():
    left, right = runs(drawn(Line("ready", [3, 3, None, 3])))
    assert len(left.split()) == 2
    assert len(right.split()) == 2, "one alone is a short dash"


def test_lines_share_one_scale():
    tree = drawn(Line("a", [100] * 4, 1), Line("b", [50] * 4, 2))
    assert heights(*runs(tree, 1))[0] < heights(*runs(tree, 2))[0]


@pytest.mark.parametrize(
    ("value", "top"),
    [(0, 1), (0.2, 1), (1, 1), (1.1, 2), (2, 2), (3, 5), (6, 10), (10, 10), (11, 20), (99999, 1e5)],
)
def test_the_scale_ends_at_a_round_number(value, top):
    assert _round_up(value) == top


def test_a_screen_reader_is_told_what_is_drawn():
    tree = drawn(Line("ready", [1, 1234, None, 7]), Line("dead", [None] * 4, 3))
    picture = tree.find("svg")
    assert picture.get("role") == "img"
    title, description = picture.get("aria-labelledby").split()
    assert picture.find(f"title[@id='{title}']").text == "Ready & waiting"
    told = picture.find(f"desc[@id='{description}']").text
    assert told == "ready: last 7, at most 1,234; dead: no figures"
    cells = [cell.text for cell in tree.findall("details/table/tbody/tr/td")]
    assert cells == ["7", "?", "?", "?", "1,234", "?", "1", "?"], "the newest first"


def test_each_step_tells_its_figures_to_a_pointer():
    tree = drawn(Line("ready", [1, None, 2.5, 3]), Line("dead", [0] * 4, 3))
    told = [each.find("title").text.split("\n")[1:] for each in tree.iter("rect")]
    assert told == [["ready: 1", "dead: 0"], ["ready: ?", "dead: 0"],
                    ["ready: 2.5", "dead: 0"], ["ready: 3", "dead: 0"]]  # fmt: skip


def test_nothing_has_a_style_or_a_script_of_its_own():
    page = chart("outbox-x", "<script>", [START], [Line("<b>", [1])])
    assert "<script" not in page
    assert "<b>" not in page
    assert not re.search(r"\bstyle=|\son\w+=|https?:", page)


def test_without_figures_there_is_no_chart():
    assert not chart("outbox-x", "Ready", [], [Line("ready", [])])
    assert not chart("outbox-x", "Ready", [START], [Line("ready", [None])])


def test_a_day_shows_the_peak_of_a_step_even_of_the_last_one():
    def series(*ready):
        steps = [START + timedelta(minutes=10 * each) for each in range(len(ready))]
        none = [0.0] * len(ready)
        return Series(steps, none, none, none, [*ready])

    drawn = job_charts(series(3, 9), series(3, 9), now=2)
    hour, day = (ElementTree.fromstring(drawn[place]) for place in (0, 2))
    assert [each.text for each in hour.findall("details/table/tbody/tr/td")] == ["2", "3"]
    assert [each.text for each in day.findall("details/table/tbody/tr/td")] == ["9", "3"]


@pytest.mark.parametrize(
    ("value", "words"), [(None, "?"), (0, "0"), (0.25, "0.2"), (3, "3"), (1e6, "1,000,000")]
)
def test_numbers_for_people(value, words):
    assert number(value) == words
