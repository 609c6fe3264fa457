"""The admin shows any content of a row safely: escaped, cut, visible; it decodes only JSON."""

from __future__ import annotations

import json
import pickle
import re
import zlib
from datetime import date
from decimal import Decimal
from uuid import UUID

import pytest
from django.db import connections
from kombu.utils import json as kombu_json

from outbox_app.admin.payload import payload
from outbox_app.models import DeadJob, Incident, StagedJob
from tests.jobs.dead.rows import columns, dead_jobs, dead_row, message, staged_jobs
from tests.jobs.dead.test_status import drainer

from .pages import DEAD, DRAINERS, INCIDENTS, OVERVIEW, STAGED, body, page, text

SCRIPT = "<script>alert('x')</script>\"><img src=x onerror=alert(1)>"
#: Terminal codes, a bell, text that runs backwards, a line separator.
CODES = "\x1b[31mred\x07\u202egnp.exe\u2028\x9b"
VISIBLE = r"\x1b[31mred\x07\u202egnp.exe\u2028\x9b"


def body_of(response):
    return text(response).partition("Body: ")[2]


@pytest.fixture
def body_as_shown(superuser):
    def show(content, **envelope):
        row = staged_jobs(using="default", body=content, envelope=message(**envelope))[0]
        return body_of(superuser.get(page(row)))

    return show


def test_markup_in_every_column_is_escaped_on_every_page(alias, superuser):
    evil = dict.fromkeys(("task", "task_id", "queue", "ordering_key", "app"), SCRIPT)
    evil["body"] = json.dumps([[SCRIPT], {SCRIPT: 1}, {}]).encode()
    evil["envelope"] = message(
        headers={SCRIPT: SCRIPT, "eta": SCRIPT}, routing_key=SCRIPT, expires=SCRIPT
    )
    [staged] = staged_jobs(using=alias, **evil)
    [dead] = dead_jobs(using=alias, **evil, error=SCRIPT, reason=SCRIPT)
    [other] = dead_jobs(using=alias, **evil | {"envelope": SCRIPT}, error=SCRIPT, reason=SCRIPT)
    worker = drainer(alias, trouble=SCRIPT)
    incident = Incident.objects.using(alias).create(
        kind=SCRIPT[:20], first_id=1, last_id=2, shards=[SCRIPT], detail=SCRIPT, drainer=SCRIPT
    )
    form = {"action": "discard_selected", "_selected_action": dead.pk}
    for response in (
        *(superuser.get(url) for url in (STAGED, DEAD, DRAINERS, INCIDENTS, OVERVIEW)),
        *(superuser.get(page(row)) for row in (staged, dead, other, worker, incident)),
        superuser.get(DEAD, {"task": SCRIPT, "q": SCRIPT}),
        superuser.get(page(dead, "history")),
        superuser.post(DEAD, form),
        superuser.post(STAGED, {"action": "cancel_selected", "_selected_action": staged.pk}),
    ):
        content = body(response)
        assert "<script>alert" not in content
        assert "<img" not in re.sub(r'<img src="/static/[^>]*>', "", content)
        assert "&lt;script&gt;" in content or "<b>" not in content


def test_control_characters_are_shown_as_escapes_on_every_page(alias, superuser):
    evil = dict.fromkeys(("task", "task_id", "queue", "ordering_key", "app"), CODES)
    evil["body"] = json.dumps([[CODES], {}, {}]).encode()
    evil["envelope"] = message(headers={CODES: CODES}, routing_key=CODES)
    [staged] = staged_jobs(using=alias, **evil)
    [dead] = dead_jobs(using=alias, **evil, error=CODES, reason=CODES)
    worker = drainer(alias, trouble=CODES)
    incident = Incident.objects.using(alias).create(
        kind="unknown", first_id=1, last_id=2, detail=CODES, drainer=CODES
    )
    for response in (
        *(superuser.get(url) for url in (STAGED, DEAD, DRAINERS, INCIDENTS, OVERVIEW)),
        *(superuser.get(page(row)) for row in (staged, dead, worker, incident)),
        superuser.post(DEAD, {"action": "discard_selected", "_selected_action": dead.pk}),
        superuser.post(STAGED, {"action": "cancel_selected", "_selected_action": staged.pk}),
    ):
        content = body(response)
        assert VISIBLE in content
        assert not set(CODES) & set(content) - set("[31mredgnp.exe")


def test_json_is_decoded_and_readable(body_as_shown):
    shown = body_as_shown('[["naïve", {"a": [1, null]}], {}, {}]'.encode())
    assert "JSON, " in shown
    assert '[ [ "naïve", { "a": [ 1, null ] } ], {}, {} ]' in shown


class Explosive:
    def __reduce__(self):
        return (pytest.fail, ("a pickle was loaded",))


@pytest.mark.parametrize(
    ("content", "envelope", "said"),
    [
        (
            pickle.dumps(Explosive()),
            {"content_type": "application/x-python-serialize", "content_encoding": "binary"},
            "Opaque: application/x-python-serialize, ",
        ),
        (
            b"!!python/object/apply:os.system [id]",
            {"content_type": "application/x-yaml"},
            "Opaque: application/x-yaml, 36 bytes, not decoded.",
        ),
        (b"123", {"content_type": ""}, "Opaque: no content type, 3 bytes"),
        (
            b"\x28\xb5\x2f\xfd",
            {"headers": {"compression": "application/zstd"}},
            "Opaque: application/json, application/zstd, 4 bytes",
        ),
        (
            zlib.compress(b"[]"),
            {"headers": {"compression": "application/x-gzip"}},
            "Opaque: application/json, application/x-gzip, 10 bytes",
        ),
        (b"1", {"headers": {"compression": ["odd"]}}, "Opaque: application/json, ['odd'], 1"),
    ],
)
def test_anything_else_is_opaque(body_as_shown, content, envelope, said):
    shown = body_as_shown(content, **envelope)
    assert said in shown
    assert "os.system" not in shown


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b'["\\ud800 \\udfff"]', r'[ "\ud800 \udfff" ]'),
        (b'["\xff\xfe"]', r'["\xff\xfe"]'),
        (b'{"half": ', '{"half":'),
        (b"", "JSON, 0 bytes."),
        (b"\x00\x1b[2J", r"\x00\x1b[2J"),
        (b"[NaN, -Infinity]", "[ NaN, -Infinity ]"),
        (b"9" * 5000, "99999"),
        (b"[" * 100_000, "[[[[["),
        (b"[" * 900 + b"]" * 900, "["),
        (b'{"__type__": "uuid", "__value__": "x"}', '"__type__": "uuid"'),
    ],
)
def test_json_that_is_odd_or_damaged_is_shown(body_as_shown, content, said):
    assert said in body_as_shown(content)


@pytest.mark.parametrize("size", [20_000, 1_000_000, 3_000_000])
def test_a_large_message_is_cut(alias, superuser, size):
    content = json.dumps([["x" * size], {}, {}]).encode()
    [job] = dead_jobs(
        using=alias,
        body=content,
        envelope=message(headers={"h": "y" * size}),
        reason="z" * size,
    )
    response = superuser.get(page(job))
    shown = text(response)
    assert f"JSON, {len(content)} bytes." in shown
    assert shown.count("Cut: the first 10000 characters are shown.") == 2
    assert len(response.content) < 80_000
    assert len(superuser.get(DEAD).content) < 80_000


@pytest.mark.parametrize(
    "envelope",
    [
        "",
        "nonsense",
        "null",
        "[1]",
        '"text"',
        "[" * 5000,
        '{"headers": 5, "properties": [], "content_type": {"a": 1}, "expires": {}}',
        '{"headers": {"eta": ["x"], "compression": {}}, "content_type": null}',
        '{"headers": null}',
        '{"unknown": "\\ud800"}',
        "9" * 5000,
    ],
)
def test_a_damaged_envelope_is_shown_as_it_is(alias, superuser, envelope):
    [staged] = staged_jobs(using=alias, envelope=envelope)
    [dead] = dead_jobs(using=alias, envelope=envelope)
    for row in (staged, dead):
        shown = text(superuser.get(page(row)))
        assert "Opaque: " in shown
        if not envelope.startswith("{"):
            assert "The envelope is damaged" in shown
            assert envelope[:1000] in shown


def test_text_where_sqlite_should_hold_bytes_is_shown(superuser):
    [job] = dead_jobs(using="default")
    with connections["default"].cursor() as cursor:
        cursor.execute("UPDATE outbox_deadjob SET body = 'edited by hand', envelope = x'ff00'")
    assert "damaged" in text(superuser.get(page(job)))


def test_route_headers_and_times_are_shown(alias, superuser):
    envelope = message(
        exchange="shop",
        routing_key="mail",
        priority=7,
        headers={"traceparent": "00-abc", "eta": "2030-01-02T03:04:05+00:00"},
        expires="2031-01-01T00:00:00+00:00",
    )
    for rows in (staged_jobs, dead_jobs):
        [row] = rows(using=alias, envelope=envelope)
        shown = text(superuser.get(page(row)))
        assert "Due: 2030-01-02T03:04:05+00:00 Expires: 2031-01-01T00:00:00+00:00" in shown
        assert '"traceparent": "00-abc"' in shown
        assert '"exchange": "shop", "routing_key": "mail"' in shown
        assert '"priority": 7' in shown
        for name in ("task_id", "queue", "shard"):
            assert str(getattr(row, name)) in shown


def test_showing_a_row_does_not_change_it(alias, superuser):
    [job] = dead_jobs(using=alias, task=CODES, task_id=CODES, reason=CODES)
    before = DeadJob.objects.using(alias).values().get()
    superuser.get(page(job))
    superuser.get(DEAD)
    assert DeadJob.objects.using(alias).values().get() == before


def test_a_payload_never_raises():
    for odd in (None, b"", memoryview(b"\xff"), "text", "\ud800"):
        payload(StagedJob(**columns(body=odd, envelope="{}")))
        payload(dead_row(body=b"", envelope=odd))


@pytest.mark.parametrize("rows", [staged_jobs, dead_jobs])
@pytest.mark.parametrize(
    ("content", "shown"),
    [
        ([[1], {}, {}], "index_product(1)"),
        ([["a", None], {"on": True}, {}], "index_product('a', None, on=True)"),
        ([[], {"password": "hunter2"}, {}], "index_product(password='••••')"),
        ([["x" * 999], {}, {}], f"index_product('{'x' * 299}…)"),
        (
            json.loads(
                kombu_json.dumps([[UUID(int=7), [date(2026, 1, 2)]], {"n": Decimal(3)}, {}])
            ),
            f"index_product(uuid('{UUID(int=7).hex}'), [date('2026-01-02')], n=decimal('3'))",
        ),
        (
            [[{"__type__": "uuid", "__value__": {"hex": 7}}], {}, {}],
            "index_product({'__type__': 'uuid', '__value__': {'hex': 7}})",
        ),
        ({"task": "of the first protocol"}, "index_product(…)"),
    ],
)
def test_a_job_begins_with_its_call(alias, superuser, rows, content, shown):
    [row] = rows(using=alias, task="shop.tasks.index_product", body=json.dumps(content).encode())
    found = text(superuser.get(page(row)))
    assert f"Call: {shown} " in found
    assert found.index("Call: ") < found.index("Task: ")


def test_arguments_take_a_permission_and_a_body_that_is_decoded(alias, superuser, log_in):
    [row] = staged_jobs(using=alias, body=b"[[1], {}, {}]")
    assert "Call: send(…) " in text(log_in("viewer").get(page(row)))
    [row] = staged_jobs(using=alias, body=pickle.dumps(1), envelope=message(content_type="x"))
    assert "Call: send(…) " in text(superuser.get(page(row)))


@pytest.mark.parametrize("damage", [{"body": b"[[1]"}, {"envelope": "{"}])
def test_a_damaged_dead_job_says_so(alias, superuser, damage):
    [row] = dead_jobs(using=alias, **damage)
    assert "Call: The stored message is damaged, so no worker can" in text(superuser.get(page(row)))


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("takeover", "These jobs may have been sent twice. Idempotent tasks need nothing."),
        ("requeue", "A person staged dead jobs again."),
        ("contradiction", "It concerns no job."),
    ],
)
def test_an_incident_says_what_it_means_and_how_to_find_its_jobs(alias, superuser, kind, words):
    row = Incident.objects.using(alias).create(kind=kind, first_id=5, last_id=77)
    shown = text(superuser.get(page(row)))
    assert words in shown.partition("What it means: ")[2]
    assert ("These jobs had ids from 5 to 77" in shown) == (kind != "contradiction")


def test_an_incident_says_which_shards_as_the_overview_says_it(alias, superuser):
    shards = [3, *range(40, 61)]
    incident = Incident.objects.using(alias).create(
        kind="takeover", first_id=1, last_id=2, shards=shards
    )
    assert "Shards: 22 (3, 40-60)" in text(superuser.get(page(incident)))
