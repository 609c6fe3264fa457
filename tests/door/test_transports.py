"""The door under ASGI, and over TLS: a certificate of an unknown authority is not trusted."""

from __future__ import annotations

import asyncio
import socket
import ssl
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from wsgiref.simple_server import make_server

import httpx2
import pytest
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from django.contrib.auth.models import Group
from django.core.handlers.asgi import ASGIHandler
from django.core.handlers.wsgi import WSGIHandler
from django.db import transaction

from outbox_app.door import client, connections
from outbox_app.door.client import call
from outbox_app.door.exceptions import PeerUnavailable
from outbox_app.door.peers import peer_named
from outbox_app.prepared import NewPrepared, fence, prepare, prepare_many, prepared
from outbox_app.prepared.exceptions import KeeperUnavailable
from tests.fixtures.door import Handler, Server
from tests.patience import patience

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"]),
    pytest.mark.parametrize("alias", [pytest.param("postgres", id="postgres")], indirect=True),
    pytest.mark.usefixtures("both"),
]


@pytest.fixture
def new_client(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Forget all connections, as in a process that has called no peer yet."""
    monkeypatch.setattr(connections, "_idle", defaultdict(deque))
    connections._context.cache_clear()
    yield
    connections._close_idle(0)
    connections._context.cache_clear()


async def sent_by_asgi(method: str, url: str, headers: Any, body: bytes) -> httpx2.Response:
    async with httpx2.AsyncClient(transport=httpx2.ASGITransport(ASGIHandler())) as http:
        return await http.request(method, url, headers=headers, content=body)


@pytest.fixture
def asgi(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call goes to Django's ASGI application, which is this process."""

    def exchange(target: Any, method: str, headers: Any, body: bytes, **options: Any) -> Any:
        url = f"{target.scheme}://{target.authority}{target.path}"
        response = asyncio.run(sent_by_asgi(method, url, headers, body))
        return response.status_code, response.headers, response.content

    monkeypatch.setattr(connections, "exchange", exchange)


@pytest.mark.usefixtures("asgi")
def test_under_asgi(alias: str, sender: str, ask: Any, states: Any, in_log: Any) -> None:
    with prepared("order-1", "order.paid", {"by": "Ärger €"}, using=sender, to="shop", wait=True):
        Group.objects.using(sender).create(name="paid")
    new = [NewPrepared(f"order-{n}", "order.paid", {"n": n}, immune=0) for n in (2, 3)]
    committed, gone = prepare_many(new, using=sender, to="shop")
    with transaction.atomic(using=sender):
        fence(committed)
    shop = peer_named("shop", "keeper")
    status, said = call(shop, "GET", "prepared/open?skip=1")
    assert (status, [each["id"] for each in said]) == (200, [str(gone.event_id)])
    assert call(shop, "GET", "prepared/%6Fpen")[0] == 200  # signed as it is sent
    assert call(shop, "POST", "prepared/", {"id": 1})[0] == 415
    ask()
    assert states() == ["confirmed", "confirmed", "cancelled"]
    assert [data for _, _, data in in_log()] == [{"by": "Ärger €"}, {"n": 2}]


@pytest.mark.usefixtures("asgi")
@pytest.mark.parametrize(("size", "status"), [(1, 401), (5_000_000, 413)])
def test_what_is_refused_under_asgi(alias: str, size: int, status: int) -> None:
    sent = sent_by_asgi("POST", "http://127.0.0.1/outbox/prepared/", {}, b"{" * size)
    response = asyncio.run(sent)
    assert (response.status_code, response.json()["status"]) == (status, status)


@pytest.mark.usefixtures("new_client")
def test_an_answer_is_waited_for_until_the_deadline(alias: str, monkeypatch: Any) -> None:
    """Not for the seconds of a call that has none of its own."""
    monkeypatch.setattr(client, "SECONDS", 0.1)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"http://127.0.0.1:{silent.getsockname()[1]}/outbox/"
        with pytest.raises(PeerUnavailable, match="gave no answer: TimeoutError"):
            call(peer_named("shop", "keeper"), "GET", "open", address=address, seconds=0.5)


@pytest.mark.usefixtures("new_client")
def test_what_cannot_be_connected_to_was_not_sent(alias: str) -> None:
    """Also where the call has less time than a connection may take: another server is tried."""
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, ExitStack() as waiting:
        for _ in range(8):  # more than wait to be accepted: for others nothing is heard
            other = waiting.enter_context(socket.socket())
            other.setblocking(False)
            other.connect_ex(full.getsockname())
        address = f"http://127.0.0.1:{full.getsockname()[1]}/outbox/"
        with pytest.raises(PeerUnavailable, match=r"No connection to 127\.0\.0\.1") as raised:
            call(peer_named("shop", "keeper"), "GET", "open", address=address, seconds=0.5)
    assert not raised.value.sent


@pytest.mark.usefixtures("new_client")
def test_an_address_that_no_host_has(alias: str) -> None:
    """One server of a service may have registered it by mistake: the others are tried."""
    with pytest.raises(PeerUnavailable, match="NotConnected") as raised:
        call(peer_named("shop", "keeper"), "GET", "open", address="https://10.0.0.256/outbox/")
    assert not raised.value.sent


@pytest.mark.usefixtures("new_client")
def test_names_that_are_long_looked_up_keep_no_other_one_waiting(
    alias: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, found = socket.getaddrinfo, threading.Event()

    def look_up(host: Any, *args: Any, **options: Any) -> Any:
        if host == "away.example":
            found.wait(patience())
        return real("127.0.0.1" if host == "away.example" else host, *args, **options)

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    with ThreadPoolExecutor(40) as pool:
        for _ in range(40):
            pool.submit(connections._addresses, "away.example", 443, patience())
        try:
            assert connections._addresses("localhost", 443, patience() / 2)
            with pytest.raises(TimeoutError):
                connections._addresses("away.example", 443, 0.1)
        finally:
            found.set()


@pytest.fixture
def certificate(tmp_path: Path) -> Path:
    """A self-signed certificate for 127.0.0.1, with its key."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "shop")])
    now = datetime.now(UTC)
    address = x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))])
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - timedelta(hours=1))
        .not_valid_after(now + timedelta(hours=1))
        .add_extension(address, critical=False)
        .sign(key, SHA256())
    )
    path = tmp_path / "shop.pem"
    pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    path.write_bytes(pem + made.public_bytes(Encoding.PEM))
    return path


@pytest.fixture
def tls(both: None, certificate: Path, ports: dict[str, int], settings: Any) -> Iterator[None]:
    """The shop is served over TLS, and billing's settings have its https address."""
    known = settings.OUTBOX["PEERS"]
    shop = known["shop"] | {"address": f"https://127.0.0.1:{ports['shop']}/outbox/"}
    settings.OUTBOX = {**settings.OUTBOX, "PEERS": known | {"shop": shop}}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with make_server("127.0.0.1", ports["shop"], WSGIHandler(), Server, Handler) as server:
        server.socket = context.wrap_socket(
            server.socket, server_side=True, do_handshake_on_connect=False
        )
        thread = threading.Thread(target=server.serve_forever, args=[0.05])
        thread.start()
        yield
        server.shutdown()
        thread.join()


@pytest.mark.usefixtures("new_client", "tls")
def test_a_certificate_that_is_not_trusted(alias: str, sender: str, states: Any) -> None:
    refused = pytest.raises(KeeperUnavailable, match="CERTIFICATE_VERIFY_FAILED")
    with refused, prepared("order-1", "order.paid", using=sender, to="shop"):
        raise AssertionError("never begun")
    assert states() == []


@pytest.mark.usefixtures("new_client", "tls")
def test_a_certificate_that_is_trusted(
    alias: str,
    sender: str,
    settings: Any,
    certificate: Path,
    monkeypatch: pytest.MonkeyPatch,
    states: Any,
) -> None:
    """By the variable that OpenSSL reads; for the address that it names only."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    with prepared("order-1", "order.paid", using=sender, to="shop", wait=True):
        pass
    assert states() == ["confirmed"]
    known = settings.OUTBOX["PEERS"]
    shop = known["shop"] | {"address": known["shop"]["address"].replace("127.0.0.1", "localhost")}
    settings.OUTBOX = {**settings.OUTBOX, "PEERS": known | {"shop": shop}}
    with pytest.raises(KeeperUnavailable, match="CERTIFICATE_VERIFY_FAILED"):
        prepare("order-2", "order.paid", using=sender, to="shop")
