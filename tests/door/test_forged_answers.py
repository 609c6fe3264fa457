"""Invalid answers, each built by hand: they count as silence, and decide no event."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest

from outbox_app.door import client
from outbox_app.door.exceptions import InvalidPeer, PeerUnavailable
from outbox_app.door.messages import MessageRefused
from outbox_app.door.peers import peer_named
from outbox_app.prepared import NewPrepared, prepare
from outbox_app.prepared.exceptions import KeeperUnavailable
from outbox_app.prepared.fences import Question
from outbox_app.prepared.remote import HttpKeeper, ask_over_http
from outbox_app.prepared.request import checked
from tests.fixtures.door import ROOT

from . import rfc9421

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"]),
    pytest.mark.parametrize("alias", [pytest.param("default", id="sqlite")], indirect=True),
    pytest.mark.usefixtures("both"),
]

ID = UUID("01999d2e-6f0a-7c3e-9b1a-0a1b2c3d4e5f")
COMMITTED = json.dumps([{"id": str(ID), "outcome": "committed"}]).encode()
QUESTION = Question(ID, datetime.now(UTC), "order-17", "order.paid")

FORKED = """
import os, sys, uuid, django
django.setup()
from django.utils import timezone
from outbox_app.prepared.fences import Question
from outbox_app.prepared.remote import ask_over_http

def ask():
    questions = [Question(uuid.UUID(sys.argv[1]), timezone.now())]
    print(*ask_over_http("billing", questions).values(), flush=True)

ask()
if child := os.fork():
    os.waitpid(child, 0)
    ask()
else:
    ask()
    os._exit(0)
"""

ENDING = """
import atexit, sys, threading, uuid, django
django.setup()
from django.utils import timezone
from outbox_app.door import client
from outbox_app.prepared import sender
from outbox_app.prepared.fences import Question
from outbox_app.prepared.remote import ask_over_http

def ask(items):
    threading.main_thread().join()
    questions = [Question(uuid.UUID(sys.argv[1]), timezone.now())]
    print(*ask_over_http("billing", questions).values(), flush=True)

sender.calls.send(sender._attempt, [None], ask)
atexit.register(sender.calls.drain, 60)
"""

Reply = Callable[[Any], None]


@pytest.fixture
def signer(peers: dict[str, Any]) -> Callable[[bytes], bytes]:
    """The key of billing, whom the shop asks."""
    path = peers["billing"]["shop"]["keys"][0]["private"].removeprefix("file:")
    return rfc9421.by_ed25519(Path(path).read_bytes())


@pytest.fixture
def server(ports: dict[str, int]) -> Iterator[Callable[[str, Reply], list[str]]]:
    """``server(project, reply)``: a server with this reply; returns the requests that it gets."""
    servers = []

    def start(project: str, reply: Reply) -> list[str]:
        asked: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                self.rfile.read(int(self.headers["Content-Length"] or 0))
                asked.append(self.path)
                with suppress(OSError):
                    reply(self)
                self.close_connection = True

            do_GET = do_POST

            def log_message(self, *args: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", ports[project]), Handler)
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=[0.05], daemon=True).start()
        servers.append(server)
        return asked

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


def replying(signer: Any, status: int = 200, body: bytes = COMMITTED, **changes: Any) -> Reply:
    """Reply with an answer that is signed, but for what is given; ``sent_…`` differs on the way."""
    options = {"keyid": "billing-1", **changes}
    sent_body, sent_status = options.pop("sent_body", body), options.pop("sent_status", status)
    without, more = options.pop("without", ()), options.pop("more", {})
    to = options.pop("to", {})

    def reply(handler: Any) -> None:
        asked = {"method": "POST", "path": handler.path, "signature": handler.headers["Signature"]}
        headers = rfc9421.answer(
            status, body, signer, asked=tuple((asked | to).values()), **options
        )
        handler.send_response(sent_status)
        for name, value in (headers | {"Content-Length": str(len(sent_body))} | more).items():
            if name not in without:
                handler.send_header(name, value)
        handler.end_headers()
        handler.wfile.write(sent_body)

    return reply


def test_what_is_signed_as_it_should_be(alias: str, server: Any, signer: Any) -> None:
    asked = server("billing", replying(signer))
    assert ask_over_http("billing", [QUESTION]) == {ID: "committed"}
    assert asked == ["/outbox/check"]


FORGED: dict[str, dict[str, Any]] = {
    "unsigned": {"without": ("Signature", "Signature-Input")},
    "HTML": {"body": b"<html>OK</html>", "content_type": "text/html"},
    "HTML, unsigned": {
        "body": b"<html>OK</html>",
        "content_type": "text/html",
        "without": ("Signature", "Signature-Input"),
    },
    "empty": {"body": b""},
    "another body": {"sent_body": COMMITTED.replace(b"committed", b"rolled_back")},
    "another status": {"status": 404, "sent_status": 200},
    "another id": {"body": COMMITTED.replace(b"01999d2e", b"01999d2f")},
    "to another request": {"to": {"signature": "sig1=:AAAA:"}},
    "to another path": {"to": {"path": "/outbox/prepared/"}},
    "to another method": {"to": {"method": "GET"}},
    **{
        f"without {name}": {"covered": [each for each in rfc9421.ANSWER if each != name]}
        for name in rfc9421.ANSWER
    },
    "unknown key": {"keyid": "shop-1"},
    "too old": {"created": -700, "expires": -400},
    "too long": {"expires": 301},
    "wrong tag": {"tag": "outbox-v2"},
    "compressed": {"sent_body": gzip.compress(COMMITTED), "more": {"Content-Encoding": "gzip"}},
    "duplicate keys": {"body": COMMITTED[:-2] + b', "outcome": "rolled_back"}]'},
    "not found": {"status": 404},
    "an error": {"status": 500},
    "no list": {"body": b"{}"},
    "two outcomes": {
        "body": COMMITTED[:-1] + b", " + COMMITTED[1:].replace(b"committed", b"rolled_back")
    },
}


@pytest.mark.parametrize("forged", FORGED.values(), ids=FORGED)
def test_what_is_forged(alias: str, server: Any, signer: Any, forged: dict[str, Any]) -> None:
    server("billing", replying(signer, **forged))
    with pytest.raises((PeerUnavailable, MessageRefused)):
        ask_over_http("billing", [QUESTION])


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (-7200, "clock is off by -7"),
        (7200, "clock is off by +7"),
        (30, "not trusted"),
        (None, "not trusted"),
    ],
)
def test_a_refusal_tells_of_a_clock_that_is_off(
    alias: str, server: Any, seconds: int | None, words: str
) -> None:
    """Refusals are not signed: the ``Date`` shows by how much the clocks differ."""

    def reply(handler: Any) -> None:
        handler.send_response_only(401)
        date = "soon" if seconds is None else formatdate(time.time() + seconds, usegmt=True)
        for name, value in {"Date": date, "Content-Length": "0"}.items():
            handler.send_header(name, value)
        handler.end_headers()

    server("billing", reply)
    with pytest.raises(PeerUnavailable, match="answer 401 of the peer 'billing'") as raised:
        ask_over_http("billing", [QUESTION])
    assert words in str(raised.value)
    assert ("set the clock" in str(raised.value)) == ("off by" in words)


@pytest.mark.parametrize("outcome", ["confirmed", "", None, 1, ["committed"], {}])
def test_an_outcome_that_there_is_not(alias: str, server: Any, signer: Any, outcome: Any) -> None:
    server(
        "billing", replying(signer, body=json.dumps([{"id": str(ID), "outcome": outcome}]).encode())
    )
    assert ask_over_http("billing", [QUESTION]) == {}


@pytest.mark.parametrize("status", [301, 302, 307, 308])
def test_a_redirect_is_not_followed(
    alias: str, server: Any, signer: Any, ports: dict[str, int], status: int
) -> None:
    private = server("shop", replying(signer))
    there = {"Location": f"http://127.0.0.1:{ports['shop']}/outbox/check"}
    server("billing", replying(signer, status, more=there))
    with pytest.raises(PeerUnavailable):
        ask_over_http("billing", [QUESTION])
    assert private == []


def endless(handler: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", str(2 * 1024**3))
    handler.end_headers()
    while True:
        handler.wfile.write(b"x" * 65536)


def dripping_body(handler: Any) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    while True:
        handler.wfile.write(b"x")
        time.sleep(0.2)


def dripping_head(handler: Any) -> None:
    while True:
        handler.wfile.write(b"H")
        time.sleep(0.2)


@pytest.mark.parametrize("reply", [endless, dripping_body, dripping_head])
def test_a_call_ends(alias: str, server: Any, reply: Reply) -> None:
    server("billing", reply)
    begin = time.monotonic()
    peer = peer_named("billing", "sender")
    with pytest.raises(PeerUnavailable):
        client.call(peer, "POST", "check", [], seconds=0.7)
    assert time.monotonic() - begin < 20


def test_cookies_are_not_kept(alias: str, server: Any, signer: Any) -> None:
    cookies = []

    def reply(handler: Any) -> None:
        cookies.append(handler.headers["Cookie"])
        replying(signer, more={"Set-Cookie": "a=1; Path=/"})(handler)

    server("billing", reply)
    for _ in range(2):
        assert ask_over_http("billing", [QUESTION]) == {ID: "committed"}
    assert cookies == [None, None]


def test_a_process_that_is_forked_calls(
    alias: str, server: Any, signer: Any, variables: Any, ports: dict[str, int]
) -> None:
    """Over connections of its own, while its parent goes on; no proxy of the environment."""
    asked, proxy = server("billing", replying(signer)), server("shop", replying(signer))
    address = f"http://127.0.0.1:{ports['shop']}"
    proxies = {"HTTP_PROXY": address, "http_proxy": address, "NO_PROXY": "", "no_proxy": ""}
    done = subprocess.run(
        [sys.executable, "-c", FORKED, str(ID)],
        cwd=ROOT,
        env=variables("shop", alias) | proxies,
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["committed"] * 3, done.stderr
    assert (len(asked), proxy) == (3, [])


def test_a_process_that_ends_calls(alias: str, server: Any, signer: Any, variables: Any) -> None:
    """A confirm may be under way. Names are looked up without an executor, as those have ended."""
    server("billing", replying(signer))
    environment = variables("shop", alias)
    peers = environment["DOOR_PEERS"].replace("127.0.0.1", "localhost")
    done = subprocess.run(
        [sys.executable, "-c", ENDING, str(ID)],
        cwd=ROOT,
        env=environment | {"DOOR_PEERS": peers},
        capture_output=True,
        text=True,
    )
    assert done.stdout.split() == ["committed"], done.stderr


@pytest.mark.parametrize(
    "address",
    [
        "http://10.0.0.1/outbox/",
        "http://shop.example/",
        "http://127.0.0.1.example/",
        "ftp://127.0.0.1/",
        "https://user:word@shop.example/",
        "https://shop.example/?a=1",
        "https://",
        "",
        None,
    ],
)
def test_an_address_that_is_not_called(
    alias: str, settings: Any, peers: dict[str, Any], address: Any
) -> None:
    changed = {"billing": peers["shop"]["billing"] | {"address": address}}
    settings.OUTBOX = {**settings.OUTBOX, "PEERS": changed}
    with pytest.raises(InvalidPeer, match="address"):
        ask_over_http("billing", [QUESTION])


def test_a_keeper_that_is_not_believed_has_recorded_nothing(
    alias: str, sender: str, server: Any, signer: Any
) -> None:
    """201 of a stranger is no reason to begin a transaction."""
    said = [{"status": 201, "id": str(ID), "state": "prepared"}]
    server("shop", replying(signer, body=json.dumps(said).encode()))
    with pytest.raises(KeeperUnavailable, match="is not trusted"):
        prepare("order-17", "order.paid", using=sender, to="shop", event_id=ID)


@pytest.mark.parametrize(
    "said",
    [
        [],
        [{"status": 201}],
        [{"status": 201, "id": str(ID)}],
        [{"status": 409, "id": str(ID), "state": "prepared"}],
        [{"status": 200, "id": str(ID), "state": "conflict"}],
        [{"status": 201, "id": str(UUID(int=1)), "state": "prepared"}],
        [{"status": 500}],
        ["prepared"],
        {"status": 201},
    ],
)
def test_a_keeper_that_says_something_else(
    alias: str, sender: str, peers: dict[str, Any], server: Any, said: Any
) -> None:
    path = peers["shop"]["billing"]["keys"][0]["private"].removeprefix("file:")
    by = rfc9421.by_ed25519(Path(path).read_bytes())
    server("shop", replying(by, body=json.dumps(said).encode(), keyid="shop-1"))
    keeper = HttpKeeper("shop", sender)
    request = checked(NewPrepared("order-17", "order.paid", event_id=ID))
    with pytest.raises(KeeperUnavailable):
        keeper.prepare([request])


@pytest.mark.parametrize(
    "said",
    [
        {"status": 500},
        {"status": 200, "state": "cancelled"},
        {"status": 409},
        {"status": 500, "state": "undecided"},
        {"status": 500, "state": "cancelled"},
        {"status": 201, "state": "confirmed"},
        {"status": 200, "state": "contradiction"},
        {"status": 409, "state": "unknown"},
        {"status": 409, "state": "pruned"},
        {"status": 409, "state": ["cancelled"]},
    ],
    ids=str,
)
def test_a_decision_of_which_a_keeper_says_something_else(
    alias: str, sender: str, peers: dict[str, Any], server: Any, said: dict[str, Any]
) -> None:
    path = peers["shop"]["billing"]["keys"][0]["private"].removeprefix("file:")
    by = rfc9421.by_ed25519(Path(path).read_bytes())
    body = json.dumps([said | {"id": str(ID)}]).encode()
    to = {"method": "POST", "path": "/outbox/prepared/decide"}
    server("shop", replying(by, body=body, keyid="shop-1", to=to))
    with pytest.raises(KeeperUnavailable, match="sent no answer for the event"):
        HttpKeeper("shop", sender).decide({ID: "confirmed"})


@pytest.mark.parametrize(
    "said",
    [
        {},
        {"id": 5},
        {"id": str(ID), "prepared_at": "now", "stream": "", "type": ""},
        {"id": str(ID), "prepared_at": "0001-01-01T00:00:00+14:00", "stream": "", "type": ""},
    ],
)
def test_open_events_that_are_none(
    alias: str, sender: str, peers: dict[str, Any], server: Any, said: Any
) -> None:
    path = peers["shop"]["billing"]["keys"][0]["private"].removeprefix("file:")
    by = rfc9421.by_ed25519(Path(path).read_bytes())
    to = {"method": "GET", "path": "/outbox/prepared/open"}
    server("shop", replying(by, body=json.dumps([said]).encode(), keyid="shop-1", to=to))
    with pytest.raises(KeeperUnavailable, match="unexpected answer"):
        HttpKeeper("shop", sender).open()
