"""Invalid requests, each built by hand: they are refused, and change nothing."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Callable
from copy import deepcopy
from datetime import timedelta
from io import BytesIO
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from django.db import connections, transaction
from django.test import Client
from django.utils import timezone

from outbox_app.door.messages import MessageRefused, cloudevent, prepared_fields
from outbox_app.events import publish
from outbox_app.events.models import Event
from outbox_app.models import StagedJob
from outbox_app.prepared import NewPrepared, keeper
from outbox_app.prepared.models import PreparedEvent
from outbox_app.prepared.request import checked

from . import rfc9421

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"]),
    pytest.mark.parametrize("alias", [pytest.param("default", id="sqlite")], indirect=True),
    pytest.mark.usefixtures("both"),
]

ID = "01999d2e-6f0a-7c3e-9b1a-0a1b2c3d4e5f"
EVENT = {
    "specversion": "1.0",
    "id": ID,
    "source": "/billing",
    "type": "order.paid",
    "subject": "order-17",
    "data": {"total": 30},
}
TYPE, BATCH = "application/cloudevents+json", "application/cloudevents-batch+json"
PREPARE = "/outbox/prepared/"
SECRET = "s" * 32


def body_of(content: Any) -> bytes:
    return json.dumps(content).encode()


@pytest.fixture
def signer(peers: dict[str, Any]) -> Callable[[bytes], bytes]:
    """The key of billing."""
    path = peers["billing"]["shop"]["keys"][0]["private"].removeprefix("file:")
    return rfc9421.by_ed25519(Path(path).read_bytes())


@pytest.fixture
def send(signer: Any) -> Callable[..., Any]:
    """``send(body)``: billing's request with these changes; ``sent_…`` change after signing."""

    def run(
        body: bytes = body_of(EVENT),
        *,
        method: str = "POST",
        path: str = PREPARE,
        content_type: str = TYPE,
        by: Any = None,
        more: dict[str, str] | None = None,
        without: tuple[str, ...] = (),
        sent_method: str = "",
        sent_path: str = "",
        sent_query: str = "",
        sent_body: bytes | None = None,
        environ: dict[str, Any] | None = None,
        **options: Any,
    ) -> Any:
        headers = rfc9421.request(
            method,
            path,
            body,
            by or signer,
            content_type=content_type,
            **{"keyid": "billing-1", **options},
        )
        headers = {name: v for name, v in (headers | (more or {})).items() if name not in without}
        query = sent_query or options.get("query", "")
        return Client().generic(
            sent_method or method,
            (sent_path or path) + (f"?{query}" if query else ""),
            body if sent_body is None else sent_body,
            headers=headers,
            **(environ or {}),
        )

    return run


class Slow(BytesIO):
    """A body that comes slowly: who reads it would wait."""

    def read(self, size: int | None = -1) -> bytes:
        raise AssertionError("the body was read")


def nothing_is_there() -> bool:
    return not any(each.objects.exists() for each in (PreparedEvent, Event, StagedJob))


def test_what_is_signed_as_it_should_be(alias: str, send: Any) -> None:
    response = send()
    assert (response.status_code, response.json()) == (201, {"id": ID, "state": "prepared"})
    assert "Set-Cookie" not in response.headers
    [row] = PreparedEvent.objects.all()
    assert (row.sender, row.event_id, row.stream) == ("billing", UUID(ID), "order-17")


def test_no_session_login_token_or_transaction(
    alias: str, settings: Any, signer: Any, monkeypatch: Any
) -> None:
    settings.MIDDLEWARE = [
        *settings.MIDDLEWARE,
        "django.contrib.auth.middleware.LoginRequiredMiddleware",
    ]
    monkeypatch.setitem(connections[alias].settings_dict, "ATOMIC_REQUESTS", True)
    atomic = []
    monkeypatch.setattr(
        keeper, "failpoint", lambda name: atomic.append(connections[alias].in_atomic_block)
    )
    body = body_of(EVENT)
    headers = rfc9421.request("POST", PREPARE, body, signer, keyid="billing-1", content_type=TYPE)
    response = Client(enforce_csrf_checks=True).generic("POST", PREPARE, body, headers=headers)
    assert (response.status_code, dict(response.cookies)) == (201, {})
    assert atomic == [False], "committed when it is recorded"


FORGED = {
    "unsigned": {"without": ("Signature", "Signature-Input")},
    "no signature": {"without": ("Signature",)},
    "no input": {"without": ("Signature-Input",)},
    "another's signature": {"more": {"Signature": f"sig1=:{'A' * 86}==:"}},
    "no signature at all": {"more": {"Signature": "sig1=::"}},
    "nonsense": {"more": {"Signature-Input": "(((", "Signature": ";;;"}},
    "label of another": {"more": {"Signature": f"sig2=:{'A' * 86}==:"}},
    **{
        f"without {name}": {"covered": [each for each in rfc9421.REQUEST if each != name]}
        for name in rfc9421.REQUEST
    },
    "nothing covered": {"covered": []},
    "another host": {"more": {"Host": "localhost"}},
    "another path": {"sent_path": "/outbox/prepared/decide"},
    "another query": {"sent_query": "a=1"},
    "query lost": {"query": "a=1", "sent_query": "a=2"},
    "another method": {"method": "PUT", "sent_method": "POST"},
    "another body": {"sent_body": body_of(EVENT | {"type": "order.lost"})},
    "truncated body": {"sent_body": body_of(EVENT)[:-1]},
    "no body": {"sent_body": b""},
    "re-serialised": {"sent_body": json.dumps(EVENT, separators=(",", ":")).encode()},
    "another content type": {"more": {"Content-Type": "application/json"}},
    "another digest": {"more": {"Content-Digest": rfc9421.digest(b"other")}},
    "no digest": {"without": ("Content-Digest",)},
    "unknown key": {"keyid": "nobody-1"},
    "no key": {"keyid": None},
    "our own key": {"keyid": "shop-1"},
    "other alg": {"alg": "hmac-sha256"},
    "alg of nothing": {"alg": "none"},
    "too old": {"created": -700, "expires": -400},
    "no time": {"created": None},
    "no end": {"expires": None},
    "from the future": {"created": 120, "expires": 300},
    "too long": {"expires": 301},
    "ends before it begins": {"created": 0, "expires": -10},
    "wrong tag": {"tag": "outbox-v2"},
    "no tag": {"tag": None},
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_what_is_forged(alias: str, send: Any, forged: dict[str, Any]) -> None:
    """One answer for all, which says nothing and is not signed."""
    response = send(**forged)
    assert response.status_code == 401
    assert response.json() == {"type": "about:blank", "title": "Unauthorized", "status": 401}
    assert response["Content-Type"] == "application/problem+json"
    assert "Signature" not in response
    assert nothing_is_there()


READ = {"another body", "truncated body", "no body", "re-serialised"}


@pytest.mark.parametrize("forged", FORGED.keys() - READ)
def test_no_stranger_has_a_body_read(alias: str, send: Any, forged: str) -> None:
    """It could come slowly, on many connections, and no thread would be left for others."""
    response = send(**FORGED[forged], environ={"wsgi.input": Slow()})
    assert response.status_code == 401


@pytest.mark.parametrize(("declared", "status"), [(4 * 1024 * 1024 + 1, 413), ("9" * 5000, 401)])
def test_no_body_is_read_that_is_too_large(
    alias: str, send: Any, declared: Any, status: int
) -> None:
    environ = {"wsgi.input": Slow() if status == 413 else BytesIO(), "CONTENT_LENGTH": declared}
    assert send(environ=environ | {"CONTENT_LENGTH": str(declared)}).status_code == status


def test_a_body_is_parsed_only_if_it_is_signed(alias: str, send: Any) -> None:
    assert send(b"{", without=("Signature",)).status_code == 401
    assert send(b"{", keyid="nobody-1", more={"Content-Encoding": "gzip"}).status_code == 401
    assert send(b"{").status_code == 400


def test_for_a_host_that_is_not_ours(alias: str, send: Any) -> None:
    """Signed by a sender of both, and passed on by the other keeper."""
    assert send(host="other.example").status_code == 400  # by Django
    assert nothing_is_there()


@pytest.mark.parametrize("seconds", [-310, 30])
def test_clocks_may_differ_by_a_minute(alias: str, send: Any, seconds: int) -> None:
    assert send(created=seconds, expires=seconds + 300).status_code == 201


@pytest.mark.parametrize("hours", [-2, 2])
def test_a_clock_that_is_hours_away(alias: str, send: Any, caplog: Any, hours: int) -> None:
    """Refused, and the log says by how much."""
    seconds = hours * 3600
    assert send(created=seconds, expires=seconds + 300).status_code == 401
    [line] = [each for each in caplog.messages if "Clock" in each]
    assert "key=billing-1" in line
    assert abs(int(line.rpartition("=")[2]) - seconds) < 60
    assert nothing_is_there()


def test_two_signatures(alias: str, send: Any, signer: Any) -> None:
    body = body_of(EVENT)
    options = {"keyid": "billing-1", "content_type": TYPE}
    one = rfc9421.request("POST", PREPARE, body, signer, **options)
    two = rfc9421.request("POST", PREPARE, body, signer, label="sig2", **options)
    both = {name: f"{one[name]}, {two[name]}" for name in ("Signature-Input", "Signature")}
    assert send(more=both).status_code == 401
    twice = {name: f"{one[name]}, {one[name]}" for name in ("Signature-Input", "Signature")}
    assert send(more=twice).status_code == 401
    assert nothing_is_there()


def with_keys(settings: Any, peers: dict[str, Any], *keys: dict[str, Any]) -> None:
    changed = deepcopy(peers["shop"])
    changed["billing"]["keys"] = [changed["billing"]["keys"][0], *keys]
    settings.OUTBOX = {**settings.OUTBOX, "PEERS": changed}


@pytest.mark.parametrize(
    ("validity", "status"),
    [
        ({"until": -1}, 401),
        ({"from": 3600}, 401),
        ({"from": -3600, "until": 3600}, 201),
        ({"until": "no time"}, 401),
    ],
)
def test_a_key_is_valid_for_a_time(
    alias: str, settings: Any, peers: Any, send: Any, validity: dict[str, Any], status: int
) -> None:
    def moment(value: Any) -> str:
        later = timezone.now() + timedelta(seconds=0 if isinstance(value, str) else value)
        return value if isinstance(value, str) else later.isoformat()

    theirs = peers["shop"]["billing"]["keys"][1]
    moments = {name: moment(value) for name, value in validity.items()}
    with_keys(settings, peers, theirs | moments)
    assert send().status_code == status


@pytest.mark.parametrize(
    ("secret", "alg", "status"),
    [
        (SECRET, None, 201),
        (SECRET, "hmac-sha256", 201),
        (SECRET, "ed25519", 401),
        ("s" * 31, None, 401),
    ],
)
def test_a_shared_secret(
    alias: str,
    settings: Any,
    peers: Any,
    send: Any,
    monkeypatch: Any,
    secret: str,
    alg: Any,
    status: int,
) -> None:
    monkeypatch.setitem(os.environ, "DOOR_SECRET", secret)
    with_keys(settings, peers, {"id": "shared", "secret": "env:DOOR_SECRET"})
    response = send(by=rfc9421.by_hmac(secret.encode()), keyid="shared", alg=alg)
    assert response.status_code == status


def test_a_public_key_is_no_shared_secret(alias: str, peers: Any, send: Any) -> None:
    """Who knows the public key cannot sign with it, as HMAC would."""
    path = peers["shop"]["billing"]["keys"][1]["public"].removeprefix("file:")
    by = rfc9421.by_hmac(Path(path).read_bytes())
    assert send(by=by).status_code == send(by=by, alg="hmac-sha256").status_code == 401


def test_an_id_of_two_peers_is_believed_of_neither(
    alias: str, settings: Any, peers: Any, send: Any
) -> None:
    both = {"billing": peers["shop"]["billing"], "other": peers["shop"]["billing"]}
    settings.OUTBOX = {**settings.OUTBOX, "PEERS": both}
    assert send().status_code == 401


def test_the_log_names_a_key_that_is_not_believed(alias: str, send: Any, caplog: Any) -> None:
    """As far as it is sane: who signs with it is not known, and may have put anything there."""
    assert send(keyid="billing-2025").status_code == send(keyid="x" * 10_000).status_code == 401
    known, long = (
        each for each in caplog.messages if each.startswith("Request has no valid signature")
    )
    assert "'billing-2025'" in known
    assert len(long) < 300


def test_a_peer_of_the_setting_needs_no_database(
    alias: str, send: Any, django_assert_num_queries: Any
) -> None:
    with django_assert_num_queries(0):
        assert send(b"", method="GET", path=f"{PREPARE}x").status_code == 404
        assert send(b"{", content_type=TYPE).status_code == 400


def test_a_keeper_is_no_sender(alias: str, settings: Any, peers: Any, send: Any) -> None:
    changed = {"billing": peers["shop"]["billing"] | {"direction": "keeper"}}
    settings.OUTBOX = {**settings.OUTBOX, "PEERS": changed}
    assert send().status_code == 401


@pytest.mark.parametrize("keys", [5, "billing-1"], ids=repr)
def test_a_peer_with_wrong_keys_closes_no_door(
    alias: str, settings: Any, peers: Any, send: Any, keys: Any
) -> None:
    known = {"depot": {"direction": "sender", "address": "", "keys": keys}}
    settings.OUTBOX = {**settings.OUTBOX, "PEERS": known}
    assert send().status_code == 401
    known["billing"] = peers["shop"]["billing"]
    assert send().status_code == 201


MALFORMED = {
    "no JSON": (400, b"{"),
    "duplicate keys": (400, body_of(EVENT)[:-1] + b', "id": "x"}'),
    "UTF-16": (400, json.dumps(EVENT).encode("utf-16")),
    "UTF-16, no mark": (400, json.dumps(EVENT).encode("utf-16-le")),
    "a mark": (400, b"\xef\xbb\xbf" + body_of(EVENT)),
    "NaN": (400, b'{"data": NaN}'),
    "deep": (400, b"[" * 100_000),
    "a long number": (400, b"1" * 5000),
    "empty": (422, b""),
    "a list": (422, body_of([EVENT])),
    "no id": (422, body_of({k: v for k, v in EVENT.items() if k != "id"})),
    "an id in capitals": (422, body_of(EVENT | {"id": ID.upper()})),
    "an id that is a number": (422, body_of(EVENT | {"id": 5})),
    "an id of zeros": (422, body_of(EVENT | {"id": str(UUID(int=0))})),
    "unknown attribute": (422, body_of(EVENT | {"checkurl": "http://evil.example"})),
    "another version": (422, body_of(EVENT | {"specversion": "0.3"})),
    "binary data": (422, body_of(EVENT | {"data_base64": "AAAA"})),
    "XML": (422, body_of(EVENT | {"datacontenttype": "application/xml"})),
    "no stream": (422, body_of(EVENT | {"subject": ""})),
    "unknown log": (422, body_of(EVENT | {"log": "auth_user"})),
    "unknown policy": (422, body_of(EVENT | {"policy": "guess"})),
    "times of nothing": (422, body_of(EVENT | {"decideby": -1})),
    "longer than may be": (422, body_of(EVENT | {"decideby": 10**9})),
    "longer than a float": (422, body_of(EVENT | {"decideby": 10**400})),
    "a time as text": (422, body_of(EVENT | {"immune": "10"})),
    "metadata that is no object": (422, body_of(EVENT | {"metadata": "[]"})),
    "a surrogate": (422, body_of(EVENT | {"subject": "\ud800"})),
    "a surrogate in metadata": (422, body_of(EVENT | {"metadata": '{"a": "\ud800"}'})),
    "type not granted": (403, body_of(EVENT | {"type": "user.deleted"})),
    "topic not granted": (403, body_of(EVENT | {"topic": "secret"})),
    "job not granted": (403, body_of(EVENT | {"job": True, "type": "os.system"} | {"data": {}})),
    "a task nobody has": (
        422,
        body_of({**EVENT, "job": True, "type": "tests.door.none", "data": {}} | {}),
    ),
}


@pytest.mark.parametrize(("status", "body"), MALFORMED.values(), ids=MALFORMED)
def test_what_has_no_meaning(alias: str, send: Any, status: int, body: bytes) -> None:
    if b'"job": true' in body:
        body = body_of({k: v for k, v in json.loads(body).items() if k != "subject"})
    response = send(body)
    assert (response.status_code, response["Content-Type"]) == (status, "application/problem+json")
    assert response.json()["status"] == status
    assert "Signature" in response
    for word in (b"order", b"evil", b"guess", b"system", b"secret", b"user"):
        assert word not in response.content
    assert nothing_is_there()


@pytest.mark.parametrize(
    ("content_type", "status"),
    [
        ("text/html", 415),
        ("application/json", 415),
        (f"{TYPE}; charset=utf-16", 415),
        (f"{TYPE}; charset=UTF-8", 201),
        (f'{TYPE};charset="utf-8"', 201),
    ],
)
def test_the_content_type(alias: str, send: Any, content_type: str, status: int) -> None:
    assert send(content_type=content_type).status_code == status


def test_compressed(alias: str, send: Any) -> None:
    body = gzip.compress(body_of(EVENT))
    assert send(body, more={"Content-Encoding": "gzip"}).status_code == 415
    assert nothing_is_there()


def test_a_body_without_its_length(alias: str, signer: Any) -> None:
    """Django reads none of it under WSGI, and its digest would be said to be wrong."""
    body = body_of(EVENT)
    headers = rfc9421.request("POST", PREPARE, body, signer, keyid="billing-1", content_type=TYPE)
    headers |= {"Transfer-Encoding": "chunked"}
    response = Client().generic("POST", PREPARE, body, headers=headers, CONTENT_LENGTH="")
    assert (response.status_code, response.json()["title"]) == (411, "Length Required")
    assert "Content-Length" in response.json()["detail"]


def test_a_body_that_is_broken_off(alias: str, signer: Any) -> None:
    """Its caller has given up, of which some servers, such as uWSGI, make an error."""

    class Gone(BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            raise OSError("error during read")

    headers = rfc9421.request("POST", PREPARE, b"{}", signer, keyid="billing-1", content_type=TYPE)
    options: Any = {"headers": headers, "wsgi.input": Gone()}
    response = Client().generic("POST", PREPARE, b"{}", **options)
    assert (response.status_code, "ended before" in response.json()["detail"]) == (400, True)


def test_too_large(alias: str, settings: Any, peers: Any, send: Any) -> None:
    """Before anything else is looked at; a peer may have less."""
    large = b" " * (4 * 1024 * 1024 + 1)
    response = send(large, keyid="nobody-1")
    assert (response.status_code, "Signature" in response) == (413, False)
    few = {"billing": peers["shop"]["billing"] | {"limits": {"bytes": 100, "events": 1}}}
    settings.OUTBOX = {**settings.OUTBOX, "PEERS": few}
    assert send().status_code == 413
    few["billing"]["limits"] = {"events": 1}
    assert send(body_of([EVENT, EVENT]), content_type=BATCH).status_code == 413
    assert nothing_is_there()
    assert send(body_of([EVENT]), content_type=BATCH).status_code == 200


JOB = {name: EVENT[name] for name in ("specversion", "id", "source", "type")} | {"job": True}


def test_parts_of_a_second_are_sent_as_whole_ones() -> None:
    new = NewPrepared("order-17", "order.paid", decide_by=1.5, immune=0.5)
    event = cloudevent(checked(new), source="/billing")
    assert (event["decideby"], event["immune"]) == (2, 1)


def test_the_trace_of_a_job() -> None:
    trace = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    job = checked(NewPrepared(job="tests.add", args=[1, 2], metadata=trace))
    sent = prepared_fields(cloudevent(job, source="/billing"))
    assert (sent["args"], sent["metadata"]) == ([1, 2], trace)


def test_a_trace_that_no_database_stores() -> None:
    """Of a job it is stored as it comes, and one in a batch would keep all of it away."""
    for state in ("a=\0", "a=\ud800"):
        with pytest.raises(MessageRefused, match="must be text"):
            prepared_fields(JOB | {"tracestate": state})
    assert prepared_fields(JOB | {"tracestate": "a=b"})["metadata"] == {"tracestate": "a=b"}


@pytest.mark.parametrize(
    "changes",
    [
        {"subject": "a"},
        {"log": "outbox_event"},
        {"topic": "a"},
        {"metadata": "{}"},
        {"data": {"args": {}}},
        {"data": {"kwargs": None}},
        {"data": {"retries": 1}},
        {"decideby": 1.5},
        {"immune": True},
        {"job": 1},
    ],
    ids=str,
)
def test_a_job_that_has_no_meaning(changes: dict[str, Any]) -> None:
    with pytest.raises(MessageRefused) as refused:
        prepared_fields(JOB | changes)
    assert refused.value.status == 422


def test_the_event_of_the_page(alias: str, send: Any) -> None:
    page = Path(__file__).parents[2].joinpath("docs/reference/prepared.md").read_text()
    [event] = re.findall(r"### Prepare\n.*?```json\n(.*?)```", page, re.DOTALL)
    assert send(event.encode()).status_code == 201


def test_a_batch_with_bad_elements(alias: str, send: Any) -> None:
    """The others are taken, and each has its own answer."""
    ids = [str(UUID(int=UUID(ID).int + n)) for n in range(5)]
    good = [EVENT | {"id": id} for id in ids]
    bad = [good[1] | {"type": "user.deleted"}, good[2] | {"policy": "guess"}, "no event"]
    response = send(body_of([good[0], *bad, good[4], good[0] | {"data": 1}]), content_type=BATCH)
    assert response.status_code == 200
    assert response.json() == [
        {"status": 201, "id": ids[0], "state": "prepared"},
        {"status": 403},
        {"status": 422},
        {"status": 422},
        {"status": 201, "id": ids[4], "state": "prepared"},
        {"status": 422},
    ]
    assert PreparedEvent.objects.count() == 2
    many = [EVENT | {"id": str(UUID(int=n + 1))} for n in range(501)]
    assert send(body_of(many), content_type=BATCH).status_code == 413
    assert send(b"[]", content_type=BATCH).status_code == 400


def test_an_id_that_the_log_has(alias: str, send: Any) -> None:
    """The sender must not begin its transaction: the event could never be published."""
    with transaction.atomic():
        publish("order-17", "order.lost", message_id=ID)
    response = send()
    assert (response.status_code, response.json()["state"]) == (409, "conflict")
    free = EVENT | {"id": str(UUID(int=UUID(ID).int + 1))}
    response = send(body_of([EVENT, free]), content_type=BATCH)
    assert [each["status"] for each in response.json()] == [409, 201]
    assert PreparedEvent.objects.get().event_id == UUID(free["id"])


def test_replayed(alias: str, send: Any, signer: Any) -> None:
    """Within its 300 seconds: the same answer, and nothing changes."""
    body, path = body_of(EVENT), f"{PREPARE}{ID}/confirm"
    options = {"keyid": "billing-1"}
    prepare = rfc9421.request("POST", PREPARE, body, signer, content_type=TYPE, **options)
    confirm = rfc9421.request("POST", path, b"", signer, **options)

    def again(headers: dict[str, str], path: str, body: bytes) -> tuple[int, Any]:
        response = Client().generic("POST", path, body, headers=headers)
        return response.status_code, response.json()

    assert again(prepare, PREPARE, body) == (201, {"id": ID, "state": "prepared"})
    assert again(prepare, PREPARE, body) == (200, {"id": ID, "state": "prepared"})
    assert again(confirm, path, b"") == (200, {"id": ID, "state": "confirmed"})
    assert again(confirm, path, b"") == (200, {"id": ID, "state": "confirmed"})
    status, said = again(prepare, PREPARE, body)
    assert (status, said["state"]) == (409, "confirmed")
    assert (PreparedEvent.objects.count(), Event.objects.count()) == (1, 1)
