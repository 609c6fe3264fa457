"""Several addresses of one broker: the drain finds the one that answers."""

from __future__ import annotations

import pytest
from django.db import transaction

from outbox_app.jobs.drain.drain import Drain
from tests import tasks

from .test_main_path import received

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.mark.parametrize("broker", ["redis", "rabbitmq"])
@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
def test_the_third_of_three_answers(alias, broker, request, make_app):
    url = request.getfixturevalue(f"{broker}_url")
    scheme = url.partition(":")[0]
    app = make_app(f"{scheme}://127.0.0.1:1//;{scheme}://127.0.0.1:2//;{url}")
    note = app.task(name="note")(tasks.note)
    with transaction.atomic(using=alias):
        note.delay("", 1)

    turns = []

    def give_up(drain):
        turns.append(drain.trouble)
        if len(turns) > 5:
            drain.stop()

    assert Drain(using=alias, on_turn=give_up).run(once=True).published == 1
    assert not any(turns)
    app.conf.broker_url = url
    assert len(received(app)) == 1
