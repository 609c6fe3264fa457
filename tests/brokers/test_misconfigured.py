"""A broker that waiting will not heal is reported in one sentence: no traceback, no secret."""

from __future__ import annotations

import pytest

from tests.faults.tools import draining, eventually, on

pytestmark = [
    pytest.mark.django_db(transaction=True),
    on("default"),
    pytest.mark.usefixtures("quick"),
]


@pytest.mark.parametrize(
    ("url", "sentence"),
    [
        ("nonsense://me:secret@h", "No such transport: nonsense. Let broker_url begin with"),
        ("mongodb://me:secret@h", "the library of its transport is missing, or cannot be imported"),
        ("redis://h:secret/0", "its broker_url cannot be read. Write it as"),
        ("redis", "Correct the user and the password in broker_url"),
    ],
)
def test_is_said_in_one_sentence(alias, url, sentence, redis_url, make_named_app, book, caplog):
    app, jobs = make_named_app("memory://"), book(alias)
    jobs.stage(app, 1)
    app.conf.broker_url = redis_url.replace("//", "//me:secret@") if url == "redis" else url
    with draining(alias) as drainer:
        eventually(lambda: drainer.trouble, "it notices")
        assert sentence in drainer.trouble

    assert "secret" not in caplog.text + drainer.trouble
    assert not any(record.exc_info and record.exc_info[0] for record in caplog.records)
    app.conf.broker_url = "memory://"
