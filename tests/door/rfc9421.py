"""Messages that are signed by hand, from the text of RFC 9421 and RFC 9530: without a library."""

from __future__ import annotations

import hashlib
import hmac
import time
from base64 import b64encode
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cryptography.hazmat.primitives.serialization import load_pem_private_key

HOST = "127.0.0.1"
REQUEST = ("@method", "@authority", "@path", "@query", "content-digest", "content-type")
ANSWER = ("@status", "content-digest", "@method;req", "@path;req", "signature;req")


def digest(body: bytes) -> str:
    return f"sha-256=:{b64encode(hashlib.sha256(body).digest()).decode()}:"


def by_ed25519(pem: bytes) -> Callable[[bytes], bytes]:
    return load_pem_private_key(pem, None).sign  # type: ignore[union-attr, return-value, call-arg]


def by_hmac(secret: bytes) -> Callable[[bytes], bytes]:
    return lambda base: hmac.digest(secret, base, "sha256")


def sign(
    values: dict[str, str],
    signer: Callable[[bytes], bytes],
    *,
    keyid: str | None,
    covered: Sequence[str],
    created: float | None = 0.0,
    expires: float | None = 300.0,
    tag: str | None = "outbox-v1",
    alg: str | None = None,
    label: str = "sig1",
) -> dict[str, str]:
    """The two fields of a signature; ``created`` and ``expires`` are seconds from now."""
    now = time.time()
    identifiers = [name.partition(";") for name in covered]
    names = [f'"{name}"{semicolon}{flag}' for name, semicolon, flag in identifiers]
    given: dict[str, Any] = {
        "created": None if created is None else int(now + created),
        "expires": None if expires is None else int(now + expires),
        "keyid": None if keyid is None else f'"{keyid}"',
        "alg": alg and f'"{alg}"',
        "tag": tag and f'"{tag}"',
    }
    parameters = "".join(f";{name}={value}" for name, value in given.items() if value is not None)
    params = f"({' '.join(names)}){parameters}"
    pairs = zip(names, covered, strict=True)
    lines = [f"{name}: {values[key]}" for name, key in pairs]
    base = "\n".join([*lines, f'"@signature-params": {params}'])
    signature = b64encode(signer(base.encode())).decode()
    return {"Signature-Input": f"{label}={params}", "Signature": f"{label}=:{signature}:"}


def request(
    method: str,
    path: str,
    body: bytes,
    signer: Callable[[bytes], bytes],
    *,
    query: str = "",
    host: str = HOST,
    content_type: str = "application/json",
    covered: Sequence[str] = REQUEST,
    fields: Mapping[str, str] | None = None,
    **options: Any,
) -> dict[str, str]:
    """The headers of a request that is signed, and more ``fields`` that are covered."""
    more = {name.lower(): value.strip() for name, value in (fields or {}).items()}
    values = {
        "@method": method,
        "@authority": host,
        "@path": path,
        "@query": f"?{query}",
        "content-digest": digest(body),
        "content-type": content_type,
        **more,
    }
    covered = (*covered, *more)
    headers = {
        **(fields or {}),
        "Host": host,
        "Content-Type": content_type,
        "Content-Digest": digest(body),
    }
    return headers | sign(values, signer, covered=covered, **options)


def answer(
    status: int,
    body: bytes,
    signer: Callable[[bytes], bytes],
    *,
    asked: tuple[str, str, str],
    content_type: str = "application/json",
    covered: Sequence[str] = ANSWER,
    **options: Any,
) -> dict[str, str]:
    """The headers of an answer to (method, path, ``Signature``)."""
    method, path, signature = asked
    values = {"@status": str(status), "content-digest": digest(body)}
    values |= {"@method;req": method, "@path;req": path, "signature;req": signature}
    headers = {"Content-Type": content_type, "Content-Digest": digest(body)}
    return headers | sign(values, signer, covered=covered, **options)
