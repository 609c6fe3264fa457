"""A worker sends the body of a chord, with any backend that counts the parts."""

from __future__ import annotations

import pytest
from celery import chord
from celery.app.trace import build_tracer
from celery.backends.cache import CacheBackend
from celery.canvas import maybe_signature
from django.db import transaction

from outbox_app.testing import staged_jobs
from tests.jobs.staging import tasks

pytestmark = pytest.mark.django_db(transaction=True)


class CountingBackend(CacheBackend):
    """Counts the parts in a transaction of its own, and sends the body by itself, as django-db."""

    #: Alias of that transaction; and whether the body is sent inside it, as early versions did.
    using, inside = "default", False

    def __init__(self, app, **kwargs):
        super().__init__(app, backend="memory://", **kwargs)
        self.parts = []

    def apply_chord(self, header_result_args, body, **kwargs):
        pass

    def on_chord_part_return(self, request, state, result, **kwargs):
        self.parts.append(result)
        with transaction.atomic(using=self.using):
            if self.inside and len(self.parts) == 2:
                self.send_body(request)
        if not self.inside and len(self.parts) == 2:
            self.send_body(request)

    def send_body(self, request):
        maybe_signature(request.chord, app=self.app).delay(self.parts)


@pytest.fixture
def work(make_app, monkeypatch):
    """``work(alias, using=…, inside=…)``: stage and execute two parts; returns the app."""

    def run(alias, *, using, inside=False):
        monkeypatch.setattr(CountingBackend, "using", using)
        monkeypatch.setattr(CountingBackend, "inside", inside)
        app = make_app(result_backend=f"{__name__}:CountingBackend")
        add = app.task(name="add", shared=False)(tasks.add)
        total = app.task(name="total", shared=False)(tasks.total)
        with transaction.atomic(using=alias):
            chord([add.s(1, 1), add.s(2, 2)], total.s()).delay()
        for job in staged_jobs(using=alias):
            job.row.delete(using=alias)
            trace = build_tracer(job.task, app.tasks[job.task], app=app)
            assert trace(job.task_id, job.args, job.kwargs, job.request).info is None
        return app

    return run


@pytest.mark.parametrize("outside", ["refuse", "stage", "send"])
def test_it_is_sent(outside, alias, work, sent_by, staged, settings):
    settings.OUTBOX = {**settings.OUTBOX, "OUTSIDE": outside}

    app = work(alias, using=alias)

    assert sent_by(app) == [[[2, 4]]]
    assert not staged()


def test_inside_the_backends_own_transaction_it_is_staged(alias, work, sent_by, staged, settings):
    settings.OUTBOX = {**settings.OUTBOX, "OUTSIDE": "refuse"}

    app = work(alias, using=alias, inside=True)

    assert staged() == [[[2, 4]]]
    assert not sent_by(app)


@pytest.mark.django_db(transaction=True, databases=["default", "postgres"])
@pytest.mark.parametrize("alias", ["default"], indirect=True)
def test_inside_one_on_another_alias_it_is_sent(alias, work, sent_by, staged):
    app = work(alias, using="postgres", inside=True)

    assert sent_by(app) == [[[2, 4]]]
    assert not staged()
