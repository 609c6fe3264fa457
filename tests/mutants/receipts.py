"""Bugs of receipts: jobs that are lost after the broker took them, or run twice."""

from .seeded import Bug

RUN = "tests/receipts/test_run.py::"
SENT = "tests/receipts/test_sent_rows.py::"
STATUS = "tests/receipts/test_status.py::"

BUGS = [
    Bug(
        "copies-into-a-slow-queue",
        "P4",
        "jobs/drain/resending.py",
        [("again = [row for row in idle if not waiting.get(row.queue)]", "again = list(idle)")],
        [f"{SENT}test_it_waits_while_messages_are_in_its_queue"],
        "A queue that is slow grows by copies of its own messages.",
    ),
    Bug(
        "sent-again-while-it-runs",
        "P4",
        "jobs/drain/resending.py",
        [("[row for row in rows if row.id not in alive]", "list(rows)")],
        [f"{SENT}test_it_waits_while_a_worker_executes_it"],
        "A long task is sent again and again while it runs.",
    ),
    Bug(
        "dead-though-it-was-begun",
        "P4",
        "jobs/drain/resending.py",
        [(" and row.id not in begun]", "]")],
        [f"{SENT}test_one_that_was_begun_is_not_dead_by_its_publishes"],
        "A job whose worker was lost is given up, though another one would execute it.",
    ),
    Bug(
        "run-of-a-live-lease-taken",
        "P4",
        "receipts/ledger.py",
        [
            ("WHERE {{r}}.lease_until < {{now}} ", "WHERE TRUE "),
            ("IF(lease_until < {{now}}, {new}, {name})", "{new}"),
        ],
        [f"{RUN}test_a_copy_is_skipped_once_the_other_worker_renews_its_lease"],
        "Two workers run a job at the same time.",
    ),
    Bug(
        "executed-without-its-row",
        "P4",
        "receipts/tracer.py",
        [("            return SKIPPED", "            return tracer(uuid, args, kwargs, request)")],
        [f"{RUN}test_a_message_whose_job_has_ended_is_skipped"],
        "A job that has ended, or was cancelled, is executed once more.",
    ),
    Bug(
        "requeued-message-without-its-row",
        "P4",
        "receipts/run.py",
        [("value.requeue or ", "")],
        [f"{RUN}test_rejected"],
        "A job that its task gives back to the broker loses its row.",
    ),
    Bug(
        "limit-of-a-retry-from-its-first-call",
        "P4",
        "receipts/ledger.py",
        [("publishes = 1, sent_at = {due}, ", "publishes = 1, ")],
        [f"{STATUS}test_the_limit_begins_anew_with_a_retry"],
        "A job that retries in an hour is said to be one that no worker has started.",
    ),
    Bug(
        "begun-counts-as-not-started",
        "P4",
        "receipts/status.py",
        [("sent_at IS NOT NULL AND staged_id IS NULL AND", "sent_at IS NOT NULL AND")],
        [f"{STATUS}test_counts_by_queue_and_task"],
        "A long task raises the alarm of a silent worker.",
    ),
    Bug(
        "sent-counts-as-held",
        "P4",
        "jobs/drain/status.py",
        [('return count["all"] - count["sent"]', 'return count["all"]')],
        [f"{STATUS}test_a_sent_job_is_not_held"],
        "Jobs at the workers look like jobs that wait for their time.",
    ),
    Bug(
        "begun-by-id-alone",
        "P4",
        "receipts/ledger.py",
        [
            (
                '" FROM {j} WHERE id = %s AND task_id = %s',
                '" FROM {j} WHERE id = %s AND task_id >= %s',
            )
        ],
        [f"{RUN}test_one_whose_row_is_another_job_s_is_skipped"],
        "After a restored backup a message begins the job that has its id now.",
    ),
]
