"""The report: one complete file, which loads nothing from the network, and escapes all text."""

from __future__ import annotations

import dataclasses
import os
import re
from datetime import UTC, datetime, timedelta
from html.parser import HTMLParser

import pytest

from outbox_app.pipeline.defects import KINDS, Audit, Defect
from outbox_app.pipeline.figures import Figures, _over_time, figures
from outbox_app.pipeline.report import bars, columns, write_report

EVIL = "</title><script>alert(1)</script>\"'&\u202e\x1b\ud800"
RESULT = Audit(
    log="outbox_event",
    counts={"gap": 2, "tail": 1},
    defects=[
        Defect("gap", "order-17", 4, 6, 991, ""),
        Defect("gap", "order-18", 2, 2, 992, ""),
        Defect("tail", "order-19", 3, 3, None, ""),
    ],
    events=2_200_000,
    streams=700,
    seconds=4.2,
    checked=["gap", "tail", "order"],
    accepted=5,
)
SOUND = dataclasses.replace(RESULT, counts={}, defects=[], accepted=0)
FIGURES = Figures(
    "day", [("2026-01-01", 3), ("2026-01-02", 0)], [("order.placed", 3)], [("order-17", 2)]
)


class Page(HTMLParser):
    """Elements, text, and whatever would load something or run."""

    VOID = {"meta", "link", "br", "img"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.loads: list[str] = []
        self.told: list[str] = []
        self.drawn: list[str] = []
        self.text = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("src", "href", "srcset", "action") or name.startswith("on"):
                self.loads.append(f"{tag} {name}={value}")
            if name == "aria-label":
                self.told.append(value)
            if name == "class" and value in ("bar", "columns"):
                self.drawn.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def page(tmp_path):
    """``page(result, …)``: the written report, parsed."""

    def make(result, **options):
        path = tmp_path / "report.html"
        write_report(path, result, **options)
        assert [each.name for each in tmp_path.iterdir()] == ["report.html"]
        text = path.read_text(encoding="utf-8")
        assert "url(" not in text
        assert "@import" not in text
        parsed = Page(text)
        assert parsed.open == []
        assert parsed.loads == []
        assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
        return parsed

    return make


def test_it_tells_what_was_found_and_what_to_do(page):
    before = datetime.now(UTC)
    parsed = page(RESULT, figures=FIGURES)
    [told_at] = re.findall("([0-9 :-]{16}) UTC, in 4.2 s", parsed.text)
    assert f"{before:%Y-%m-%d %H:%M}" <= told_at <= f"{datetime.now(UTC):%Y-%m-%d %H:%M}"
    for told in (
        "Audit of outbox_event",
        "3 defects were found.",
        "2,200,000",
        "order-17: versions 4 to 6 are missing (position 991 waits behind them)",
        KINDS["gap"].advice,
        "Events per day",
        "not checked",
    ):
        assert told in parsed.text
    assert parsed.drawn == ["bar", "bar", "columns", "bar", "bar"]
    assert parsed.text.count(KINDS["gap"].advice) == 1  # not once for each kind that shares it


def test_of_a_sound_log_it_says_so(page):
    parsed = page(SOUND, figures=FIGURES)
    assert "Sound: nothing is missing" in parsed.text
    assert "What to do" not in parsed.text
    assert parsed.drawn == ["columns", "bar", "bar"]


def test_each_picture_can_be_read_without_seeing_it(page):
    parsed = page(RESULT, figures=FIGURES)
    assert parsed.told == ["2 values; the largest is 2026-01-01 with 3."]
    assert parsed.tags.count("details") == 1
    assert parsed.tags.count("figure") == parsed.tags.count("figcaption") == 4
    assert re.search(r"2026-01-01\s*3\s*2026-01-02\s*0", parsed.text)


def test_text_of_strangers_is_only_text(page):
    defects = [Defect(kind, EVIL, 1, 2, 3, EVIL) for kind in KINDS]
    counts = dict.fromkeys(KINDS, 1)
    evil = dataclasses.replace(RESULT, log=EVIL, defects=defects, counts=counts)
    drawn = Figures("day", [(EVIL, 3)], [(EVIL, 3)], [(EVIL, 2)])
    parsed = page(evil, figures=drawn)
    assert "<script>alert(1)</script>" in parsed.text
    assert not re.search("[\u202e\x1b\ud800]", parsed.text)


def test_the_page_forbids_itself_all_but_its_style(tmp_path):
    write_report(tmp_path / "a.html", RESULT)
    policy = "content=\"default-src 'none'; style-src 'unsafe-inline'\""
    text = (tmp_path / "a.html").read_text()
    assert policy in text
    assert "prefers-color-scheme: dark" in text


def test_a_long_list_is_cut_and_says_so(page):
    defects = [Defect("gap", f"order-{n}", 2, 2, n, "") for n in range(1200)]
    parsed = page(dataclasses.replace(RESULT, counts={"gap": 5000}, defects=defects))
    assert "Listed: 1,000 of 5,000." in parsed.text


def test_what_cannot_be_written_leaves_the_old_report(tmp_path, monkeypatch):
    path = tmp_path / "report.html"
    path.write_text("old")

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_report(path, RESULT)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [
        ("report.html", "old")
    ]


@pytest.mark.parametrize("draw", [bars, columns])
def test_bars_are_as_long_as_their_numbers(draw):
    drawn = draw("Title", "Of", [("a", 1_000_000), ("b", 500_000), ("c", 1), ("d", 0)])
    side = "width" if draw is bars else "height"
    lengths = [float(size) for size in re.findall(rf'style="{side}: ([\d.]+)%"', drawn)]
    assert lengths[0] == pytest.approx(2 * lengths[1], abs=0.2)
    assert lengths[2:] == [1, 0]  # what is there is seen
    assert "Nothing." in draw("Title", "Of", [])


def test_the_ends_of_the_time_are_named():
    assert columns("Title", "Of", [("first", 1), ("second", 1), ("last", 1)]).count("last</") == 2
    assert columns("Title", "Of", [("only", 1)]).count("<span>only</span>") == 1


def test_figures_of_a_log(spark):
    rows = [
        ("a", "x", datetime(2026, 1, 1, 23, 59, 59, tzinfo=UTC)),
        ("a", "y", datetime(2026, 1, 1, 0, 0, 0, tzinfo=UTC)),
        ("b", "x", datetime(2026, 1, 3, 0, 0, 0, tzinfo=UTC)),
    ]
    schema = "stream string, type string, recorded_at timestamp"
    events = spark.createDataFrame(rows, schema)
    spark.conf.set("spark.sql.session.timeZone", "Asia/Tokyo")
    try:
        counted = figures(events)
    finally:
        spark.conf.set("spark.sql.session.timeZone", "UTC")
    assert counted == Figures(
        "day",
        [("2026-01-01", 2), ("2026-01-02", 0), ("2026-01-03", 1)],
        [("x", 2), ("y", 1)],
        [("a", 2), ("b", 1)],
    )


def test_times_that_were_written_by_hand_are_not_drawn(spark):
    """MySQL has dates that there are not, which are null, and PostgreSQL has infinity."""
    micros = [None, 2**63 - 1, -(2**62), 0]
    rows = spark.createDataFrame([(each,) for each in micros], "micros bigint")
    made = "timestamp_micros(micros) as recorded_at"
    counted = figures(rows.selectExpr("'a' as stream", "'x' as type", made))
    assert counted == Figures("hour", [("1970-01-01 00:00", 1)], [("x", 4)], [("a", 4)])


@pytest.mark.parametrize(
    ("hours", "unit", "labels"),
    [
        ([], "day", []),
        ([(7, 1), (9, 1)], "hour", ["1970-01-01 07:00", "1970-01-01 08:00", "1970-01-01 09:00"]),
        ([(23, 1), (24, 1)], "day", ["1970-01-01", "1970-01-02"]),
        ([(1_000_000, 1), (999_999, 1)], "hour", ["2084-01-29 15:00", "2084-01-29 16:00"]),
    ],
)
def test_the_unit_suits_the_time(hours, unit, labels):
    drawn, counted = _over_time(hours)
    assert (drawn, [label for label, _ in counted]) == (unit, labels)


def test_the_first_and_the_last_moment_are_drawn():
    epoch, hour = datetime(1970, 1, 1), timedelta(hours=1)
    first, last = ((each - epoch) // hour for each in (datetime.min, datetime.max))
    assert _over_time([(first, 1)]) == ("hour", [("0001-01-01 00:00", 1)])
    assert _over_time([(last, 1)]) == ("hour", [("9999-12-31 23:00", 1)])
    _, months = _over_time([(first, 1), (24 * 366, 2)])
    assert (months[0], months[-1], len(months)) == (("0001-01", 1), ("1971-01", 2), 1970 * 12 + 1)


def test_a_long_time_is_drawn_in_months():
    unit, months = _over_time([(0, 1), (24 * 130, 2), (24 * 131, 3)])
    assert unit == "month"
    assert months == [("1970-01", 1), ("1970-02", 0), ("1970-03", 0), ("1970-04", 0),
                      ("1970-05", 5)]  # fmt: skip
