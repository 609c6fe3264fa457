"""Commands of entities that come through the door, and the client that sends them."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from django.db import OperationalError
from django.db.models import QuerySet
from django.test import Client
from django.utils import timezone, translation

from outbox_app.database.clock import DatabaseNow
from outbox_app.door.exceptions import InvalidPeer, PeerUnavailable
from outbox_app.entities import Rejected, remote, service, views
from outbox_app.entities.declaration import spec_of
from outbox_app.entities.exceptions import (
    AnswerArchived,
    AnswerGone,
    CommandIdConflict,
    EntityContended,
    EntityError,
    InvalidCommand,
    OutcomeUnknown,
    Overloaded,
    UnknownEntity,
)
from outbox_app.events import prune_events
from outbox_app.events.exceptions import VersionConflict
from outbox_app.events.log.newevent import NO_STREAM
from tests.archives import archive
from tests.entities.models import Account, AccountVersion
from tests.faults.tools import on
from tests.fixtures.door import GRANTED, TYPE

from . import rfc9421

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])
#: About messages, headers and grants: no database differs.
one = on("default")

ELEMENT = {"id": "a", "command": "withdraw", "key": "k-1"}
ABSENT = {"status": 404, "detail": "There is no such command for this caller."}


@pytest.fixture
def send(granted: None, peers: dict[str, Any]) -> Callable[..., Any]:
    """``send("withdraw", {"amount": 5})``: a request of billing for account a, signed by hand."""
    pem = peers["billing"]["shop"]["keys"][0]["private"].removeprefix("file:")
    signer = rfc9421.by_ed25519(Path(pem).read_bytes())

    def run(
        command: str = "withdraw",
        arguments: Any = None,
        *,
        body: bytes | None = None,
        id: str = "a",
        type: str = TYPE,
        key: str | None = "k-1",
        method: str = "POST",
        path: str = "",
        sent: dict[str, str] | None = None,
        fields: dict[str, str] | None = None,
    ) -> Any:
        given = fields or {}
        if key is not None:
            given = given | {"Idempotency-Key": key}
        path = path or f"/outbox/entities/{type}/{id}/{command}"
        body = json.dumps(arguments or {}).encode() if body is None else body
        headers = rfc9421.request(method, path, body, signer, keyid="billing-1", fields=given)
        return Client().generic(method, path, body, headers=headers | (sent or {}))

    return run


def versions() -> list[tuple[int, str, Any]]:
    return list(Account.history("a").values_list("version", "command_id", "response"))


@one
def test_it_is_executed_once_for_each_key(alias: str, account: None, send: Any) -> None:
    response = send("withdraw", {"amount": 4})
    assert response.status_code == 200
    assert response.json() == {"version": 2, "replayed": False, "response": {"balance": 6}}
    assert (response["ETag"], response.has_header("Idempotency-Replayed")) == ('"2"', False)
    assert "Signature" in response
    again = send("withdraw", {"amount": 4})
    assert again.json() == response.json() | {"replayed": True}
    assert (again["ETag"], again["Idempotency-Replayed"]) == ('"2"', "true")
    assert versions()[1:] == [(2, "billing:k-1", {"balance": 6})]


@one
def test_a_key_is_the_peers_own(alias: str, account: None, send: Any) -> None:
    Account.execute("a", "withdraw", {"amount": 1}, command_id="k-1")
    Account.execute("a", "withdraw", {"amount": 1}, command_id="bank:k-1")
    assert send("withdraw", {"amount": 4}).json()["replayed"] is False
    assert [id for _, id, _ in versions()] == ["open", "k-1", "bank:k-1", "billing:k-1"]


ANSWERS: dict[str, tuple[int, dict[str, Any], dict[str, Any]]] = {
    "rejected": (
        422,
        {"arguments": {"amount": 50}},
        {"rejected": True, "code": "balance", "version": 2, "replayed": False},
    ),
    "unknown entity": (404, {"arguments": {"amount": 1}, "id": "b"}, {"code": "unknown_entity"}),
    "another version": (
        412,
        {"arguments": {"amount": 1}, "fields": {"If-Match": '"7"'}},
        {"code": "version_conflict", "current": 1},
    ),
    "not to exist": (
        412,
        {"arguments": {"amount": 1}, "fields": {"If-Match": '"0"'}},
        {"code": "version_conflict", "current": 1},
    ),
    "other arguments": (422, {"arguments": {"sum": 1}}, {"code": "invalid_command"}),
    "a version of too many digits": (
        422,
        {"arguments": {"amount": 1}, "fields": {"If-Match": f'"{10**18 * 9 + 10**18 - 1}"'}},
        {"code": "invalid_command"},
    ),
    "a surrogate": (422, {"body": b'{"amount": "\\ud800"}'}, {"code": "invalid_command"}),
    "a handler that raises": (500, {"command": "fail"}, {"code": "failed"}),
}


@one
@pytest.mark.parametrize(("status", "asked", "said"), ANSWERS.values(), ids=ANSWERS)
def test_answers_that_say_no(
    alias: str, account: None, send: Any, status: int, asked: dict[str, Any], said: dict[str, Any]
) -> None:
    response = send(**asked)
    assert (response.status_code, response["Content-Type"]) == (status, "application/problem+json")
    found = response.json()
    assert found | said == found
    assert found["status"] == status
    assert found["detail"]
    assert "Signature" in response
    assert len(versions()) == (2 if "rejected" in said else 1)


@one
@pytest.mark.parametrize("archived", [True, False])
def test_an_answer_that_was_pruned(
    alias: str, account: None, shop: Any, send: Any, tmp_path: Any, archived: bool
) -> None:
    shop.execute(TYPE, "a", "withdraw", {"amount": 4}, command_id="k-1")
    rows = QuerySet(AccountVersion, using=alias)
    rows.update(recorded_at=DatabaseNow() - timedelta(days=9))
    folder = str(tmp_path / "versions") if archived else None
    if archived:
        archive(alias, folder, log=AccountVersion)
    prune_events(using=alias, log="account_version", older_than=3, archive=folder)
    response = send("withdraw", {"amount": 4})
    both = ("answer_archived", AnswerArchived) if archived else ("answer_gone", AnswerGone)
    said = response.json()
    assert (response.status_code, said["code"], said["version"]) == (410, both[0], 2)
    with pytest.raises(AnswerGone, match="is not executed again") as caught:
        shop.execute(TYPE, "a", "withdraw", {"amount": 4}, command_id="k-1")
    assert (type(caught.value), caught.value.version) == (both[1], 2)
    assert not rows.exists()


@one
def test_a_key_of_another_request(alias: str, account: None, send: Any) -> None:
    send("withdraw", {"amount": 4})
    response = send("withdraw", {"amount": 5})
    assert (response.status_code, response.json()["code"]) == (422, "command_id_conflict")


@one
@pytest.mark.parametrize(
    "key",
    [None, "", "k" * 175, "k" * 300, "a,b", "a b", "a\tb"],
    ids=["missing", "empty", "175", "300", "comma", "space", "tab"],
)
def test_keys_that_are_none(alias: str, account: None, send: Any, key: str | None) -> None:
    response = send("withdraw", {"amount": 1}, key=key)
    assert response.status_code == 400
    assert "Idempotency-Key" in response.json()["detail"]
    assert len(versions()) == 1


@one
@pytest.mark.parametrize("key", ["a\x00", "a\x01b", "a\x7f"], ids=repr)
def test_keys_that_no_signature_covers(alias: str, account: None, send: Any, key: str) -> None:
    assert send("withdraw", {"amount": 1}, key=key).status_code in (400, 401)
    assert len(versions()) == 1


@one
def test_the_longest_key(alias: str, account: None, send: Any) -> None:
    assert send("withdraw", {"amount": 1}, key="k" * 174).status_code == 200


@one
@pytest.mark.parametrize("value", ["*", 'W/"1"', '"1", "2"', "1", '""', '"01"', '"-1"', ""])
def test_versions_that_are_none(alias: str, account: None, send: Any, value: str) -> None:
    response = send("withdraw", {"amount": 1}, fields={"If-Match": value})
    assert (response.status_code, len(versions())) == (400, 1)
    assert send("withdraw", {"amount": 1}, fields={"If-Match": '"1"'}).status_code == 200


@one
@pytest.mark.parametrize(
    "body",
    [b"", b"null", b"[]", b'"amount"', b"{", b'{"amount": 1, "amount": 1}', b'{"amount": NaN}'],
    ids=["empty", "null", "a list", "a text", "no JSON", "a key twice", "NaN"],
)
def test_bodies_that_are_no_object(alias: str, account: None, send: Any, body: bytes) -> None:
    response = send("withdraw", body=body)
    assert (response.status_code, len(versions())) == (400, 1)


@one
@pytest.mark.parametrize("value", ["0", "0.000", "-1", "x", "1e3", "nan", "1234567", ""])
def test_seconds_that_are_none(alias: str, account: None, send: Any, value: str) -> None:
    response = send("withdraw", {"amount": 1}, fields={"Outbox-Seconds-Left": value})
    assert (response.status_code, len(versions())) == (400, 1)


@one
@pytest.mark.parametrize(
    ("given", "timeout"),
    [({}, None), ({"Outbox-Seconds-Left": "2.5"}, 2.5), ({"Outbox-Seconds-Left": "900"}, 10.0)],
)
def test_a_server_gives_up_when_its_caller_has(
    alias: str, account: None, send: Any, monkeypatch: Any, given: dict[str, str], timeout: Any
) -> None:
    execute, waits = Account.execute, []

    def note(*args: Any, **options: Any) -> Any:
        waits.append(options["timeout"])
        return execute(*args, **options)

    monkeypatch.setattr(Account, "execute", note)
    assert send("withdraw", {"amount": 1}, fields=given).status_code == 200
    assert waits == [timeout]


@one
@pytest.mark.parametrize(
    "asked",
    [
        {"command": "enlist"},
        {"command": "none"},
        {"command": "versions"},
        {"type": "entities.stock"},
        {"type": "entities.Account"},
        {"type": "account"},
        {"type": "auth.user"},
    ],
    ids=repr,
)
def test_what_was_not_granted_is_not_there(
    alias: str, account: None, send: Any, asked: dict[str, str]
) -> None:
    response = send(**asked)
    assert response.status_code == 404
    assert response.json() | ABSENT == response.json()
    assert "code" not in response.json()


@one
def test_headers_that_are_not_signed(alias: str, account: None, send: Any) -> None:
    """What means something is covered: added, changed or taken away it is not believed."""
    for sent in ({"If-Match": '"1"'}, {"Outbox-Seconds-Left": "3"}, {"Idempotency-Key": "k-2"}):
        assert send("withdraw", {"amount": 1}, sent=sent).status_code == 401
    headers = {"Outbox-Redirected": "7"}  # means nothing
    assert send("withdraw", {"amount": 1}, sent=headers).status_code == 200


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize("alias", [pytest.param("postgres", id="postgres")], indirect=True)
def test_what_another_server_passes_on(alias: str, account: None, send: Any, settings: Any) -> None:
    """It is executed here; what has no answer is for the other server to do."""
    own = {"language": "en", "zone": "UTC"}

    def asked(command: str, arguments: Any, key: str, **more: Any) -> dict[str, Any]:
        return {"id": "a", "command": command, "arguments": arguments, "key": key, **own, **more}

    commands = [
        asked("withdraw", {"amount": 4}, "k-1"),
        asked("open", {"owner": "bob"}, "k-2", id="b", expected_version=0),
        asked("withdraw", {"amount": 4}, "k-1"),
        asked("withdraw", {"amount": 50}, "k-3", expected_version=2),
        asked("withdraw", {"amount": 4}, "k-4", expected_version=7),
        asked("fail", {}, "k-5"),
    ]

    def passed_on(commands: Any = commands, type: str = TYPE) -> Any:
        return send(path=f"/outbox/routed/{type}", key=None, body=json.dumps(commands).encode())

    assert passed_on().status_code == 404  # by a peer of another service
    settings.OUTBOX = {**settings.OUTBOX, "FLEET": {"SERVICE": "billing", "TOPOLOGY": None}}
    text = "There is not enough on the account."
    no = {"status": 422, "rejected": True, "code": "balance", "detail": text, "version": 3}
    assert passed_on().json() == [
        {"status": 200, "response": {"balance": 6}, "version": 2, "replayed": False},
        {"status": 200, "response": None, "version": 1, "replayed": False},
        {"status": 200, "response": {"balance": 6}, "version": 2, "replayed": True},
        no | {"replayed": False},
        None,
        None,
    ]
    for type in ("auth.user", "account", "entities.none"):
        assert passed_on(type=type).status_code == 422
    odd = [
        *({"arguments": []}, {"zone": "Nowhere"}, {"zone": 7}, {"language": 7}, {"more": 1}),
        *({"key": 7}, {"expected_version": [1]}, {"expected_version": False}, {"command": []}),
    ]
    for change in odd:
        assert passed_on([asked("withdraw", {}, "k-6") | change]).status_code == 422
    for body in (["a"], [[]], [{}]):
        assert passed_on(body).status_code == 422
    for body in (7, {}, []):
        assert passed_on(body).status_code == 400
    assert passed_on(commands * 200).status_code == 413
    assert len(versions()) == 3


@one
@pytest.mark.usefixtures("fresh")
@pytest.mark.django_isolate_apps("tests.entities")
def test_a_proxy_that_another_server_passes_on(
    alias: str, account: None, send: Any, settings: Any, monkeypatch: Any, django_isolated_apps: Any
) -> None:
    """Else its leader would refuse it, and be passed nothing for seconds."""

    class Shown(Account):
        class Meta:
            proxy = True
            app_label = "entities"

    monkeypatch.setattr(views, "apps", django_isolated_apps)
    settings.OUTBOX = {**settings.OUTBOX, "FLEET": {"SERVICE": "billing", "TOPOLOGY": None}}
    asked = {"id": "a", "command": "withdraw", "arguments": {"amount": 4}, "key": "k-1"}
    body = json.dumps([asked | {"language": "en", "zone": "UTC"}]).encode()
    response = send(path=f"/outbox/routed/{Shown._meta.label_lower}", key=None, body=body)
    assert [each["response"] for each in response.json()] == [{"balance": 6}]


@one
@pytest.mark.usefixtures("fresh")
def test_a_command_that_another_server_passes_on_has_its_callers_language_and_zone(
    alias: str, account: None, send: Any, settings: Any, monkeypatch: Any
) -> None:
    def note(self: Any, amount: Any) -> str:
        return f"{translation.get_language()} {timezone.get_current_timezone_name()}"

    monkeypatch.setattr(spec_of(Account).commands["withdraw"], "handler", note)
    settings.OUTBOX = {**settings.OUTBOX, "FLEET": {"SERVICE": "billing", "TOPOLOGY": None}}
    callers = ("de", "Asia/Tokyo"), ("fr", "UTC")
    asked = {"id": "a", "command": "withdraw", "arguments": {"amount": 4}}
    commands = [asked | {"key": f"k-{at}", "language": at, "zone": zone} for at, zone in callers]
    body = json.dumps(commands).encode()
    said = send(path=f"/outbox/routed/{TYPE}", key=None, body=body).json()
    assert [each["response"] for each in said] == ["de Asia/Tokyo", "fr UTC"]
    assert translation.get_language() == "en-us"


@one
def test_the_database_is_away(alias: str, send: Any, monkeypatch: Any) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise OperationalError("away")

    monkeypatch.setattr(Account, "execute", fail)
    assert send("withdraw", {"amount": 1}).status_code == 503


@one
def test_what_may_be_executed_is_described(alias: str, send: Any) -> None:
    said = send(method="GET", path="/outbox/openapi.json", body=b"", key=None).json()
    assert (said["openapi"], len(said["paths"])) == ("3.1.0", len(GRANTED) + 1)
    operation = said["paths"][f"/entities/{TYPE}/{{id}}/withdraw"]["post"]
    assert operation["operationId"] == f"{TYPE}.withdraw"
    by_name = {each["name"]: each for each in operation["parameters"]}
    assert {name: each["required"] for name, each in by_name.items()} == {
        "id": True,
        "Idempotency-Key": True,
        "If-Match": False,
        "Outbox-Seconds-Left": False,
    }
    schema = operation["requestBody"]["content"]["application/json"]["schema"]
    assert schema == {
        "type": "object",
        "properties": {"amount": {}},
        "required": ["amount"],
        "additionalProperties": False,
    }
    # Each operation is where the document says it is, and answers in the way it says.
    for path, methods in said["paths"].items():
        [(method, each)] = methods.items()
        url = "/outbox" + path.replace("{id}", "nothing")
        body = b"{}" if "{id}" in path else json.dumps([{**ELEMENT, "arguments": {}}]).encode()
        response = send(method=method.upper(), path=url, body=body)
        described = each["responses"].get(str(response.status_code), each["responses"]["default"])
        [(content_type, content)] = described["content"].items()
        assert response["Content-Type"] == content_type
        schema, answer = content["schema"], response.json()
        if schema["type"] == "array":
            schema, [answer] = schema["items"]["oneOf"][1], answer
        assert set(schema["required"]) <= answer.keys()
        unnamed = answer.keys() - schema["properties"].keys()
        assert unnamed <= {"type", "title", "version", "replayed"}


def test_a_service_executes(alias: str, shop: Any) -> None:
    opened = shop.execute(TYPE, "a", "open", {"owner": "ä", "balance": 10}, command_id="k-1")
    assert (opened.version, opened.response, opened.replayed) == (1, None, False)
    first = shop.execute(TYPE, "a", "withdraw", {"amount": 4}, command_id="k-2", expected_version=1)
    assert (first.version, first.response, first.replayed) == (2, {"balance": 6}, False)
    again = asyncio.run(shop.aexecute(TYPE, "a", "withdraw", {"amount": 4}, command_id="k-2"))
    assert (again.version, again.response, again.replayed) == (2, {"balance": 6}, True)
    no = shop.execute(TYPE, "a", "withdraw", {"amount": 7}, command_id="k-3")
    assert (no.version, no.response, no.rejected.code) == (3, None, "balance")
    with pytest.raises(Rejected, match="not enough"):
        shop.execute(TYPE, "a", "withdraw", {"amount": 7}, command_id="k-3", raise_rejected=True)
    assert Account.objects.using(alias).get().state == {"owner": "ä", "balance": 6}


@one
def test_what_a_service_refuses(alias: str, account: None, shop: Any) -> None:
    shop.execute(TYPE, "a", "withdraw", {"amount": 1}, command_id="k-1")
    asked: list[tuple[type[Exception], str, str, Any, dict[str, Any]]] = [
        (VersionConflict, "a", "withdraw", {"amount": 1}, {"expected_version": 1}),
        (VersionConflict, "a", "withdraw", {"amount": 1}, {"expected_version": NO_STREAM}),
        (UnknownEntity, "b", "withdraw", {"amount": 1}, {}),
        (CommandIdConflict, "a", "withdraw", {"amount": 2}, {"command_id": "k-1"}),
        (InvalidCommand, "a", "withdraw", {"sum": 2}, {}),
        (InvalidCommand, "a", "enlist", {"item": 2}, {}),
        (InvalidCommand, "a", "withdraw", {"amount": 1}, {"command_id": "a b"}),
        (InvalidCommand, "a", "withdraw", {"amount": 1}, {"command_id": "ä"}),
        (InvalidCommand, "a/../b", "withdraw", {"amount": 1}, {}),
        (InvalidCommand, "a\nb", "withdraw", {"amount": 1}, {}),
        (InvalidCommand, "a//b", "withdraw", {"amount": 1}, {}),
        (InvalidCommand, "a", "b/withdraw", {"amount": 1}, {}),
        (EntityError, "a", "fail", {}, {}),
    ]
    for error, id, command, arguments, options in asked:
        with pytest.raises(error) as raised:
            shop.execute(TYPE, id, command, arguments, **{"command_id": "k-9"} | options)
        assert type(raised.value) is error
        assert getattr(raised.value, "current", 2) == 2
    with pytest.raises(InvalidPeer):
        service("bank").execute(TYPE, "a", "withdraw", command_id="k-9")
    assert len(versions()) == 2


@one
@pytest.mark.parametrize("timeout", [0, -1, 2_000_000, float("nan"), "1", True])
def test_a_timeout_is_a_number_above_zero(
    alias: str, account: None, shop: Any, timeout: Any
) -> None:
    with pytest.raises(InvalidCommand, match="timeout must be above 0"):
        shop.execute(TYPE, "a", "withdraw", {"amount": 1}, command_id="k-1", timeout=timeout)
    assert len(versions()) == 1


@one
@pytest.mark.parametrize("error", [EntityContended("x"), Overloaded("x"), OutcomeUnknown("x")])
def test_errors_of_a_server(alias: str, shop: Any, monkeypatch: Any, error: Exception) -> None:
    def fail(*args: Any, **options: Any) -> Any:
        raise error

    monkeypatch.setattr(Account, "execute", fail)
    with pytest.raises(type(error), match="x"):
        shop.execute(TYPE, "a", "withdraw", command_id="k-1")


@one
@pytest.mark.parametrize("id", ["a/b", "ü ?#%2F", "=;@:+&,$!~*'()\\", "a\tb\r", ".a", "x" * 255])
def test_ids_arrive_as_they_are(alias: str, shop: Any, id: str) -> None:
    assert shop.execute(TYPE, id, "open", {"owner": 1}, command_id="k").version == 1
    assert [each.pk for each in Account.objects.all()] == [id]


@one
def test_answers_that_are_large(alias: str, shop: Any, account: None, declare: Any) -> None:
    def echo(self: Any, text: str) -> str:
        return text

    declare(echo)
    text = "ü" * 60_000
    assert shop.execute(TYPE, "a", "echo", {"text": text}, command_id="k").response == text


@one
def test_no_answer(alias: str, shop: Any, monkeypatch: Any) -> None:
    """What may have arrived is unknown; what was not sent was not executed."""
    for sent, error in ((True, OutcomeUnknown), (False, PeerUnavailable)):

        def fail(*args: Any, sent: bool = sent, **options: Any) -> Any:
            raise PeerUnavailable("gone", sent=sent)

        monkeypatch.setattr(remote.client, "call", fail)
        with pytest.raises(error, match="gone"):
            shop.execute(TYPE, "a", "withdraw", command_id="k")


@one
@pytest.mark.parametrize("status", [200, 422])
@pytest.mark.parametrize("version", [None, "7", [7]])
def test_a_rejection_without_its_version_is_no_answer(
    alias: str, shop: Any, monkeypatch: Any, status: int, version: Any
) -> None:
    """From a service in another language, say. The caller gets an error of this package."""
    said = {"rejected": True, "code": "balance", "detail": "No.", "version": version}
    monkeypatch.setattr(remote.client, "call", lambda *args, **options: (status, said))
    with pytest.raises(PeerUnavailable if status == 200 else InvalidCommand):
        shop.execute(TYPE, "a", "withdraw", command_id="k")
