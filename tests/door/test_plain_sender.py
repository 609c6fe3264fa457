"""The sender without Django from the how-to, with a real keeper."""

from __future__ import annotations

import importlib.util
import re
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from outbox_app.prepared.models import PreparedEvent
from tests.fixtures.door import ROOT

pytestmark = [
    pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"]),
    pytest.mark.parametrize("alias", [pytest.param("postgres", id="postgres")], indirect=True),
]
PAGE = ROOT / "docs" / "howto" / "prepared-without-django.md"


@pytest.fixture
def plain(
    tmp_path: Path, ports: dict[str, int], peers: Any, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Any]:
    """The module from the page, with its door open."""
    text = PAGE.read_text()
    code = "".join(re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    file = tmp_path / "plain_sender.py"
    file.write_text(code)
    ours, theirs = peers["billing"]["shop"]["keys"]
    monkeypatch.setenv("SHOP", f"http://127.0.0.1:{ports['shop']}/outbox/")
    monkeypatch.setenv("DATABASE", str(tmp_path / "billing.sqlite3"))
    monkeypatch.setenv("OUR_KEY", ours["private"].removeprefix("file:"))
    monkeypatch.setenv("SHOP_KEY", theirs["public"].removeprefix("file:"))
    with closing(sqlite3.connect(tmp_path / "billing.sqlite3")) as db, db:
        [ddl] = re.findall(r"^-- SQLite.*\n(CREATE .*;)$", text, re.MULTILINE)
        db.execute(ddl)
        db.execute("CREATE TABLE payment (stream text, amount int)")
    spec = importlib.util.spec_from_file_location("plain_sender", file)
    assert spec
    assert spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    server = ThreadingHTTPServer(("127.0.0.1", ports["billing"]), module.Door)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield module
    server.shutdown()
    server.server_close()


def test_the_sender_of_the_page(
    alias: str,
    plain: Any,
    serve: Any,
    both: None,
    ask: Any,
    states: Any,
    in_log: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    serve("shop", alias)
    plain.pay("order-1", 30)
    assert (states(), in_log()) == (["confirmed"], [("order-1", "order.paid", {"amount": 30})])
    call = plain.call
    monkeypatch.setattr(plain, "call", lambda path, *more: "confirm" in path or call(path, *more))
    plain.pay("order-2", 30)  # its confirm is lost

    def dies(*_: Any) -> Any:
        raise SystemExit

    monkeypatch.setattr(plain.sqlite3, "connect", dies)
    with pytest.raises(SystemExit):
        plain.pay("order-3", 30)
    monkeypatch.undo()
    assert states() == ["confirmed", "prepared", "prepared"]
    PreparedEvent.objects.using(alias).open().update(next_check_at="2026-01-01T00:00:00+00:00")
    ask()
    assert states() == ["confirmed", "confirmed", "cancelled"]
    assert [stream for stream, *_ in in_log()] == ["order-1", "order-2"]
