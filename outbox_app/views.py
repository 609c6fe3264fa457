"""Views for machines: ``health`` for checks from outside, ``metrics`` for Prometheus.

Both return numbers, and never a payload, the name of a task's argument or the text of an exception.
They require no login: make them reachable from your network only, or wrap them. Their work is
bounded, and they answer even if the database is unreachable. Their answers are not cached.
"""

from __future__ import annotations

import django.db
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.views.decorators.cache import never_cache
from django.views.decorators.http import require_safe

from .database.transactions import without_transaction
from .monitoring.diagnosis import Limits, is_healthy, problems
from .monitoring.status import outbox_status
from .text import get_logger

logger = get_logger("outbox_app.views")


@without_transaction
@never_cache
@require_safe
def health(
    request: HttpRequest,
    *,
    max_age: float | None = None,
    max_backlog: int | None = None,
    max_dead: int | None = None,
    using: str | None = None,
) -> HttpResponse:
    """Answer 503 if a problem is bad, else 200; the JSON has all problems and a few figures.

    Args:
        request: GET or HEAD.
        max_age: Also fail if the oldest ready or due job is older, in seconds.
        max_backlog: Also fail if more jobs are ready or due.
        max_dead: Also fail if more jobs are dead.
        using: Database alias. Default: the outbox's.
    """
    limits = Limits(max_age=max_age, max_backlog=max_backlog, max_dead=max_dead)
    try:
        found = outbox_status(using=using)
    except django.db.Error as error:
        logger.warning("Health could not be read error=%s", error)
        text = "The database cannot be read, or has no outbox tables."
        reason = {"code": "database", "severity": "bad", "text": text}
        return JsonResponse({"status": "unknown", "problems": [reason]}, status=503)
    wrong = problems(found, limits)
    ok = is_healthy(wrong)
    answer = {
        "status": "ok" if ok else "failing",
        "problems": [
            {"code": each.code, "severity": each.severity, "text": each.text} for each in wrong
        ],
        "backlog": found.waiting,
        "oldest_seconds": round(found.backlog.oldest_seconds, 3),
        "dead": found.dead.total,
        "drainers": len(found.alive),
        "unowned_shards": len(found.unowned_shards),
    }
    return JsonResponse(answer, status=200 if ok else 503)


@without_transaction
@never_cache
@require_safe
def metrics(request: HttpRequest, *, using: str | None = None) -> HttpResponse:
    """Answer with the metrics of the outbox, in the format that the scraper asks for.

    Args:
        request: GET or HEAD.
        using: Database alias. Default: the outbox's.
    """
    try:
        from .metrics import exposition
    except ImportError:
        text = "Metrics need prometheus_client: pip install prometheus-client.\n"
        return HttpResponse(text, status=501, content_type="text/plain; charset=utf-8")
    content, content_type = exposition(request.headers.get("Accept", ""), using=using)
    return HttpResponse(content, content_type=content_type)
