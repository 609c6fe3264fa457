"""Calls to a peer: one signed request, and one answer that is verified before it is used.

Only registered addresses are called, by https (by http on this machine alone). The timeout covers
the whole call. An answer that cannot be verified raises ``PeerUnavailable``. Importing this does
not need the extra ``door``.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from http.client import HTTPException, HTTPMessage
from types import SimpleNamespace
from typing import Any

from ..text import error_text
from . import connections
from .exceptions import PeerUnavailable
from .messages import JSON, PROBLEM, MessageRefused, media_type, parsed, written
from .peers import VERIFIES, Key, Peer, base_url, signing_key, valid_keys

#: Seconds to connect, default seconds of a whole call, and default limit of an answer in bytes.
CONNECT, SECONDS, BYTES = 3.0, 10.0, 64 * 1024
#: Headers of each request.
ALWAYS = {"Accept": JSON, "Accept-Encoding": "identity"}


def call(
    peer: Peer,
    method: str,
    path: str,
    payload: Any = None,
    *,
    content_type: str = JSON,
    address: str | None = None,
    seconds: float = SECONDS,
    headers: Mapping[str, str] | None = None,
    most: int = BYTES,
) -> tuple[int, Any]:
    """Return the status and the content of a peer's answer. Raises ``PeerError``.

    Args:
        address: The address of one of the peer's servers. Default: the peer's own address.
        seconds: The timeout of the whole call. The peer learns it, and gives up in time.
        headers: Additional headers. The signature covers those that the door reads.
        most: The limit of the answer in bytes.
    """
    from .signing import CLOCKS, NotBelieved, sign, verify

    until = time.monotonic() + seconds
    body = b"" if payload is None else written(payload)
    url = base_url(peer, address) + path
    request = SimpleNamespace(method=method, url=url, headers=HTTPMessage())
    own = {"Content-Type": content_type, "Outbox-Seconds-Left": f"{seconds:.3f}"}
    for name, value in (ALWAYS | own | dict(headers or {})).items():
        request.headers[name] = value
    try:
        target = connections.target_of(url)
        request.headers["Host"] = target.authority
        request.url = f"{target.scheme}://{target.authority}{target.path}"
        sign(request, body, signing_key(peer))
        status, received, answer = connections.exchange(
            *(target, method, dict(request.headers.items()), body),
            # Connecting ends before the call does: if it fails, the request was not sent.
            connect=min(CONNECT, 0.8 * seconds),
            until=until,
            most=most,
        )
    except (OSError, HTTPException) as error:
        sent = not isinstance(error, connections.NotConnected)
        raise PeerUnavailable(
            f"The peer {peer.name!r} gave no answer: {error_text(error)}", sent=sent
        ) from error

    def peer_of(id: Any) -> tuple[Peer, Key] | None:
        return next(((peer, key) for key in valid_keys(peer, VERIFIES) if key.id == id), None)

    try:
        response = SimpleNamespace(status_code=status, headers=received, request=request)
        verify(response, lambda: answer, peer_of)
        if media_type(received.get("Content-Type", "")) not in (JSON, PROBLEM):
            raise MessageRefused(502, "Its content type is not JSON.")
        return status, parsed(answer)
    except (NotBelieved, MessageRefused) as error:
        why = ""
        # Refusals of a signature are alike, and not signed. The clocks may be the reason.
        if status == 401 and abs(away := _seconds_ahead(received.get("Date"))) > CLOCKS:
            why = (
                f". By its Date, its clock is off by {away:+.0f} seconds: set the clock of the "
                "peer, or of this host"
            )
        raise PeerUnavailable(
            f"The answer {status} of the peer {peer.name!r} is not trusted: {error}{why}"
        ) from error


def _seconds_ahead(date: str | None) -> float:
    """Return how far a header ``Date`` is ahead of this host's clock; 0 if it is no time."""
    try:
        return parsedate_to_datetime(date or "").timestamp() - time.time()
    except (ValueError, OverflowError):
        return 0.0
