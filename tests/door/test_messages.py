"""Messages through the door, on each database. This process is both services."""

from __future__ import annotations

import socket
import sys
import threading
import time
from contextlib import nullcontext
from datetime import UTC, datetime, timedelta
from io import StringIO
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from celery import _state
from django.core.management import call_command
from django.db import connections, transaction
from django.utils import timezone

from outbox_app.door.client import call
from outbox_app.door.exceptions import InvalidPeer
from outbox_app.door.peers import Peer, moment, peer_named
from outbox_app.events.models import Event
from outbox_app.models import StagedJob
from outbox_app.prepared import (
    NewPrepared,
    cancel,
    confirm,
    fence,
    fences,
    operations,
    prepare,
    prepare_many,
    prepared,
    prepared_many,
    remote,
)
from outbox_app.prepared import sender as senders
from outbox_app.prepared.exceptions import (
    Contradiction,
    FencedOut,
    InvalidPrepared,
    KeeperUnavailable,
    PreparedConflict,
    PreparedError,
)
from outbox_app.prepared.fences import Question, outcomes
from outbox_app.prepared.models import Fence, PreparedEvent
from outbox_app.prepared.remote import HttpKeeper, ask_over_http
from outbox_app.prepared.request import checked, time_ordered_id
from tests import tasks
from tests.events.log.own_log.models import Visit
from tests.faults.tools import on
from tests.patience import eventually, patience
from tests.servers.proxy import Proxy

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"]),
    pytest.mark.usefixtures("served"),
]
#: About keys, addresses and the network: no database differs.
one = on("default")


def paid(using: str, **options: Any) -> Any:
    return prepared("order-17", "order.paid", {"total": 30}, using=using, to="shop", **options)


def test_an_event(alias: str, sender: str, told: Any, in_log: Any, states: Any) -> None:
    with paid(sender, metadata={"by": "Ärger €", "n": 1.5}, topic="paid") as event:
        assert (states(), in_log()) == (["prepared"], [])
    told()
    [row] = Event.objects.using(alias).all()
    assert (row.stream, row.type, row.topic, row.data) == (
        *("order-17", "order.paid", "paid"),
        {"total": 30},
    )
    assert row.metadata["by"] == "Ärger €"
    assert row.message_id == event.event_id
    [fenced] = Fence.objects.using(sender).exclude(pk=Fence.MARK)
    assert (fenced.outcome, fenced.keeper) == ("committed", "shop")


def test_a_job(alias: str, sender: str, make_app: Any, monkeypatch: Any) -> None:
    app = make_app()
    app.task(name="tests.door.add")(tasks.add)
    app.task(name="tests.add")(tasks.add)
    monkeypatch.setattr(_state, "_task_stack", _state._task_stack)
    monkeypatch.setattr(_state, "default_app", app)
    monkeypatch.setattr(_state._tls, "current_app", None)
    with prepared(
        job="tests.door.add", args=[1], kwargs={"y": 2}, using=sender, to="shop", wait=True
    ):
        pass
    [job] = StagedJob.objects.using(alias)
    assert job.task == "tests.door.add"
    with (
        pytest.raises(InvalidPrepared, match="may not be prepared"),
        prepared(job="tests.add", args=[1, 2], using=sender, to="shop"),
    ):
        raise AssertionError("never begun")


def test_rolled_back(alias: str, sender: str, told: Any, states: Any, in_log: Any) -> None:
    def fail() -> None:
        with paid(sender):
            raise ValueError("no money")

    with pytest.raises(ValueError, match="no money"):
        fail()
    told()
    assert (states(), in_log()) == (["cancelled"], [])


def test_what_was_not_granted(alias: str, sender: str, served: Any) -> None:
    """All of them or an error; what was recorded is asked about, and cancelled."""
    new = [NewPrepared("a", "order.paid"), NewPrepared("a", "user.deleted")]
    with pytest.raises(InvalidPrepared, match="may not be prepared by this service"):
        prepare_many(new, using=sender, to="shop")
    with pytest.raises(InvalidPrepared, match="may not be prepared by this service"):
        prepare("a", "order.paid", topic="other", using=sender, to="shop")
    for types in ([], "order.*"):  # a text is no list of patterns, of which one were "*"
        served(types=types)
        with pytest.raises(InvalidPrepared, match="may not be prepared by this service"):
            prepare("a", "order.paid", using=sender, to="shop")
    assert PreparedEvent.objects.using(alias).count() == 1


def test_the_same_id(alias: str, sender: str) -> None:
    event = prepare("a", "order.paid", using=sender, to="shop")
    again = prepare("a", "order.paid", using=sender, to="shop", event_id=event.event_id)
    assert again.event_id == event.event_id
    with pytest.raises(PreparedConflict, match="belongs to an event"):
        prepare("b", "order.paid", using=sender, to="shop", event_id=event.event_id)
    cancel(event)
    with pytest.raises(PreparedConflict, match="cancelled already"):
        prepare("a", "order.paid", using=sender, to="shop", event_id=event.event_id)


def test_a_contradiction(alias: str, sender: str) -> None:
    event = prepare("a", "order.paid", using=sender, to="shop")
    HttpKeeper("shop", sender).decide({event.event_id: "cancelled"})
    with transaction.atomic(using=sender):
        fence(event)
    with pytest.raises(Contradiction, match="decided otherwise at the keeper 'shop'"):
        confirm(event)


def test_a_keeper_that_cannot_publish_it(alias: str, sender: str, states: Any) -> None:
    event = prepare("a", "order.paid", using=sender, to="shop")
    PreparedEvent.objects.using(alias).update(content={"data": 1, "metadata": {}})
    with transaction.atomic(using=sender):
        fence(event)
    with pytest.raises(PreparedError, match="is undecided: the log of the keeper says why"):
        confirm(event)
    assert states() == ["undecided"]


def test_a_keeper_that_was_restored(alias: str, sender: str, in_log: Any) -> None:
    event = prepare("a", "order.paid", using=sender, to="shop")
    with transaction.atomic(using=sender):
        fence(event)
    PreparedEvent.objects.using(alias).all().delete()
    confirm(event)
    assert len(in_log()) == 1


def test_each_request(alias: str, sender: str) -> None:
    event = prepare("a", "order.paid", using=sender, to="shop")
    shop, id = peer_named("shop", "keeper"), event.event_id
    assert call(shop, "GET", "prepared/open") == (200, []), "it is immune for ten seconds"
    PreparedEvent.objects.using(alias).update(next_check_at=timezone.now() - timedelta(minutes=1))
    status, said = call(shop, "GET", f"prepared/{id}")
    assert (status, said["id"], said["state"], said["type"]) == (
        *(200, str(id), "prepared"),
        "order.paid",
    )
    status, said = call(shop, "GET", "prepared/open")
    assert (status, [each["id"] for each in said]) == (200, [str(id)])
    [question] = HttpKeeper("shop", sender).open()
    assert question == Question(id, question.prepared_at, "a", "order.paid")
    assert call(shop, "GET", "prepared/open?skip=1") == (200, [])
    assert call(shop, "GET", "prepared/open?skip=x")[0] == 400
    assert call(shop, "POST", f"prepared/{id}/confirm") == (
        200,
        {"id": str(id), "state": "confirmed"},
    )
    assert call(shop, "POST", f"prepared/{id}/confirm", {})[0] == 400
    status, said = call(shop, "POST", f"prepared/{id}/cancel")
    assert (status, said["state"]) == (409, "contradiction")
    assert call(shop, "GET", "prepared/open") == (200, [])
    unknown = str(time_ordered_id())
    assert call(shop, "GET", f"prepared/{unknown}")[0] == 404
    status, said = call(shop, "POST", f"prepared/{unknown}/confirm")
    assert (status, said["id"], said["state"]) == (404, unknown, "unknown")
    assert call(shop, "POST", f"prepared/{unknown}/cancel")[0] == 200, "a late prepare is dead"
    decisions = [{"id": str(id), "state": "confirmed"}, {"id": unknown, "state": "confirmed"}]
    status, said = call(shop, "POST", "prepared/decide", decisions)
    assert (status, [each["status"] for each in said]) == (200, [200, 409])
    assert [each["state"] for each in said] == ["confirmed", "contradiction"]
    for wrong in (
        decisions[:1] * 2,
        [{"id": str(id)}],
        [{"id": str(id), "state": "prepared"}],
        [{"id": str(id), "state": ["confirmed"]}],
        [{"id": "1", "state": "confirmed"}],
        [1],
    ):
        assert call(shop, "POST", "prepared/decide", wrong)[0] == 422
    assert call(shop, "POST", "prepared/decide", [])[0] == 400
    assert call(shop, "POST", "prepared/decide", {"id": str(id)})[0] == 400


def test_another_sender_is_not_told_of_it(
    alias: str, sender: str, settings: Any, new_key: Any, states: Any
) -> None:
    """Its id is 404, and what it says of the event changes nothing."""
    event = prepare("a", "order.paid", using=sender, to="shop")
    key, known = new_key("other-1"), settings.OUTBOX["PEERS"]
    other = known["billing"] | {"keys": [known["billing"]["keys"][0], key["theirs"]]}
    shop = known["shop"] | {"keys": [key["ours"], known["shop"]["keys"][1]]}
    peers = {"billing": known["billing"], "other": other, "shop": shop}
    settings.OUTBOX = {**settings.OUTBOX, "PEERS": peers}
    peer, id = peer_named("shop", "keeper"), event.event_id
    assert call(peer, "GET", f"prepared/{id}")[0] == 404
    assert call(peer, "GET", "prepared/open") == (200, [])
    assert call(peer, "POST", f"prepared/{id}/confirm")[0] == 404
    assert call(peer, "POST", f"prepared/{id}/cancel")[0] == 200, "an event of its own, which dies"
    row = PreparedEvent.objects.using(alias).get(sender="billing")
    assert row.state == "prepared"


def test_a_check_back(alias: str, sender: str, states: Any, ask: Any) -> None:
    gone = prepare("a", "order.paid", using=sender, to="shop", immune=0)
    done = prepare("b", "order.paid", using=sender, to="shop", immune=0)
    with transaction.atomic(using=sender):
        fence(done)
    ask()
    assert states() == ["cancelled", "confirmed"]
    answers = ask_over_http(
        "billing", [Question(each.event_id, timezone.now()) for each in (gone, done)]
    )
    assert answers == {gone.event_id: "rolled_back", done.event_id: "committed"}


@one
def test_a_keeper_that_takes_few_at_once(alias: str, sender: str, served: Any, states: Any) -> None:
    """Confirms that wait go in one request: under load it was too large."""
    served(limits={"events": 2})
    new = [NewPrepared("a", "order.paid")] * 7
    with prepared_many(new, using=sender, to="shop", wait=True):
        pass
    assert states() == ["confirmed"] * 7


@one
def test_a_keeper_that_refuses_the_request(alias: str, sender: str, served: Any) -> None:
    served(limits={"bytes": 100})
    with pytest.raises(InvalidPrepared, match="refused the request"):
        prepare("order-1", "order.paid", using=sender, to="shop")


@one
def test_a_half_that_fails_is_the_answer(alias: str, monkeypatch: Any) -> None:
    answers = [(413, {}), (413, {}), (503, {"status": 503}), (200, [1])]
    monkeypatch.setattr(remote, "call", lambda *args, **options: answers.pop(0))
    assert remote.call_in_parts(Peer(), "GET", "prepared/open") == (413, {})
    assert remote.call_in_parts(Peer(), "POST", "check", [1, 2]) == (503, {"status": 503})
    assert answers == [(200, [1])]


@one
def test_a_sender_that_takes_few_at_once(
    alias: str, sender: str, states: Any, ask: Any, settings: Any
) -> None:
    """Its limits are not known to who asks: nothing would ever be answered."""
    prepare_many([NewPrepared("a", "order.paid", immune=0)] * 7, using=sender, to="shop")
    settings.OUTBOX["PEERS"]["shop"]["limits"] = {"events": 2}
    assert ask().trouble == ""
    assert states() == ["cancelled"] * 7


@pytest.mark.parametrize("asks", [True, False])
def test_without_time_zones(
    alias: str,
    sender: str,
    states: Any,
    ask: Any,
    settings: Any,
    peers: Any,
    asks: bool,
) -> None:
    """What is sent has its zone nevertheless, and keys are valid for a time."""
    settings.USE_TZ, settings.TIME_ZONE = False, "UTC"  # as that of the servers
    for each in (peers["shop"]["billing"], peers["billing"]["shop"]):
        each["keys"] = [{"from": "2026-01-01T00:00:00+01:00"} | key for key in each["keys"]]
    gone = prepare("a", "order.paid", using=sender, to="shop", immune=0)
    done = prepare("b", "order.paid", using=sender, to="shop", immune=0)
    with transaction.atomic(using=sender):
        fence(done)
    Fence.objects.using(sender).create(
        event_id=Fence.MARK, outcome="pruned", written_at=timezone.now() - timedelta(days=9)
    )
    if asks:
        assert ask().trouble == ""
    else:
        operations.answer("shop")
    assert states() == ["cancelled", "confirmed"]
    _, said = call(peer_named("shop", "keeper"), "GET", f"prepared/{gone.event_id}")
    assert all(timezone.is_aware(moment(said[name])) for name in ("prepared_at", "decide_by"))


@one
def test_a_time_of_sqlite_without_time_zones(alias: str, sender: str, settings: Any) -> None:
    """Its clock is UTC, also in a project that is elsewhere."""
    settings.USE_TZ, settings.TIME_ZONE = False, "Asia/Tokyo"
    event = prepare("a", "order.paid", using=sender, to="shop", decide_by=60)
    _, said = call(peer_named("shop", "keeper"), "GET", f"prepared/{event.event_id}")
    for name, seconds in (("prepared_at", 0), ("decide_by", 60)):
        late = datetime.now(UTC) - moment(said[name]) + timedelta(seconds=seconds)
        assert timedelta(seconds=-1) < late < timedelta(seconds=patience())


def test_a_keeper_is_not_told_of_fences_of_another(alias: str, sender: str) -> None:
    id = time_ordered_id()
    Fence.objects.using(sender).create(event_id=id, outcome="committed", keeper="depot")
    assert ask_over_http("billing", [Question(id, timezone.now())]) == {}


@one
def test_an_id_that_has_committed_with_another_keeper(
    alias: str, sender: str, told: Any, states: Any, ask: Any
) -> None:
    """Its second transaction was rolled back: the fence of the first one says nothing of it.

    Here both keepers have one database, so the second one has the id for another log.
    """
    with paid(sender) as event:
        pass
    told()
    second = {"using": sender, "event_id": event.event_id, "log": Visit}
    again = prepared("b", "order.paid", immune=0, **second)
    with pytest.raises(FencedOut), again:
        raise AssertionError("never begun")
    told()
    ask()
    assert states() == ["confirmed", "prepared"]
    other = prepare("b", "order.paid", **second)
    with pytest.raises(FencedOut, match="says another keeper's"):
        confirm(other)


@one
def test_an_answer_comes_in_the_time_of_who_asks(alias: str, sender: str) -> None:
    """However many transactions are open: what is known of the others is said."""
    new = [NewPrepared(f"order-{n}", "order.paid", immune=0) for n in range(12)]
    done, *others = prepare_many(new, using=sender, to="shop")
    with transaction.atomic(using=sender):
        fence(done)
    asked = [
        {"id": str(each.event_id), "prepared_at": timezone.now().isoformat()}
        for each in (done, *others)
    ]
    with transaction.atomic(using=sender):
        for each in others:
            fence(each)
        status, said = call(peer_named("billing", "sender"), "POST", "check", asked, seconds=4)
    outcomes = {each["id"]: each["outcome"] for each in said}
    assert status == 200
    assert outcomes.pop(str(done.event_id)) == "committed"
    assert list(outcomes.values()) == ["in_progress"] * len(others)


def test_nobody_asks_about_the_mark_of_fences(alias: str, sender: str) -> None:
    with pytest.raises(Exception, match="422"):
        ask_over_http("billing", [Question(Fence.MARK, timezone.now())])
    assert outcomes([Question(Fence.MARK, timezone.now())], using=sender) == {}
    assert not Fence.objects.using(sender).exists()


@pytest.mark.parametrize("confirms", [False, True])
def test_what_a_function_has_answered_is_answered_again(
    alias: str, sender: str, monkeypatch: pytest.MonkeyPatch, confirms: bool
) -> None:
    """A reply may be lost, and so may the call of a sender that confirms by itself."""
    said = [("order.*", lambda question: "committed")]
    monkeypatch.setattr(fences, "_functions", said)
    event = prepare("a", "order.paid", using=sender, to="shop", immune=0)
    if confirms:
        assert senders._outcomes([event]) == {event.event_id: "committed"}
    asked = Question(event.event_id, timezone.now(), "a", "order.paid")
    for _ in range(3):
        assert ask_over_http("billing", [asked]) == {event.event_id: "committed"}


@one
def test_keys_change_while_events_are_open(
    alias: str, sender: str, settings: Any, new_key: Any, states: Any, ask: Any
) -> None:
    """New beside old on both sides, then new alone: nothing that is open depends on a key."""
    events = [prepare("a", "order.paid", using=sender, to="shop", immune=0)]
    known, shop, billing = settings.OUTBOX["PEERS"], new_key("shop-2"), new_key("billing-2")
    past = (timezone.now() - timedelta(seconds=1)).isoformat()

    def keys(name: str, *more: dict[str, Any], old: bool) -> dict[str, Any]:
        before = known[name]["keys"] if old else [k | {"until": past} for k in known[name]["keys"]]
        return known[name] | {"keys": [*before, *more]}

    for old in (True, False):
        peers = {
            "billing": keys("billing", shop["ours"], billing["theirs"], old=old),
            "shop": keys("shop", billing["ours"], shop["theirs"], old=old),
        }
        settings.OUTBOX = {**settings.OUTBOX, "PEERS": peers}
        events.append(prepare("a", "order.paid", using=sender, to="shop", immune=0))
    cancel(events.pop(0))
    with transaction.atomic(using=sender):
        fence(events[1])
    ask()
    assert states() == ["cancelled", "cancelled", "confirmed"]


@one
def test_no_key_is_valid(alias: str, sender: str, served: Any, settings: Any) -> None:
    known = settings.OUTBOX["PEERS"]
    theirs = known["shop"] | {"keys": known["shop"]["keys"][1:]}
    settings.OUTBOX = {**settings.OUTBOX, "PEERS": known | {"shop": theirs}}
    with pytest.raises(KeeperUnavailable, match="No key that signs"):
        prepare("a", "order.paid", using=sender, to="shop")


@one
@pytest.mark.parametrize("whose", ["billing", "shop"])
def test_a_key_that_is_none(
    alias: str, sender: str, peers: Any, whose: str, states: Any, caplog: Any
) -> None:
    """As where its file is being written, or is another one: said of the key, on both sides."""
    [key, _] = peers[whose][{"billing": "shop", "shop": "billing"}[whose]]["keys"]
    Path(key["private"].removeprefix("file:")).write_text("-----BEGIN PRIVATE KEY-----\nMC4C")
    with pytest.raises(KeeperUnavailable) as raised:
        prepare("a", "order.paid", using=sender, to="shop")
    said = str(raised.value) if whose == "billing" else caplog.text
    assert f"Nothing can be signed with the key '{whose}-1'" in said
    assert ("503" in str(raised.value)) == (whose == "shop")


@one
def test_a_peer_is_removed_while_its_events_are_open(
    alias: str, sender: str, served: Any, settings: Any, ask: Any, states: Any
) -> None:
    """They stay, and say why; they are asked about again when it is back."""
    prepare("a", "order.paid", using=sender, to="shop", immune=0)
    known = settings.OUTBOX["PEERS"]
    settings.OUTBOX = {**settings.OUTBOX, "PEERS": {"shop": known["shop"]}}
    loop = ask()
    assert "There is no sender 'billing' among the peers" in loop.trouble
    [row] = PreparedEvent.objects.using(alias)
    assert (row.state, row.unreachable) == ("prepared", 1)
    assert "billing" in row.last_answer
    settings.OUTBOX = {**settings.OUTBOX, "PEERS": known}
    PreparedEvent.objects.using(alias).update(next_check_at=row.prepared_at)
    ask()
    assert states() == ["cancelled"]


@one
def test_a_keeper_that_there_is_not(alias: str, sender: str) -> None:
    with pytest.raises(InvalidPrepared, match="There is no keeper 'depot' among the peers"):
        prepare("a", "order.paid", using=sender, to="depot")
    with pytest.raises(InvalidPrepared, match="For each alias register a peer"):
        prepare("a", "order.paid", using=alias, to="shop")


@one
@pytest.mark.parametrize("log", [5, None, PreparedEvent])
def test_a_log_that_is_none(alias: str, sender: str, log: Any) -> None:
    with pytest.raises(InvalidPrepared, match="log must be a concrete model"):
        prepare("a", "order.paid", log=log, using=sender, to="shop")


@one
def test_without_the_extra(alias: str, sender: str, monkeypatch: Any, client: Any) -> None:
    """What is local works; the rest says in a sentence what to install."""
    monkeypatch.setitem(sys.modules, "http_message_signatures", None)
    for name in ("door.signing", "door.client", "prepared.remote"):
        monkeypatch.delitem(sys.modules, f"outbox_app.{name}", raising=False)
        room, _, module = name.partition(".")
        monkeypatch.delattr(sys.modules[f"outbox_app.{room}"], module, raising=False)
    with pytest.raises(InvalidPeer, match=r"pip install 'outbox-app\[door\]'"):
        prepare("a", "order.paid", using=sender, to="shop")
    response = client.post("/outbox/check", headers={"Host": "127.0.0.1"})
    assert response.status_code == 503
    assert "pip install" in response.json()["detail"]
    prepare("a", "order.paid", using=sender)


@one
def test_a_keeper_that_hangs_holds_a_transaction_for_two_seconds(
    alias: str, sender: str, settings: Any, ports: dict[str, int]
) -> None:
    with socket.create_server(("127.0.0.1", ports["billing"])):
        known = settings.OUTBOX["PEERS"]
        hangs = known["shop"] | {"address": f"http://127.0.0.1:{ports['billing']}/"}
        settings.OUTBOX = {**settings.OUTBOX, "PEERS": known | {"shop": hangs}}
        begin = time.monotonic()
        with transaction.atomic(using=alias), pytest.raises(KeeperUnavailable):
            prepare("a", "order.paid", using=sender, to="shop")
        assert 1.5 < time.monotonic() - begin < 9


@one
@pytest.mark.parametrize("mode", ["cut_on_reply", "drop_reply", "refuse"])
def test_a_reply_is_lost(
    alias: str,
    sender: str,
    settings: Any,
    ports: dict[str, int],
    states: Any,
    ask: Any,
    mode: Any,
    monkeypatch: Any,
) -> None:
    """To prepare: the transaction is not begun. To confirm: it is asked about, or told again."""
    with Proxy("127.0.0.1", ports["shop"]) as link:
        known = settings.OUTBOX["PEERS"]
        through = known["shop"] | {"address": f"http://127.0.0.1:{link.port}/outbox/"}
        settings.OUTBOX = {**settings.OUTBOX, "PEERS": known | {"shop": through}}
        event = prepare("a", "order.paid", using=sender, to="shop", immune=0)
        with transaction.atomic(using=sender):
            fence(event)
        link.mode = mode
        link.cut()
        monkeypatch.setattr(remote, "SECONDS", 2.0)
        with pytest.raises(KeeperUnavailable):
            confirm(event)
        with pytest.raises(KeeperUnavailable):
            prepare("b", "order.paid", using=sender, to="shop", immune=0)
    arrived = mode != "refuse"
    eventually(lambda: states() == (["confirmed", "prepared"] if arrived else ["prepared"]))
    ask()
    assert states() == (["confirmed", "cancelled"] if arrived else ["confirmed"])


def test_a_sender_that_cannot_be_called_answers_by_itself(
    alias: str, sender: str, served: Any, settings: Any, states: Any, in_log: Any
) -> None:
    """Two that have committed, one that never began, one that is open, and one that is immune."""
    events = prepare_many(
        [NewPrepared(f"o-{n}", "order.paid", immune=3600) for n in range(5)],
        using=sender,
        to="shop",
    )
    committed, _, still_open, also, young = events
    for event in (committed, also):
        with transaction.atomic(using=sender):
            fence(event)
    rows = PreparedEvent.objects.using(alias)
    # SQLite has one writer: while a transaction is open nothing can be answered.
    holds = connections[sender].vendor != "sqlite"
    young_ids = [young.event_id] if holds else [young.event_id, still_open.event_id]
    minute_ago = timezone.now() - timedelta(minutes=1)
    rows.exclude(event_id__in=young_ids).update(next_check_at=minute_ago)
    lines: list[str] = []
    with transaction.atomic(using=sender) if holds else nullcontext():
        if holds:
            fence(still_open)
        done = operations.answer("shop", write=lines.append)
    if not holds:
        with transaction.atomic(using=sender):
            fence(still_open)
        rows.filter(event_id=still_open.event_id).update(next_check_at=minute_ago)
    left = 1 if holds else 0
    assert done == {"confirmed": 2, "cancelled": 1, "contradiction": 0, "open": left}
    assert lines == [f"answered keeper=shop confirmed=2 cancelled=1 contradiction=0 open={left}"]
    assert states() == ["confirmed", "cancelled", "prepared", "confirmed", "prepared"]
    out = StringIO()
    call_command("outbox_prepared", "answer", "shop", stdout=out)
    assert out.getvalue() == "answered keeper=shop confirmed=1 cancelled=0 contradiction=0 open=0\n"
    assert {stream for stream, *_ in in_log()} == {"o-0", "o-2", "o-3"}


def test_a_sender_with_more_open_events_than_a_keeper_skips_comes_to_an_end(
    sender: str, served: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr("outbox_app.prepared.operations.MOST_SKIPPED", 0)
    monkeypatch.setattr("outbox_app.prepared.views.MOST_SKIPPED", 0)
    monkeypatch.setattr(operations, "outcomes", lambda found, **_: {})  # all are in progress
    prepare("o", "order.paid", using=sender, to="shop", immune=0)
    assert operations.answer("shop", write=lambda line: None)["open"] == 1


def test_many_threads_call(alias: str, sender: str, states: Any) -> None:
    errors: list[Exception] = []

    def run(n: int) -> None:
        try:
            keeper = HttpKeeper("shop", sender)
            ids = [UUID(int=n * 100 + each + 1) for each in range(5)]
            new = [NewPrepared(f"s-{id}", "order.paid", event_id=id) for id in ids]
            keeper.prepare([checked(each) for each in new])
            keeper.decide(dict.fromkeys(ids, "confirmed"))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=[n]) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert states() == ["confirmed"] * 20
