from celery import Task, shared_task
from library.celery import app

from .models import Loan, Note, Report


class Audited(Task):
    """A base class of the project, with a hook of its own."""

    def on_success(self, retval, task_id, args, kwargs):
        Note.objects.create(text=f"{self.name} succeeded with {retval}")


@shared_task(autoretry_for=(Loan.DoesNotExist,), retry_backoff=True, max_retries=2)
def remind(loan_id):
    loan = Loan.objects.get(pk=loan_id)
    Loan.objects.filter(pk=loan_id).update(reminded=True)
    return loan.book.title


@app.task(bind=True, base=Audited, default_retry_delay=0.1, max_retries=5)
def fine(self, cents):
    if self.request.retries < 2:
        raise self.retry(exc=ConnectionError("the bank is away"))
    return [cents, self.request.retries]


@shared_task
def add(x, y):
    return x + y


@shared_task
def total(numbers, *, of=""):
    return [sum(numbers), of]


@shared_task(bind=True)
def describe(self, *args, **kwargs):
    """What a task sees of its call."""
    request = self.request
    route = request.delivery_info
    return {
        "args": list(args),
        "kwargs": kwargs,
        "queue": route["routing_key"],
        "priority": route["priority"],
        "shelf": (request.headers or {}).get("shelf"),
        "eta": bool(request.eta),
        "limits": list(request.timelimit or []),
        "root": request.root_id == request.id,
        "traced by Sentry": "sentry-trace" in (request.headers or {}),
    }


@shared_task(ignore_result=True)
def note(text):
    Note.objects.create(text=text)


@shared_task
def broken(why):
    raise ZeroDivisionError(why)


@shared_task
def mourn(request, error, trace):
    note.delay(f"{request.task} failed: {error}")


@shared_task
def report_pages(report_id, pages):
    Report.objects.filter(pk=report_id).update(pages=pages)
    return pages


@shared_task
def look_for_overdue(by):
    Note.objects.create(text=f"looked, as {by} asked")
