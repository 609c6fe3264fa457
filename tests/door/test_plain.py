"""The plain form of signatures, with http-message-signatures as the judge of each decision."""

from __future__ import annotations

import time
from base64 import b64encode
from http.client import HTTPMessage
from types import SimpleNamespace
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
)
from http_message_signatures.structures import CaseInsensitiveDict
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from outbox_app.door import plain, signing
from outbox_app.door.exceptions import InvalidPeer
from outbox_app.door.peers import Key, Peer

pytestmark = pytest.mark.unit

PEER, BODY = Peer(name="billing"), b'{"amount": 5}'
PRIVATE = Ed25519PrivateKey.from_private_bytes(bytes(range(32)))
PEM = PRIVATE.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
ASKED = {
    "Content-Type": "application/json",
    "Idempotency-Key": "k-1",
    "If-Match": '"7"',
    "Outbox-Seconds-Left": "4.800",
}
URL = "https://shop.example/outbox/entities/bank.account/a-17/withdraw"


@pytest.fixture(scope="module", autouse=True)
def keys(tmp_path_factory: Any) -> Any:
    """``KEYS[algorithm]``: the key that signs, and the one that verifies."""
    folder = tmp_path_factory.mktemp("keys")
    pem = PRIVATE.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    (folder / "private").write_bytes(pem)
    (folder / "secret").write_bytes(b"s" * 32)
    secret = Key("app-1", "hmac-sha256", f"file:{folder / 'secret'}")
    private = Key("app-1", "ed25519", f"file:{folder / 'private'}")
    KEYS.update(
        {"hmac-sha256": (secret, secret), "ed25519": (private, Key("app-1", "ed25519", PEM))}
    )


#: Without the judge of ``conftest``.
VERIFY = plain.verify
KEYS: dict[str, tuple[Key, Key]] = {}


def request(method: str = "POST", url: str = URL, headers: Any = ASKED) -> Any:
    return SimpleNamespace(method=method, url=url, headers=CaseInsensitiveDict(headers))


def answer(asked: Any, status: int = 200, headers: Any = ()) -> Any:
    return SimpleNamespace(status_code=status, headers=dict(headers), request=asked)


def by_the_library(function: Any, *args: Any) -> Any:
    """What ``signing`` does if no message has the plain form."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plain, "sign", lambda *args, **options: False)
        patch.setattr(plain, "verify", lambda *args: None)
        return decision(function, *args)


def decision(function: Any, *args: Any) -> Any:
    try:
        return function(*args)
    except (signing.NotBelieved, InvalidPeer) as error:
        return type(error), str(error)


def peer_of(algorithm: str) -> Any:
    key = KEYS[algorithm][1]
    return lambda id: (PEER, key) if id == key.id else None


def judge(message: Any, body: bytes = BODY, algorithm: str = "hmac-sha256") -> bool:
    """Return whether a message is believed: both have to say so, or to refuse it alike."""
    asked = message, lambda: body, peer_of(algorithm)
    ours, judged = decision(signing.verify, *asked), by_the_library(signing.verify, *asked)
    assert ours == judged
    found = plain.verify(message, peer_of(algorithm))
    if found and plain.digest(body) == found[1]:
        assert judged == (found[0], body)
    return bool(judged == (PEER, body))


ALGORITHMS = pytest.mark.parametrize("algorithm", ["hmac-sha256", "ed25519"])


@ALGORITHMS
def test_messages_of_this_package_have_the_plain_form(algorithm: str) -> None:
    """The library signs them with the same bytes, and neither side needs it."""
    asked, same = request(), request()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signing, "HTTPMessageSigner", None)
        patch.setattr(plain, "verify", VERIFY)
        patch.setattr(signing._Verifier, "verify", None)
        signing.sign(asked, BODY, KEYS[algorithm][0])
        assert signing.verify(asked, lambda: BODY, peer_of(algorithm)) == (PEER, BODY)
        reply = answer(asked)
        signing.sign(reply, b"[]", KEYS[algorithm][0])
        assert signing.verify(reply, lambda: b"[]", peer_of(algorithm)) == (PEER, b"[]")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signing, "datetime", Clock)
        Clock.at = int(asked.headers["Signature-Input"].split(";created=")[1].split(";")[0])
        assert by_the_library(signing.sign, same, BODY, KEYS[algorithm][0]) is None
    assert same.headers == asked.headers
    assert judge(asked, BODY, algorithm)
    assert judge(reply, b"[]", algorithm)


class Clock(signing.datetime):
    at = 0.0

    @classmethod
    def now(cls, tz: Any = None) -> Any:
        return signing.datetime.fromtimestamp(cls.at, tz)


TEXT = st.text(st.characters(max_codepoint=300), max_size=12)
#: Mostly plain, with what a parser may stumble over.
VALUES = st.one_of(st.from_regex(r"[!-~]([ -~]{0,8}[!-~])?", fullmatch=True), TEXT)
PATHS = st.one_of(
    st.from_regex(r"/([a-z.~:@!$&'()*+,;=/-]|%[0-9A-F]{2}){0,9}", fullmatch=True), TEXT
)
HOSTS = st.sampled_from(
    ["shop.example", "127.0.0.1", "[::1]", "Shop.Example", "a_b", "user@shop", "ä.example", ""]
)
PORTS = st.sampled_from(["", ":80", ":443", ":8080", ":080", ":", ":0"])
QUERIES = st.one_of(st.just(""), st.from_regex(r"\?[a-z=&?%/]{0,6}", fullmatch=True))
SCHEMES = st.sampled_from(["http", "https", "HTTP", "ftp"])
URLS = st.tuples(SCHEMES, HOSTS, PORTS, PATHS, QUERIES).map(
    lambda p: f"{p[0]}://{p[1]}{p[2]}{p[3]}{p[4]}"
)
NAMES = st.sampled_from(
    [*ASKED, "content-type", "Content-Digest", "Signature", "Accept", "IF-MATCH"]
)
HEADERS = st.dictionaries(NAMES, VALUES, max_size=5).map(lambda d: {**ASKED, **d})
METHODS = st.sampled_from(["POST", "GET", "post", "PO ST", "", "POST\n"])
MANY = settings(max_examples=400, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@MANY
@given(METHODS, URLS, HEADERS, st.binary(max_size=5), st.sampled_from(["app-1", 'a"b', "ä", "a b"]))
@example("POST", URL, ASKED, BODY, "app-1")
def test_what_is_signed(method: str, url: str, headers: Any, body: bytes, id: str) -> None:
    """The plain form is that of the library, byte for byte, or left to it."""
    key = KEYS["hmac-sha256"][0]._replace(id=id)
    ours, theirs = request(method, url, headers), request(method, url, headers)
    now = int(time.time())
    before = ours.headers.copy()
    is_plain = plain.sign(ours, body, key, created=now)
    assert is_plain or ours.headers == before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(signing, "datetime", Clock)
        Clock.at = now
        judged = by_the_library(signing.sign, theirs, body, key)
    if is_plain:
        assert judged is None
        assert ours.headers == theirs.headers
    for asked in (ours, theirs):
        reply, twin = answer(asked, 200), answer(asked, 200)
        if plain.sign(reply, body, key, created=now):
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(signing, "datetime", Clock)
                assert by_the_library(signing.sign, twin, body, key) is None
            assert reply.headers == twin.headers


COMPONENTS = ["@method", "@authority", "@path", "@query", "content-digest", "content-type"]
COMPONENTS += ["idempotency-key", "if-match", "outbox-seconds-left"]


@st.composite
def by_hand(draw: Any) -> dict[str, str]:
    """Signed with the right key, in any order and spelling, of more or less than the profile."""
    values = {f'"{name.lower()}"': value for name, value in ASKED.items()}
    values |= {'"@method"': "POST", '"@authority"': "shop.example", '"@query"': "?"}
    values |= {'"@path"': URL.removeprefix("https://shop.example")}
    values |= {'"content-digest"': plain.digest(BODY), '"accept"': "a"}
    covered = draw(st.permutations([f'"{name}"' for name in COMPONENTS]))
    change = draw(st.sampled_from(["", "", "", "less", "more", "twice", "flag"]))
    if change == "less":
        covered = covered[1:]
    if change in ("more", "twice"):
        covered = [*covered, '"accept"' if change == "more" else covered[0]]
    if change == "flag":
        values['"if-match";sf'] = '"7"'
        covered = ['"if-match";sf' if name == '"if-match"' else name for name in covered]
    now = int(time.time())
    created = now + draw(st.sampled_from([0, 0, 0, -359, -361, 59, 61, -7200]))
    expires = created + draw(st.sampled_from([300, 300, 300, 1, 0, 301, -5]))
    parameters = {
        "created": draw(
            st.sampled_from([str(created), str(created), f'"{created}"', f"0{created}"])
        ),
        "expires": str(expires),
        "keyid": draw(
            st.sampled_from(['"app-1"', '"app-1"', '"app-2"', "7", "app-1", '"app\\\\1"'])
        ),
        "tag": draw(st.sampled_from(['"outbox-v1"', '"outbox-v1"', '"outbox-v2"', "outbox-v1"])),
    }
    for name, value in {"alg": '"hmac-sha256"', "nonce": '"n"', "odd": "1"}.items():
        if draw(st.integers(0, 5)) == 5:
            parameters[name] = value
    if draw(st.integers(0, 9)) == 9:
        parameters.pop(draw(st.sampled_from(sorted(parameters))))
    order = draw(st.permutations(sorted(parameters)))
    if draw(st.integers(0, 9)) == 9:
        order = [*order, order[0]]
    space = draw(st.sampled_from(["", "", "", "", " "]))
    text = "".join(f";{space}{name}={parameters[name]}" for name in order)
    signed = f"({' '.join(covered)}){text}"
    label = draw(st.sampled_from(["outbox", "sig1", "*a.b-c", "Sig", "1"]))
    lines = [f"{name}: {values[name]}" for name in covered]
    base = "\n".join([*lines, f'"@signature-params": {signed}']).encode()
    mac = b64encode(plain._signer("hmac-sha256", b"s" * 32)(base)).decode()  # type: ignore[misc]
    headers = {**ASKED, "Content-Digest": plain.digest(BODY), "Accept": "a"}
    return headers | {"Signature-Input": f"{label}={signed}", "Signature": f"{label}=:{mac}:"}


@MANY
@given(by_hand())
def test_what_is_signed_by_hand(headers: dict[str, str]) -> None:
    judge(request(headers=headers))


def test_what_is_signed_by_hand_is_often_believed() -> None:
    """Else the property above would say little."""
    believed: list[bool] = []

    @settings(max_examples=100, deadline=None, database=None)
    @given(by_hand())
    def count(headers: dict[str, str]) -> None:
        believed.append(judge(request(headers=headers)))

    count()
    assert any(believed)
    assert not all(believed)


EDITS = st.sampled_from(
    ["=", "+", ":", ";", '"', "(", ")", " ", "\t", ",", "0", "A", "é", "\n", "/", "\\", "?1", "%20"]
)


@MANY
@given(
    st.sampled_from([*ASKED, "Content-Digest", "Signature-Input", "Signature", "url", "method"]),
    st.integers(0, 400),
    st.integers(0, 2),
    st.one_of(st.just(""), EDITS, TEXT),
    st.sampled_from(["hmac-sha256", "ed25519"]),
)
def test_what_is_changed_on_its_way(name: str, at: int, cut: int, put: str, algorithm: str) -> None:
    """A character more, less or another one, anywhere: both decide alike, of answers as well."""
    asked = request()
    signing.sign(asked, BODY, KEYS[algorithm][0])
    reply = answer(asked)
    signing.sign(reply, BODY, KEYS[algorithm][0])
    for message in (asked, reply):
        holder = vars(asked) if name in ("url", "method") else message.headers
        if name not in holder:
            continue
        text = holder[name]
        place = at % (len(text) + 1)
        holder[name] = text[:place] + put + text[place + cut :]
        is_same = holder[name].strip(" \t") == text
        believed = judge(message, BODY, algorithm)
        assert believed or not is_same or name in ("url", "method")
        holder[name] = text


@pytest.mark.parametrize("name", ["Signature", "Signature-Input", "Content-Digest", "Content-Type"])
def test_a_line_that_is_there_twice(name: str) -> None:
    asked = request()
    signing.sign(asked, BODY, KEYS["hmac-sha256"][0])
    lines = HTTPMessage()
    for line, value in [*asked.headers.items(), (name, asked.headers[name])]:
        lines[line] = value
    asked.headers = lines
    assert plain.verify(asked, peer_of("hmac-sha256")) is None
    assert not judge(asked)


@pytest.mark.parametrize("text", [b"no key", PEM.encode()[:80], b"-----BEGIN PRIVATE KEY-----"])
def test_keys_that_are_none(tmp_path: Any, text: bytes) -> None:
    file = tmp_path / "key"
    file.write_bytes(text)
    key = Key("app-1", "ed25519", f"file:{file}")
    with pytest.raises(InvalidPeer, match="Nothing can be signed with the key 'app-1'"):
        signing.sign(request(), BODY, key)
    asked = request()
    signing.sign(asked, BODY, KEYS["ed25519"][0])
    assert plain.verify(asked, lambda id: (PEER, key)) is None
    with pytest.raises(signing.NotBelieved):
        signing.verify(asked, lambda: BODY, lambda id: (PEER, key))


def test_a_key_that_is_replaced(tmp_path: Any) -> None:
    """It is parsed once, and read each time."""
    file = tmp_path / "key"
    key = Key("app-1", "hmac-sha256", f"file:{file}")
    seen = []
    for text in (b"a" * 32, b"b" * 32, b"a" * 32):
        file.write_bytes(text)
        asked = request()
        assert plain.sign(asked, BODY, key, created=1764000000)
        seen.append(asked.headers["Signature"])
    assert seen[0] == seen[2] != seen[1]


def test_another_kind_of_key(tmp_path: Any) -> None:
    """One that signs otherwise is no key of the profile, though it is a key."""
    from cryptography.hazmat.primitives.asymmetric.ed448 import Ed448PrivateKey

    other = Ed448PrivateKey.generate()
    file = tmp_path / "key"
    file.write_bytes(other.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(InvalidPeer, match="Nothing can be signed"):
        signing.sign(request(), BODY, Key("app-1", "ed25519", f"file:{file}"))
    pem = other.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    asked = request()
    signing.sign(asked, BODY, KEYS["ed25519"][0])
    assert plain.verify(asked, lambda id: (PEER, Key("app-1", "ed25519", pem))) is None
