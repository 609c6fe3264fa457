"""A job with an ordering key dies: later ones pass it, but with DEAD_KEY "block" they wait."""

from __future__ import annotations

import json

import pytest
from django.db import transaction

from outbox_app.jobs.drain.drain import Drain
from outbox_app.models import DeadJob, StagedJob
from tests import tasks

from .test_main_path import received

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture(params=["redis", "rabbitmq"])
def note(request, make_app):
    """A task on Redis (batches) or RabbitMQ (one by one)."""
    app = make_app(request.getfixturevalue(f"{request.param}_url"))
    return app.task(name="note")(tasks.note)


@pytest.fixture
def block(settings):
    settings.OUTBOX = {**settings.OUTBOX, "DEAD_KEY": "block"}


def stage(note, alias, *numbers, key="k"):
    with transaction.atomic(using=alias):
        for number in numbers:
            note.apply_async((key, number), ordering_key=key)


def damage(alias, number, envelope=None):
    """Make one job of the key impossible to send."""
    rows = StagedJob.objects.using(alias).filter(ordering_key="k").order_by("id")
    row = rows[number - 1]
    if envelope is None:  # Redis is asked for the route before, RabbitMQ refuses it when it is sent
        route = {"exchange": "amq.direct", "routing_key": "nobody", "declare": []}
        envelope = json.dumps({**json.loads(row.envelope), **route})
    rows.filter(id=row.id).update(envelope=envelope)


def sent(note, key="k"):
    bodies = [json.loads(message.body)[0] for message in received(note.app)]
    return [number for k, number in bodies if k == key]


@pytest.mark.parametrize("how", ["when it is prepared", "when it is sent"])
@pytest.mark.parametrize("alias", ["postgres", "mariadb", "default"], indirect=True)
def test_none_overtakes_it(alias, note, block, how):
    stage(note, alias, 1, 2, 3, 4, 5)
    stage(note, alias, 1, 2, key="other")
    damage(alias, 3, "nonsense" if how == "when it is prepared" else None)

    tally = Drain(using=alias).run(once=True)

    assert (tally.published, tally.dead) == (4, 3)
    dead = list(DeadJob.objects.using(alias).order_by("staged_id"))
    assert [job.ordering_key for job in dead] == ["k"] * 3
    assert "Ordering key 'k' is blocked by the dead job" in dead[1].reason
    assert "Ordering key 'k' is blocked by the dead job" in dead[2].reason
    messages = [json.loads(message.body)[0] for message in received(note.app)]
    assert [number for key, number in messages if key == "k"] == [1, 2]
    assert [number for key, number in messages if key == "other"] == [1, 2]

    # Nor one that comes later, until a person has decided.
    stage(note, alias, 6)
    assert Drain(using=alias).run(once=True).dead == 1
    DeadJob.objects.using(alias).all().delete()
    stage(note, alias, 7)
    Drain(using=alias).run(once=True)
    assert sent(note) == [7]


@pytest.mark.parametrize("alias", ["postgres", "mariadb", "default"], indirect=True)
def test_none_overtakes_the_first_of_two(alias, note, block):
    """The later one is found to be damaged before the first one is sent."""
    stage(note, alias, 1, 2, 3, 4)
    damage(alias, 1)
    damage(alias, 3, "nonsense")

    tally = Drain(using=alias).run(once=True)

    assert (tally.published, tally.dead, sent(note)) == (0, 4, [])


@pytest.mark.parametrize("alias", ["postgres", "mariadb", "default"], indirect=True)
def test_earlier_ones_leave(alias, note, block):
    """A person has moved one to dead while the broker was away, say."""
    stage(note, alias, 1, 2, 3, 4)
    row = StagedJob.objects.using(alias).order_by("id")[2]
    DeadJob.objects.using(alias).create(**row.copied(), staged_id=row.pk)
    row.delete()

    tally = Drain(using=alias).run(once=True)

    assert (tally.published, tally.dead, sent(note)) == (2, 1, [1, 2])


@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
def test_others_pass_by_default(alias, note):
    stage(note, alias, 1, 2, 3, 4, 5)
    damage(alias, 3)
    tally = Drain(using=alias).run(once=True)
    assert (tally.published, tally.dead) == (4, 1)
    assert sent(note) == [1, 2, 4, 5]


@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
def test_jobs_without_a_key_block_nothing(alias, note, block):
    with transaction.atomic(using=alias):
        for number in range(1, 6):
            note.delay("", number)
    StagedJob.objects.using(alias).filter(id=StagedJob.objects.using(alias).first().id).update(
        envelope="nonsense"
    )
    tally = Drain(using=alias).run(once=True)
    assert (tally.published, tally.dead) == (4, 1)
