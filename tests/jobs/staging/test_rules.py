"""Which calls stage, which are sent directly, and which are refused: the table of ``sending``."""

from __future__ import annotations

from contextlib import suppress

import pytest
from celery import VERSION, chain, chord, group
from celery.contrib.django.task import DjangoTask
from celery.exceptions import Ignore
from django.db import transaction
from kombu.exceptions import LimitExceeded, OperationalError

from outbox_app.exceptions import InvalidJob, NotAtomic
from outbox_app.models import StagedJob
from tests.jobs.staging import tasks
from tests.jobs.staging.transactions import rolled_back
from tests.servers import free_port

pytestmark = pytest.mark.django_db(transaction=True)

#: Each sends add(1, 1), some more than that.
FORMS = {
    "delay": lambda add: add.delay(1, 1),
    "apply_async": lambda add: add.apply_async((1, 1), countdown=10),
    "send_task": lambda add: add.app.send_task("add", (1, 1)),
    "signature": lambda add: add.s(1, 1).delay(),
    "chain": lambda add: chain(add.s(1, 1), add.s(2)).delay(),
    "group": lambda add: group(add.s(1, 1), add.s(2, 2)).delay(),
    "chord": lambda add: chord([add.s(1, 1), add.s(2, 2)], add.s(3)).delay(),
    "chord without a header": lambda add: chord([], add.si(1, 1)).delay(),
    "chunks": lambda add: add.chunks([(1, 1)], 1).group().delay(),
}
#: Celery marks the tasks of the outermost chain as a replacement, not those of a chain in it.
REPLACEMENTS = {
    "task": lambda add: add.s(1, 1),
    "group": lambda add: group(add.s(1, 1), add.s(2, 2)),
    "chord": lambda add: chord([add.s(1, 1), add.s(2, 2)], add.s(3)),
    "chain": lambda add: add.s(1, 1) | add.s(2),
    "chain of a chain": lambda add: chain(add.s(1, 1) | add.s(2)),
    "chain of a chain that ends in a group": lambda add: chain(
        add.s(1, 1) | group(add.s(2), add.s(3))
    ),
}
#: Where "alias" is such a parameter, and no fixture, the outbox is on "default" all the same.
on_sqlite = pytest.mark.parametrize("alias", ["default"])
beside_postgres = pytest.mark.parametrize("alias", ["postgres"])
each_form = pytest.mark.parametrize("send", FORMS.values(), ids=FORMS)


@each_form
def test_inside_atomic_on_the_outbox_alias_it_is_staged(send, alias, add, staged, sent):
    with transaction.atomic(using=alias):
        send(add)
        here = staged()

    assert here
    assert staged() == here
    assert not sent()


@on_sqlite
@each_form
def test_what_is_rolled_back_was_never_staged(send, alias, add, staged, sent):
    with rolled_back(alias):
        send(add)

    assert not staged()
    assert not sent()


def test_a_chord_whose_header_is_a_generator_is_unrolled_where_it_is_staged(alias, add, staged):
    made = []

    def parts():
        for number in range(3):
            made.append(number)
            yield add.s(number, number)

    with transaction.atomic(using=alias):
        chord(parts())(add.si(9, 9))
        assert made == [0, 1, 2]
        assert len(staged()) == 3


def test_what_is_sent_on_purpose_before_an_error_leaves_with_a_connection(alias, add, staged, sent):
    with rolled_back(alias), add.app.connection_for_write() as connection:
        add.apply_async((1, 1), connection=connection)

    assert not staged()
    assert len(sent()) == 1


@on_sqlite
@pytest.mark.parametrize("canvas", REPLACEMENTS.values(), ids=REPLACEMENTS)
@pytest.mark.parametrize("backend", ["cache+memory://", "file:///tmp"], ids=["counts", "polled"])
def test_what_replaces_a_task_is_sent_though_its_transaction_is_rolled_back(
    backend, canvas, alias, app, add, staged, sent
):
    app.conf.update(result_backend=backend, task_allow_error_cb_on_chord_header=True)
    replaced = app.task(name="replaced", bind=True, shared=False)(tasks.bound)
    rest = {"errbacks": [add.si(8, 8)], "chain": [add.s(9)]}
    replaced.push_request(id="t-1", called_directly=False, **rest)
    try:
        with pytest.raises(Ignore), transaction.atomic(using=alias):
            replaced.replace(canvas(add))
    finally:
        replaced.pop_request()

    assert sent()


@pytest.mark.parametrize("form", ["delay", "group", "chord"])
def test_a_savepoint_takes_its_jobs_with_it(form, alias, add, staged):
    with transaction.atomic(using=alias):
        add.delay("before", 0)
        with rolled_back(alias):
            FORMS[form](add)
        with transaction.atomic(using=alias):
            add.delay("after", 0)

    assert staged() == [["before", 0], ["after", 0]]


@on_sqlite
@each_form
def test_outside_a_transaction_it_is_sent(send, alias, add, staged, sent):
    send(add)

    assert sent()
    assert not staged()


@on_sqlite
@each_form
def test_outside_a_transaction_it_is_staged_where_the_setting_says_so(
    send, alias, add, staged, sent, settings
):
    settings.OUTBOX = {**settings.OUTBOX, "OUTSIDE": "stage"}

    send(add)

    assert staged()
    assert not sent()


@on_sqlite
@each_form
def test_outside_a_transaction_it_is_refused_where_the_setting_says_so(
    send, alias, add, staged, sent, settings
):
    settings.OUTBOX = {**settings.OUTBOX, "OUTSIDE": "refuse"}

    with pytest.raises(
        NotAtomic, match=r"called outside a transaction, and OUTBOX\['OUTSIDE'\] is 'refuse'"
    ):
        send(add)

    assert not staged()
    assert not sent()


@each_form
@beside_postgres
@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_inside_atomic_on_another_alias_it_is_refused(send, alias, add, sent):
    with (
        transaction.atomic(using=alias),
        pytest.raises(NotAtomic, match=r"atomic\(using='postgres'\).*staged on 'default'"),
    ):
        send(add)

    assert not sent()
    assert not StagedJob.objects.exists()


@beside_postgres
@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_inside_both_it_is_staged_on_the_outbox_alias(alias, add):
    with transaction.atomic(using=alias), transaction.atomic(using="default"):
        add.delay(1, 1)

    assert StagedJob.objects.using("default").count() == 1
    assert not StagedJob.objects.using(alias).exists()


@beside_postgres
@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_using_names_the_alias_of_one_call(alias, add, sent):
    with transaction.atomic(using=alias):
        add.apply_async((1, 1), using=alias)
        group(add.s(2, 2), add.s(3, 3)).apply_async(using=alias)
        chord([add.s(1), add.s(2)], add.s(3)).apply_async((1,), using=alias)
        (add.s(4, 4) | add.s(5)).apply_async(using=alias)

    assert StagedJob.objects.using(alias).count() == 6
    assert not StagedJob.objects.using("default").exists()
    assert not sent()


@beside_postgres
@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_using_names_an_alias_without_a_result_backend_that_is_up(alias, make_app):
    app = make_app(result_backend=f"redis://127.0.0.1:{free_port()}/1")
    add = app.task(name="add", shared=False)(tasks.add)
    with transaction.atomic(using=alias):
        group(add.s(2, 2), add.s(3, 3)).apply_async(using=alias)
        chain(add.s(4, 4), group(add.s(5), add.s(6))).apply_async(using=alias)
    assert StagedJob.objects.using(alias).count() == 3


@on_sqlite
def test_in_a_transaction_of_the_test_case_it_is_staged(alias, add, staged, sent):
    # What django.test.TestCase and a test with plain django_db do around each test.
    with transaction.atomic(using=alias, durable=False):
        add.delay(1, 1)
        assert staged() == [[1, 1]]
        transaction.set_rollback(True, using=alias)
    assert not staged()
    assert not sent()


@on_sqlite
@pytest.mark.parametrize("option", ["producer", "publisher"])
def test_with_a_producer_it_is_sent(option, alias, app, add, staged, sent):
    with transaction.atomic(using=alias), app.producer_pool.acquire(block=True) as producer:
        add.apply_async((1, 1), **{option: producer})
        add.s(2, 2).apply_async(**{option: producer})

    assert sent() == [[1, 1], [2, 2]]
    assert not staged()


@on_sqlite
def test_with_a_connection_it_is_sent(alias, app, add, staged, sent):
    with transaction.atomic(using=alias), app.connection_for_write() as connection:
        add.apply_async((1, 1), connection=connection)

    assert sent() == [[1, 1]]
    assert not staged()


@on_sqlite
def test_with_a_connection_the_reply_queue_is_made_before(alias, make_app, rabbitmq_url):
    """Or an early result would be dropped, as Celery's ``rpc://`` knows no other time for it."""
    app = make_app(rabbitmq_url, result_backend="rpc://")
    add = app.task(name="add", shared=False)(tasks.add)
    with transaction.atomic(using=alias), app.connection_for_write() as connection:
        add.apply_async((1, 1), connection=connection)
        app.backend.binding(connection.default_channel).queue_declare(passive=True)


@on_sqlite
def test_by_name_a_task_is_sent_without_amqps_option_immediate(
    alias, make_app, rabbitmq_url, sent_by
):
    """RabbitMQ closes the connection for it, and the message is lost."""
    app = make_app(rabbitmq_url, broker_transport_options={"confirm_publish": True})
    app.task(name="add", immediate=True, shared=False, lazy=False)(tasks.add)
    app.send_task("add", (1, 1))

    assert sent_by(app) == [[1, 1]]


@on_sqlite
def test_a_producer_taken_by_hand_publishes_at_once(alias, app, add, staged, sent):
    with transaction.atomic(using=alias), app.producer_or_acquire() as producer:
        body = ((7, 7), {}, {})
        producer.publish(body, routing_key=app.main, serializer="json", retry=True)
        add.apply_async((1, 1), producer=producer)
        assert sent() == [[7, 7]]
        assert not staged()

    assert staged() == [[1, 1]], "what is not a raw message is staged when the block ends"


@on_sqlite
@pytest.mark.parametrize("form", [group, lambda header: chord(header, header[0].clone((3,)))])
def test_a_canvas_of_two_apps_stages_what_is_the_outboxs(
    form, alias, add, plain, plain_add, staged, sent, sent_by
):
    """Celery sends a group with the producer of its first task's app, here a plain one."""
    tasks_of_both = [plain_add.s(1, 1), add.s(2, 2)]
    with rolled_back(alias):
        form(tasks_of_both).delay()
    with transaction.atomic(using=alias):
        form(tasks_of_both).delay()
    assert staged() == [[2, 2]]
    assert not sent()
    assert sent_by(plain) == [[1, 1], [1, 1]]


@on_sqlite
def test_a_group_with_a_producer_is_sent(alias, app, add, plain_add, staged, sent_by):
    with transaction.atomic(using=alias), app.amqp.producer_pool.acquire() as producer:
        group(plain_add.s(1, 1), add.s(2, 2)).apply_async(producer=producer)
    assert not staged()


@on_sqlite
@pytest.mark.skipif(VERSION < (5, 7), reason="this Celery waits for a producer without a time-out")
def test_a_producer_taken_by_hand_is_waited_for_as_long_as_celery_would(alias, app, monkeypatch):
    app.conf.broker_pool_acquire_timeout = 0.01
    waited = []

    def acquire(*, timeout=None, **options):
        waited.append(timeout)
        raise LimitExceeded(1)

    monkeypatch.setattr(app.amqp.producer_pool, "acquire", acquire)
    refusal = pytest.raises(OperationalError, match="broker_pool_limit")
    with transaction.atomic(using=alias), app.producer_or_acquire() as producer, refusal:
        assert not producer.connection
    assert waited == [0.01]


@on_sqlite
def test_a_block_of_a_producer_stages_all_or_nothing(alias, app, add, staged):
    with transaction.atomic(using=alias):
        with suppress(InvalidJob), app.producer_or_acquire() as producer:
            add.apply_async((1, 1), producer=producer)
            add.apply_async((1, 1), producer=producer, queue="amq.x")
        add.delay(2, 2)

    assert staged() == [[2, 2]]


def test_a_savepoint_inside_a_block_decides_about_its_own_jobs(alias, app, add, staged):
    with transaction.atomic(using=alias), app.producer_or_acquire() as producer:
        add.apply_async((1, 1), producer=producer)
        with transaction.atomic(using=alias):
            add.apply_async((2, 2), producer=producer)
        with rolled_back(alias):
            add.apply_async((3, 3), producer=producer)
        with transaction.atomic(using=alias, savepoint=False):
            add.apply_async((4, 4), producer=producer)

    assert sorted(staged()) == [[1, 1], [2, 2], [4, 4]]


@on_sqlite
def test_a_transaction_inside_a_block_decides_about_its_own_jobs(alias, app, add, staged, settings):
    settings.OUTBOX = {**settings.OUTBOX, "OUTSIDE": "stage"}
    with app.producer_or_acquire() as producer:
        add.apply_async((1, 1), producer=producer)
        with rolled_back(alias):
            add.apply_async((2, 2), producer=producer)

    assert staged() == [[1, 1]]


@pytest.mark.django_db(transaction=True, databases=["default", "postgres", "mariadb"])
def test_on_commit_calls_stage(alias, add, staged, sent):
    assert isinstance(add, DjangoTask)
    with transaction.atomic(using=alias):
        assert add.delay_on_commit(1, y=1) is None
        add.apply_async_on_commit((2, 2), countdown=5)
        assert len(staged()) == 2
    add.delay_on_commit(3, 3)

    assert staged() == [[1], [2, 2]]
    assert sent() == [[3, 3]]


@on_sqlite
def test_on_commit_calls_that_are_sent_by_hand_wait_for_the_commit(alias, add, staged, sent):
    with add.app.connection_for_write() as connection:
        with rolled_back(alias):
            add.apply_async_on_commit((1, 1), connection=connection)
        with transaction.atomic(using=alias):
            add.apply_async_on_commit((2, 2), connection=connection)
            assert not sent()

    assert sent() == [[2, 2]]
    assert not staged()


@beside_postgres
@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
def test_on_commit_calls_in_another_transaction_wait_for_it(alias, app, add, sent, settings):
    settings.OUTBOX = {**settings.OUTBOX, "DATABASE": alias}
    with transaction.atomic(using="default"):
        add.delay_on_commit(1, 1)
        assert not sent()

    assert sent() == [[1, 1]]


@on_sqlite
def test_eager_tasks_run_at_once(alias, app, add, staged, sent):
    app.conf.task_always_eager = True
    with transaction.atomic(using=alias):
        assert add.delay(1, 2).get() == 3
        assert group(add.s(1, 1), add.s(2, 2)).delay().get() == [2, 4]
        assert (add.s(1, 1) | add.s(5)).apply_async(ordering_key="k").get() == 7

    assert not staged()
    assert not sent()


@on_sqlite
def test_a_link_of_a_task_that_runs_here_is_staged(alias, add, staged, sent):
    with transaction.atomic(using=alias):
        add.apply((1, 2), link=add.s(10))

    assert staged() == [[3, 10]]
    assert not sent()
