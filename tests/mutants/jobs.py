"""Bugs that lose, leak, repeat or reorder jobs."""

from .seeded import Bug

BUGS = [
    Bug(
        "delete-by-id-alone",
        "P3",
        "jobs/drain/batch.py",
        [('found = f"id {is_listed} AND id ||', 'found = f"id {is_listed} AND TRUE OR id ||')],
        ["tests/jobs/drain/test_ids_again.py::test_what_is_owed_deletes_no_other_job"],
        "An id that the database gave out again belongs to another job, which is deleted unsent.",
    ),
    Bug(
        "floor-under-the-scan",
        "P3",
        "jobs/drain/batch.py",
        [
            (
                "if id not in self._but]",
                'if id not in self._but and id > getattr(self, "_floor", 0)]',
            ),
            (
                "self._ids = self._ids[bisect_right(some, last) :]",
                "self._ids, self._floor = self._ids[bisect_right(some, last) :], last",
            ),
        ],
        [
            "tests/jobs/drain/test_late_commit.py::test_a_row_that_commits_late_with_a_low_id_is_drained"
        ],
        "A job that commits late has a lower id than the last batch, and is never read.",
    ),
    Bug(
        "heartbeat-forgets-suspended-time",
        "P5",
        "process/lease.py",
        [("return time.monotonic() if boottime is None", "return time.monotonic() if boottime")],
        ["tests/jobs/drain/test_lost_lease.py::test_the_clock_of_a_lease_counts_suspended_time"],
        "After a suspension a drainer trusts a lease that others have taken over.",
        survived_at_first=True,
    ),
    Bug(
        "lease-counts-from-the-answer",
        "P5",
        "process/lease.py",
        [
            (
                "            raise self._removed()\n        self._beaten_at = started",
                "            raise self._removed()\n        self._beaten_at = self.clock()",
            )
        ],
        ["tests/jobs/drain/test_lease.py::test_a_heartbeat_that_took_too_long_is_not_trusted"],
        "A heartbeat that waited for a slow database is trusted for longer than it counts there.",
    ),
    Bug(
        "claim-whoever-owns",
        "P5",
        "process/lease.py",
        [
            (
                "leases = self._leases().filter(owner=owner, part__in=parts)",
                "leases = self._leases().filter(part__in=parts)",
            )
        ],
        ["tests/jobs/drain/test_lease.py::test_who_joins_meanwhile_is_not_robbed"],
        "Two drainers that take over one shard both own it.",
    ),
    Bug(
        "key-leaves-its-shard",
        "P7",
        "jobs/staging/insert.py",
        [("crc32((ordering_key or task_id).encode())", "crc32(task_id.encode())")],
        [
            "tests/jobs/staging/test_many.py::test_the_shard_is_that_of_the_key_or_else_of_the_task_id"
        ],
        "The jobs of one key are in several shards, and several drainers send them.",
    ),
    Bug(
        "unknown-without-an-error",
        "P5",
        "jobs/drain/drain.py",
        [("        if result.unknown:\n", "        if result.unknown and result.error:\n")],
        ["tests/jobs/brokers/test_redis_batch.py::test_each_queue_has_to_take_it"],
        "Redis took a job in one of two queues; the extra publish has no incident.",
        survived_at_first=True,
    ),
    Bug(
        "incident-forgotten-before-written",
        "P5",
        "jobs/drain/unsettled.py",
        [
            (
                "            record_incident(**self._incidents[0], using=self.using)\n"
                "            del self._incidents[0]\n",
                "            record_incident(**self._incidents.pop(0), using=self.using)\n",
            )
        ],
        ["tests/jobs/drain/test_unsettled.py::test_an_incident_is_owed_until_it_is_written"],
        "If the database is away for a moment, an incident is never written.",
    ),
    Bug(
        "shards-given-up-unsettled",
        "P5",
        "jobs/drain/drain.py",
        [
            (
                "        self._settle_all()\n        if self.holder.sharing_is_due():",
                "        if self.holder.sharing_is_due():",
            )
        ],
        [
            "tests/jobs/drain/test_unsettled.py::test_a_transaction_that_cancels_a_job_holds_up_no_other"
        ],
        "The next owner of a shard publishes rows whose deletion had failed, without an incident.",
    ),
    Bug(
        "hold-without-a-margin",
        "P5",
        "jobs/immediate.py",
        [("if began + 2 * timeout > self.until:", "if began > self.until:")],
        [
            "tests/jobs/immediate/test_settled.py::test_a_hold_that_ran_out_before_the_commit_is_released"
        ],
        "A process still sends a job that the drain reads already.",
    ),
    Bug(
        "sent-twice-counts-as-accepted",
        "P5",
        "jobs/immediate.py",
        [("for row in result.accepted if row.id not in kept]", "for row in result.accepted]")],
        ["tests/jobs/immediate/test_settled.py::test_a_job_that_was_sent_twice_has_its_incident"],
        "A job that immediate delivery may have sent twice is deleted without an incident.",
    ),
    Bug(
        "savepoint-does-not-write",
        "P1",
        "jobs/staging/insert.py",
        [
            (
                "if _savepoint_of(connections[using]) != self._savepoints.get(using, (False, [])):",
                "if False:",
            )
        ],
        [
            "tests/jobs/staging/test_many.py::test_a_savepoint_in_the_generator_decides_about_its_own_jobs"
        ],
        "A job of a savepoint that was rolled back is staged all the same.",
    ),
    Bug(
        "goes-on-behind-a-row-that-stayed",
        "P7",
        "jobs/drain/drain.py",
        [
            (
                "app.all_left = none_stays and len(result.accepted) == len(rows)",
                "app.all_left = none_stays",
            )
        ],
        ["tests/jobs/drain/test_batches.py::test_the_later_jobs_of_a_key_wait_for_one_that_stayed"],
        "A later job of a key is sent before the earlier one that the broker did not take.",
        survived_at_first=True,
    ),
    Bug(
        "dead-without-a-look",
        "P3",
        "jobs/drain/dead_rows.py",
        [
            (
                "if found is None or not staged._raw_delete(using):",
                "if found is None or staged._raw_delete(using) is None:",
            )
        ],
        [
            "tests/jobs/drain/test_ids_again.py::test_a_job_that_another_drainer_has_published_meanwhile_is_not_dead_as_well"
        ],
        "Of two drainers that hold a row both bury it: a job that was sent is dead as well.",
        survived_at_first=True,
    ),
    Bug(
        "one-confirm-confirms-all-before",
        "P3",
        "jobs/drain/amqp_batch.py",
        [
            (
                "for each in range(self._all_up_to + 1, tag + 1) if multiple else [tag]:",
                "for each in range(self._all_up_to + 1, tag + 1):",
            )
        ],
        ["tests/jobs/brokers/test_amqp_batch.py::test_what_has_no_answer_is_unconfirmed"],
        "RabbitMQ confirms one message, and earlier ones that it may still refuse are deleted.",
    ),
    Bug(
        "id-kept-after-a-commit-inside",
        "P6",
        "jobs/idempotent.py",
        [
            (
                "        entry_of(job_id, using=using).delete()\n        error.add_note",
                "        error.add_note",
            )
        ],
        ["tests/jobs/inbox/test_ended_transactions.py::test_a_transaction_that_was_ended"],
        "The task ended its transaction: its id stays, and a second delivery does no work.",
    ),
    Bug(
        "requeued-out-of-order",
        "P7",
        "jobs/dead.py",
        [("        jobs.sort(key=lambda job: (job.staged_id, job.pk))\n", "")],
        [
            "tests/jobs/dead/test_requeue.py::test_the_later_jobs_of_a_blocked_key_come_back_with_the_first"
        ],
        "The jobs of a blocked key are staged again in the order in which they died.",
    ),
    Bug(
        "template-forgets-what-was-chosen",
        "P1",
        "jobs/staging/template.py",
        [("if part and of in marks and name not in self.chosen", "if part and of in marks")],
        [
            "tests/jobs/staging/test_template.py::test_what_was_chosen_is_not_taken_for_what_follows_from_a_job"
        ],
        "The arguments of a job are shown although the caller chose what is shown in their place.",
    ),
    Bug(
        "template-goes-by-the-name-of-a-wrapper",
        "P1",
        "jobs/staging/template.py",
        [
            (
                'name = function.__globals__["__name__"]',
                "name = function.__module__",
            )
        ],
        [
            "tests/jobs/staging/test_template.py::test_a_wrapper_of_celery_s_own_is_called_for_each_job"
        ],
        "Sentry's wrapper of apply_async has Celery's name, and is skipped from the third job on.",
    ),
]
