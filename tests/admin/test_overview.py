"""The overview, from its URL to its text: the content, the permissions, and the cost."""

from __future__ import annotations

import re
from datetime import timedelta
from uuid import uuid4

import pytest
from django.db import connections, transaction
from django.test.utils import CaptureQueriesContext

from outbox_app.database.clock import DatabaseNow
from outbox_app.entities import series as entities_series
from outbox_app.events import publish
from outbox_app.events.models import Event, Gap, Subscription
from outbox_app.models import DeadJob, Incident, Lease, Process, StagedJob, Statistic, counting
from tests.jobs.dead.rows import dead_jobs, staged_jobs
from tests.jobs.dead.test_status import drainer, hold

from ..entities.test_admin import staff
from .pages import OVERVIEW, body, text

LIVE = f"{OVERVIEW}?part=live"


def own(alias, *drainers, shards=128):
    """Give the shards to drainers, evenly."""
    Lease.objects.using(alias).all().delete()
    Lease.objects.using(alias).bulk_create(
        Lease(resource="jobs", part=part, owner=drainers[part % len(drainers)].pk)
        for part in range(shards)
    )


def age(alias, job, **ago):
    StagedJob.objects.using(alias).filter(pk=job.pk).update(
        staged_at=DatabaseNow() - timedelta(**ago)
    )


def verdict(response):
    return re.search(r'class="outbox-headline outbox-(\w+)">([^<]*)<', body(response)).groups()


def problems(response):
    """Tone, link and text of each problem. The first one's text is the headline's."""
    found = re.findall(r'<li class="outbox-(\w+)">(?:<a href="([^"]*)">)?([^<]+)<', body(response))
    return [(*first[:2], verdict(response)[1]) for first in found[:1]] + found[1:]


class TestVerdict:
    def test_nothing_is_running(self, alias, superuser):
        tone, words = verdict(superuser.get(OVERVIEW))
        assert tone == "bad"
        assert words == "Nothing is being sent: no drainer is running."
        assert "Start manage.py drain_outbox." in text(superuser.get(OVERVIEW))

    def test_all_are_silent(self, alias, superuser):
        silent = drainer(alias, silent=99)
        own(alias, silent)
        page = superuser.get(OVERVIEW)
        assert verdict(page)[0] == "bad"
        assert "no drainer is running" in verdict(page)[1]
        assert "web-1:7: silent beyond its lease" in text(page)

    def test_nothing_is_waiting(self, alias, superuser):
        own(alias, drainer(alias))
        assert verdict(superuser.get(OVERVIEW)) == (
            "good", "All staged work has left. Nothing is waiting.")  # fmt: skip

    def test_work_is_leaving(self, alias, superuser):
        own(alias, drainer(alias))
        staged_jobs(using=alias)
        tone, words = verdict(superuser.get(OVERVIEW))
        assert tone == "good"
        assert words.startswith("Work is leaving. The oldest ready job waits ")

    def test_work_is_late_and_nothing_leaves(self, alias, superuser):
        own(alias, drainer(alias))
        job, *_ = staged_jobs(3, using=alias)
        age(alias, job, minutes=185)
        assert verdict(superuser.get(OVERVIEW)) == (
            "bad",
            "Nothing is being sent: 3 jobs are ready, the oldest for 3 h 5 min.",
        )

    def test_a_job_that_was_held_is_late_from_when_it_was_due(self, alias, superuser):
        own(alias, drainer(alias))
        [job] = staged_jobs(using=alias)
        hold(alias, job, minutes=-4)
        tone, words = verdict(superuser.get(OVERVIEW))
        assert (tone, words) == ("good", "Work is leaving. The oldest ready job waits 4 min.")
        hold(alias, job, minutes=-185)
        page = superuser.get(OVERVIEW)
        assert verdict(page)[0] == "bad"
        assert "Nothing is being sent: 1 job has been ready for 3 h 5 min." in verdict(page)[1]
        assert "Oldest ready 3 h 5 min" in text(page)

    def test_a_held_job_is_not_late(self, alias, superuser):
        own(alias, drainer(alias))
        [job] = staged_jobs(using=alias)
        age(alias, job, minutes=185)
        hold(alias, job, days=1)
        assert verdict(superuser.get(OVERVIEW)) == (
            "good", "All work that is due has left. Held jobs wait for their time.")  # fmt: skip

    def test_the_cause_is_in_it_once(self, alias, superuser):
        own(alias, drainer(alias, trouble="BrokerUnavailable: localhost:6379 refuses connections"))
        staged_jobs(2, using=alias)
        page = superuser.get(OVERVIEW)
        assert verdict(page)[1] == (
            "Nothing is being sent: 2 jobs are waiting and every drainer is in trouble: "
            "localhost:6379 refuses connections."
        )
        shown = text(page).partition("Drainers Host")[0]
        assert shown.count("refuses connections") == 1
        assert shown.count("in trouble") == 1
        assert "Remove the cause; drainers retry on their own. web-1:7" in shown


class TestProblems:
    def test_all_is_well(self, alias, superuser):
        own(alias, drainer(alias))
        assert problems(superuser.get(OVERVIEW)) == []

    def test_what_needs_somebody_is_named_with_a_link_that_leads_there(self, alias, superuser):
        own(alias, drainer(alias), shards=120)
        drainer(alias, silent=99)
        drainer(alias, trouble="BrokerUnavailable: refused")
        dead_jobs(2, using=alias)
        Subscription.objects.using(alias).create(name="mail & co", paused=True)
        Gap.objects.using(alias).create(kind="version", log="outbox_event", stream="s", first=2,
                                        last=3)  # fmt: skip
        listed = problems(superuser.get(OVERVIEW))
        tones = [tone for tone, *_ in listed]
        assert tones == sorted(tones), "bad ones before warnings"
        found = {words: (tone, link) for tone, link, words in listed}
        told = "\n".join(found)
        assert "8 shards have no owner" in told
        assert "is silent beyond its lease: its jobs wait" in told
        assert "1 drainer is in trouble." in told
        assert "web-1:7: BrokerUnavailable: refused" in text(superuser.get(OVERVIEW))
        assert found["2 jobs have died in the last hour."][0] == "warning"
        assert found["1 gap is open."][0] == "warning"
        for _tone, link in found.values():
            assert superuser.get(link.replace("&amp;", "&")).status_code == 200, link


class TestSections:
    def test_dead_jobs_are_a_matrix_whose_cells_are_links(self, alias, superuser, monkeypatch):
        dead_jobs(3, using=alias, task="shop & co", error="kombu.E", reason="NO_ROUTE")
        [old] = dead_jobs(1, using=alias, task="shop & co", error="kombu.F")
        DeadJob.objects.using(alias).filter(pk=old.pk).update(
            died_at=DatabaseNow() - timedelta(hours=30)
        )
        page = superuser.get(OVERVIEW)
        assert "shop & co 3 3 3 4 4 4" in text(page)
        assert "There are more." not in text(page)
        assert " E 3 3 3 3 3 3 NO_ROUTE" in text(page)
        assert " F 0 0 0 1 1 1" in text(page)
        links = re.findall(r'href="([^"]*task=shop[^"]*)">(\d+)<', body(page))
        assert len(links) == 6
        for link, count in links:
            there = superuser.get(link.replace("&amp;", "&"))
            assert len(re.findall('class="field-task_id', body(there))) == int(count)
        monkeypatch.setattr(counting, "LISTED", 1)
        more = "There are more. Shown: the most frequent of the newest 100,000 jobs."
        assert more in text(superuser.get(OVERVIEW))

    def test_drainers_with_what_they_own(self, alias, superuser):
        own(alias, drainer(alias, done=1234), shards=100)
        shown = text(superuser.get(OVERVIEW))
        assert "web-1 7 100 (0-99)" in shown
        assert "1,234" in shown or "1234" in shown
        assert "Unowned shards 28 (100-127)" in shown

    def test_what_each_drainer_owns_is_told_in_ranges(self, alias, superuser):
        own(alias, drainer(alias), drainer(alias), shards=4)
        Lease.objects.using(alias).filter(part=1).delete()
        shown = text(superuser.get(OVERVIEW))
        assert "web-1 7 2 (0, 2)" in shown
        assert "web-1 7 1 (3)" in shown
        assert "Unowned shards 125 (1, 4-127)" in shown

    def test_subscriptions_with_what_they_handle(self, alias, superuser):
        Subscription.objects.using(alias).create(name="mail & co", paused=True)
        now = DatabaseNow()
        [minute] = Subscription.objects.using(alias).annotate(now=now).values_list("now", flat=True)
        for ago in range(-1, 3):
            Statistic.objects.using(alias).create(
                source="x",
                minute=minute.replace(second=0, microsecond=0) - timedelta(minutes=ago),
                name="handled",
                dimension="subscription",
                label="mail & co",
                value=77,
            )
        assert "mail & co undeclared 0 - 77 0 0 -" in text(superuser.get(OVERVIEW))

    def test_held_jobs_by_when_they_are_due(self, alias, superuser):
        jobs = staged_jobs(4, using=alias)
        hold(alias, jobs[1], minutes=-1)
        hold(alias, jobs[2], minutes=9)
        hold(alias, jobs[3], days=9)
        assert "due now 1 due within the hour 1 due later 1" in text(superuser.get(OVERVIEW))

    def test_gaps_and_incidents(self, alias, superuser):
        Gap.objects.using(alias).create(
            kind="version", log="outbox_event", stream="order-7", first=2, last=3, attempts=5
        )
        Incident.objects.using(alias).create(
            kind="takeover", first_id=5, last_id=77777, shards=[1, 2, 3], detail="after the lease"
        )
        shown = text(superuser.get(OVERVIEW))
        assert "order-7, versions 2 to 3 an audit 5" in shown
        assert "shards taken over from a dead drainer 5 - 77777 3 after the lease" in shown
        Incident.objects.using(alias).update(shards=5)  # by hand
        assert "dead drainer 5 - 77777 0 after the lease" in text(superuser.get(OVERVIEW))

    def test_charts_are_drawn(self, alias, superuser):
        drainer(alias)
        assert "<figure" not in body(superuser.get(OVERVIEW)), "nothing was counted yet"
        [minute] = Process.objects.using(alias).annotate(now=DatabaseNow()).values_list("now")
        begins = minute[0].replace(second=0, microsecond=0)
        figure = {"source": "x", "name": "published", "value": 1}
        Statistic.objects.using(alias).create(minute=begins - timedelta(minutes=20), **figure)
        page = body(superuser.get(OVERVIEW))
        captions = re.findall(r"<figcaption[^>]*>([^<]*)<", page)
        assert captions == ["Ready jobs, last hour", "Jobs per minute, last hour",
                            "Ready jobs, last day", "Jobs per minute, last day"]  # fmt: skip
        ids = re.findall(r'\bid="([^"]*)"', page)
        assert len(ids) == len(set(ids))

    def test_jobs_come_before_what_capabilities_add(self, alias, superuser):
        own(alias, drainer(alias), shards=100)
        dead_jobs(using=alias)
        [job] = staged_jobs(using=alias)
        hold(alias, job, minutes=9)
        Subscription.objects.using(alias).create(name="mail")
        Gap.objects.using(alias).create(kind="version", log="outbox_event", first=2, last=3)
        Incident.objects.using(alias).create(kind="unknown", first_id=1, last_id=2)
        shown = text(superuser.get(OVERVIEW))
        heads = ["Unowned shards", "Dead jobs Task", "Held jobs, by",
                 "Subscriptions Name", "Open gaps First seen", "Latest incidents"]  # fmt: skip
        places = [shown.index(each) for each in heads]
        assert places == sorted(places)

    def test_what_has_nothing_to_show_is_not_shown(self, alias, superuser):
        own(alias, drainer(alias))
        Subscription.objects.using(alias).all().delete()
        page = body(superuser.get(LIVE))
        assert re.findall(r"<caption>(?:<a[^>]*>)?([^<]*)<", page) == ["Drainers"]
        names = re.findall(r"<dt>(?:<a[^>]*>)?([^<]*)<", page)
        assert names == ["Ready", "Published per minute", "Dead"]
        assert "Unowned shards" not in page

    def test_events_published_beside_events_handled(self, alias, superuser):
        Subscription.objects.using(alias).create(name="stock")
        worker = drainer(alias)
        [minute] = Process.objects.using(alias).annotate(now=DatabaseNow()).values_list("now")
        begins = minute[0].replace(second=0, microsecond=0)
        for ago in range(-1, 30):  # the next one may have begun by now
            for name, kind, label, value in (
                ("newest_position", "log", "outbox_event", 1000 - 5 * ago),
                ("handled", "subscription", "stock", 3),
            ):
                Statistic.objects.using(alias).create(
                    source=str(worker.pk), minute=begins - timedelta(minutes=ago), name=name,
                    dimension=kind, label=label, value=value)  # fmt: skip
        page = body(superuser.get(OVERVIEW))
        [table] = re.findall(
            r"<figcaption[^>]*>Events per minute, last hour<.*?<tbody>(.*?)</tbody>",
            page,
            re.DOTALL,
        )
        cells = re.findall(r"<td>([^<]*)</td>", table)
        assert cells[:40:2] == ["5"] * 20
        assert cells[1:40:2] == ["3"] * 20
        assert cells[-2] == "?"

    def test_figures_of_the_last_minutes_come_from_the_counters(self, alias, superuser):
        worker = drainer(alias)
        own(alias, worker)
        now = DatabaseNow()
        [(minute,)] = Process.objects.using(alias).annotate(now=now).values_list("now")
        minute = minute.replace(second=0, microsecond=0)
        Statistic.objects.using(alias).bulk_create(
            Statistic(
                source=str(worker.pk), minute=minute - timedelta(minutes=ago), name=name, value=n
            )
            for ago in range(-1, 30)  # the next one may have begun by now
            for name, n in {"published": 120, "dead": 7, "ready": 4321}.items()
        )
        response = superuser.get(OVERVIEW)
        page = body(response)
        charts = re.findall(r"<figcaption[^>]*>([^<]*)<.*?<tbody>(.*?)</tbody>", page, re.DOTALL)
        hour = {caption: re.findall(r"<td>([^<]*)</td>", table) for caption, table in charts}
        assert hour["Ready jobs, last hour"][:30] == ["0", *["4,321"] * 29]
        assert hour["Jobs per minute, last hour"][:40:2] == ["120"] * 20
        assert hour["Jobs per minute, last hour"][1:40:2] == ["7"] * 20
        assert hour["Jobs per minute, last hour"][-2:] == ["?", "?"], "nobody was there to count"
        assert hour["Ready jobs, last day"][1] == "4,321", "of ten minutes the highest"
        assert re.search(r"Published per minute (1[2-9]\d|2[0-4]\d) ", text(response))
        row = r"web-1 7 128 \(0-127\) [\d.]+ s ago (1[2-9]\d|2[0-4]\d) "
        assert re.search(row, text(response))


def test_how_many_were_published_immediately(alias, superuser):
    """A part of those that were published, of the same minutes, however far the current one is."""
    own(alias, drainer(alias))
    [minute] = (
        Process.objects.using(alias).annotate(now=DatabaseNow()).values_list("now", flat=True)
    )
    begin = minute.replace(second=0, microsecond=0)
    figures = (1, "published", 3000), (1, "immediate", 2000), (0, "published", 600)
    for ago, name, value in figures:
        Statistic.objects.using(alias).create(
            source="x", minute=begin - timedelta(minutes=ago), name=name, value=value
        )
    shown = r"Published per minute ([\d,]+) last minute; ([\d,]+) immediately"
    found = re.search(shown, text(superuser.get(OVERVIEW)))
    if found is None:  # the next minute has begun, and no job of it was published immediately
        assert "immediately" not in text(superuser.get(OVERVIEW))
        return
    published, immediate = (int(each.replace(",", "")) for each in found.groups())
    assert immediate == pytest.approx(published * 2000 / 3600, abs=1)


class TestLivePart:
    def test_it_is_the_part_that_changes(self, alias, superuser):
        live, whole = superuser.get(LIVE), body(superuser.get(OVERVIEW))
        assert "<html" not in body(live)
        assert "no-store" in live.headers["Cache-Control"]
        headings = r"<(?:caption|figcaption|dt)[^>]*>(.*)<"
        assert re.findall(headings, body(live)) == re.findall(headings, whole)
        assert body(live).rstrip()[-60:] in whole
        staged_jobs(3, using=alias)
        assert "Ready 3" in text(superuser.get(LIVE))

    @pytest.mark.parametrize("role", ["anonymous", "staff"])
    def test_it_is_for_those_who_may_see_the_page(self, log_in, role):
        assert log_in(role).get(LIVE).status_code == (302 if role == "anonymous" else 403)

    def test_both_take_no_post(self, superuser):
        assert superuser.post(OVERVIEW).status_code == superuser.post(LIVE).status_code == 405


def test_one_sees_what_one_may_view(log_in):
    staged_jobs(using="default")
    dead_jobs(using="default")
    drainer("default")
    alone = text(log_in("staff", permissions=["view_process"]).get(OVERVIEW))
    assert "Drainers" in alone
    for words in ("Oldest ready", "Ready jobs", "Dead", "Subscriptions", "gaps", "incidents"):
        assert words not in alone


@pytest.mark.parametrize("may", [False, True])
def test_queries_of_others_take_a_permission(log_in, may):
    """A session that writes staged jobs and does not commit, on PostgreSQL."""
    pytest.importorskip("psycopg")
    permissions = ["view_process", "view_stagedjob", *(["view_query_process"] if may else [])]
    client = log_in("staff", permissions=permissions)
    if "postgres" not in connections:
        pytest.skip("POSTGRES_URL is not set")
    from django.conf import settings as django_settings
    from django.test import override_settings

    outbox = {**django_settings.OUTBOX, "DATABASE": "postgres"}
    other = connections.create_connection("postgres")
    try:
        other.set_autocommit(False)
        with other.cursor() as cursor:
            cursor.execute("DELETE FROM outbox_stagedjob WHERE id = 0 /* secret */")
        with override_settings(OUTBOX=outbox):
            shown = text(client.get(OVERVIEW))
    finally:
        other.close()
    assert "In flight on outbox_stagedjob" in shown
    assert "idle in transaction" in shown
    assert ("/* secret */" in shown) == may


def test_the_number_of_statements_does_not_depend_on_the_rows(alias, superuser):
    def statements():
        with CaptureQueriesContext(connections[alias]) as queries:
            superuser.get(OVERVIEW)
        return len([each for each in queries if "SAVEPOINT" not in each["sql"]])

    for rows in (1, 30):
        for number in range(rows):
            dead_jobs(2, using=alias, task=f"t{number}", error=f"e{number}")
            staged_jobs(2, using=alias)
            drainer(alias)
            Incident.objects.using(alias).create(kind="unknown", first_id=1, last_id=2)
            Gap.objects.using(alias).create(
                kind="version", log="outbox_event", stream=f"s{rows}-{number}", first=2, last=3
            )
            Subscription.objects.using(alias).create(name=f"s{rows}-{number}")
        if rows == 1:
            before = statements()
    assert statements() == before <= 63  # some of them for each log, four for entities


def test_what_has_sunk(alias, superuser, settings):
    assert 'id="outbox-sinks"' not in body(superuser.get(OVERVIEW))
    settings.OUTBOX = {**settings.OUTBOX, "SINK": {"outbox_event": ("/srv/archive", 90)}}
    with transaction.atomic(using=alias):
        publish("order-1", "placed", using=alias)
    Event.objects.using(alias).update(recorded_at=DatabaseNow() - timedelta(days=91, hours=2))
    [(_, link, words)] = [each for each in problems(superuser.get(OVERVIEW)) if "sink" in each[2]]
    assert (link, words) == ("#outbox-sinks", "1 log does not sink.")
    page = text(superuser.get(OVERVIEW))
    shown = "Archive /srv/archive Events sink after 90 d 0 h Oldest in the database 91 d 2 h "
    assert shown in page
    assert "Behind 1 d 2 h Waits for a process of run_subscriptions or run_outbox; none" in page
    Process.objects.using(alias).create(
        id=uuid4(),
        resource="sink:outbox_event",
        host="h",
        pid=1,
        lease_seconds=600,
        trouble="held <b>by</b> x",
    )
    assert "Waits for held <b>by</b> x" in text(superuser.get(OVERVIEW))


class TestEntities:
    @pytest.fixture
    def told(self, monkeypatch):
        told = entities_series.Commands(
            1234, 3, {"bal<b>ance": 9, "": 1}, (1, 20), (0.002, None), 5, 70, 6
        )
        monkeypatch.setattr(entities_series, "commands", lambda aliases: told)

    def test_what_was_answered(self, alias, superuser, told):
        shown = text(superuser.get(OVERVIEW))
        for words in (
            "Commands per minute 1,234",
            "Conflicts per minute 3",
            "Passed on to the leading server, per minute 70",
            "Executed by a server that does not lead, per minute 6",
            "Waiting now 5",
            "p50 and p95 1, 20",
            "p50 and p95 2 ms, -",
            "Code of rejections Per minute bal<b>ance 9 - 1",
        ):
            assert words in shown

    @pytest.mark.parametrize("more", [(), ("view_account",)])
    def test_they_are_for_those_who_may_view_a_type(self, alias, told, more):
        shown = text(staff("view_process", *more).get(OVERVIEW))
        assert ("Waiting now" in shown) == bool(more)

    def test_a_project_without_entities_has_no_such_part(self, alias, superuser, monkeypatch):
        monkeypatch.setattr("outbox_app.entities.doors.entity_types", lambda: [])
        assert "Waiting now" not in text(superuser.get(OVERVIEW))


def test_what_errors_quote_is_masked(alias, superuser):
    words = "refused: password=hunter2 for amqp"
    own(alias, drainer(alias, trouble=words))
    dead_jobs(using=alias, error="E", reason=words)
    page = text(superuser.get(OVERVIEW))
    # The headline, the table of drainers, and two of the dead.
    assert page.count("refused: password=•••• for amqp") == 4
    assert "hunter2" not in page


def test_what_strangers_wrote_is_shown_as_text(alias, superuser):
    evil = "<script>alert(1)</script>\x1b[31m\u202e"
    drainer(alias, trouble=evil)
    Process.objects.using(alias).update(host=evil)
    dead_jobs(using=alias, task=evil, error=evil, reason=evil)
    Incident.objects.using(alias).create(kind="unknown", first_id=1, last_id=2, detail=evil)
    Gap.objects.using(alias).create(kind="version", log="outbox_event", stream=evil, first=2,
                                    last=3)  # fmt: skip
    Subscription.objects.using(alias).create(name=evil[:70], paused=True)
    page = body(superuser.get(OVERVIEW))
    assert "<script>alert" not in page
    assert page.count("&lt;script&gt;alert(1)") >= 6
    assert "\x1b" not in page
    assert "\u202e" not in page
