"""The client without a library, and the test vectors of its page: a server accepts both."""

from __future__ import annotations

import importlib.util
import re
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from wsgiref.simple_server import WSGIRequestHandler, make_server

import pytest
from django.core.handlers.wsgi import WSGIHandler
from http_message_signatures.structures import CaseInsensitiveDict

from outbox_app.door import signing
from outbox_app.door.peers import Key, Peer
from tests.entities.models import Account
from tests.fixtures.door import ROOT, Handler, Server

PAGE = (ROOT / "docs" / "howto" / "client-in-another-language.md").read_text()
BLOCKS = re.findall(r"^```text\n(.*?)\n```$", PAGE, re.MULTILINE | re.DOTALL)
MORE, ASKED, HEADERS, ANSWERED, OF_ANSWER, PUBLIC, BY_ED25519 = BLOCKS
SECRET = re.findall(r"^The secret is `(\w+)`", PAGE, re.MULTILINE)[0]
BODY, SAID = (each.encode() for each in re.findall(r"the body `(\{.*?\})`", PAGE))


def fields(text: str) -> dict[str, str]:
    return dict(line.split(": ", 1) for line in text.splitlines())


def parameters(text: str) -> str:
    """Of the last line of what is signed."""
    return text.rpartition(": (")[2].rpartition(")")[2]


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The module from the page."""
    monkeypatch.setenv("APP_SECRET", SECRET)
    file = tmp_path / "plain_client.py"
    [code] = re.findall(r"^```python\n(import .*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    file.write_text(code)
    spec = importlib.util.spec_from_file_location("plain_client", file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("signed", "signature", "body"),
    [(ASKED, HEADERS, BODY), (ANSWERED, OF_ANSWER, SAID)],
    ids=["request", "answer"],
)
def test_the_client_makes_what_the_page_shows(
    client: Any, signed: str, signature: str, body: bytes
) -> None:
    *lines, _ = signed.splitlines()
    components = dict(line.split(": ", 1) for line in lines)
    assert components['"content-digest"'] == client.digest(body)
    assert client.base(components, parameters(signed)) == signed
    made = client.signature(components, parameters(signed))
    assert fields(signature)["Signature"] == f"outbox=:{made}:"
    assert fields(HEADERS)["Signature-Input"] == "outbox=" + ASKED.rpartition('params": ')[2]
    assert client.times(1764000000) == parameters(ASKED)


@pytest.mark.parametrize("algorithm", ["hmac-sha256", "ed25519"])
@pytest.mark.parametrize("forged", [False, True])
def test_a_server_believes_the_vectors(
    algorithm: str, forged: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("APP_SECRET", SECRET)
    monkeypatch.setattr(signing._Verifier, "check_time", lambda self: None)  # they are of 2025
    key, headers = Key("app-2026", algorithm, "env:APP_SECRET"), fields(HEADERS)
    if algorithm == "ed25519":
        key = Key("app-ed", algorithm, PUBLIC)
        headers["Signature-Input"] = headers["Signature-Input"].replace("app-2026", key.id)
        headers |= fields(BY_ED25519)
    values = {name: value for name, value in fields(ASKED.replace('"', "")).items()}
    headers |= fields(MORE) | {"Content-Type": "application/json"}
    headers["Content-Digest"] = values["content-digest"]
    if forged:
        headers["Idempotency-Key"] = "k-2"
    asked = SimpleNamespace(
        method=values["@method"],
        url=f"https://{values['@authority']}{values['@path']}",
        headers=CaseInsensitiveDict(headers),
    )
    peer = Peer(name="app")
    if forged:
        with pytest.raises(signing.NotBelieved):
            signing.verify(asked, lambda: BODY, lambda id: (peer, key))
        return
    found = signing.verify(asked, lambda: BODY, lambda id: (peer, key) if id == key.id else None)
    assert found == (peer, BODY)


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
@pytest.mark.parametrize("alias", [pytest.param("postgres", id="postgres")], indirect=True)
class TestAServer:
    @pytest.fixture
    def host(self, alias: str, settings: Any) -> Iterator[str]:
        settings.ROOT_URLCONF = "tests.door.urls"
        settings.ALLOWED_HOSTS = ["127.0.0.1"]
        keys = [{"id": "app-2026", "secret": "env:APP_SECRET"}]
        app = {"direction": "sender", "address": "https://app.example/", "keys": keys}
        app |= {"commands": ["entities.account.*"]}  # type: ignore[dict-item]
        settings.OUTBOX = {**settings.OUTBOX, "PEERS": {"app": app}}
        with make_server("127.0.0.1", 0, WSGIHandler(), Server, Handler) as server:
            thread = threading.Thread(target=server.serve_forever, args=[0.05])
            thread.start()
            yield f"127.0.0.1:{server.server_port}"
            server.shutdown()
            thread.join()

    def test_the_client_is_answered(self, client: Any, alias: str, host: str) -> None:
        Account.execute("ä b", "open", {"owner": "ann", "balance": 30}, command_id="o", using=alias)
        client.CONNECTION = client.http.client.HTTPConnection
        path = "/outbox/entities/entities.account/%C3%A4%20b/withdraw"
        status, said = client.execute(host, path, {"amount": 5}, "k-1", version=1)
        assert (status, said) == (
            200,
            {"version": 2, "replayed": False, "response": {"balance": 25}},
        )
        status, again = client.execute(host, path, {"amount": 5}, "k-1", version=1)
        assert (status, again["replayed"]) == (200, True)
        assert client.execute(host, path, {"amount": 99}, "k-2")[1]["rejected"] is True
        assert client.withdraw(host, "ä b", 5, "k-3")[0] == 404  # the page's type is not granted

    @pytest.mark.parametrize("name", ["RAW_URI", "REQUEST_URI"])
    def test_a_path_with_other_escapes_than_djangos(
        self, client: Any, alias: str, host: str, monkeypatch: pytest.MonkeyPatch, name: str
    ) -> None:
        def telling(handler: Any) -> Any:
            return WSGIRequestHandler.get_environ(handler) | {name: handler.path}

        monkeypatch.setattr(Handler, "get_environ", telling)
        client.CONNECTION = client.http.client.HTTPConnection
        id = "ann@shop.example:1=/ä"
        path = f"/outbox/entities/entities.account/{client.quote(id)}/open"
        status, said = client.execute(host, path, {"owner": "ann", "balance": 30}, "k-1")
        assert (status, said["version"]) == (200, 1)
        assert Account.objects.using(alias).filter(pk=id).exists()

    def test_what_is_not_signed_so_is_not_believed(
        self, client: Any, alias: str, host: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        client.CONNECTION = client.http.client.HTTPConnection
        path = "/outbox/entities/entities.account/a/withdraw"
        monkeypatch.setenv("APP_SECRET", "f" * 32)  # of the server
        with pytest.raises(TypeError):  # 401, without a signature
            client.execute(host, path, {"amount": 5}, "k-1")
