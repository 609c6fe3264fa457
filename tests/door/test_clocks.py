"""A peer's wrong clock is noticed from its signatures, and reported by the diagnosis."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import django.db
import pytest
from django.core.checks import run_checks
from django.db import connections, transaction

from outbox_app.database.clock import DatabaseNow
from outbox_app.door import clocks
from outbox_app.door.clocks import note_clock, wrong_clocks
from outbox_app.door.exceptions import PeerUnavailable
from outbox_app.models import Statistic
from outbox_app.monitoring.diagnosis import problems
from outbox_app.monitoring.status import outbox_status
from outbox_app.prepared.remote import ask_over_http

from .test_forged_answers import QUESTION, replying
from .test_forged_answers import server as server
from .test_forged_requests import send as send
from .test_forged_requests import signer as signer

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"]),
    pytest.mark.usefixtures("both"),
]
only_here = pytest.mark.parametrize("alias", [pytest.param("default", id="sqlite")], indirect=True)


def told() -> str:
    """What the diagnosis says of clocks."""
    return "; ".join(each.detail for each in problems(outbox_status()) if each.code == "peer_clock")


@only_here
@pytest.mark.parametrize(("hours", "status"), [(-2, 401), (2, 401)])
def test_a_request_of_a_peer_hours_away(alias: str, send: Any, hours: int, status: int) -> None:
    seconds = hours * 3600
    assert send(created=seconds, expires=seconds + 300).status_code == status
    assert told() in {f"billing: {seconds + late:+d} s" for late in (-2, -1, 0)}
    assert send().status_code == 201
    assert told() == ""


@only_here
def test_a_request_that_is_believed_nevertheless(alias: str, send: Any) -> None:
    assert send(created=-100, expires=100).status_code == 201
    assert told().startswith("billing: -10")


@only_here
@pytest.mark.parametrize("seconds", [-7200, -100, 7200])
def test_an_answer_of_a_peer(alias: str, server: Any, signer: Any, seconds: int) -> None:
    """Also where it is refused, as it seems to come from another time."""
    server("billing", replying(signer, created=seconds, expires=seconds + 300))
    if seconds == -100:
        ask_over_http("billing", [QUESTION])
    else:
        with pytest.raises(PeerUnavailable):
            ask_over_http("billing", [QUESTION])
    assert told().startswith(f"billing: {seconds // 100:+d}"[:-1])


@only_here
def test_only_who_has_the_key_tells_of_its_clock(alias: str, send: Any) -> None:
    late = {"created": 7200, "expires": 7500}
    assert send(more={"Signature": f"sig1=:{'A' * 86}==:"}, **late).status_code == 401
    assert send(covered=[], **late).status_code == 401
    assert told() == ""
    # The owner of the key has signed the time, whatever became of the body.
    assert send(sent_body=b"{}", **late).status_code == 401
    assert told().startswith("billing: +7")


def rows(alias: str) -> list[float]:
    return list(Statistic.objects.using(alias).order_by("id").values_list("value", flat=True))


def test_what_is_written(alias: str, django_assert_num_queries: Any, monkeypatch: Any) -> None:
    with django_assert_num_queries(0, using=alias):
        note_clock("shop", 60)
        note_clock("billing", -60)
    note_clock("billing", 90)
    with django_assert_num_queries(0, using=alias):
        for seconds in (89, 91, 149, 150):
            note_clock("billing", seconds)
    note_clock("billing", 151)
    note_clock("shop", -7200.4)
    assert wrong_clocks(using=alias) == {"billing": 151, "shop": -7200}
    monkeypatch.setattr(clocks, "EVERY", -1.0)
    note_clock("shop", -7300.0)
    assert wrong_clocks(using=alias)["shop"] == -7300
    note_clock("billing", 3)
    with django_assert_num_queries(0, using=alias):
        note_clock("billing", 3)
    assert wrong_clocks(using=alias) == {"shop": -7300}
    Statistic.objects.using(alias).update(minute=DatabaseNow() - timedelta(minutes=61))
    assert wrong_clocks(using=alias) == {}


def test_the_newest_minute_counts(alias: str) -> None:
    note_clock("billing", 90)
    Statistic.objects.using(alias).update(minute=DatabaseNow() - timedelta(minutes=5))
    note_clock("billing", 0)
    assert wrong_clocks(using=alias) == {}
    assert sorted(rows(alias)) == [0.0, 90.0]


@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
def test_an_alias_with_a_time_zone(alias: str, monkeypatch: Any) -> None:
    connection: Any = connections[alias]

    def begin(zone: str | None) -> None:
        monkeypatch.setitem(connection.settings_dict, "TIME_ZONE", zone)
        for name in ("timezone", "timezone_name"):
            vars(connection).pop(name, None)
        connection.ensure_timezone()

    begin("Asia/Kolkata")
    try:
        note_clock("billing", 90)
        assert wrong_clocks(using=alias) == {"billing": 90}
    finally:
        begin(None)


def test_other_statistics_are_no_clocks(alias: str) -> None:
    note_clock("billing", 90)
    Statistic.objects.using(alias).update(name="drained")
    assert wrong_clocks(using=alias) == {}


def test_the_check_tells_it_too(alias: str) -> None:
    note_clock("billing", -7200)
    found = [each for each in run_checks(databases=[alias]) if each.id == "outbox.W036"]
    assert ["-7200" in each.msg and "'billing'" in each.msg for each in found] == [True]
    assert not [each for each in run_checks() if each.id == "outbox.W036"]


def test_nothing_is_written_in_the_caller_s_transaction(alias: str) -> None:
    with transaction.atomic(using=alias):
        note_clock("billing", 90)
    assert rows(alias) == []
    note_clock("billing", 90)
    assert rows(alias) == [90.0]


def test_a_database_that_is_away_fails_no_call(alias: str, monkeypatch: Any, caplog: Any) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise django.db.OperationalError("away")

    monkeypatch.setattr(clocks, "write_figures", fail)
    note_clock("billing", 90)
    assert 'not noted error="OperationalError: away"' in caplog.text
