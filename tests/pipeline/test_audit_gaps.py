"""The gaps that an audit records: a person can read and accept them, and filled ones are closed."""

from __future__ import annotations

from collections import Counter
from io import StringIO

import pytest
from django.contrib.admin import site
from django.core.management import call_command

from outbox_app.events import publish
from outbox_app.events.exceptions import GapNotSkippable
from outbox_app.events.models import Event, Gap, ParkedStream
from outbox_app.events.subscriptions.skips import skip_gap
from outbox_app.events.subscriptions.version_gaps import give_up
from outbox_app.pipeline.defects import Audit, Defect
from outbox_app.pipeline.driver import audit_gaps
from outbox_app.pipeline.driver.audit_gaps import accepted_gaps, record


def gap(stream: str, first: int, last: int, kind: str = "gap") -> Defect:
    return Defect(kind, stream, first, last, 991, "")


def audited(*defects: Defect, **counts: int) -> Audit:
    counts = {**Counter(each.kind for each in defects), **counts}
    return Audit(Event._meta.db_table, counts, defects, events=9, streams=1, seconds=0.1)


@pytest.fixture
def found(alias):
    """``found(*defects)``: record these defects."""
    return lambda *defects: record(audited(*defects), log=Event, using=alias)


@pytest.fixture
def rows(alias):
    """``rows()``: the gaps of audits."""

    def read():
        gaps = Gap.objects.using(alias).filter(subscription="").order_by("stream", "first")
        return [(each.stream, each.first, each.last, each.state) for each in gaps]

    return read


@pytest.fixture
def stream(alias, in_atomic):
    """``stream("a", 5)``: publish 5 events, without those of the given versions."""

    def make(name, count, without=()):
        for _ in range(count):
            publish(name, "happened", using=alias)
        Event.objects.using(alias).filter(stream=name, version__in=without).delete()

    return make


def test_missing_versions_become_rows(alias, found, rows):
    outcome = found(
        gap("a", 4, 6),
        gap("b", 1, 2, "late_start"),
        gap("c", 7, 7, "tail"),
        Defect("order", "d", 2, 2, 9, ""),
        Defect("duplicate_version", "d", 3, 3, 10, ""),
    )
    assert (outcome.written, outcome.unchanged, outcome.filled, outcome.left_out) == (3, 0, 0, 0)
    assert rows() == [("a", 4, 6, "open"), ("b", 1, 2, "open"), ("c", 7, 7, "open")]
    row = Gap.objects.using(alias).get(stream="a")
    assert (row.kind, row.log, row.partition, row.attempts) == ("version", "outbox_event", 0, 0)


def test_streams_that_differ_in_case_or_spaces_are_different(found, rows):
    found(gap("a", 2, 2), gap("A", 2, 2), gap("a ", 2, 2), gap("ä", 2, 2))
    assert len(rows()) == 4


def test_an_unchanged_gap_is_not_written_again(alias, found, rows):
    found(gap("a", 4, 6))
    seen_at = Gap.objects.using(alias).get().seen_at
    outcome = found(gap("a", 4, 6))
    assert (outcome.written, outcome.unchanged) == (0, 1)
    assert Gap.objects.using(alias).get().seen_at == seen_at


def test_a_gap_that_grows_stays_one_row(found, rows):
    found(gap("a", 4, 6))
    assert found(gap("a", 4, 9)).written == 1
    assert rows() == [("a", 4, 9, "open")]
    found(gap("a", 2, 9))
    assert rows() == [("a", 2, 9, "open"), ("a", 4, 9, "open")]


def test_a_gap_is_filled_when_its_versions_are_there(alias, found, rows, stream):
    stream("a", 8)
    stream("b", 5, without=[2, 3])
    found(gap("a", 4, 6), gap("b", 2, 3))
    assert found(gap("b", 2, 3)).filled == 1
    assert rows() == [("a", 4, 6, "filled"), ("b", 2, 3, "open")]
    assert Gap.objects.using(alias).get(stream="a").settled_at
    assert found(gap("b", 2, 3)).filled == 0


def test_a_gap_that_was_not_looked_for_stays_open(found, rows, stream):
    """As when its front was pruned, or heads were not read: only evidence closes a gap."""
    stream("a", 8, without=[5])
    stream("b", 8)
    found(gap("a", 4, 6))
    assert found().filled == 0
    assert rows() == [("a", 4, 6, "open")]


def test_a_gap_that_is_filled_in_part_stays_open(found, rows, stream):
    stream("a", 8, without=[5, 7])
    found(gap("a", 3, 7))
    assert found(gap("a", 5, 5), gap("a", 7, 7)).filled == 0
    assert rows() == [("a", 3, 7, "open"), ("a", 5, 5, "open"), ("a", 7, 7, "open")]


@pytest.mark.parametrize(
    ("without", "known", "again", "expected"),
    [
        ([2, 5], (4, 6), (2, 2), [(2, 2, "open"), (4, 6, "open")]),
        ([2], (4, 6), (2, 2), [(2, 2, "open"), (4, 6, "filled")]),
        ([2, 3, 4], (4, 4), (2, 4), [(2, 4, "open"), (4, 4, "open")]),
        ([6], (2, 3), (6, 6), [(2, 3, "filled"), (6, 6, "open")]),
        ([5], (3, 5), (5, 5), [(3, 5, "open"), (5, 5, "open")]),
    ],
)
def test_a_gap_beside_another_one(found, rows, stream, without, known, again, expected):
    stream("a", 8, without=without)
    found(gap("a", *known))
    found(gap("a", *again))
    assert rows() == [("a", *each) for each in expected]


def test_an_audit_of_log_and_archive_settles_what_only_the_archive_has(alias, found, rows):
    found(gap("a", 4, 6), gap("b", 2, 2))
    skip_gap(Gap.objects.using(alias).get(stream="b").pk, by="ann", reason="why", using=alias)
    assert record(audited(), log=Event, using=alias, whole=True).filled == 1
    assert rows() == [("a", 4, 6, "filled"), ("b", 2, 2, "skipped")]


def test_an_audit_that_leaves_gaps_out_settles_none_of_them(monkeypatch, found, rows):
    found(gap("b", 2, 2))
    monkeypatch.setattr(audit_gaps, "LIMIT", 1)
    found(gap("a", 2, 2), gap("b", 2, 2))
    assert rows() == [("a", 2, 2, "open"), ("b", 2, 2, "open")]


def test_two_audits_that_find_one_gap_at_a_time_write_one_row(monkeypatch, alias, found, rows):
    found(gap("a", 4, 6))
    none = Gap.objects.using(alias).none()
    monkeypatch.setattr(audit_gaps, "_rows", lambda log, using: none)
    found(gap("a", 4, 6))
    monkeypatch.undo()
    assert rows() == [("a", 4, 6, "open")]


def test_a_gap_that_a_person_accepts_while_it_grows_stays_accepted(monkeypatch, alias, found, rows):
    found(gap("a", 4, 6))
    unchanged = audit_gaps._unchanged

    def decided(*arguments):
        Gap.objects.using(alias).update(state="skipped")
        return unchanged(*arguments)

    monkeypatch.setattr(audit_gaps, "_unchanged", decided)
    assert found(gap("a", 4, 7)).written == 0
    assert rows() == [("a", 4, 6, "skipped")]


def test_what_is_missing_again_is_open_again(alias, found, rows, stream):
    stream("a", 8)
    found(gap("a", 4, 6))
    found()
    assert rows() == [("a", 4, 6, "filled")]
    found(gap("a", 4, 6))
    assert rows() == [("a", 4, 6, "open")]
    assert Gap.objects.using(alias).get().settled_at is None


def test_a_person_accepts_a_gap(alias, found, rows):
    found(gap("a", 4, 6), gap("b", 2, 2))
    id = Gap.objects.using(alias).get(stream="a").pk
    with pytest.raises(GapNotSkippable, match="requires a name and a reason"):
        skip_gap(id, by="ann", reason=" ", using=alias)
    row = skip_gap(id, by="ann", reason="see ticket 88", using=alias)
    assert (row.state, row.settled_by, row.reason) == ("skipped", "ann", "see ticket 88")
    assert accepted_gaps(Event, using=alias) == [("a", 4, 6)]
    with pytest.raises(GapNotSkippable, match="is skipped"):
        skip_gap(id, by="bob", reason="again", using=alias)
    # Found again by an audit that was not told of it, it stays what the person has made of it.
    outcome = found(gap("a", 4, 6), gap("b", 2, 2))
    assert (outcome.written, outcome.unchanged) == (0, 1)
    assert rows() == [("a", 4, 6, "skipped"), ("b", 2, 2, "open")]
    # Part of it is there again: the rest was accepted.
    assert found(gap("a", 4, 5), gap("b", 2, 2)).written == 0
    assert rows() == [("a", 4, 6, "skipped"), ("b", 2, 2, "open")]
    # More than what was accepted is open again.
    found(gap("a", 4, 7), gap("b", 2, 2))
    assert rows() == [("a", 4, 7, "open"), ("b", 2, 2, "open")]


def held(alias: str, first: int, last: int) -> Gap:
    """A gap of the subscription shop, and its parked stream."""
    of = {"subscription": "shop", "log": "outbox_event", "stream": "a"}
    ParkedStream.objects.using(alias).create(**of, partition=0, version=first, position=9, error="")
    return Gap.objects.using(alias).create(**of, kind="version", first=first, last=last)


def test_what_a_person_skips_for_a_subscription_is_accepted_by_audits(alias, found, rows):
    skip_gap(held(alias, 4, 6).pk, by="ann", reason="see ticket 88", using=alias)
    assert accepted_gaps(Event, using=alias) == [("a", 4, 6)]
    assert found(gap("a", 4, 6)).written == 0
    assert rows() == [("a", 4, 6, "skipped")]
    row = Gap.objects.using(alias).get(subscription="")
    assert (row.settled_by, row.reason, row.settled_at is None) == ("ann", "see ticket 88", False)
    # More is missing than what the person has accepted.
    assert found(gap("a", 4, 7)).written == 1
    assert rows() == [("a", 4, 7, "open")]


@pytest.mark.parametrize(
    ("known", "expected"),
    [
        ((4, 6), [(4, 6, "skipped")]),
        ((5, 6), [(4, 6, "skipped"), (5, 6, "skipped")]),
        ((4, 9), [(4, 9, "open")]),
        ((3, 6), [(3, 6, "open"), (4, 6, "skipped")]),
    ],
)
def test_so_are_the_gaps_that_an_audit_has_found_before(alias, found, rows, known, expected):
    found(gap("a", *known))
    skip_gap(held(alias, 4, 6).pk, by="ann", reason="why", using=alias)
    assert rows() == [("a", *each) for each in expected]


def test_what_a_subscription_skips_by_itself_is_not_accepted(alias, found, rows, in_atomic):
    skipped = held(alias, 4, 6)
    assert give_up(skipped, by="subscription shop", reason="missing", using=alias)
    assert found(gap("a", 4, 6)).written == 1
    assert rows() == [("a", 4, 6, "open")]


def test_gaps_of_subscriptions_and_other_logs_are_left_alone(alias, found, stream):
    stream("a", 8)
    for log, subscription in (("outbox_event", "shop"), ("other_log", "")):
        Gap.objects.using(alias).create(
            kind="version", subscription=subscription, log=log, stream="a", first=4, last=6
        )
    found()
    found(gap("a", 4, 6))
    found()
    states = Gap.objects.using(alias).order_by("pk").values_list("state", flat=True)
    assert list(states) == ["open", "open", "filled"]
    assert accepted_gaps(Event, using=alias) == []


def test_too_many_are_cut_and_it_is_said(monkeypatch, found, rows):
    monkeypatch.setattr(audit_gaps, "LIMIT", 2)
    outcome = found(*(gap(name, 2, 2) for name in "abcd"))
    assert rows() == [("a", 2, 2, "open"), ("b", 2, 2, "open")]
    assert str(outcome) == "gaps written=2 unchanged=0 filled=0 left_out=2"


def test_those_that_the_audit_has_only_counted_are_left_out(alias):
    outcome = record(audited(gap("a", 2, 2), gap=5, order=7), log=Event, using=alias)
    assert str(outcome) == "gaps written=1 unchanged=0 filled=0 left_out=4"


def test_ten_thousand_are_no_ten_thousand_statements(alias, found, django_assert_max_num_queries):
    many = [gap(f"order-{n:05}", 2, 2) for n in range(3000)]
    # Rows are written a thousand at a time, on SQLite by fewer, as it takes few parameters.
    with django_assert_max_num_queries(60, using=alias):
        assert found(*many).written == 3000
        assert found(*many).unchanged == 3000


@pytest.mark.parametrize("again", [{"state": "skipped"}, {"state": "filled"}, {"last": 9}])
def test_a_decision_taken_meanwhile_stands(alias, monkeypatch, found, rows, stream, again):
    stream("a", 8)
    found(gap("a", 4, 6))
    there = audit_gaps._there

    def decided(*arguments):
        Gap.objects.using(alias).update(**again, reason="a person")
        return there(*arguments)

    monkeypatch.setattr(audit_gaps, "_there", decided)
    assert found().filled == 0
    assert Gap.objects.using(alias).get().reason == "a person"


def test_commands_and_admin_know_gaps_of_audits(alias, found):
    found(gap("a", 4, 6))
    row = Gap.objects.using(alias).open().get()
    assert site._registry[Gap].found_by(row) == "an audit"
    output = StringIO()
    call_command(
        "outbox_subscriptions", "skip-gap", str(row.pk), "--reason=why", f"--database={alias}",
        stdout=output,
    )  # fmt: skip
    assert output.getvalue().startswith("Skipped: a, versions 4 to 6")
    assert accepted_gaps(Event, using=alias) == [("a", 4, 6)]
