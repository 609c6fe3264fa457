"""Calls to a peer: one signed request, and one answer that is verified before it is used.

Only registered addresses are called, by https (by http on this machine alone). The client follows
no redirect, keeps no cookie and uses no proxy of the environment. The timeout covers the whole
call, so a peer that sends a byte a second cannot extend it: all calls of a process run on the event
loop of one thread, which the first call starts; after a fork, the child starts its own. An answer
that cannot be verified raises ``PeerUnavailable``. Importing this does not need the extra ``door``.
"""

from __future__ import annotations

import asyncio
import os
import selectors
import socket
import ssl
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing, contextmanager
from email.utils import parsedate_to_datetime
from http.cookiejar import CookieJar, DefaultCookiePolicy
from typing import TYPE_CHECKING, Any

from ..text import error_text
from .exceptions import PeerUnavailable
from .messages import JSON, PROBLEM, MessageRefused, media_type, parsed, written
from .peers import VERIFIES, Key, Peer, base_url, signing_key, valid_keys

if TYPE_CHECKING:
    from .signing import httpx2

#: Seconds to connect, default seconds of a whole call, and default limit of an answer in bytes.
CONNECT, SECONDS, BYTES = 3.0, 10.0, 64 * 1024
#: Concurrent DNS look-ups. A look-up cannot be cancelled, and others must not wait behind it.
NAMES = 256


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
    from .signing import CLOCKS, NotBelieved, adapt_message, httpx2, sign, verify

    loop, client = _running()
    body = b"" if payload is None else written(payload)
    always = {"Content-Type": content_type, "Outbox-Seconds-Left": f"{seconds:.3f}"}
    url = base_url(peer, address) + path
    # Connecting ends before the whole call does: if it fails, the request was certainly not sent.
    timeout = httpx2.Timeout(None, connect=min(CONNECT, 0.8 * seconds))
    not_sent = httpx2.InvalidURL, httpx2.ConnectError, httpx2.ConnectTimeout
    try:
        request = client.build_request(
            *(method, url), content=body, headers=always | dict(headers or {}), timeout=timeout
        )
        sign(adapt_message(request), body, signing_key(peer))
        future = asyncio.run_coroutine_threadsafe(_exchange(client, request, seconds, most), loop)
        response, answer = future.result()
    except (httpx2.HTTPError, httpx2.StreamError, OSError, *not_sent) as error:
        raise PeerUnavailable(
            f"The peer {peer.name!r} gave no answer: {error_text(error)}",
            sent=not isinstance(error, not_sent),
        ) from error

    def peer_of(id: Any) -> tuple[Peer, Key] | None:
        return next(((peer, key) for key in valid_keys(peer, VERIFIES) if key.id == id), None)

    try:
        verify(adapt_message(response), lambda: answer, peer_of)
        if media_type(response.headers.get("Content-Type", "")) not in (JSON, PROBLEM):
            raise MessageRefused(502, "Its content type is not JSON.")
        return response.status_code, parsed(answer)
    except (NotBelieved, MessageRefused) as error:
        status, why = response.status_code, ""
        # Refusals of a signature are alike, and not signed. The clocks may be the reason.
        if status == 401 and abs(away := _seconds_ahead(response.headers.get("Date"))) > CLOCKS:
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


async def _exchange(
    client: httpx2.AsyncClient, request: httpx2.Request, seconds: float, most: int
) -> tuple[httpx2.Response, bytes]:
    async with asyncio.timeout(seconds), aclosing(await client.send(request, stream=True)) as reply:
        body = bytearray()
        async for chunk in reply.aiter_raw():
            body += chunk
            if len(body) > most:
                raise OSError(f"The answer has more than {most} bytes.")
        return reply, bytes(body)


@contextmanager
def _of_no_thread() -> Iterator[None]:
    """Hide the running loop while other greenlets may run.

    Under gevent they see this loop as theirs, and Django would refuse them database access.
    """
    loop = asyncio.get_running_loop()
    asyncio._set_running_loop(None)
    try:
        yield
    finally:
        asyncio._set_running_loop(loop)


class _Selector(selectors.DefaultSelector):
    def select(self, timeout: float | None = None) -> list[Any]:
        with _of_no_thread():
            return super().select(timeout)


class _Loop(asyncio.SelectorEventLoop):
    def run_in_executor(self, *args: Any) -> Any:  # type: ignore[override]
        with _of_no_thread():  # starting a thread lets other greenlets run
            return super().run_in_executor(*args)

    async def getaddrinfo(self, *args: Any, **options: Any) -> Any:
        try:
            return await super().getaddrinfo(*args, **options)
        except RuntimeError:  # the interpreter exits, and has ended the executor's threads
            return socket.getaddrinfo(*args, **options)


_lock = threading.Lock()
#: The loop and client of each process id. A child leaves those of its parent, which uses them.
_loops: dict[int, tuple[asyncio.AbstractEventLoop, httpx2.AsyncClient]] = {}


def _running() -> tuple[asyncio.AbstractEventLoop, httpx2.AsyncClient]:
    from .signing import httpx2

    with _lock:
        if os.getpid() not in _loops:
            loop = _Loop(_Selector())
            loop.set_default_executor(ThreadPoolExecutor(NAMES, "outbox-names"))
            headers = {"Accept": JSON, "Accept-Encoding": "identity"}
            monkey = sys.modules.get("gevent.monkey")
            if monkey and monkey.is_module_patched("select"):
                # Before it reuses a connection, the client polls it, and other greenlets run.
                headers["Connection"] = "close"
            client = httpx2.AsyncClient(
                headers=headers,
                # Servers close idle connections after two seconds at the earliest.
                limits=httpx2.Limits(keepalive_expiry=1.0),
                cookies=CookieJar(DefaultCookiePolicy(allowed_domains=[])),
                verify=ssl.create_default_context(),
                follow_redirects=False,
                trust_env=False,
            )
            threading.Thread(target=loop.run_forever, name="outbox-door", daemon=True).start()
            _loops[os.getpid()] = loop, client
        return _loops[os.getpid()]


def _after_fork() -> None:
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_after_fork)
