"""Signatures in their plain form, which outbox_app and the client of the documentation write.

A message in the plain form has one signature, which covers the components of the profile and no
others, and its values are printable ASCII. Such a message is signed and verified here, by string
operations, at a tenth of the cost of a general parser. Any other message, and any that does not
verify here, is judged by http-message-signatures, in ``signing``: it words all refusals, and tests
compare each acceptance with its own.
"""

from __future__ import annotations

import hmac
import re
import time
from base64 import b64decode, b64encode
from collections.abc import Callable, Mapping
from functools import lru_cache
from hashlib import sha256
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import load_pem_private_key, load_pem_public_key

from .peers import Key, Peer

TAG = "outbox-v1"
#: The longest time for which a signature is valid, in seconds.
VALID = 300
#: Seconds by which two clocks may differ.
CLOCKS = 60
REQUEST = ("@method", "@authority", "@path", "@query", "content-digest", "content-type")
#: Headers that the door reads: the signature must cover each of them that is present.
MEANT = ("idempotency-key", "if-match", "outbox-seconds-left")
ANSWER = ("@status", "content-digest", '"@method";req', '"@path";req', '"signature";req')

PeerOf = Callable[[Any], tuple[Peer, Key] | None]

_CHARS = r"(?:[A-Za-z0-9._~!$&'()*+,;=:@/-]|%[0-9A-Fa-f]{2})"
_URL = re.compile(
    rf"(https?)://([a-z0-9.-]+)(?::([1-9][0-9]*))?(/{_CHARS}*)(?:\?((?:{_CHARS}|\?)*))?"
)
_METHOD = re.compile("[A-Z]+")
_VALUE = re.compile("[!-~](?:[ -~]*[!-~])?")
_ID = re.compile(r"[ !#-\[\]-~]+")
_NAMES = {"created", "expires", "keyid", "tag", "alg"}
_PARAMETER = r';([a-z]+)=(0|[1-9][0-9]{0,14}|"[ !#-\[\]-~]*")'
_INPUT = re.compile(rf"([a-z*][a-z0-9_.*-]*)=(\(([^()]*)\)((?:{_PARAMETER})*))")
_DIGEST = re.compile("sha-256=:([A-Za-z0-9+/]{43}=):")


def sign(message: Any, body: bytes, key: Key, *, created: int) -> bool:
    """Sign a message in the plain form; return False, and change nothing, if it has another one."""
    lines = _lines(message.headers)
    if lines is None or not lines.keys().isdisjoint(("content-digest", "signature")):
        return False
    lines["content-digest"] = digest(body)
    values, keyed = _values(message, lines), _signer(key.algorithm, key.read())
    if values is None or keyed is None or not _ID.fullmatch(key.id):
        return False
    parameters = f';created={created};keyid="{key.id}";alg="{key.algorithm}"'
    parameters += f';expires={created + VALID};tag="{TAG}"'
    signed = f"({' '.join(values)}){parameters}"
    signature = b64encode(keyed(_base(values, values, signed))).decode()
    message.headers["Content-Digest"] = lines["content-digest"]
    message.headers["Signature-Input"] = f"outbox={signed}"
    message.headers["Signature"] = f"outbox=:{signature}:"
    return True


def verify(message: Any, peer_of: PeerOf) -> tuple[Peer, str] | None:
    """Return the peer that has signed a message, and the digest of the body that it has signed.

    Return None if the message has not the plain form, or does not verify.
    """
    lines = _lines(message.headers)
    found = lines and _INPUT.fullmatch(lines.get("signature-input", ""))
    values = _values(message, lines) if lines and found else None
    if not lines or not found or values is None:
        return None
    label, signed, covered, text = found.group(1, 2, 3, 4)
    names, pairs = covered.split(" "), re.findall(_PARAMETER, text)
    parameters = dict(pairs)
    if sorted(names) != sorted(values) or len(parameters) < len(pairs):
        return None
    if not {"created", "expires", "keyid", "tag"} <= parameters.keys() <= _NAMES:
        return None
    known = peer_of(parameters["keyid"].strip('"'))
    signature = _bytes(lines.get("signature", ""), f"{label}=:")
    if known is None or signature is None:
        return None
    peer, key = known
    texts = {"keyid": key.id, "tag": TAG, "alg": key.algorithm}
    if any(parameters[name] != f'"{value}"' for name, value in texts.items() if name in parameters):
        return None
    verifier = _verifier(key.algorithm, key.read())
    if verifier is None or not verifier(signature, _base(names, values, signed)):
        return None
    if not _is_timely(parameters["created"], parameters["expires"]):
        return None
    return peer, lines["content-digest"]


def digest(body: bytes) -> str:
    return f"sha-256=:{b64encode(sha256(body).digest()).decode()}:"


def _is_timely(created: str, expires: str) -> bool:
    if not (created.isdigit() and expires.isdigit()):
        return False
    begins, ends, now = int(created), int(expires), time.time()
    fits = 0 < ends - begins <= VALID
    return fits and -VALID - CLOCKS < begins - now < CLOCKS and ends >= now - CLOCKS


def _lines(headers: Mapping[str, str]) -> dict[str, str] | None:
    """Return the headers in lower case; None if a name has two lines."""
    items = list(headers.items())
    lines = {name.lower(): value for name, value in items}
    return lines if len(lines) == len(items) else None


def _values(message: Any, lines: dict[str, str]) -> dict[str, str] | None:
    """Return the values of the components of the profile; None if they are not plain."""
    if not hasattr(message, "status_code"):
        names = [*REQUEST[4:], *(name for name in MEANT if name in lines)]
        values = _of_request(message)
    else:
        asked = message.request
        names, signature = ["content-digest"], (_lines(asked.headers) or {}).get("signature", "")
        if (parts := _of_request(asked)) and _VALUE.fullmatch(signature):
            values = {'"@status"': str(message.status_code)}
            values |= {'"content-digest"': "", '"@method";req': parts['"@method"']}
            values |= {'"@path";req': parts['"@path"'], '"signature";req': signature}
        else:
            values = None
    if values is None or not _DIGEST.fullmatch(lines.get("content-digest", "")):
        return None
    for name in names:
        if not _VALUE.fullmatch(lines.get(name, "")):
            return None
        values[f'"{name}"'] = lines[name]
    return values


def _of_request(message: Any) -> dict[str, str] | None:
    url = _URL.fullmatch(message.url)
    if not url or not _METHOD.fullmatch(message.method):
        return None
    scheme, host, port, path, query = url.groups()
    own = not port or (scheme, port) in (("http", "80"), ("https", "443"))
    return {
        '"@method"': message.method,
        '"@authority"': host if own else f"{host}:{port}",
        '"@path"': path,
        '"@query"': f"?{query or ''}",
    }


def _base(names: Any, values: dict[str, str], signed: str) -> bytes:
    lines = [f"{name}: {values[name]}" for name in names]
    return "\n".join([*lines, f'"@signature-params": {signed}']).encode()


def _bytes(text: str, begin: str) -> bytes | None:
    """Return the bytes of ``label=:…:``, if they are written as an encoder writes them."""
    if not (text.startswith(begin) and text.endswith(":")):
        return None
    coded = text[len(begin) : -1]
    try:
        found = b64decode(coded, validate=True)
    except ValueError:
        return None
    return found if b64encode(found).decode() == coded else None


# A key is parsed once. It is read at each use, and its text is its identity here: so a file that is
# replaced is another key.


@lru_cache(maxsize=64)
def _signer(algorithm: str, key: bytes) -> Callable[[bytes], bytes] | None:
    if algorithm == "hmac-sha256":
        return lambda base: hmac.digest(key, base, "sha256")
    try:
        private = load_pem_private_key(key, None)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    return private.sign if isinstance(private, Ed25519PrivateKey) else None


@lru_cache(maxsize=64)
def _verifier(algorithm: str, key: bytes) -> Callable[[bytes, bytes], bool] | None:
    if algorithm == "hmac-sha256":
        return lambda mac, base: hmac.compare_digest(mac, hmac.digest(key, base, "sha256"))
    try:
        public = load_pem_public_key(key)
    except (ValueError, TypeError, UnsupportedAlgorithm):
        return None
    if not isinstance(public, Ed25519PublicKey):
        return None

    def is_of_it(signature: bytes, base: bytes) -> bool:
        try:
            public.verify(signature, base)
        except InvalidSignature:
            return False
        return True

    return is_of_it
