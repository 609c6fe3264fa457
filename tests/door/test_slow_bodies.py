"""Callers whose bodies come slowly, or never: a server has threads left for its peers."""

from __future__ import annotations

import socket
from contextlib import ExitStack
from typing import Any

import pytest
from django.db import transaction

from outbox_app.prepared import confirm, fence, prepare
from tests.patience import patience

from . import rfc9421

pytestmark = pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])
PATH = "/outbox/prepared/"


@pytest.mark.parametrize("signed", [False, True], ids=["unsigned", "unknown"])
def test_strangers_that_send_no_body(
    alias: str, sender: str, serve: Any, both: None, ports: Any, in_log: Any, signed: bool
) -> None:
    """Each of 30 has promised a megabyte, and is refused without it; the server has four threads.

    They end when they are refused: gunicorn itself waits for some seconds for those that do not.
    """
    serve("shop", alias)
    headers, type = {}, "application/cloudevents+json"
    if signed:
        by = rfc9421.by_hmac(b"s" * 32)
        headers = rfc9421.request("POST", PATH, b"{}", by, keyid="nobody-1", content_type=type)
    headers |= {"Host": f"127.0.0.1:{ports['shop']}", "Content-Length": "1000000"}
    lines = [f"POST {PATH} HTTP/1.1", *(f"{name}: {value}" for name, value in headers.items())]
    with ExitStack() as stack:
        slow = [
            stack.enter_context(socket.create_connection(("127.0.0.1", ports["shop"])))
            for _ in range(30)
        ]
        for each in slow:
            each.settimeout(patience(10))
            each.sendall("\r\n".join([*lines, "", "{"]).encode())
        answers = set()
        for each in slow:
            answers.add(each.recv(12))
            each.close()
    assert answers == {b"HTTP/1.1 401"}
    event = prepare("order-17", "order.paid", using=sender, to="shop")
    with transaction.atomic(using=sender):
        fence(event)
    confirm(event)
    assert len(in_log()) == 1
