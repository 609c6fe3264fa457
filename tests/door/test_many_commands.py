"""Many commands in one request: each answered by itself, in order; and requests that attack it."""

from __future__ import annotations

import asyncio
import json
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError, transaction
from django.test import Client

from outbox_app.door import client, messages, peers
from outbox_app.door.exceptions import PeerUnavailable
from outbox_app.entities import Command, Outcome, forwarding, queue, remote, views
from outbox_app.entities.exceptions import (
    CommandIdConflict,
    CommandTimeout,
    EntityError,
    InvalidCommand,
    OutcomeUnknown,
    UnknownEntity,
)
from outbox_app.events.exceptions import VersionConflict
from outbox_app.events.log.newevent import NO_STREAM
from tests.door.test_commands import versions
from tests.entities.models import Account
from tests.faults.tools import on
from tests.fixtures.door import GRANTED, TYPE

from . import rfc9421

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"]),
    pytest.mark.usefixtures("fresh"),
]
#: About messages and signatures: no database differs.
one = on("postgres")
PATH = f"/outbox/entities/{TYPE}"


def take(amount: Any, key: str, **options: Any) -> Command:
    return Command("a", "withdraw", {"amount": amount}, command_id=key, **options)


def element(key: Any = "k-1", **changes: Any) -> dict[str, Any]:
    return {"id": "a", "command": "withdraw", "arguments": {"amount": 1}, "key": key} | changes


@pytest.fixture
def requests(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Method, path, number of commands and limit in bytes of each request that is sent."""
    made, call = [], client.call

    def note(peer: Any, method: str, path: str, payload: Any, **options: Any) -> Any:
        made.append((method, path, len(payload), options["most"]))
        return call(peer, method, path, payload, **options)

    monkeypatch.setattr(client, "call", note)
    return made


def sizes(requests: list[Any]) -> list[int]:
    return [count for _, _, count, _ in requests]


@pytest.fixture
def post(granted: None, peers: dict[str, Any]) -> Callable[..., Any]:
    """``post(commands)``: a request of billing, signed by hand; ``sent_…`` change after that."""
    pem = peers["billing"]["shop"]["keys"][0]["private"].removeprefix("file:")
    signer = rfc9421.by_ed25519(Path(pem).read_bytes())

    def run(
        commands: Any,
        *,
        path: str = PATH,
        sent: bytes | None = None,
        sent_path: str = "",
        fields: dict[str, str] | None = None,
        more: dict[str, str] | None = None,
        **options: Any,
    ) -> Any:
        body = commands if isinstance(commands, bytes) else json.dumps(commands).encode()
        options = {"keyid": "billing-1", "fields": fields} | options
        headers = rfc9421.request("POST", path, body, signer, **options) | (more or {})
        body = body if sent is None else sent
        return Client().generic("POST", sent_path or path, body, headers=headers)

    return run


def test_each_is_answered_by_itself_in_order(alias: str, shop: Any) -> None:
    """One that fails leaves the others as they are. A repeat gets the first answers again."""
    asked = [
        Command("a", "open", {"owner": "ä", "balance": 10}, command_id="k-1"),
        take(4, "k-2", expected_version=1),
        take(50, "k-3"),
        take(4, "k-4", expected_version=1),
        Command("b", "withdraw", {"amount": 1}, command_id="k-5"),
        Command("a", "fail", command_id="k-6"),
        take(2, "k-7"),
        Command("b/../c//", "open", {"owner": "bob"}, command_id="k-8", expected_version=NO_STREAM),
        take(3, "k-2"),
        take(2, "a b"),
        take(object(), "k-9"),
        Command("a", "enlist", {"item": 1}, command_id="k-10"),
    ]
    answers = shop.execute_many(TYPE, asked, return_exceptions=True)
    wanted: list[Any] = [
        (1, None, None),
        (2, {"balance": 6}, None),
        (3, None, "balance"),
        VersionConflict,
        UnknownEntity,
        EntityError,
        (4, {"balance": 4}, None),
        (1, None, None),
        CommandIdConflict,
        InvalidCommand,
        InvalidCommand,
        InvalidCommand,
    ]

    def shown(answer: Any) -> Any:
        if not isinstance(answer, Outcome):
            return type(answer)
        return answer.version, answer.response, answer.rejected and answer.rejected.code

    assert [shown(each) for each in answers] == wanted
    assert answers[3].current == 3
    again = asyncio.run(shop.aexecute_many(TYPE, asked, return_exceptions=True))
    assert [shown(each) for each in again] == wanted
    assert {each.replayed for each in again if isinstance(each, Outcome)} == {True}
    assert [row[:2] for row in versions()] == [
        *((1, "billing:k-1"), (2, "billing:k-2"), (3, "billing:k-3"), (4, "billing:k-7"))
    ]
    with pytest.raises(VersionConflict):  # the first error
        shop.execute_many(TYPE, asked)
    assert shop.execute_many(TYPE.upper(), asked[:2])[1].response == {"balance": 6}
    assert shop.execute_many(TYPE, []) == []


@one
def test_a_key_is_the_same_alone_and_among_others(
    alias: str,
    account: None,
    shop: Any,
) -> None:
    first = shop.execute(TYPE, "a", "withdraw", {"amount": 1}, command_id="k")
    [again] = shop.execute_many(TYPE, [take(1, "k")])
    assert (first.version, again.version, again.replayed) == (2, 2, True)


@one
def test_commands_of_one_entity_share_a_transaction(
    alias: str,
    account: None,
    shop: Any,
    monkeypatch: Any,
) -> None:
    """They wait in the queue of their entity, beside those of this process."""
    sizes = []
    answer = queue.answer

    def note(entity: Any, calls: Any, **options: Any) -> Any:
        sizes.append((len(calls), threading.current_thread().name))
        return answer(entity, calls, **options)

    monkeypatch.setattr(queue, "answer", note)
    answers = shop.execute_many(TYPE, [take(0, f"k-{n}") for n in range(50)])
    assert [each.version for each in answers] == list(range(2, 52))
    assert sum(size for size, _ in sizes) == 50
    assert len(sizes) < 10
    assert {name for _, name in sizes} == {"outbox-entities"}


@one
def test_in_a_transaction_of_the_test(
    alias: str,
    account: None,
    post: Any,
    settings: Any,
) -> None:
    """As in a ``TestCase`` of a project, whose rows no other connection sees."""
    with transaction.atomic(using=alias):
        Account.execute("b", "open", {"owner": "bob", "balance": 2}, command_id="o", using=alias)
        [said] = forwarding.answered_here(
            Account, [queue.Call(Command("b", "withdraw", {"amount": 1}, command_id="x"))], 10
        )
    assert said.response == {"balance": 1}


@one
def test_a_service_without_the_fleet(
    alias: str, account: None, post: Any, monkeypatch: Any
) -> None:
    """It is not installed: its models cannot be imported."""
    monkeypatch.setitem(sys.modules, "outbox_app.fleet.topology", None)
    monkeypatch.delattr("outbox_app.fleet.topology", raising=False)
    assert [each["status"] for each in post([element()]).json()] == [200]


@one
def test_one_post_with_one_signature(
    alias: str,
    account: None,
    shop: Any,
    requests: list[Any],
) -> None:
    shop.execute_many(TYPE, [take(0, f"k-{n}") for n in range(100)])
    assert requests == [("POST", f"entities/{TYPE}", 100, peers.LIMITS["bytes"])]


@one
def test_more_than_a_request_may_have(
    alias: str,
    account: None,
    shop: Any,
    monkeypatch: Any,
    requests: list[Any],
) -> None:
    """They are sent in several requests: by the limits known here, then by the peer's own."""
    monkeypatch.setitem(peers.LIMITS, "commands", 4)
    asked = [take(0, f"k-{n}") for n in range(10)]
    answers = shop.execute_many(TYPE, asked)
    assert ([each.version for each in answers], sizes(requests)) == ([*range(2, 12)], [4, 4, 2])
    requests.clear()
    monkeypatch.setitem(peers.LIMITS, "bytes", 200)
    answers = shop.execute_many(TYPE, asked[:4])
    assert ([each.replayed for each in answers], sizes(requests)) == ([True] * 4, [2, 2])


@one
def test_less_than_others_may_send(
    alias: str,
    account: None,
    shop: Any,
    settings: Any,
) -> None:
    """Only the peer knows its limits: halves are sent, and what is too large alone is refused."""
    known = settings.OUTBOX["PEERS"]
    few = {"billing": known["billing"] | {"limits": {"commands": 3, "bytes": 300}}}
    settings.OUTBOX = {**settings.OUTBOX, "PEERS": known | few}
    asked = [take(0, f"k-{n}") for n in range(7)]
    large = Command("a", "withdraw", {"amount": "x" * 300}, command_id="large")
    *answers, error = shop.execute_many(TYPE, [*asked, large], return_exceptions=True)
    assert [each.version for each in answers] == list(range(2, 9))
    assert isinstance(error, InvalidCommand)
    assert "refuses 'withdraw'" in str(error)


@one
def test_answers_that_do_not_fit(
    alias: str,
    account: None,
    shop: Any,
    monkeypatch: Any,
) -> None:
    """They were executed: a repeat of their commands finds them, before others are sent."""
    fitting, sizes = views.fitting, []

    def two(answers: Any) -> Any:
        sizes.append(len(answers))
        return [*fitting(answers[:2]), *[None] * len(answers[2:])]

    monkeypatch.setattr(views, "fitting", two)
    monkeypatch.setitem(peers.LIMITS, "commands", 5)
    answers = shop.execute_many(TYPE, [take(1, f"k-{n}") for n in range(6)])
    assert [each.version for each in answers] == list(range(2, 8))
    assert sizes == [5, 3, 1, 1]
    monkeypatch.setattr(views, "fitting", lambda answers: [None] * len(answers))
    with pytest.raises(OutcomeUnknown):
        shop.execute_many(TYPE, [take(1, "k-1"), take(1, "k-2")])
    assert len(versions()) == 7


@one
@pytest.mark.parametrize("sent", [True, False])
def test_a_repeat_for_answers_without_room_gets_none(
    alias: str, account: None, shop: Any, monkeypatch: Any, sent: bool
) -> None:
    """Its commands were sent before, and executed."""
    call, requests = client.call, []

    def once(*args: Any, **options: Any) -> Any:
        requests.append(args)
        if len(requests) > 1:
            raise PeerUnavailable("gone", sent=sent)
        return call(*args, **options)

    monkeypatch.setattr(client, "call", once)
    monkeypatch.setattr(views, "fitting", lambda answers: [*answers[:-1], None])
    asked = [take(1, f"k-{n}") for n in range(3)]
    answers = shop.execute_many(TYPE, asked, return_exceptions=True)
    assert [type(each) for each in answers] == [Outcome, Outcome, OutcomeUnknown]


@one
@pytest.mark.parametrize("lost", [PeerUnavailable("gone"), (503, None), (200, [])], ids=str)
def test_no_command_overtakes_one_that_is_to_be_repeated(
    alias: str, account: None, shop: Any, monkeypatch: Any, lost: Any
) -> None:
    requests = []

    def lose(*args: Any, **options: Any) -> Any:
        requests.append(args)
        if isinstance(lost, Exception):
            raise lost
        return lost

    monkeypatch.setitem(peers.LIMITS, "commands", 2)
    asked = [take(1, f"k-{n}") for n in range(5)]
    with monkeypatch.context() as patch:
        patch.setattr(client, "call", lose)
        answers = shop.execute_many(TYPE, asked, return_exceptions=True)
    assert [type(each) for each in answers] == [OutcomeUnknown] * 2 + [PeerUnavailable] * 3
    assert not any(each.sent for each in answers[2:])
    assert len(requests) == 1
    assert [each.version for each in shop.execute_many(TYPE, asked)] == list(range(2, 7))


@one
def test_no_answer(alias: str, shop: Any, monkeypatch: Any) -> None:
    """What may have arrived is unknown; what was not sent was not executed."""
    asked = [take(1, "k-1"), take(1, "k-2")]
    for sent, error in ((True, OutcomeUnknown), (False, PeerUnavailable)):

        def fail(*args: Any, sent: bool = sent, **options: Any) -> Any:
            raise PeerUnavailable("gone", sent=sent)

        monkeypatch.setattr(client, "call", fail)
        with pytest.raises(error, match="gone"):
            shop.execute_many(TYPE, asked)
        answers = shop.execute_many(TYPE, asked, return_exceptions=True)
        assert [type(each) for each in answers] == [error] * 2


ANSWER = {"status": 200, "response": 1, "version": 7, "replayed": False}


@one
@pytest.mark.parametrize(
    ("status", "said", "error"),
    [
        (200, [ANSWER], OutcomeUnknown),
        (200, [ANSWER] * 3, OutcomeUnknown),
        (200, {"0": ANSWER, "1": ANSWER}, OutcomeUnknown),
        (200, None, OutcomeUnknown),
        (200, ["yes", 7], OutcomeUnknown),
        (200, [{"status": 503, "detail": "away"}] * 2, OutcomeUnknown),
        (200, [{"status": 200, "version": 7}] * 2, OutcomeUnknown),
        (500, {"status": 500}, OutcomeUnknown),
        (503, None, OutcomeUnknown),
        (404, {"detail": "no such address"}, InvalidCommand),
    ],
)
def test_answers_that_are_none(
    alias: str,
    shop: Any,
    monkeypatch: Any,
    status: int,
    said: Any,
    error: type[Exception],
) -> None:
    """Whose each answer is would be a guess."""
    monkeypatch.setattr(client, "call", lambda *args, **options: (status, said))
    answers = shop.execute_many(TYPE, [take(1, "k-1"), take(1, "k-2")], return_exceptions=True)
    assert [type(each) for each in answers] == [error] * 2


@one
def test_the_time_of_all(alias: str, account: None, shop: Any) -> None:
    for timeout in (0, -1, 2_000_000, float("nan"), "1", True):
        with pytest.raises(InvalidCommand, match="timeout must be above 0"):
            shop.execute_many(TYPE, [take(1, "k-1")], timeout=timeout)
    assert len(versions()) == 1


@one
@pytest.mark.parametrize("left", ["2.5", "900"])
def test_a_server_gives_up_when_its_caller_has(
    alias: str,
    account: None,
    post: Any,
    monkeypatch: Any,
    left: str,
) -> None:
    waits = []
    wait = queue.Queues.wait

    def note(self: Any, queue: Any, call: Any) -> None:
        waits.append(call.seconds_left)
        wait(self, queue, call)

    monkeypatch.setattr(queue.Queues, "wait", note)
    assert post([element()], fields={"Outbox-Seconds-Left": left}).status_code == 200
    assert waits[0] <= min(float(left), Account.timeout)
    assert post([element()], fields={"Outbox-Seconds-Left": "soon"}).status_code == 400


@one
def test_an_answer_of_a_batch_that_goes_on_is_not_told(
    alias: str,
    account: None,
    post: Any,
    monkeypatch: Any,
) -> None:
    """Its transaction has not committed: it may be undone after the caller's time."""

    def wait(self: Any, queue: Any, call: Any) -> None:
        call.answer = Outcome({"balance": 9}, 2, None, replayed=False)
        raise call.late(begun=True)

    monkeypatch.setattr(queue.Queues, "wait", wait)
    [said] = post([element()]).json()
    assert (said["status"], said["code"]) == (504, "outcome_unknown")


@one
def test_a_queue_that_is_full(
    alias: str,
    account: None,
    post: Any,
    settings: Any,
    monkeypatch: Any,
) -> None:
    settings.OUTBOX = {**settings.OUTBOX, "ENTITY_QUEUE": 2}
    monkeypatch.setattr(queue.Queues, "_pass_lead", lambda self, queue: None)  # none is taken
    monkeypatch.setattr(queue.Queues, "wait", lambda *args: (_ for _ in ()).throw(CommandTimeout()))
    said = post([element(f"k-{n}") for n in range(4)]).json()
    assert [each["code"] for each in said] == ["timeout", "timeout", "overloaded", "overloaded"]
    queue.queues.by_key.clear()
    queue.queues.waiting = 0


@one
def test_the_database_is_away(
    alias: str,
    account: None,
    post: Any,
    monkeypatch: Any,
) -> None:
    """For all of them, another server may reach it. An error of one is its own."""
    away = OperationalError("away")
    yes = Outcome(None, 2, None, replayed=False)
    answers = [[away, away], [away, yes]]
    monkeypatch.setattr(views, "answered_here", lambda *args: answers.pop(0))
    asked = [element(), element("k-2")]
    assert post(asked).status_code == 503
    assert [each["status"] for each in post(asked).json()] == [503, 200]


# Attacks: each is refused as a single command would be, and changes nothing.

ODD: dict[str, tuple[int, Any]] = {
    "no object": (422, "withdraw"),
    "a list": (422, ["a", "withdraw", {"amount": 1}, "k-1"]),
    "no id": (422, {k: v for k, v in element().items() if k != "id"}),
    "no key": (422, {k: v for k, v in element().items() if k != "key"}),
    "an unknown field": (422, element(using="other")),
    "the language of another": (422, element(language="de", zone="UTC")),
    "an id that is none": (422, element(id=7)),
    "an empty id": (422, element(id="")),
    "a surrogate": (422, element(id="\ud800")),
    "a command that is none": (422, element(command=["withdraw"])),
    "a command not granted": (404, element(command="enlist")),
    "a method that is no command": (404, element(command="versions")),
    "arguments that are none": (422, element(arguments=[1])),
    "a version that is none": (422, element(expected_version="1")),
    "a version below none": (422, element(expected_version=-1)),
    "a version of false": (422, element(expected_version=False)),
    "a key with a comma": (400, element("a,b")),
    "a key with a line break": (400, element("a\nb")),
    "a key that is too long": (400, element("k" * 175)),
    "a key that is empty": (400, element("")),
    "a key that is a number": (400, element(7)),
}


@one
@pytest.mark.parametrize(("status", "odd"), ODD.values(), ids=ODD)
def test_an_element_that_has_no_meaning(
    alias: str,
    account: None,
    post: Any,
    status: int,
    odd: Any,
) -> None:
    """It is refused by itself, wherever it is."""
    said = post([element("k-8"), odd, element("k-9")]).json()
    assert [each["status"] for each in said] == [200, status, 200]
    assert said[1]["detail"]
    assert [id for _, id, _ in versions()] == ["open", "billing:k-8", "billing:k-9"]


@one
@pytest.mark.parametrize(
    ("status", "body"),
    [
        (400, b"{"),
        (400, b"{}"),
        (400, b"[]"),
        (400, b""),
        (400, b'[{"id": "a", "id": "b", "command": "withdraw", "key": "k-1"}]'),
        (400, b'[{"id": "a", "command": "withdraw", "key": "k", "arguments": {"amount": NaN}}]'),
        (400, b"[" * 100_000),
    ],
)
def test_a_list_that_has_no_meaning(
    alias: str,
    account: None,
    post: Any,
    status: int,
    body: bytes,
) -> None:
    response = post(body)
    assert (response.status_code, response["Content-Type"]) == (status, "application/problem+json")
    assert "Signature" in response
    assert len(versions()) == 1


@one
@pytest.mark.parametrize("type", ["entities.stock", "entities.Account", "account", "auth.user"])
def test_a_type_that_was_not_granted(
    alias: str,
    account: None,
    post: Any,
    type: str,
) -> None:
    [said] = post([element()], path=f"/outbox/entities/{type}").json()
    assert said == {"status": 404, "detail": "There is no such command for this caller."}


FORGED: dict[str, dict[str, Any]] = {
    "a command more": {"sent": json.dumps([element(), element("k-2"), element("k-3")]).encode()},
    "a command less": {"sent": json.dumps([element()]).encode()},
    "reordered": {"sent": json.dumps([element("k-2"), element()]).encode()},
    "another amount": {"sent": json.dumps([element(arguments={"amount": 9})]).encode()},
    "another key": {"sent": json.dumps([element("k-9"), element("k-2")]).encode()},
    "truncated": {"sent": json.dumps([element(), element("k-2")]).encode()[:-1]},
    "no body": {"sent": b""},
    "for another type": {"sent_path": "/outbox/entities/entities.stock"},
    "to be forwarded": {"sent_path": f"/outbox/routed/{TYPE}"},
    "another digest": {"more": {"Content-Digest": rfc9421.digest(b"[]")}},
    "no digest covered": {"covered": [e for e in rfc9421.REQUEST if e != "content-digest"]},
    "too old": {"created": -700, "expires": -400},
    "too long": {"expires": 301},
    "more time": {"more": {"Outbox-Seconds-Left": "900"}},
    "our own key": {"keyid": "shop-1"},
}


@one
@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_what_is_forged(
    alias: str,
    account: None,
    post: Any,
    forged: dict[str, Any],
) -> None:
    """One signature covers all: no command of such a request is executed."""
    response = post([element(), element("k-2")], **forged)
    assert response.status_code == 401
    assert response.json() == {"type": "about:blank", "title": "Unauthorized", "status": 401}
    assert "Signature" not in response
    assert len(versions()) == 1


@one
def test_replayed(alias: str, account: None, peers: Any, granted: None) -> None:
    """Within its 300 seconds: the same answers, and nothing changes."""
    path = peers["billing"]["shop"]["keys"][0]["private"].removeprefix("file:")
    signer = rfc9421.by_ed25519(Path(path).read_bytes())
    body = json.dumps([element(), element("k-2")]).encode()
    headers = rfc9421.request("POST", PATH, body, signer, keyid="billing-1")

    def again() -> Any:
        return Client().generic("POST", PATH, body, headers=headers).json()

    first, second = again(), again()
    assert [each["replayed"] for each in first + second] == [False, False, True, True]
    assert [each | {"replayed": 0} for each in first] == [each | {"replayed": 0} for each in second]
    assert len(versions()) == 3


@one
def test_commands_in_another_order_are_not_repeated(
    alias: str,
    account: None,
    post: Any,
) -> None:
    """A peer that signs them anew in another order gets the first answers, each with its own."""
    asked = [element(), element("k-2"), element("k-2"), element("k-3", arguments={"amount": 99})]
    first = post(asked).json()
    assert [each["version"] for each in first] == [2, 3, 3, 4]
    second = post(asked[::-1]).json()
    assert [each["version"] for each in second] == [4, 3, 3, 2]
    assert [each["replayed"] for each in second] == [True] * 4
    assert len(versions()) == 4


@one
def test_too_large(
    alias: str,
    account: None,
    post: Any,
    settings: Any,
    monkeypatch: Any,
) -> None:
    assert post([element(f"k-{n}") for n in range(1001)]).status_code == 413
    large = post(b" " * (4 * 1024 * 1024 + 1), keyid="nobody-1")
    assert (large.status_code, "Signature" in large) == (413, False)
    known = settings.OUTBOX["PEERS"]
    few = {"billing": known["billing"] | {"limits": {"commands": 2, "bytes": 1000}}}
    settings.OUTBOX = {**settings.OUTBOX, "PEERS": known | few}
    assert post([element(f"k-{n}") for n in range(3)]).status_code == 413
    assert post([element(arguments={"amount": "x" * 1000})]).status_code == 413
    assert len(versions()) == 1
    assert post([element("k-1"), element("k-2")]).status_code == 200


@one
def test_no_peer_forwards_but_the_service_itself(
    alias: str,
    account: None,
    post: Any,
    settings: Any,
) -> None:
    """A forwarded command needs no grant, and its id is taken as it is."""
    forwarded = [element("open", language="en", zone="UTC")]
    path = f"/outbox/routed/{TYPE}"
    for fleet in ({}, {"SERVICE": "shop", "TOPOLOGY": None}, {"SERVICE": "", "TOPOLOGY": None}):
        settings.OUTBOX = {**settings.OUTBOX, "FLEET": fleet}
        response = post(forwarded, path=path)
        assert (response.status_code, "Signature" in response) == (404, True)
    assert len(versions()) == 1


@one
def test_an_error_tells_nothing_of_the_others(
    alias: str,
    account: None,
    post: Any,
    caplog: Any,
) -> None:
    said = post([element(), element("k-2", command="fail", arguments={})]).json()
    assert said[1] == {
        **{"status": 500, "code": "failed"},
        "detail": "The command has failed. The log says why.",
    }
    assert "Command failed peer=billing command=entities.account.fail" in caplog.text
    assert messages.parsed(json.dumps(said).encode()) == said
    assert remote.outcome_of(said[0]) == Outcome({"balance": 9}, 2, None, replayed=False)
    assert GRANTED[2].endswith("fail")
