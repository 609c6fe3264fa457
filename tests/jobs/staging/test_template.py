"""Templates: what they make equals what Celery makes, and what they may not make they do not."""

from __future__ import annotations

import gc
import json
from contextvars import copy_context
from datetime import UTC, datetime
from functools import wraps
from itertools import count
from unittest import mock

import pytest
from celery import chord, group
from celery.app import base
from celery.app.amqp import AMQP
from celery.app.task import Task
from celery.signals import after_task_publish, before_task_publish, task_sent
from django.db import transaction
from hypothesis import event, given, settings
from hypothesis import strategies as st
from kombu.exceptions import EncodeError

from outbox_app import stage_many
from outbox_app.celery import OutboxCelery
from outbox_app.exceptions import InvalidJob
from outbox_app.jobs.message import Message
from outbox_app.jobs.staging import insert
from outbox_app.jobs.staging.calls import force_staging
from outbox_app.jobs.staging.producer import PAIRED
from outbox_app.jobs.staging.template import KINDS, Template, Templates
from outbox_app.models import StagedJob
from tests.jobs.staging import tasks

pytestmark = pytest.mark.django_db(transaction=True)

#: What the apps take for now, so that both ways give a countdown the same time.
NOW = datetime.now(UTC)

#: The app of linked signatures.
OTHER = OutboxCelery("other", set_as_current=False)

texts = st.text(max_size=5) | st.sampled_from(["%", "%(id)s", "'", '"', "callbacks", "chord", "🎈"])
scalars = st.none() | st.booleans() | st.integers() | st.floats() | texts
values = st.recursive(
    scalars
    | st.uuids()
    | st.datetimes()
    | st.decimals(allow_nan=False)
    | st.just("x" * 1100)
    | st.binary(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
headers = st.dictionaries(st.sampled_from(["trace", "root_id", "%"]), scalars, max_size=2)
#: Options that all jobs of a kind have in common.
shared = st.fixed_dictionaries(
    {},
    optional={
        "serializer": st.sampled_from(["json", "pickle", "yaml"]),
        "compression": st.sampled_from(["zlib", "bzip2"]),
        "queue": st.sampled_from(["a", "b"]),
        "priority": st.integers(0, 9),
        "headers": headers,
        "expiration": st.integers(1, 5),
        "argsrepr": st.sampled_from(["()", "<secret>", "%"]),
        "kwargsrepr": st.just("{}"),
        "root_id": st.just("id-0"),
        "correlation_id": st.just("id-0"),
        "parent_id": st.just("p"),
        "group_id": st.just("g"),
        "reply_to": st.just("answers"),
        "shadow": st.just("sum"),
        "time_limit": st.integers(1, 9),
        "ignore_result": st.booleans(),
        "delivery_mode": st.just("transient"),
        "add_to_parent": st.booleans(),
    },
)
#: Options of jobs that Celery makes.
by_celery = st.sampled_from(
    [
        {"countdown": 5},
        {"expires": 3000},
        {"eta": NOW},
        {"stamped_headers": ["stamp"], "stamp": "s"},
        {"link": OTHER.signature("other")},
        {"headers": {"id": "mine"}},
    ]
)
own = st.fixed_dictionaries(
    {},
    optional={
        "task_id": st.sampled_from(["mine", "ß", "%"]),
        "group_index": st.integers(0, 3),
        "ordering_key": st.sampled_from(["k", "ß"]),
    },
)
jobs = st.lists(
    st.tuples(
        st.sampled_from(["plain", "options"]),
        st.lists(values, max_size=2),
        st.dictionaries(st.sampled_from("xyz"), values, max_size=2),
        own,
    ),
    min_size=4,
    max_size=9,
)
conf = st.fixed_dictionaries(
    {},
    optional={
        "task_serializer": st.sampled_from(["json", "pickle", "yaml"]),
        "task_compression": st.sampled_from(["zlib"]),
        "task_send_sent_event": st.booleans(),
        "task_routes": st.sampled_from(
            [{"any*": {"queue": "a", "argsrepr": "routed"}}, {"any": {"headers": {"h": 1}}}]
        ),
        "task_repr_maxlevels": st.integers(1, 4),
    },
)


def made(app, signatures, options, *, with_templates):
    """Return the columns of the rows that a call makes, and how many a template has made."""
    batch, templates = insert.StagedBatch(), Templates(ordering_key="")
    by_celery = []

    def run():
        insert.collect_in(batch)
        with force_staging(using="default"):
            for signature in signatures:

                def long_way(signature=signature):
                    by_celery.append(signature)
                    signature.apply_async(**options)

                if with_templates:
                    templates.stage(signature, None, None, options, long_way)
                else:
                    long_way()

    with mock.patch.object(base, "uuid", side_effect=map("id-{}".format, count())):
        copy_context().run(run)
    columns = {field.name for field in StagedJob._meta.concrete_fields} - {"staged_at"}
    rows = [{name: getattr(job, name) for name in columns} for job in batch.waiting["default"]]
    return rows, len(rows) - len(by_celery)


def app_with_tasks(**conf):
    app = OutboxCelery("a", broker="memory://", set_as_current=False)
    app.conf.update(conf)
    app.now = lambda: NOW
    app.task(name="anything", shared=False)(tasks.anything)
    return app


@given(conf=conf, jobs=jobs, shared=shared, options=shared | st.just({}) | by_celery)
@settings(deadline=None)
def test_a_template_makes_what_celery_makes(conf, jobs, shared, options):
    app = app_with_tasks(**conf)
    kinds = {"plain": {}, "options": shared}

    def signatures():
        for kind, args, kwargs, alone in jobs:
            yield app.tasks["anything"].s(*args, **kwargs).set(**kinds[kind], **alone)

    try:
        expected, error = made(app, signatures(), options, with_templates=False)[0], None
    except Exception as raised:  # of Celery's, or of ours
        expected, error = None, raised
    if error is not None:
        with pytest.raises(type(error)):
            made(app, signatures(), options, with_templates=True)
    else:
        rows, by_template = made(app, signatures(), options, with_templates=True)
        event(f"by a template: {by_template > 0}")
        assert rows == expected
    app.close()


#: Options and settings with which a template is used.
USED = {
    "nothing": ({}, {}),
    "pickle": ({"serializer": "pickle", "compression": "zlib"}, {}),
    "yaml": ({}, {"task_serializer": "yaml"}),
    "options": (
        {"queue": "a", "priority": 3, "headers": {"h": [1]}, "argsrepr": "?", "root_id": "r"},
        {},
    ),
    "route": ({}, {"task_routes": {"any*": {"queue": "a"}}}),
    "event": ({}, {"task_send_sent_event": True}),
    "ids of their own": ({"task_id": "mine"}, {}),
    "key": ({"ordering_key": "k"}, {}),
}


@pytest.mark.parametrize(("options", "conf"), USED.values(), ids=USED)
def test_a_template_makes_all_but_two(options, conf):
    app = app_with_tasks(**conf)
    task = app.tasks["anything"]
    signatures = [task.s(i, x=f"{i}%").set(**options) for i in range(5)]

    rows, by_template = made(app, signatures, {}, with_templates=True)

    assert rows == made(app, signatures, {}, with_templates=False)[0]
    assert by_template == 3
    app.close()


def test_a_chosen_text_that_is_also_the_first_job_s_stays_in_the_event():
    app = app_with_tasks(task_send_sent_event=True)
    task, options = app.tasks["anything"], {"argsrepr": "()", "kwargsrepr": "{}"}
    signatures = [task.s(), task.s(), task.s(1, x=1)]
    rows, by_template = made(app, signatures, options, with_templates=True)
    assert rows == made(app, signatures, options, with_templates=False)[0]
    assert by_template == 1
    app.close()


def test_kinds_are_forgotten_so_that_memory_stays_bounded():
    """As where each job has headers of its own."""
    app = app_with_tasks()
    task = app.tasks["anything"]
    others = [task.s().set(headers={"tenant": i}) for i in range(KINDS)]
    assert made(app, [task.s(), *others[:-1], task.s(), task.s()], {}, with_templates=True)[1] == 1
    assert made(app, [task.s(), *others, task.s(), task.s()], {}, with_templates=True)[1] == 0
    app.close()


def _router(name, *args, **kwargs):
    return {"queue": "routed"}


class OwnAMQP(AMQP):
    def as_task_v2(self, *args, **kwargs):
        return super().as_task_v2(*args, **kwargs)


class OwnTask(Task):
    def apply_async(self, *args, **kwargs):
        return super().apply_async(*args, **kwargs)


class Named(Task):
    def shadow_name(self, args, kwargs, options):
        return f"shadow-{args}"


class Between(OutboxCelery):
    def send_task(self, *args, **kwargs):
        return super().send_task(*args, **kwargs)


#: Options, settings, and classes of the app, with which Celery makes each job.
BY_CELERY = {
    "countdown": ({"countdown": 5}, {}, {}),
    "expires": ({"expires": 5}, {}, {}),
    "eta": ({"eta": NOW}, {}, {}),
    "link": ({"link": OTHER.signature("other")}, {}, {}),
    "stamp": ({"stamped_headers": ["s"], "s": 1}, {}, {}),
    "router": ({}, {"task_routes": _router}, {}),
    "as_task_v2": ({}, {}, {"amqp": OwnAMQP}),
    "apply_async": ({}, {}, {"task_cls": OwnTask}),
    "shadow_name": ({}, {}, {"task_cls": Named}),
    "send_task": ({}, {}, {"class": Between}),
}


@pytest.mark.parametrize(("options", "conf", "classes"), BY_CELERY.values(), ids=BY_CELERY)
def test_celery_makes_what_anything_else_may_see(options, conf, classes):
    kinds = dict(classes)
    cls = kinds.pop("class", OutboxCelery)
    app = cls("a", broker="memory://", set_as_current=False, **kinds)
    app.conf.update(conf)
    app.now = lambda: NOW
    task = app.task(name="anything", shared=False)(tasks.anything)
    signatures = [task.s(i).set(**options) for i in range(5)]

    rows, by_template = made(app, signatures, {}, with_templates=True)

    assert (len(rows), by_template) == (5, 0)
    app.close()


def test_a_wrapper_of_celery_s_own_is_called_for_each_job(monkeypatch):
    """As Sentry's, which has the name and the module of what it wraps."""
    called, own = [], Task.apply_async

    @wraps(own)
    def apply_async(self, args=None, kwargs=None, **options):
        called.append(args)
        return own(self, args, kwargs, **options)

    monkeypatch.setattr(Task, "apply_async", apply_async)
    app = app_with_tasks()
    made(app, [app.tasks["anything"].s(i) for i in range(5)], {}, with_templates=True)
    assert called == [(i,) for i in range(5)]
    app.close()


def test_what_was_chosen_is_not_taken_for_what_follows_from_a_job():
    """The first two jobs have the arguments that their ``argsrepr`` shows, the others do not."""
    app = app_with_tasks()
    task = app.tasks["anything"]
    signatures = [task.s(*([i] if i > 1 else [])).set(argsrepr="()") for i in range(5)]

    rows, by_template = made(app, signatures, {}, with_templates=True)

    shown = [json.loads(row["envelope"])["headers"]["argsrepr"] for row in rows]
    assert (shown, by_template) == (["()"] * 5, 3)
    app.close()


@pytest.mark.parametrize("signal", [before_task_publish, task_sent], ids=["before", "sent"])
def test_a_receiver_that_comes_meanwhile_sees_the_jobs_from_there(signal):
    app, seen = app_with_tasks(), []

    def receiver(sender, **facts):
        seen.append(sender)

    receiver.__module__ = PAIRED[0] if signal is task_sent else "project"

    def signatures():
        for i in range(6):
            if i == 4:
                signal.connect(receiver, weak=False)
            yield app.tasks["anything"].s(i)

    # The app keeps the list of receivers, in whose place Celery 5.5 puts another one when it
    # removes receivers that are gone.
    gc.collect()
    with signal.lock:
        signal._clear_dead_receivers()
    try:
        made(app, signatures(), {}, with_templates=True)
    finally:
        signal.disconnect(receiver)
    assert seen == ["anything"] * 2
    app.close()


@pytest.fixture
def spans():
    """``spans``: what a tracer has seen; it adds a header to each message."""
    found = []

    def before(sender, headers, properties, **facts):
        headers["traceparent"] = f"span of {headers['id']}"
        kept = {name: facts[name] for name in ("body", "exchange", "routing_key", "declare")}
        found.append(("begin", sender, {**headers}, {**properties}, kept))

    def after(sender, headers, **facts):
        found.append(("end", sender, {**headers}, facts["body"], facts["routing_key"]))

    for receiver in (before, after):
        receiver.__module__ = f"{PAIRED[0]}.somewhere"
    before_task_publish.connect(before, weak=False)
    after_task_publish.connect(after, weak=False)
    yield found
    before_task_publish.disconnect(before)
    after_task_publish.disconnect(after)


@pytest.mark.parametrize("options", [{}, {"compression": "zlib", "headers": {"h": "1"}}])
def test_a_tracer_is_called_for_each_job_with_its_message(options, spans):
    app = app_with_tasks()
    task = app.tasks["anything"]

    def seen(**how):
        spans.clear()
        result = made(app, [task.s(i).set(**options) for i in range(5)], {}, **how)
        return result, json.loads(json.dumps(spans, default=repr))

    (expected, _), expected_spans = seen(with_templates=False)
    (rows, by_template), found = seen(with_templates=True)

    assert (rows, by_template) == (expected, 3)
    assert found == expected_spans
    assert [each[0] for each in found] == ["begin", "end"] * 5
    app.close()


def test_a_tracer_s_span_ends_where_a_job_is_refused(spans, app, settings):
    task = app.task(name="anything", shared=False)(tasks.anything)
    settings.OUTBOX = {**settings.OUTBOX, "MAX_MESSAGE_BYTES": 4000}
    with transaction.atomic(), pytest.raises(InvalidJob, match="at most 4000"):
        stage_many(task.s("x" * (4000 if i == 4 else 1)) for i in range(9))
    assert [each[0] for each in spans] == ["begin", "end"] * 5
    assert not StagedJob.objects.exists()


#: The fault of the fifth job.
BAD = {
    "an argument too few": (lambda task: task.s(1), TypeError),
    "no JSON": (lambda task: task.s(1, object()), EncodeError),
    "a key with a control character": (
        lambda task: task.s(1, 2).set(ordering_key="\n"),
        InvalidJob,
    ),
    "an id that is too long": (lambda task: task.s(1, 2).set(task_id="x" * 300), InvalidJob),
    "too large": (lambda task: task.s(1, "x" * 5000), InvalidJob),
}


@pytest.mark.parametrize(("bad", "error"), BAD.values(), ids=BAD)
def test_each_job_is_checked_as_celery_s_are(bad, error, app, add, settings):
    settings.OUTBOX = {**settings.OUTBOX, "MAX_MESSAGE_BYTES": 4000}
    with transaction.atomic():
        with pytest.raises(error) as alone:
            bad(add).delay()
        with pytest.raises(error) as many:
            stage_many(bad(add) if i == 4 else add.s(i, i) for i in range(9))
    assert type(many.value) is type(alone.value)
    assert not StagedJob.objects.exists()


@pytest.fixture
def by_template(monkeypatch):
    """``by_template``: the jobs that templates have staged."""
    found, own = [], Template.stage

    def stage(self, job, batch):
        found.append(job)
        own(self, job, batch)

    monkeypatch.setattr(Template, "stage", stage)
    return found


@pytest.mark.parametrize("kind", ["group", "chord"])
def test_the_tasks_of_a_group_are_made_by_a_template(kind, app, add, by_template):
    tasks_ = [add.s(i, i) for i in range(6)]
    canvas = group(tasks_) if kind == "group" else chord(tasks_, add.si(0, 0))
    with transaction.atomic():
        result = canvas.delay()
    results = (result if kind == "group" else result.parent).results

    rows = list(StagedJob.objects.order_by("id"))
    found = [Message.loads(job.envelope).headers for job in rows]
    assert len(by_template) == 4
    assert [each["id"] for each in found] == [each.id for each in results]
    assert [each["group_index"] for each in found] == list(range(6))
    assert {each["group"] for each in found} == {(result if kind == "group" else result.parent).id}
    bodies = [json.loads(bytes(job.body)) for job in rows]
    assert all(bool(body[2]["chord"]) == (kind == "chord") for body in bodies)


def test_one_key_for_all_jobs_of_a_group(app, add, by_template):
    from outbox_app import stage

    with transaction.atomic():
        stage(group(add.s(i, i) for i in range(5)), ordering_key="k")
    assert {(job.ordering_key, job.shard) for job in StagedJob.objects.all()} == {
        ("k", insert.shard_of_job("k", ""))
    }
    assert len(by_template) == 3


def test_a_worker_s_task_knows_the_jobs_that_it_has_staged(app, add, by_template):
    children = []

    @app.task(bind=True, shared=False, name="parent")
    def parent(self):
        with transaction.atomic():
            stage_many(add.s(i, i) for i in range(5))
        children.extend(self.request.children)

    parent.apply().get()
    rows = list(StagedJob.objects.order_by("id"))
    assert [child.id for child in children] == [job.task_id for job in rows]
    found = [Message.loads(job.envelope).headers for job in rows]
    assert len({each["parent_id"] for each in found}) == 1
    assert len(by_template) == 3


def test_a_result_is_not_waited_for_in_the_transaction(app, add, by_template):
    from outbox_app.exceptions import StillStaged

    with transaction.atomic():
        stage_many(add.s(i, i).set(task_id=f"id-{i}") for i in range(5))
        assert by_template
        with pytest.raises(StillStaged):
            app.AsyncResult("id-4").get()
