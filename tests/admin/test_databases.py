"""Several outboxes in one admin: a page shows and changes only the outbox that its URL names."""

from __future__ import annotations

import pytest
from django.contrib.admin.models import LogEntry
from django.db import OperationalError

from outbox_app.admin import DeadJobAdmin
from outbox_app.checks.values import check_settings
from outbox_app.models import DeadJob, StagedJob
from tests.jobs.dead.rows import dead_jobs, staged_jobs

from .pages import DEAD, OVERVIEW, STAGED, hidden, page, said, selection, text

OTHER = "default"

pytestmark = pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)


@pytest.fixture(autouse=True)
def offered(alias, settings):
    settings.OUTBOX = {**settings.OUTBOX, "ADMIN_DATABASES": (OTHER,)}


def tasks(using):
    return sorted(DeadJob.objects.using(using).values_list("task", flat=True))


def on(url, using):
    return f"{url}?outbox={using}"


def test_a_list_shows_the_database_that_was_chosen(alias, superuser):
    dead_jobs(1, using=alias, task="shop.here")
    dead_jobs(1, using=OTHER, task="shop.there")
    assert superuser.get(DEAD)["Location"] == on(DEAD, alias)

    here, there = (superuser.get(on(DEAD, using)) for using in (alias, OTHER))

    assert f"Database: {alias} {OTHER}" in text(here)
    assert "shop.here" in text(here)
    assert "shop.there" not in text(here)
    assert "shop.there" in text(there)
    assert "shop.here" not in text(there)
    assert superuser.get(DEAD, {"q": "x"})["Location"] == f"{DEAD}?q=x&outbox={OTHER}"


def test_the_overview_too(alias, superuser):
    staged_jobs(3, using=OTHER)
    dead_jobs(3, using=OTHER, task="shop.there")
    assert "shop.there" in text(superuser.get(on(OVERVIEW, OTHER)))
    here, there = (text(superuser.get(on(OVERVIEW, using))) for using in (alias, OTHER))
    assert "shop.there" not in here
    assert "Start manage.py drain_outbox." in here
    assert f"Start manage.py drain_outbox --database {OTHER}." in there
    live = superuser.get(OVERVIEW, {"part": "live", "outbox": OTHER})
    assert "shop.there" in text(live)


def test_what_is_decided_reaches_the_database_of_its_page_only(alias, superuser):
    """Although another one was chosen meanwhile, and both have a row of this id."""
    [mine], [twin] = (dead_jobs(1, using=using, task=f"on.{using}") for using in (alias, OTHER))
    DeadJob.objects.using(OTHER).filter(pk=twin.pk).update(id=mine.pk)
    row = superuser.get(on(page(mine), alias))
    superuser.get(on(DEAD, OTHER))  # in another window

    # As the button on the page of a row does: it posts the page's form to the list.
    fields = {**selection("discard_selected", mine), "outbox": hidden(row)["outbox"]}
    question = superuser.post(DEAD, fields)
    assert f"Database: {alias}" in text(question)
    answer = superuser.post(DEAD, {**hidden(question), "confirmed": "yes", "reason": "why"})

    assert said(answer) == ["1 dead job was discarded."]
    assert (tasks(alias), tasks(OTHER)) == ([], [f"on.{OTHER}"])
    # In the history of the twin's page, too.
    assert f"Rows: {mine.pk} on '{alias}'." in LogEntry.objects.get().get_change_message()


def test_all_rows_of_a_list_are_those_of_its_database(alias, superuser):
    dead_jobs(2, using=alias, task="shop.here")
    dead_jobs(2, using=OTHER, task="shop.there")
    every = {"action": "requeue_selected", "select_across": "1", "_selected_action": "0"}
    question = superuser.post(on(DEAD, OTHER), every)
    superuser.post(on(DEAD, OTHER), {**hidden(question), "confirmed": "yes", "reason": "why"})
    assert tasks(alias) == ["shop.here"] * 2
    assert tasks(OTHER) == []
    assert StagedJob.objects.using(OTHER).count() == 2


@pytest.mark.parametrize("said_by_form", [[], ["default", "postgres", "mariadb"], ["elsewhere"]])
def test_a_form_that_names_no_database_changes_none(alias, superuser, said_by_form):
    [job] = dead_jobs(1, using=alias)
    fields = {**selection("discard_selected", job), "confirmed": "yes", "reason": "why"}
    answer = superuser.post(DEAD, {**fields, "outbox": said_by_form})
    assert answer["Location"] == on(DEAD, alias)
    assert "Nothing was done" in said(answer)[0]
    assert len(tasks(alias)) == 1


def test_a_database_that_is_away_is_not_chosen_for_ever(alias, superuser, monkeypatch):
    """The link of the menu names none, and leads to the one that was chosen last."""
    superuser.get(on(DEAD, OTHER))
    assert superuser.get(DEAD)["Location"] == on(DEAD, OTHER)

    def rows(admin, request):
        if admin.alias() == OTHER:
            raise OperationalError("connection refused")
        return DeadJob.objects.using(alias)

    monkeypatch.setattr(DeadJobAdmin, "get_queryset", rows)
    superuser.raise_request_exception = False
    assert superuser.get(on(DEAD, OTHER)).status_code == 500
    assert superuser.get(DEAD)["Location"] == on(DEAD, alias)


def test_who_may_not_enter_learns_no_alias(alias, log_in):
    answer = log_in("anonymous").get(DEAD)
    assert alias not in answer["Location"]
    assert "outbox=" not in answer["Location"]


def test_nothing_is_offered_where_there_is_one(alias, superuser, settings):
    settings.OUTBOX = {**settings.OUTBOX, "ADMIN_DATABASES": (alias,)}
    answer = superuser.get(STAGED)
    assert "Database:" not in text(answer)
    assert superuser.get(on(STAGED, "elsewhere")).status_code == 200


def test_aliases_are_checked(alias, settings):
    settings.OUTBOX = {**settings.OUTBOX, "ADMIN_DATABASES": ("elsewhere",)}
    [fault] = check_settings()
    assert "expected a tuple of aliases: 'default'" in fault.msg
