"""Bugs with which a reader misses events, repeats them, or reads them too early."""

from .seeded import Bug

_LOG = ["tests/events/log/test_window_postgres.py", "tests/events/log/test_windows.py"]

BUGS = [
    Bug(
        "window-closed-over-late-commits",
        "P8",
        "events/log/windows/postgres.py",
        [("if first is None and not lo.running - now.running:", "if first is None:")],
        ["tests/events/log/test_window_postgres.py::test_a_prepared_transaction"],
        "A window without new rows is passed, though transactions that it waited for have ended.",
    ),
    Bug(
        "late-rows-below-the-window",
        "P8",
        "events/log/windows/postgres.py",
        [
            (
                'f"WHERE txid = ended.xid AND id > {state.pos}',
                'f"WHERE txid = ended.xid AND id > {state.after}',
            )
        ],
        ["tests/events/log/test_window_postgres.py::test_rebase"],
        "Rows of a long transaction have lower positions than the window, and are never read.",
    ),
    Bug(
        "last-row-of-the-window",
        "P8",
        "events/log/windows/postgres.py",
        [("AND id <= {min(reach, state.last)} ", "AND id < {min(reach, state.last)} ")],
        ["tests/events/log/test_windows.py::TestWindows::test_parts_share_the_log"],
        "The last row of a window is never read.",
    ),
    Bug(
        "sees-the-first-running",
        "P8",
        "events/log/windows/postgres.py",
        [('return f"txid < {snapshot.xmax} AND', 'return f"txid <= {snapshot.xmax} AND')],
        ["tests/events/log/test_window_postgres.py::test_what_a_state_has_passed"],
        "The first transaction that had not begun counts as passed before it commits.",
    ),
    Bug(
        "rest-of-a-run-not-seen",
        "P8",
        "events/log/windows/mysql.py",
        [("first, since = b + 1, None  #", "first = b + 1  #")],
        [
            "tests/events/log/test_window_mysql.py::test_what_is_left_beside_a_row_that_came_begins_anew"
        ],
        "One row of a transaction came; the others of the same INSERT count as never used.",
    ),
    Bug(
        "settled-by-a-clock-set-back",
        "P8",
        "events/log/windows/mysql.py",
        [("elif since is None or since > now:", "elif since is None:")],
        ["tests/events/log/test_window_mysql.py::test_a_clock_that_was_set_back_begins_anew"],
        "After a fail-over to a server whose clock is behind, a gap is closed too early or late.",
    ),
    Bug(
        "seal-wins-over-a-writer",
        "P8",
        "events/log/windows/mysql.py",
        [
            (
                "had a writer after all\n                return False",
                "had a writer after all\n                return True",
            )
        ],
        ["tests/events/log/test_window_mysql.py::test_a_row_that_came_while_it_was_to_be_sealed"],
        "A position that got its row while it was sealed counts as never used.",
    ),
    Bug(
        "read-view-taken-for-a-cut",
        "P8",
        "events/log/windows/mysql.py",
        [("            if not late:\n                break\n", "            break\n")],
        ["tests/events/log/test_window_mysql.py::test_a_view_that_is_no_cut_on_small_pages"],
        "MariaDB's read view shows version 5 and not version 4: they are handled in that order.",
    ),
    Bug(
        "sqlite-passes-what-it-has-not-read",
        "P8",
        "events/log/windows/sqlite.py",
        [
            (
                'pos = rows[-1][columns.index("id")] if full else end',
                'pos = rows[-1][columns.index("id")] if full else top',
            )
        ],
        ["tests/events/log/test_windows.py::TestWindows::test_a_hole_is_passed_at_once"],
        "With a filter, a page ends before the top of the log, and the rest is passed over.",
    ),
    Bug(
        "cursor-moved-by-two",
        "P8",
        "events/subscriptions/cursors.py",
        [(".filter(pk=row.pk, revision=row.revision)", ".filter(pk=row.pk)")],
        ["tests/events/subscriptions/test_shared_pages.py::test_one_is_handled_by_two"],
        "Two processes that hold one page both handle it.",
    ),
    Bug(
        "moves-in-memory-without-a-commit",
        "P8",
        "events/subscriptions/partition.py",
        [
            (
                "            at.unstored = page\n",
                "            at.unstored, at.state = page, page.state\n",
            )
        ],
        [
            "tests/events/subscriptions/test_shared_pages.py::test_one_without_events_waits_where_nothing_was_stored"
        ],
        "After a crash the server gives out transaction ids that the process has passed.",
    ),
    Bug(
        "passes-a-shared-page-unstored",
        "P8",
        "events/subscriptions/cursors.py",
        [("if at.passed and (at.reader.table, at.passed.dump()) in stored:", "if at.passed:")],
        [
            "tests/events/subscriptions/test_shared_pages.py::test_one_without_events_waits_where_nothing_was_stored"
        ],
        "A partition moves past a page that no other has stored, and a crash makes it wrong.",
    ),
    Bug(
        "partitions-cut-by-blocks",
        "P8",
        "events/subscriptions/repartition.py",
        [
            (
                "same = [parts[n % before] for n in range(wanted)]",
                "same = [parts[n * before // wanted] for n in range(wanted)]",
            )
        ],
        [
            "tests/events/subscriptions/control/test_repartition.py::test_partitions_are_cut_where_they_stand"
        ],
        "A new partition begins where another slice stood: events twice, or never.",
        survived_at_first=True,
    ),
    Bug(
        "predecessor-counts-as-handled",
        "P8",
        "events/log/completeness.py",
        [("done = before if before > 0 else self._done_before(first)", "done = abs(before)")],
        ["tests/events/log/completeness/test_at_random.py::test_once_and_in_order"],
        "An event is handled before the earlier one of its stream that the cursor has not passed.",
    ),
    Bug(
        "emptied-log-not-noticed",
        "P8",
        "events/log/reader.py",
        [("        if known and there == known:\n", "        if known:\n")],
        ["tests/events/subscriptions/test_emptied_log.py::test_a_log_that_is_emptied"],
        "The log was emptied and gives positions out again: the first events are never handled.",
    ),
    Bug(
        "pruned-with-holes",
        "P8",
        "events/retention.py",
        [
            (
                "free = list(takewhile(lambda row: row[1] is None, front))",
                "free = [row for row in front if row[1] is None]",
            )
        ],
        ["tests/events/retention/test_events.py::test_it_stops_at_the_first_that_is_too_young"],
        "Events behind one that is still needed are removed, and a stream has a hole.",
    ),
    Bug(
        "parked-event-pruned",
        "P8",
        "events/retention.py",
        [('f"(id >= {stream.position})"', 'f"(id > {stream.position})"')],
        ["tests/events/retention/test_events.py::test_a_parked_stream_holds"],
        "The event with which a parked stream begins is removed before a person has released it.",
    ),
]
