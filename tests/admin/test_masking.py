"""Only users with permission see the content of rows, and no user sees sensitive values."""

from __future__ import annotations

import json
from cProfile import Profile

import pytest

from outbox_app.admin.masking import MASK, masked, masked_line, masked_text
from outbox_app.admin.payload import data_of
from tests.jobs.dead.rows import dead_jobs, message, staged_jobs

from ..events.test_admin import publish
from .pages import DEAD, STAGED, body, hidden, page, text
from .test_lists import listed

SECRET = "hunter-2"
HIDDEN = "Hidden: this needs the permission outbox_"


def job(alias, rows=staged_jobs, **given):
    return rows(using=alias, **given)[0]


@pytest.mark.parametrize("rows", [staged_jobs, dead_jobs])
def test_messages_take_a_permission(alias, log_in, rows):
    envelope = message(headers={"h": SECRET, "argsrepr": SECRET}, properties={"p": SECRET})
    row = job(alias, rows, body=json.dumps([[SECRET], {}, {}]).encode(), envelope=envelope)
    name = row._meta.model_name
    shown = text(log_in("viewer").get(page(row)))
    assert SECRET not in shown
    assert shown.count(f"{HIDDEN}app.view_payload_{name}.") == 3
    assert row.task_id in shown
    shown = text(
        log_in("staff", permissions=[f"view_{name}", f"view_payload_{name}"]).get(page(row))
    )
    assert shown.count(SECRET) == 5  # in the call, too
    assert HIDDEN not in shown


@pytest.mark.django_db(transaction=True)
def test_events_take_a_permission(alias, log_in, new_log):
    publish(alias, "s", data={"d": SECRET}, metadata={"m": SECRET})
    from outbox_app.events.models import Event

    event = Event.objects.using(alias).get()
    shown = text(log_in("viewer", permissions=["view_event"]).get(page(event)))
    assert SECRET not in shown
    assert shown.count(f"{HIDDEN}events.view_payload_event.") == 2
    may = ["view_event", "view_payload_event"]
    assert text(log_in("staff", permissions=may).get(page(event))).count(SECRET) == 2


@pytest.mark.parametrize(
    "key",
    ["password", "PASSWORD", "user_password_2", "passwd", "apiKey", "X-API-Key", "api key", "IBAN",
     "Set-Cookie", "privateKey", "access_token", "card_number", "cvv", "ssn", "pass word"],
)  # fmt: skip
def test_sensitive_values_are_masked_at_any_depth(key):
    given = {"a": [{"b": {key: {"deep": SECRET}}}, {key: SECRET}, [key.replace(" ", "_"), SECRET]]}
    found = json.dumps(masked(given), ensure_ascii=False)
    assert SECRET not in found
    assert found.count(MASK) == 3


@pytest.mark.parametrize("key", ["name", "passage", "ap_i", "", "authors", "order"])
def test_others_are_not(key):
    given = {"a": [{key: SECRET}, [key, SECRET], {"text": "my password is"}]}
    assert masked(json.loads(json.dumps(given))) == given


@pytest.mark.parametrize("key", ["password", "p\\u0061ssword"])
def test_json_in_a_text_is_not_shown_where_it_may_be_sensitive(alias, superuser, key):
    text_of_json = f' {{"{key}": "{SECRET}"}}'
    given = [[text_of_json, f"[{text_of_json}]"], {"data": text_of_json, "ok": '{"a": 1}'}, {}]
    shown = text(superuser.get(page(job(alias, body=json.dumps(given).encode()))))
    assert SECRET not in shown
    assert shown.count("Not shown: it may hold sensitive values.") == 3
    assert r'"ok": "{\"a\": 1}"' in shown


@pytest.mark.parametrize(
    "words",
    ["https://shop.example/reset?token=%s&u=7", "user=ann&password=%s", "data: {'api_key': '%s'}",
     "mail to ann, secret: %s"],
)  # fmt: skip
def test_values_that_are_recognised_in_a_text_are_masked(alias, superuser, words):
    """As in the link of a mail: its repr among the headers is not shown at all."""
    given = [[words % SECRET], {"url": [words % SECRET]}, {}]
    envelope = message(headers={"argsrepr": repr(given[0]), "h": words % SECRET})
    shown = text(
        superuser.get(page(job(alias, body=json.dumps(given).encode(), envelope=envelope)))
    )
    assert SECRET not in shown
    assert shown.count(MASK) == 5  # two of them in the call


@pytest.mark.parametrize("depth", [1, 2])
def test_a_text_that_is_all_there_is_may_be_json_too(depth):
    given = {"token": SECRET}
    for _ in range(depth):
        given = json.dumps(given)
    assert SECRET not in data_of(given).text
    assert SECRET not in data_of([given]).text
    assert data_of("plain").text == '"plain"'


def test_many_texts_take_no_longer_than_one():
    """A call of a megabyte may have a hundred thousand: each made the expression anew."""
    with Profile() as profile:
        masked(["token=1"] * 1000)
    assert sum(each.callcount for each in profile.getstats()) < 50_000


def test_depth_is_no_way_around():
    deep = leaf = {}
    for _ in range(50_000):
        leaf["a"] = {}
        leaf = leaf["a"]
    leaf["token"] = SECRET
    masked(deep)
    assert leaf["token"] == MASK


def test_masked_everywhere_on_the_page_for_a_superuser(alias, superuser):
    kwargs = {"password": SECRET, "ok": "seen"}
    envelope = message(
        headers={
            "Authorization": f"Bearer {SECRET}",
            "kwargsrepr": repr(kwargs),
            "argsrepr": "('plain',)",
            "nested": [{"cookie": SECRET}],
        },
        properties={"application_headers": {"x-secret": SECRET}},
        sent_event={"kwargs": repr(kwargs), "uuid": "u"},
    )
    content = json.dumps([[{"iban": SECRET}], kwargs, {"chord": {"token": SECRET}}]).encode()
    for rows in (staged_jobs, dead_jobs):
        row = job(alias, rows, body=content, envelope=envelope)
        shown = text(superuser.get(page(row)))
        assert SECRET not in shown
        assert '"ok": "seen"' in shown
        assert '"argsrepr": "(\'plain\',)"' in shown
        assert shown.count("Not shown: it may hold sensitive values.") == 2
        assert shown.count(MASK) == 8  # two of them in the call


@pytest.mark.parametrize("key", ["password", "X-API-Key", "apiKey", "Straße", "PIN"])
def test_a_search_does_not_tell_what_is_masked(alias, superuser, settings, key):
    settings.OUTBOX = {
        **settings.OUTBOX, "SENSITIVE_KEYS": ["pass word", "api_key", "straße", "pin", "card"],
    }  # fmt: skip
    for rows, url in ((staged_jobs, STAGED), (dead_jobs, DEAD)):
        headers = {"task": "shop.charge_card", "argsrepr": f"('{SECRET}',)"}
        rows(using=alias, task_id="told", task=headers["task"], envelope=message(headers=headers))
        rows(using=alias, task_id="repr",
             envelope=message(headers={"kwargsrepr": repr({key: SECRET})}))  # fmt: skip
        rows(using=alias, task_id="header", envelope=message(headers={key: SECRET}))
        assert listed(superuser.get(url, {"q": SECRET})) == ["told"]
    address = f"{DEAD}?q={SECRET}"
    every = {"action": "discard_selected", "select_across": "1", "_selected_action": "0"}
    question = superuser.post(address, every)
    superuser.post(address, {**hidden(question), "confirmed": "yes", "reason": "why"})
    assert sorted(listed(superuser.get(DEAD))) == ["header", "repr"]


@pytest.mark.django_db(transaction=True)
def test_masked_in_events(alias, superuser, new_log):
    publish(alias, "s", data={"card": SECRET, "a": 1}, metadata={"session_cookie": SECRET})
    from outbox_app.events.models import Event

    shown = text(superuser.get(page(Event.objects.using(alias).get())))
    assert SECRET not in shown
    assert '"a": 1' in shown
    assert Event.objects.using(alias).get().data == {"card": SECRET, "a": 1}


@pytest.mark.parametrize(
    ("content", "envelope"),
    [
        (b'{"password": "%s", ' % SECRET.encode(), None),
        (b'{"p\\u0061ssword": "%s", ' % SECRET.encode(), None),
        (b"[]", f'{{"headers": {{"token": "{SECRET}"'),
        (json.dumps([["x" * 2_000_000], {"password": SECRET}, {}]).encode(), None),
        (json.dumps([[{"token": SECRET}, "x" * 2_000_000], {}, {}]).encode(), None),
    ],
)
def test_what_is_no_json_is_not_shown_where_it_may_be_sensitive(
    alias, superuser, content, envelope
):
    row = job(alias, body=content, **({"envelope": envelope} if envelope else {}))
    assert SECRET not in body(superuser.get(page(row)))


def test_the_words_are_a_setting(alias, superuser, settings):
    settings.OUTBOX = {**settings.OUTBOX, "SENSITIVE_KEYS": ["Straße"]}
    content = json.dumps([[], {"strasse": SECRET, "password": "seen"}, {}]).encode()
    shown = text(superuser.get(page(job(alias, body=content))))
    assert SECRET not in shown
    assert "seen" in shown
    settings.OUTBOX = {**settings.OUTBOX, "SENSITIVE_KEYS": ()}
    assert SECRET in text(superuser.get(page(job(alias, body=content))))


@pytest.mark.parametrize(
    "words",
    [
        "bad password=%s", "{'api_key': '%s', 'b': 1}", 'no "token": "%s" here', "IBAN: %s!",
        "Authorization: Bearer %s", "Authorization: Token %s", "card_number = %s, x", "secret='%s",
        r'400 for {"body": "{\"token\": \"%s\"}"}', "401 for https://ann:%s@api.example/orders",
        f"https://oauth2:{'ya29' * 99}%s@pkg.example", "{'token' => '%s'}", "if token == '%s':",
    ],
)  # fmt: skip
def test_an_exceptions_words_are_masked_as_far_as_they_are_seen(alias, superuser, words):
    assert SECRET not in masked_text(words % SECRET)
    row = job(alias, dead_jobs, reason=words % SECRET)
    assert SECRET not in body(superuser.get(page(row)))
    assert SECRET not in body(superuser.get(DEAD))
    form = {"action": "discard_selected", "_selected_action": row.pk}
    assert SECRET not in body(superuser.post(DEAD, form))


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (
            "OSError: timed out after 10 s\nHandling 1 to 3\n",
            "OSError: timed out after 10 s; Handling 1 to 3",
        ),
        ("OSError: no.\n\n  It is away", "OSError: no. It is away"),
        ("a b\tc", "a b c"),
    ],
)
def test_lines_are_told_apart_on_one(words, line):
    assert masked_line(words, 200) == line


@pytest.mark.parametrize("words", ["KeyError: 'token'", "the password is wrong", "x=1, y: 2",
                                   "http://a:80,http://b:81/?mail=ann@shop.example"])  # fmt: skip
def test_other_words_stay(words):
    assert masked_text(words) == words
