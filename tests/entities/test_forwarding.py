"""Commands for entities that another server leads: which are forwarded, in how many requests."""

from __future__ import annotations

import asyncio
import datetime
import json
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from celery.exceptions import SoftTimeLimitExceeded
from django.db import InternalError, OperationalError, connections, transaction
from django.utils import timezone, translation

from outbox_app.door import client, messages, peers
from outbox_app.door.exceptions import PeerUnavailable
from outbox_app.entities import Command, counting, forwarding, queue
from outbox_app.entities.exceptions import DamagedEntity, OutcomeUnknown, Overloaded
from outbox_app.entities.messages import fitting, forwarded_call, outcome_content
from outbox_app.entities.request import Call, Outcome
from outbox_app.events.exceptions import VersionConflict
from outbox_app.events.signals import events_published
from outbox_app.fleet import topology
from outbox_app.process import counters
from tests.entities.models import Account, AccountVersion
from tests.patience import SECONDS, eventually, patience
from tests.process.counters.planted import totals

pytestmark = [
    pytest.mark.django_db(transaction=True),
    pytest.mark.usefixtures("fresh"),
    pytest.mark.parametrize("alias", [pytest.param("postgres", id="postgres")], indirect=True),
]
#: An answer of the leader, and one that says no.
YES = {"status": 200, "response": 7, "version": 8, "replayed": False}
NO = {"status": 422, "rejected": True, "code": "c", "detail": "t", "version": 9, "replayed": True}
LEADER = "http://127.0.0.1:1/outbox/"
NAMELESS = datetime.timezone(datetime.timedelta(hours=2))
PEER = {"direction": "both", "address": LEADER, "keys": [{"id": "f", "secret": "env:FLEET_KEY"}]}


@pytest.fixture(autouse=True)
def routed(settings: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another server leads every account."""
    monkeypatch.setattr(Account, "routed", True)
    monkeypatch.setattr(topology, "_avoided", {})
    fleet = {"SERVICE": "shop", "TOPOLOGY": [LEADER]}
    settings.OUTBOX = {**settings.OUTBOX, "FLEET": fleet, "PEERS": {"shop": PEER}}


@pytest.fixture
def requests(account: None, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The commands of each request to the leader, who answers with the first command's ``item``."""
    made: list[Any] = []

    def call(peer: Any, method: str, path: str, payload: Any, **options: Any) -> Any:
        assert (peer.name, method, options["address"]) == ("shop", "POST", LEADER)
        assert path == "routed/entities.account"
        assert options["most"] == peers.LIMITS["bytes"]
        made.append(payload)
        said = payload[0].get("arguments", {}).get("item", "none")
        if isinstance(said, Exception):
            raise said
        return 200, [said] * len(payload)

    monkeypatch.setattr(client, "call", call)
    return made


def told_here(calls: list[Call], seconds: float = SECONDS) -> list[Any]:
    """What another server is told of calls that it has passed on; None for an error."""
    answers = forwarding.answered_here(Account, calls, seconds)
    return [outcome_content(a)[1] if isinstance(a, Outcome) else None for a in answers]


@pytest.fixture
def account(alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Account, "routed", False)
    Account.execute("a", "open", {"owner": "ann", "balance": 10}, command_id="open", using=alias)
    monkeypatch.setattr(Account, "routed", True)


def test_the_leaders_answer(requests: list[Any], ask: Any, rows: Any, settings: Any) -> None:
    yes = ask("enlist", {"item": YES}, command_id="k", expected_version=1)
    assert (yes.response, yes.version, yes.rejected, yes.replayed) == (7, 8, None, False)
    no = asyncio.run(Account.aexecute("a", "enlist", {"item": NO}, command_id="l"))
    assert (no.response, no.version, no.replayed) == (None, 9, True)
    assert (no.rejected.code, no.rejected.text) == ("c", "t")
    asked = {"id": "a", "command": "enlist"}
    asked |= {"language": settings.LANGUAGE_CODE, "zone": settings.TIME_ZONE}
    assert requests == [
        [asked | {"arguments": {"item": YES}, "key": "k", "expected_version": 1}],
        [asked | {"arguments": {"item": NO}, "key": "l"}],
    ]
    assert len(rows()) == 1


def test_a_type_that_is_not_routed(
    requests: list[Any], ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Account, "routed", False)
    assert ask("withdraw", {"amount": 1}).version == 2
    again = Account.aexecute("a", "withdraw", {"amount": 1}, command_id="async")
    assert asyncio.run(again).version == 3
    assert requests == []


def test_what_has_gathered_goes_in_one_request(
    requests: list[Any], ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    go, there, call = threading.Event(), threading.Event(), client.call

    def held(*args: Any, **options: Any) -> Any:
        there.set()
        assert go.wait(SECONDS)
        return call(*args, **options)

    monkeypatch.setattr(client, "call", held)
    with ThreadPoolExecutor(7) as pool:
        asked = [pool.submit(ask, "enlist", {"item": YES | {"response": 0}})]
        assert there.wait(SECONDS)
        asked += [pool.submit(ask, "enlist", {"item": YES}) for _ in range(6)]
        eventually(lambda: sum(len(each.waiting) for each in queue.queues.by_key.values()) == 6)
        go.set()
        assert [each.result().response for each in asked] == [0] + [7] * 6
    assert [len(each) for each in requests] == [1, 6]


def test_all_that_waited_have_given_up(requests: list[Any], alias: str) -> None:
    entity_queue = queue.EntityQueue(queue.QueueKey(Account, alias, leader=LEADER))
    queue.queues.by_key[entity_queue.key] = entity_queue
    queue.queues.lead(entity_queue)
    assert (requests, queue.queues.by_key) == ([], {})


def test_what_goes_to_a_leader_fits_one_request(requests: list[Any], alias: str) -> None:
    entity_queue = queue.EntityQueue(queue.QueueKey(Account, alias, leader=LEADER))
    for number in range(40):
        item = YES | {"response": "ä" * 130_000}
        asked = Command("ö" * 255, "enlist", {"item": item}, command_id=f"{number:ü>255}")
        entity_queue.waiting[Call(asked)] = None
    taken = 0
    while batch := entity_queue.take():
        taken += len(batch)
        forwarding.forward(Account, batch, leader=LEADER)
        assert len(messages.written(requests[-1])) <= peers.LIMITS["bytes"]
    assert taken == 40


@pytest.mark.usefixtures("account")
def test_servers_that_wait_for_one_another(alias: str, settings: Any, monkeypatch: Any) -> None:
    """What a pool passes on leaves it free for what others pass on to it."""
    told: list[Any] = []

    def call(*args: Any, **options: Any) -> Any:
        told.append(told_here(list(map(forwarded_call, args[3])), options["seconds"]))
        return 200, told[-1]

    async def ask(first: int, count: int) -> list[int]:
        entity, take = Account, ("withdraw", {"amount": 1})
        ids = [f"{first + number}" for number in range(count)]
        asked = [entity.aexecute("a", *take, command_id=id, timeout=SECONDS) for id in ids]
        return [outcome.version for outcome in await asyncio.gather(*asked)]

    monkeypatch.setattr(client, "call", call)
    monkeypatch.setattr(queue, "IDLE", 0.1)
    monkeypatch.setattr(forwarding, "SECONDS", SECONDS / 2)
    settings.OUTBOX = {**settings.OUTBOX, "ENTITY_THREADS": 1}
    for first, count in (2, 1), (3, 5), (8, 1):
        assert asyncio.run(ask(first, count)) == list(range(first, first + count))
    assert not any(None in each for each in told)
    eventually(lambda: queue.queues.threads == 0)


@pytest.mark.usefixtures("account")
def test_answers_fit_one_answer(ask: Any, alias: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that do not are found by the server that has passed the commands on."""
    monkeypatch.setitem(peers.LIMITS, "bytes", 300)
    calls = [Call(Command("a", "withdraw", {"amount": 1}, command_id=f"{n}")) for n in range(9)]
    told = fitting(told_here(calls))
    assert len(messages.written(told)) <= 300
    assert [None in each for each in (told[:3], told[-3:])] == [False, True]
    assert fitting(told[:3]) == told[:3]
    large, small = {"response": "x" * 300}, {"response": 1}
    assert fitting([large, small, None, small]) == [None, small, None, small]
    monkeypatch.setattr(client, "call", lambda *args, **options: (200, [None]))
    assert ask("withdraw", {"amount": 1}, command_id="8").response == {"balance": 1}


@pytest.mark.parametrize(
    "failure", [PeerUnavailable("gone"), OSError("odd"), [1, 2], "text"], ids=repr
)
def test_a_leader_that_does_not_answer(
    requests: list[Any], ask: Any, rows: Any, monkeypatch: Any, failure: Any
) -> None:
    """The command is executed here, and the next ones, until it is tried again."""

    def call(*args: Any, **options: Any) -> Any:
        requests.append("failed")
        if isinstance(failure, Exception):
            raise failure
        return 200, [failure]

    monkeypatch.setattr(client, "call", call)
    assert ask("withdraw", {"amount": 1}).response == {"balance": 9}
    again = Account.aexecute("a", "withdraw", {"amount": 1}, command_id="async")
    assert asyncio.run(again).response == {"balance": 8}
    assert (len(requests), len(rows())) == (1, 3)
    topology._avoided.clear()
    again = Account.aexecute("a", "withdraw", {"amount": 1}, command_id="async-2")
    assert asyncio.run(again).response == {"balance": 7}
    assert (len(requests), len(rows())) == (2, 4)


def test_the_time_limit_of_a_task_is_no_fault_of_the_leader(
    account: None, ask: Any, rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def call(*args: Any, **options: Any) -> Any:
        raise SoftTimeLimitExceeded

    monkeypatch.setattr(client, "call", call)
    with pytest.raises(SoftTimeLimitExceeded):
        ask("withdraw", {"amount": 1})
    assert (len(rows()), topology._avoided) == (1, {})


def test_how_long_a_leader_has(account: None, ask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    given: list[float] = []

    def call(*args: Any, seconds: float, **options: Any) -> Any:
        given.append(seconds)
        return 200, [YES]

    monkeypatch.setattr(client, "call", call)
    for timeout in (3, 60):
        ask("withdraw", {"amount": 1}, timeout=timeout)
    assert 0 < given[0] <= 1.5
    assert given[1] == forwarding.SECONDS


def test_an_answer_of_another_length_is_none(
    account: None, ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whose each answer is would be a guess."""
    monkeypatch.setattr(client, "call", lambda *args, **options: (200, [YES] * 2))
    assert ask("withdraw", {"amount": 1}).response == {"balance": 9}


@pytest.mark.parametrize(("given", "own"), [(0.5, 60), (60, 0.5)])
def test_how_long_a_passed_command_may_take(
    account: None, alias: str, monkeypatch: pytest.MonkeyPatch, given: float, own: float
) -> None:
    monkeypatch.setattr(Account, "timeout", own)
    call = Call(Command("a", "withdraw", {"amount": 1}, command_id="x"))
    forwarding.answered_here(Account, [call], given)
    assert call.seconds_left < 0.5


def test_an_error_at_the_leader_costs_no_other_its_answer(account: None, alias: str) -> None:
    asked = [("fail", {}), ("withdraw", {"amount": 1})]
    calls = [Call(Command("a", name, given, command_id=name)) for name, given in asked]
    assert [each and each["response"] for each in told_here(calls)] == [None, {"balance": 9}]


def test_a_leader_that_is_about_to_end_answers_nothing(alias: str, fresh: Any) -> None:
    fresh.closed = True
    call = Call(Command("a", "withdraw", {"amount": 1}, command_id="x"))
    [error] = forwarding.answered_here(Account, [call], SECONDS)
    assert isinstance(error, Overloaded)


def test_what_the_leader_leaves_is_done_here(requests: list[Any], ask: Any) -> None:
    """Its errors are those of this process; a leader that answers so is not avoided."""
    for _ in range(2):
        with pytest.raises(VersionConflict):
            ask("enlist", {"item": None}, expected_version=7)
    assert len(requests) == 2


def test_an_entity_that_was_edited_by_hand(requests: list[Any], ask: Any, alias: str) -> None:
    with connections[alias].cursor() as cursor:
        cursor.execute("UPDATE account SET version = 7 WHERE id = 'a'")
    with pytest.raises(DamagedEntity):
        ask("enlist", {"item": None})
    assert len(requests) == 1


@pytest.mark.parametrize("error", [OperationalError, InternalError])
def test_what_is_refused_while_it_is_written_is_told(
    requests: list[Any], ask: Any, rows: Any, error: type[Exception]
) -> None:
    """By a trigger, say. It was looked for before that: to ask again would be refused again."""

    def refuse(**kwargs: Any) -> None:
        raise error("not on Sundays")

    events_published.connect(refuse, sender=AccountVersion)
    try:
        with pytest.raises(error, match="not on Sundays"):
            ask("withdraw", {"amount": 1})
    finally:
        events_published.disconnect(refuse, sender=AccountVersion)
    assert (len(requests), len(rows())) == (1, 1)


def test_what_is_counted(requests: list[Any], ask: Any, alias: str, monkeypatch: Any) -> None:
    """With their batches, as these are counted: no statement is made for it."""
    monkeypatch.setattr(counters, "_shared", {})
    monkeypatch.setattr(counters, "EVERY", 1000)
    ask("enlist", {"item": YES}, command_id="k")  # the leader counts it
    monkeypatch.setattr(client, "call", lambda *args, **options: (503, None))
    ask("withdraw", {"amount": 1})  # not answered
    ask("withdraw", {"amount": 1})  # not asked, for a while
    calls = [Call(Command("a", "withdraw", {"amount": 1}, command_id="here"))]
    forwarding.answered_here(Account, calls, 10, forwarded=True)  # nor does this server lead it
    monkeypatch.setattr(topology, "other_leader", lambda slice: "")
    calls = [Call(Command("a", "withdraw", {"amount": 1}, command_id=f"p-{n}")) for n in range(2)]
    forwarding.answered_here(Account, calls, 10, forwarded=True)
    forwarding.answered_here(Account, [Call(Command("a", "date", command_id="own"))], 10)
    ask("withdraw", {"amount": 1})
    monkeypatch.setattr(counters, "EVERY", 0)
    counting.write_if_due(alias)
    found = totals(alias)
    assert found["commands"] == 7
    assert found["routed_commands elsewhere"] == 3
    assert found["routed_commands passed_on"] == 2


def test_what_stays_here(requests: list[Any], ask: Any, alias: str, settings: Any) -> None:
    with transaction.atomic(using=alias):
        ask("withdraw", {"amount": 1})
    with timezone.override(NAMELESS):
        ask("withdraw", {"amount": 1})
    given = settings.OUTBOX
    for other in ({"ENTITY_SCOPE": "os.getpid"}, {"DATABASE": "default"}):  # is not that of ``ask``
        settings.OUTBOX = {**given, **other}
        ask("withdraw", {"amount": 1})
    assert not requests
    assert Account.objects.using(alias).get().state["balance"] == 6


def test_the_language_and_the_zone_of_a_caller_go_to_the_leader(
    requests: list[Any], ask: Any, settings: Any
) -> None:
    with translation.override("de"), timezone.override("Asia/Tokyo"):
        ask("enlist", {"item": YES})
    with translation.override(None):
        ask("enlist", {"item": YES}, command_id="k")
    found = [(each["language"], each["zone"]) for [each] in requests]
    assert found == [("de", "Asia/Tokyo"), (None, settings.TIME_ZONE)]


def test_what_the_leader_may_still_execute_is_not_said_to_be_not_begun(
    requests: list[Any], ask: Any, held: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not answered in its time, and here another command is under way."""

    def call(*args: Any, **options: Any) -> Any:
        raise PeerUnavailable("It gave no answer.")

    def stay() -> Any:
        try:
            with timezone.override(NAMELESS):
                return ask("withdraw", {"amount": 1})
        finally:
            connections.close_all()

    monkeypatch.setattr(client, "call", call)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(stay)
        held.wait()
        with pytest.raises(OutcomeUnknown):
            ask("withdraw", {"amount": 1}, timeout=0.1)
        held.go.set()
        first.result()


def test_what_the_leader_may_still_execute_is_not_said_to_be_not_written(
    requests: list[Any], ask: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has not answered, and this process is about to end."""

    def call(*args: Any, **options: Any) -> Any:
        queue.queues.closed = True
        raise PeerUnavailable("It gave no answer.")

    monkeypatch.setattr(client, "call", call)
    with pytest.raises(OutcomeUnknown):
        ask("withdraw", {"amount": 1})


@pytest.mark.usefixtures("account")
def test_greenlets(alias: str, environment: Any, monkeypatch: Any) -> None:
    """Under gevent all threads are one, which has one running loop at a time."""
    monkeypatch.setattr(Account, "routed", False)
    for number in range(3):
        options = {"command_id": "open", "using": alias}
        Account.execute(f"a-{number}", "open", {"owner": "ann"}, **options)
    done = subprocess.run(
        [sys.executable, "-m", "tests.entities.greenlets", "30"],
        env=environment(alias),
        capture_output=True,
        text=True,
        timeout=patience(100),
    )
    assert done.returncode == 0, done.stderr
    versions, arrived, avoided, loops = json.loads(done.stdout)
    assert versions == sorted([*range(2, 12)] * 3), done.stderr
    assert (arrived, avoided, loops) == (30, [], 0)
