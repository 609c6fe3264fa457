"""How the door serves a view: signed requests in, signed answers out.

A request is checked in this order: declared size, key, signature, time; then its body is read, and
its digest, content and grants are checked. No stranger can make a thread wait for a body.
Every answer is signed, except the one to an unknown caller (its body is always the same). Errors
are problem documents (RFC 9457) with fixed sentences. No view has a session, cookie or transaction.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial, wraps
from http import HTTPStatus
from types import SimpleNamespace
from typing import Any
from urllib.parse import unquote

import django.db
from django.contrib.auth.decorators import login_not_required
from django.core.exceptions import SuspiciousOperation
from django.http import HttpRequest, HttpResponse, UnreadablePostError
from django.utils.encoding import escape_uri_path
from django.views.decorators.cache import cache_control, never_cache
from django.views.decorators.csrf import csrf_exempt
from django.views.decorators.http import require_http_methods

from ..database.transactions import without_transaction
from ..text import get_logger
from . import messages, peers
from .exceptions import InvalidPeer
from .messages import MessageRefused
from .peers import Peer

logger = get_logger("outbox_app.door")

SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,3})?")  # of ``Outbox-Seconds-Left``
#: The status and the content of an answer. The content of an error extends its problem document.
Reply = tuple[int, Any]
View = Callable[..., Reply | tuple[int, Any, dict[str, str]]]


def door(method: str, direction: str, *types: str) -> Callable[[View], Callable[..., HttpResponse]]:
    """Serve a view to peers of this direction, for signed requests of these content types."""

    def wrap(view: View) -> Callable[..., HttpResponse]:
        @wraps(view)
        def served(request: HttpRequest, **kwargs: Any) -> HttpResponse:
            try:
                return _answered(request, partial(view, **kwargs), direction, types)
            except (InvalidPeer, django.db.Error) as error:
                logger.error("The door cannot answer requests error=%s", error)
                return _response(503, {"detail": "The log says why."})

        guarded = csrf_exempt(never_cache(require_http_methods([method])(served)))
        return without_transaction(login_not_required(cache_control(no_transform=True)(guarded)))

    return wrap


def _answered(
    request: HttpRequest, view: View, direction: str, types: Sequence[str]
) -> HttpResponse:
    try:
        from . import signing
    except InvalidPeer as error:  # the extra is missing
        return _response(503, {"detail": str(error)})
    declared = _declared_bytes(request)
    if declared > peers.LIMITS["bytes"]:
        return _response(413, {})
    if not declared and "wsgi.input" in request.META and "Transfer-Encoding" in request.headers:
        return _response(411, {"detail": "By WSGI Django reads no body without Content-Length."})
    try:
        query = request.META.get("QUERY_STRING", "")
        url = f"{request.scheme}://{request.get_host()}{_path_sent(request)}"
        url = f"{url}?{query}" if query else url
        message = SimpleNamespace(method=request.method, url=url, headers=request.headers)
        peer_of = partial(peers.peer_of_key, direction=direction)
        peer, body = signing.verify(message, partial(_body, request), peer_of)
    except MessageRefused as error:
        return _response(error.status, {"detail": str(error)})
    except (signing.NotBelieved, SuspiciousOperation) as error:
        logger.warning("Request has no valid signature path=%s reason=%s", request.path, error)
        return _response(401, {}, {"WWW-Authenticate": "Signature"})
    try:
        response = _response(*view(request, peer, _content(request, body, peer, types)))
    except MessageRefused as error:
        response = _response(error.status, {"detail": str(error)})
    except django.db.Error as error:
        logger.warning("The database is unavailable peer=%s error=%s", peer.name, error)
        response = _response(503, {})
    status, headers = response.status_code, response.headers
    answer = SimpleNamespace(status_code=status, headers=headers, request=message)
    signing.sign(answer, response.content, peers.signing_key(peer))
    return response


def _declared_bytes(request: HttpRequest) -> int:
    try:
        return int(request.META.get("CONTENT_LENGTH") or 0)
    except ValueError:  # Django reads no body then
        return 0


def _body(request: HttpRequest) -> bytes:
    try:
        body = request.read(peers.LIMITS["bytes"] + 1)
    except UnreadablePostError as error:  # the caller has closed the connection
        detail = "The connection ended before the end of the body."
        raise MessageRefused(400, detail) from error
    if len(body) > peers.LIMITS["bytes"]:  # by ASGI, a length need not be declared
        raise MessageRefused(413, "The body is too large.")
    return body


def _path_sent(request: HttpRequest) -> str:
    """Return the path as it was sent; escape it anew if the server does not provide that."""
    raw = getattr(request, "scope", {}).get("raw_path") or b""
    raw = raw.decode("latin-1") or request.META.get("RAW_URI") or request.META.get("REQUEST_URI")
    path = str(raw).partition("?")[0]
    return path if unquote(path) == request.path else escape_uri_path(request.path)


def seconds_left(request: HttpRequest) -> float | None:
    """Return the seconds for which the caller still waits, or None if it sent no limit."""
    header = request.headers.get("Outbox-Seconds-Left")
    if header is not None and (not SECONDS.fullmatch(header) or not float(header)):
        raise MessageRefused(400, "Outbox-Seconds-Left must be a number of seconds above 0.")
    return float(header) if header else None


def _content(request: HttpRequest, body: bytes, peer: Peer, types: Sequence[str]) -> Any:
    if len(body) > peers.limit(peer, "bytes"):
        raise MessageRefused(413, "The request has more bytes than this peer may send.")
    if request.headers.get("Content-Encoding", "identity") != "identity":
        raise MessageRefused(415, "The body must not be compressed.")
    if messages.media_type(request.headers.get("Content-Type", "")) not in types:
        raise MessageRefused(415, f"The content type must be {' or '.join(types)}.")
    return messages.parsed(body) if body else None


def _response(status: int, content: Any, headers: dict[str, str] | None = None) -> HttpResponse:
    type = messages.JSON
    if status >= 400:
        type, title = messages.PROBLEM, HTTPStatus(status).phrase
        content = {"type": "about:blank", "title": title, "status": status} | content
    body = messages.written(content)
    return HttpResponse(body, status=status, content_type=type, headers=headers)
