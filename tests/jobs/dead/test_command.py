"""``manage.py outbox_dead``: its output, its effects, and its exit codes."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from io import StringIO
from pathlib import Path

import pytest
from django.core.management import CommandError, call_command

from outbox_app.models import DeadJob, Incident, StagedJob, counting
from tests import forking

from .rows import dead_jobs

ROOT = Path(__file__).resolve().parents[3]


def run(*arguments):
    """Return the exit code and what was written."""
    out = StringIO()
    try:
        call_command("outbox_dead", *arguments, stdout=out)
    except SystemExit as stop:
        return stop.code, out.getvalue()
    except CommandError as error:
        return error.returncode, f"{out.getvalue()}{error}"
    return 0, out.getvalue()


def left(alias):
    return sorted(DeadJob.objects.using(alias).values_list("task", flat=True))


@pytest.mark.django_db
def test_list_groups_by_task_and_error_with_the_newest_reason(alias):
    dead_jobs(2, using=alias, task="shop.send", error="kombu.E", reason="first")
    dead_jobs(1, using=alias, task="shop.send", error="kombu.E", reason="NO_ROUTE\nin vhost")
    dead_jobs(1, using=alias, task="shop.pay", error="ValueError", reason="bad")

    code, out = run("list")

    assert code == 0
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert lines[1].startswith("3 ")
    assert lines[1].endswith(" shop.send")
    assert lines[2:4] == ["kombu.E", "NO_ROUTE in vhost"]
    assert lines[4].endswith(" shop.pay")
    assert "There are more" not in out
    assert run("list", "--task", "shop.pay")[1].count("shop.") == 1


@pytest.mark.django_db
def test_list_is_bounded(alias, monkeypatch):
    monkeypatch.setattr(counting, "LISTED", 2)
    for number in range(3):
        dead_jobs(using=alias, task=f"t{number}")
    code, out = run("list")
    assert code == 0
    assert "t1" in out
    assert "t2" not in out
    assert "There are more" in out


@pytest.mark.django_db
def test_list_shows_terminal_codes_as_escapes(alias):
    dead_jobs(using=alias, task="\x1b[31mred", error="\x07", reason="\x1b]0;title\x07 \u202e")
    _, out = run("list")
    assert "\\x1b[31mred" in out
    assert not {"\x1b", "\x07", "\u202e"} & set(out)


@pytest.mark.django_db
def test_why_is_kept(alias, caplog):
    dead_jobs(3, using=alias, task="a")
    assert run("requeue", "--task", "a", "--because", "the queue is back")[0] == 0
    detail = Incident.objects.using(alias).get().detail
    assert detail.endswith("manage.py outbox_dead) (reason: the queue is back).")
    dead_jobs(1, using=alias, task="a")
    assert run("discard", "--task", "a", "--because", "sent by hand\nsince")[0] == 0
    assert caplog.messages[-1].endswith('(reason: sent by hand\\nsince)"')


@pytest.mark.django_db
@pytest.mark.parametrize(("action", "rows"), [("requeue", 2), ("discard", 0)])
def test_what_is_selected_is_decided_on(alias, action, rows):
    dead_jobs(2, using=alias, task="a")
    dead_jobs(1, using=alias, task="b")

    code, out = run(action, "--task", "a")

    assert code == 0
    assert "2 dead jobs" in out
    assert left(alias) == ["b"]
    assert StagedJob.objects.using(alias).count() == rows


@pytest.mark.django_db
@pytest.mark.parametrize("action", ["requeue", "discard"])
def test_a_dry_run_counts_and_touches_nothing(alias, action):
    dead_jobs(3, using=alias)
    code, out = run(action, "--all", "--dry-run")
    assert (code, out) == (0, f"Would {action} 3 dead jobs. Nothing was done.\n")
    assert len(left(alias)) == 3
    assert not StagedJob.objects.using(alias).exists()


@pytest.mark.django_db
def test_a_dry_run_names_the_later_jobs_that_a_requeue_takes_along(alias, settings):
    settings.OUTBOX = {**settings.OUTBOX, "DEAD_KEY": "block"}
    first, *_ = dead_jobs(3, using=alias, ordering_key="order-17")
    told = "Would requeue 1 dead job, and the later dead jobs of their ordering keys. Nothing"
    assert run("requeue", "--id", str(first.pk), "--dry-run")[1].startswith(told)
    discarded = run("discard", "--id", str(first.pk), "--dry-run")
    assert discarded[1].startswith("Would discard 1 dead job. Nothing")
    assert run("requeue", "--id", str(first.pk)) == (0, "Requeued 3 dead jobs.\n")


@pytest.mark.django_db
@pytest.mark.parametrize("action", ["requeue", "discard"])
def test_without_a_selection_nothing_is_done(alias, action):
    dead_jobs(using=alias)
    code, out = run(action)
    assert code == 2
    assert "--all" in out
    assert len(left(alias)) == 1
    assert run(action, "--all")[0] == 0
    assert left(alias) == []


@pytest.mark.django_db
def test_each_option_selects(alias):
    [old] = dead_jobs(
        using=alias, task="a", error="E1", reason="no route", queue="q1", app="x", ordering_key="k"
    )
    rows = DeadJob.objects.using(alias)
    rows.update(died_at=rows.get().died_at - timedelta(hours=5))
    dead_jobs(using=alias, task="b", error="E2", reason="full", queue="q2", app="y")
    for selection in (
        ("--id", str(old.pk)),
        ("--task", "a"),
        ("--error", "E1"),
        ("--reason", "rout"),
        ("--queue", "q1"),
        ("--key", "k"),
        ("--app", "x"),
        ("--older-than", "4h"),
        ("--task", "a", "--older-than", "90m", "--newer-than", "1d"),
    ):
        code, out = run("requeue", *selection, "--dry-run")
        assert (code, out.split()[2]) == (0, "1"), selection
    assert run("requeue", "--newer-than", "1d", "--dry-run")[1].split()[2] == "2"
    assert run("requeue", "--id", str(old.pk), "--id", "1", "--dry-run")[1].split()[2] == "1"
    assert run("requeue", "--id", str(2**63 - 1), "--dry-run")[1].startswith("No ")


@pytest.mark.django_db
@pytest.mark.parametrize(
    "arguments",
    [("requeue", "--all"), ("discard", "--task", "none"), ("requeue", "--id", "5")],
)
def test_nothing_matched_is_exit_code_1(alias, arguments):
    assert run(*arguments) == (1, "No dead job matches.\n")


@pytest.mark.django_db
def test_an_empty_list_is_good_news(alias):
    assert run("list") == (0, "No dead job matches.\n")


@pytest.mark.django_db
@pytest.mark.parametrize(
    "arguments",
    [
        ("requeue", "--all", "--task", "a"),
        ("requeue", "--all", "--database", "nowhere"),
        ("requeue", "--reason", ""),
        ("discard", "--reason="),
        *(("discard", f"--{name}=") for name in ("task", "error", "queue", "key", "app")),
        ("discard", "--all", "--database="),
    ],
)
def test_wrong_arguments_are_exit_code_2(alias, arguments):
    dead_jobs(using=alias, task="a")
    assert run(*arguments)[0] == 2
    assert left(alias) == ["a"]
    assert left(alias) == ["a"]


@pytest.mark.parametrize(
    "arguments",
    [
        ("bury",),
        (),
        ("requeue", "--id", "x"),
        ("requeue", "--id", "9" * 30),
        ("requeue", "--id", str(2**63)),
        ("requeue", "--older-than", "3"),
        ("requeue", "--older-than", "9999999d"),
        ("requeue", "--older-than", "999999d"),
        ("requeue", "--older-than", "999999w"),
    ],
)
def test_arguments_that_cannot_be_read_are_refused(arguments):
    with pytest.raises(CommandError):
        call_command("outbox_dead", *arguments)


@pytest.mark.parametrize("arguments", [("requeue", "--id", "x"), ("discard",)])
def test_the_shell_sees_2_for_wrong_arguments(arguments):
    environment = {**os.environ, "DJANGO_SETTINGS_MODULE": "tests.settings"}
    command = [sys.executable, "-m", "django", "outbox_dead", *arguments]
    done = forking.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 2, done.stderr


def test_help_teaches(capsys):
    with pytest.raises(SystemExit):
        call_command("outbox_dead", "--help")
    out = capsys.readouterr().out
    for word in ("requeue", "discard", "list", "--dry-run", "Exit codes", "same task id", "3h"):
        assert word in out
