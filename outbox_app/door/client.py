"""Calls to a peer: one signed request, and one answer that is verified before it is used.

Only registered addresses are called, by https (by http on this machine alone). The client follows
no redirect, keeps no cookie and uses no proxy of the environment. A thread makes each call, over a
connection of its own, and the timeout covers the whole call: when it is over, the caller cuts the
connection, so a peer that sends a byte a second ends with it, and a call that has no connection yet
is never sent. A process that exits may start no thread (Python 3.12); there the timeout limits each
read. An answer that cannot be verified raises ``PeerUnavailable``. Importing this does
not need the extra ``door``.
"""

from __future__ import annotations

import socket
import ssl
import threading
from collections.abc import Mapping
from contextlib import closing, suppress
from functools import cache
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any

from ..exceptions import PeerUnavailable
from ..models import Peer
from ..process.background import in_thread
from .messages import JSON, PROBLEM, MessageRefused, media_type, parsed, written
from .peers import VERIFIES, Key, base_url, signing_key, valid_keys

if TYPE_CHECKING:
    from .signing import httpx2

#: Seconds to connect, default seconds of a whole call, and default limit of an answer in bytes.
CONNECT, SECONDS, BYTES = 3.0, 10.0, 64 * 1024


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
    from .signing import NotBelieved, adapt_message, httpx2, sign, verify

    body = b"" if payload is None else written(payload)
    given = {
        **{"Accept": JSON, "Accept-Encoding": "identity", "Content-Type": content_type},
        "Outbox-Seconds-Left": f"{seconds:.3f}",
    }
    client = httpx2.Client(
        cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
        verify=_trusted(),
        follow_redirects=False,
        trust_env=False,
        # Connecting ends before the whole call does: if it fails, the request was not sent.
        timeout=httpx2.Timeout(seconds, connect=min(CONNECT, 0.8 * seconds)),
    )
    line = _Line()
    # A look-up refuses a name with a label of more than 63 characters by UnicodeError.
    not_sent = httpx2.InvalidURL, UnicodeError, httpx2.ConnectError, httpx2.ConnectTimeout
    try:
        request = client.build_request(
            *(method, base_url(peer, address) + path),
            content=body,
            headers=given | dict(headers or {}),
            extensions={"trace": line.note},
        )
        sign(adapt_message(request), body, signing_key(peer))
        try:
            future = in_thread("outbox-door", _exchange, client, request, most)
        except RuntimeError:  # the interpreter exits, or the system has no more threads
            response, answer = _exchange(client, request, most)
        else:
            response, answer = future.result(seconds)
    except (httpx2.HTTPError, httpx2.StreamError, OSError, *not_sent) as error:
        raise PeerUnavailable(
            f"The peer {peer.name!r} gave no answer: {error!r}",
            sent=line.cut() and not isinstance(error, not_sent),
        ) from error
    finally:
        line.cut()

    def peer_of(id: Any) -> tuple[Peer, Key] | None:
        return next(((peer, key) for key in valid_keys(peer, VERIFIES) if key.id == id), None)

    try:
        verify(adapt_message(response), answer, peer_of)
        if media_type(response.headers.get("Content-Type", "")) not in (JSON, PROBLEM):
            raise MessageRefused(502, "Its content type is not JSON.")
        return response.status_code, parsed(answer)
    except (NotBelieved, MessageRefused) as error:
        raise PeerUnavailable(
            f"The answer {response.status_code} of the peer {peer.name!r} is not trusted: {error}"
        ) from error


def _exchange(
    client: httpx2.Client, request: httpx2.Request, most: int
) -> tuple[httpx2.Response, bytes]:
    with client, closing(client.send(request, stream=True)) as reply:
        body = bytearray()
        for chunk in reply.iter_raw():
            body += chunk
            if len(body) > most:
                raise OSError(f"The answer has more than {most} bytes.")
        return reply, bytes(body)


class _Line:
    """The connection of a call, which the caller can cut while a thread reads from it.

    Only that thread closes its socket: the number of a closed one may belong to another connection.
    So the caller has a duplicate.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_cut = False
        self._socket: socket.socket | None = None

    def note(self, event: str, info: Mapping[str, Any]) -> None:
        """Note the connection, when it is there: the client's trace extension calls this."""
        if event.endswith("connect_tcp.complete"):
            connected = info["return_value"].get_extra_info("socket")
            with self._lock:
                if self._is_cut:
                    info["return_value"].close()
                    raise TimeoutError("The call has ended.")
                self._socket = connected.dup()

    def cut(self) -> bool:
        """End the connection. Return whether there was one: if not, there will be none."""
        with self._lock:
            self._is_cut = True
            if self._socket:
                with suppress(OSError):  # the peer, or an earlier cut, has ended it
                    self._socket.shutdown(socket.SHUT_RDWR)
                self._socket.close()
            return self._socket is not None


_trusted = cache(ssl.create_default_context)
