"""Reads the event log with Spark, on this machine or on a cluster, exactly as subscriptions do.

  archive      writes the log to a Delta table, each event exactly once
  audit        looks for events that are missing, doubled or out of order, in log and archive
  rebuild      rebuilds the view of a projection from the archive and the log
  statistics   counts events per minute, type, topic and stream, and how long they took

A pipeline starts Spark on this machine, on all its cores; that needs Java 17 or later. --master
names a cluster instead; under spark-submit the session of spark-submit is used. If a pipeline is
interrupted, nothing is lost: run it again.

Exit codes: 0 done; 1 the audit has found defects, or a rebuild has failed; 2 the pipeline cannot
run, or wrong arguments; 130 interrupted.
"""

from __future__ import annotations

from typing import Any

import django.db
from django.core.management.base import CommandError, CommandParser

from ....aliases import inbox_alias
from ....exceptions import InvalidArgument
from ....management.base import OutboxCommand
from ....process.foreground import stop_on_signals
from ....process.waiting import StopFlag
from ...driver.pipeline import Pipeline, pipeline
from ...driver.rebuild import log_of, rebuild_on_spark
from ...exceptions import PipelineError
from ...session import is_running, reason


class Command(OutboxCommand):
    help = __doc__

    def add_arguments(self, parser: CommandParser) -> None:
        pipelines = parser.add_subparsers(dest="pipeline", required=True, metavar="NAME")
        archive = pipelines.add_parser("archive", help="write the log to a Delta table")
        audit = pipelines.add_parser("audit", help="find missing, doubled or unordered events")
        rebuild = pipelines.add_parser("rebuild", help="rebuild the view of a projection")
        statistics = pipelines.add_parser("statistics", help="count events and times")

        add = archive.add_argument
        add("--to", required=True, metavar="DIR", help="folder of the archive, or its address")
        until = archive.add_mutually_exclusive_group().add_argument
        now = "archive the events committed so far, then stop (default)"
        until("--available-now", action="store_true", help=now)
        until("--follow", action="store_true", help="archive new events until stopped")
        pause = "with --follow: pause between two batches (default 10, at most 3600)"
        add("--interval", type=float, default=10.0, metavar="SECONDS", help=pause)
        rows = "maximum number of events in a batch (default 500000)"
        add("--max-rows-per-batch", type=int, metavar="N", help=rows)

        pruned = "the log was pruned and there is no archive: streams may begin later"
        audit.add_argument("--pruned", action="store_true", help=pruned)
        report = "write a report with pictures"
        audit.add_argument("--report", default="", metavar="FILE.html", help=report)

        rebuild.add_argument("name", metavar="PROJECTION", help="the projection")

        add = statistics.add_argument
        add("--to", required=True, metavar="DIR", help="folder for statistics.parquet")
        skew = "number of partitions to compute the skew for (default 8)"
        add("--partitions", type=int, metavar="N", help=skew)

        for each, archived in (
            (audit, "compare the archive, too"),
            (rebuild, "read pruned events from this archive"),
            (statistics, "read pruned events from this archive"),
        ):
            each.add_argument("--archive", metavar="DIR", help=archived)
        for each in (archive, audit, statistics):
            add = each.add_argument
            add("--log", metavar="LOG", help="table of the log (default outbox_event)")
            add("--database", metavar="ALIAS", help="database alias (default: the log's)")
        for each in (archive, audit, rebuild, statistics):
            add = each.add_argument
            file = "on a cluster: file with the database's password, on every machine"
            add("--password-file", default="", metavar="FILE", help=file)
            variable = "on a cluster: environment variable with the password, in every process"
            add("--password-env", default="", metavar="NAME", help=variable)
            master = "where Spark runs (default: this machine, local[*,4])"
            add("--master", metavar="URL", help=master)
            conf = "a setting of Spark; never a password"
            add("--conf", action="append", default=[], metavar="KEY=VALUE", help=conf)

    def handle(self, **options: Any) -> None:
        conf = dict(_setting(text) for text in options["conf"])
        _check(options)
        options["archive"] = options.get("archive") or ""
        if options["pipeline"] == "rebuild":
            log, using = log_of(options["name"])
            options |= {"log": log._meta.db_table, "database": using}
        arguments = {
            name: options[name] for name in ("log", "master", "password_file", "password_env")
        }
        if not is_running():  # nothing else is written until it has
            self.remark("Starting Spark: it may take a minute.")
        try:
            with pipeline(**arguments, using=options["database"], conf=conf) as run:
                getattr(self, f"_{options['pipeline']}")(run, options)
        except django.db.Error as error:  # exit code 1 would mean defects
            raise PipelineError(reason(error)) from error

    def _archive(self, run: Pipeline, options: dict[str, Any]) -> None:
        from ...archiver import MAX_ROWS, Archiver

        rows = options["max_rows_per_batch"] or MAX_ROWS
        archiver = Archiver(
            run.session, run.options, options["to"], max_rows=rows, write=self.write
        )
        stopped = StopFlag()
        with self.handling_signals():
            stop_on_signals(stopped.set)  # the current batch is finished first
            if options["follow"]:
                archiver.follow(options["interval"], stopped.wait)
            else:
                total = archiver.run(stopped.is_set)
                self.write(f"done log={run.options.log} archived={total} to={options['to']}")

    def _audit(self, run: Pipeline, options: dict[str, Any]) -> None:
        from ...driver.run import run_audit

        arguments = {name: options[name] for name in ("archive", "pruned", "report")}
        result = run_audit(run, **arguments, write=self.write)
        if not result.sound:
            found = "1 defect" if result.total == 1 else f"{result.total} defects"
            raise CommandError(f"The audit has found {found}.", returncode=1)

    def _rebuild(self, run: Pipeline, options: dict[str, Any]) -> None:
        rebuild_on_spark(
            run.session, run.options, options["name"], archive=options["archive"], write=self.write
        )

    def _statistics(self, run: Pipeline, options: dict[str, Any]) -> None:
        from ...driver.run import run_statistics

        arguments = {name: options[name] for name in ("archive", "to", "partitions")}
        alias = inbox_alias()
        inbox = run if alias == run.using else run.elsewhere(alias)
        run_statistics(run, **arguments, inbox=inbox, write=self.write)


def _check(options: dict[str, Any]) -> None:
    for name, most in (("max_rows_per_batch", 2**31 - 1), ("partitions", 1024)):
        if (number := options.get(name)) is not None and not 1 <= number <= most:
            raise InvalidArgument(f"--{name.replace('_', '-')} must be from 1 to {most}.")
    if not 0 < options.get("interval", 1) <= 3600:
        raise InvalidArgument("--interval must be more than 0 and at most 3600 seconds.")


def _setting(text: str) -> tuple[str, str]:
    key, found, value = text.partition("=")
    if not found:
        raise InvalidArgument(f"--conf takes KEY=VALUE; got {text!r}.")
    return key, value
