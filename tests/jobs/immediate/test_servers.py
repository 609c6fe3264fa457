"""Servers that do several things in one thread: ASGI, and gevent.

Threads are in ``test_settled``, forks of one process in ``tests/faults/test_immediate``.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest
from asgiref.sync import sync_to_async
from django.contrib.auth.models import Group
from django.db import connections, transaction
from django.http import HttpResponse
from django.test import AsyncClient
from django.urls import path

from outbox_app.models import StagedJob
from tests.faults import project
from tests.faults.tools import ROOT
from tests.patience import patience

pytestmark = pytest.mark.django_db(transaction=True)
on_servers = pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
COUNT = 30


@pytest.fixture
def serve(alias, settings):
    """``serve(app)``: an address for each number, whose view commits a row and a job."""

    def start(app):
        def place(number):
            try:
                with transaction.atomic(using=alias):
                    Group.objects.using(alias).create(name=str(number))
                    app.tasks["note"].delay("", number)
            finally:
                connections[alias].close()  # it is one of the thread of such views

        async def view(request, number):
            await sync_to_async(place)(number)
            return HttpResponse()

        settings.ROOT_URLCONF = type("urls", (), {"urlpatterns": [path("<int:number>", view)]})
        settings.MIDDLEWARE = []

    return start


@pytest.fixture
def assert_all_left_at_once(alias, book):
    def check(app):
        jobs = book(alias)
        jobs.receive(app)
        assert sorted(number for _, number in jobs.bodies) == list(range(COUNT))
        assert Group.objects.using(alias).count() == COUNT
        assert not StagedJob.objects.using(alias).exists()

    return check


@on_servers
def test_requests_of_asgi(alias, broker_url, make_named_app, serve, assert_all_left_at_once):
    app = make_named_app(broker_url)
    serve(app)

    async def ask():
        client = AsyncClient()
        await asyncio.gather(*(client.get(f"/{n}") for n in range(COUNT)))

    asyncio.run(ask())
    assert_all_left_at_once(app)


@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
def test_while_a_broker_does_not_answer_the_event_loop_goes_on(
    alias, broker_url, proxy, make_named_app, serve, on
):
    on(IMMEDIATE_TIMEOUT=1)
    link, url = proxy(broker_url)
    serve(make_named_app(url))

    async def ask():
        client, turns = AsyncClient(), 0
        await client.get("/1")
        link.mode = "blackhole"
        answer = asyncio.ensure_future(client.get("/2"))
        while not answer.done():
            await asyncio.sleep(0.01)
            turns += 1
        return turns, (await answer).status_code

    turns, status = asyncio.run(ask())
    assert status == 200
    assert turns > 10  # of a hundred
    assert [job.is_immediate for job in StagedJob.objects.using(alias).all()] == [True]


@on_servers
def test_greenlets(alias, broker_url, environment, make_named_app, assert_all_left_at_once):
    app = make_named_app(broker_url)
    outbox = {"IMMEDIATE": True, "IMMEDIATE_TIMEOUT": 20, "IMMEDIATE_HOLD": 600}
    variables = project.variables({app.main: broker_url}, **outbox)
    command = [sys.executable, "-m", "tests.jobs.immediate.greenlets", str(COUNT)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**environment(alias), **variables},
        capture_output=True,
        text=True,
        timeout=patience(100),
    )
    assert done.returncode == 0, done.stderr
    assert_all_left_at_once(app)
