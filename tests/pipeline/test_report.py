"""The report: one complete file, which loads nothing from the network, and escapes all text."""

from __future__ import annotations

import dataclasses
import os
import re
from datetime import UTC, datetime
from html.parser import HTMLParser

import pytest
from django.utils.translation import override

from outbox_app.pipeline.defects import KINDS, Audit, Defect
from outbox_app.pipeline.driver.report import write_report
from outbox_app.pipeline.figures import DAYS, TOP, Figures, figures

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
    [("2026-01-01", 3_000), ("2026-01-02", 1_500), ("2026-01-04", 1)],
    [("order.placed", 3)],
    [("order-17", 2)],
)


class Page(HTMLParser):
    """Elements, text, lengths of bars, and what would load something or run."""

    VOID = {"meta", "link", "br", "img"}

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.open: list[str] = []
        self.loads: list[str] = []
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
            if name == "style":
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

    def make(result, figures=FIGURES):
        path = tmp_path / "report.html"
        write_report(path, result, figures=figures)
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
    parsed = page(RESULT)
    [told_at] = re.findall("([0-9 :-]{16}) UTC, in 4.2 s", parsed.text)
    assert f"{before:%Y-%m-%d %H:%M}" <= told_at <= f"{datetime.now(UTC):%Y-%m-%d %H:%M}"
    for told in (
        "Audit of outbox_event",
        "3 defects were found.",
        "2,200,000",
        "order-17: versions 4 to 6 are missing (position 991 waits behind them)",
        KINDS["gap"].advice,
        "Events per day (UTC)",
        "not checked",
    ):
        assert told in parsed.text
    assert parsed.text.count(KINDS["gap"].advice) == 1  # not once for each kind that shares it


def test_of_a_sound_log_it_says_so(page):
    parsed = page(SOUND)
    assert "Sound: nothing is missing" in parsed.text
    assert "What to do" not in parsed.text
    assert "Defects by kind" not in parsed.text


@pytest.mark.parametrize(("number", "verdict"), [(1, "1 defect was"), (1234, "1,234 defects were")])
def test_it_counts_the_defects_in_words(page, number, verdict):
    assert f"{verdict} found." in page(dataclasses.replace(RESULT, counts={"gap": number})).text


@pytest.mark.parametrize("language", ["en", "de"])
def test_it_is_the_same_in_every_language_and_project(page, settings, language):
    settings.TEMPLATES, settings.USE_THOUSAND_SEPARATOR = [], True
    with override(language):
        parsed = page(RESULT)
    assert "in 4.2 s" in parsed.text
    assert re.search(r"2026-01-01\s*3,000", parsed.text)
    assert parsed.drawn[2:5] == ["width: 100%", "width: 50%", "width: 0%"]


def test_each_picture_can_be_read_without_seeing_it(page):
    parsed = page(RESULT)
    assert parsed.tags.count("figure") == parsed.tags.count("figcaption") == 4
    assert re.search(r"2026-01-01\s*3,000\s*2026-01-02\s*1,500", parsed.text)


def test_text_of_strangers_is_only_text(page):
    defects = [Defect(kind, EVIL, 1, 2, 3, EVIL) for kind in KINDS]
    counts = dict.fromkeys(KINDS, 1)
    evil = dataclasses.replace(RESULT, log=EVIL, defects=defects, counts=counts)
    parsed = page(evil, Figures([(EVIL, 3)], [(EVIL, 3)], [(EVIL, 2)]))
    assert "<script>alert(1)</script>" in parsed.text
    assert not re.search("[\u202e\x1b\ud800]", parsed.text)


def test_the_page_forbids_itself_all_but_its_style(tmp_path):
    write_report(tmp_path / "a.html", RESULT, figures=FIGURES)
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
        write_report(path, RESULT, figures=FIGURES)
    assert [(each.name, each.read_text()) for each in tmp_path.iterdir()] == [
        ("report.html", "old")
    ]


def test_bars_are_as_long_as_their_numbers(page):
    many = [("a", 1_000_000), ("b", 500_000), ("c", 1)]
    parsed = page(SOUND, Figures(many, [], []))
    assert parsed.drawn == ["width: 100%", "width: 50%", "width: 0%"]
    assert parsed.text.count("Nothing.") == 2


def test_what_is_there_is_seen(page, tmp_path):
    page(SOUND)
    assert re.search(r"\.bar {[^}]* min-width: 2px;", (tmp_path / "report.html").read_text())


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
        [("2026-01-01", 2), ("2026-01-03", 1)],
        [("x", 2), ("y", 1)],
        [("a", 2), ("b", 1)],
    )


def test_times_that_were_written_by_hand_are_not_drawn(spark):
    """MySQL has dates that there are not, which are null, and PostgreSQL has infinity."""
    micros = [None, 2**63 - 1, -(2**62), 0]
    rows = spark.createDataFrame([(each,) for each in micros], "micros bigint")
    made = "timestamp_micros(micros) as recorded_at"
    counted = figures(rows.selectExpr("'a' as stream", "'x' as type", made))
    assert counted == Figures([("1970-01-01", 1)], [("x", 4)], [("a", 4)])


def test_the_first_and_the_last_day_are_drawn(spark):
    times = "timestamp'0001-01-01 00:00:00Z'", "timestamp'9999-12-31 23:59:59.999999Z'"
    rows = spark.sql(
        f"SELECT 'a' AS stream, 'x' AS type, explode(array({', '.join(times)})) AS recorded_at"
    )
    assert figures(rows).days == [("0001-01-01", 1), ("9999-12-31", 1)]


def test_the_newest_days_and_the_most_frequent_are_drawn(spark):
    rows = spark.range(100).selectExpr(
        "explode(sequence(0, id)) as again",
        "lpad(id, 2, '0') as stream",
        "'x' as type",
        "timestamp_seconds(86400 * id) as recorded_at",
    )
    counted = figures(rows)
    assert counted.days[0] == ("1970-02-10", 41)
    assert counted.days[-1] == ("1970-04-10", 100)
    assert len(counted.days) == DAYS
    assert counted.streams == [(str(n), n + 1) for n in range(99, 99 - TOP, -1)]
