import json
import time
from datetime import timedelta
from functools import partial

import sentry_sdk
from celery import chain, chord, group, signature
from celery.exceptions import TaskRevokedError
from celery.result import AsyncResult
from django.core.management.base import BaseCommand
from django.db import transaction
from django.test import Client
from django.utils import timezone
from django_celery_results.models import TaskResult
from library.celery import app
from members.models import Member

from loans.models import Book, Loan, Note, Report
from loans.tasks import add, broken, describe, fine, mourn, note, report_pages, total

SECONDS = 120


def got(result):
    try:
        return result.get(timeout=SECONDS)
    except (TaskRevokedError, ZeroDivisionError) as error:
        return f"{type(error).__name__}: {error}"


def eventually(look):
    until = time.monotonic() + SECONDS
    while not (found := look()) and time.monotonic() < until:
        time.sleep(0.05)
    return found


def chords():
    return {
        "chord": chord(add.s(i, 1) for i in range(3))(total.s(of="chord")),
        "chain of chord": chain(group(add.s(1, 1), add.s(2, 2)), total.s(of="chain"))(),
    }


class Command(BaseCommand):
    """A day in the library, and what came of it."""

    def add_arguments(self, parser):
        parser.add_argument("file")
        parser.add_argument("--rolled-back", type=int, help="tasks that run for a rollback")

    def handle(self, **options):
        Member.objects.create_user("ada", card="c-1")
        book = Book.objects.create(title="Faust")
        web = Client(raise_request_exception=False)

        lent = [web.get(f"/lend/{book.pk}/").json() for _ in range(3)]
        rolled_back = web.get(f"/lend-and-fail/{book.pk}/").status_code
        with sentry_sdk.start_transaction(name="a day"):
            asked = self.ask(early=bool(options["rolled_back"]))
        found = {name: got(result) for name, result in asked.items()}
        found["reminders"] = [got(AsyncResult(each["task"])) for each in lent]
        found["reminded"] = Loan.objects.filter(reminded=True).count()
        found["loans"] = Loan.objects.count()
        found["refused"] = rolled_back
        found["read"] = web.get(f"/read/{book.pk}/").json()
        found["report"] = list(Report.objects.values_list("title", "pages"))
        found["noted"] = eventually(lambda: Note.objects.filter(text="on commit").count())
        found["linked"] = eventually(lambda: Note.objects.filter(text="7").count())
        found["mourned"] = eventually(lambda: Note.objects.filter(text__contains="failed").count())
        found["audited"] = eventually(lambda: Note.objects.filter(text__contains="fine").count())
        found["beat"] = bool(
            eventually(lambda: Note.objects.filter(text__contains="beat").exists())
        )
        known = [each.id for each in asked.values()] + [each["task"] for each in lent]
        rows = TaskResult.objects.filter(task_id__in=known)
        found["results"] = sorted(rows.values_list("task_name", "status", "task_args"), key=str)
        ran = TaskResult.objects.filter(task_name="loans.tasks.remind").exclude(task_id__in=known)
        eventually(lambda: ran.count() >= options["rolled_back"])
        found["ran for a rollback"] = ran.count()
        with open(options["file"], "w") as file:
            json.dump(found, file, indent=1, default=str)

    def ask(self, *, early):
        """Each way to call a task that the project knows, inside a transaction.

        What is sent ``early``, before the commit, loses a chord whose parts end before it, too.
        """
        soon = timezone.now() + timedelta(seconds=0.2)
        asked = {}
        with transaction.atomic():
            asked["delay"] = add.delay(1, 2)
            asked["keywords"] = describe.delay(1, by="ada")
            asked["options"] = describe.apply_async(
                (1,), priority=5, headers={"shelf": "b"}, time_limit=60, soft_time_limit=50
            )
            asked["countdown"] = describe.apply_async(countdown=0.2)
            asked["eta"] = describe.apply_async(eta=soon)
            asked["queue"] = describe.apply_async(queue="mail")
            asked["expired"] = add.apply_async((1, 1), expires=timezone.now() - timedelta(hours=1))
            asked["by name"] = app.send_task("loans.tasks.describe", ["sent"], queue="mail")
            asked["signature"] = signature("loans.tasks.add", (2, 3), app=app).delay()
            asked["chain"] = chain(add.s(1, 2), add.s(10), add.s(100))()
            asked["group"] = group(add.s(i, i) for i in range(4)).delay()
            if not early:
                asked |= chords()
            asked["chunks"] = add.chunks([(i, i) for i in range(6)], 3).apply_async()
            asked["starmap"] = add.starmap([(1, 2), (3, 4)]).delay()
            asked["retried"] = fine.delay(250)
            asked["link"] = add.apply_async((3, 4), link=note.s())
            asked["broken"] = broken.apply_async(("no books",), link_error=mourn.s())
            with transaction.atomic():
                asked["savepoint"] = add.delay(5, 5)
            transaction.on_commit(partial(note.delay, "on commit"))
        with transaction.atomic(), transaction.atomic(using="reports"):
            report = Report.objects.create(title="loans")
            asked["reports"] = report_pages.apply_async((report.pk, 12), countdown=0.5)
        if early:
            asked |= chords()
        asked["outside"] = add.delay(20, 22)
        return asked
