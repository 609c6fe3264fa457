"""Bugs with which an event is deleted that the archive does not hold."""

from .seeded import Bug

_COMPARED = "tests/pipeline/test_prune_compares.py"

BUGS = [
    Bug(
        "batch-not-counted",
        "archive",
        "pipeline/archiver.py",
        [("if read != there:", "if read > there:")],
        ["tests/pipeline/test_archive_faults.py::test_rows_that_a_task_has_not_read"],
        "A batch is committed of which a task has read only a part.",
    ),
    Bug(
        "pruned-behind-one-that-is-missing",
        "archive",
        "events/retention.py",
        [
            (
                "                    free = free[: free.index(missing)]\n",
                "                    free.remove(missing)\n",
            )
        ],
        ["tests/pipeline/test_prune_archived.py::test_what_is_archived_goes_and_the_rest_stays"],
        "Events behind one that is not archived are removed unseen.",
    ),
    Bug(
        "archived-by-position-alone",
        "archive",
        "pipeline/driver/comparison.py",
        [("alike = reduce(pc.and_, same.values())", 'alike = same["id"]')],
        ["tests/pipeline/test_prune_archived.py::test_a_row_that_is_another_one_by_now_stays"],
        "A log that gave positions out again is pruned by the archive of the old events.",
    ),
    Bug(
        "compared-without-a-lock",
        "archive",
        "pipeline/driver/through_django.py",
        [("if lock and self._connection", "if not lock and self._connection")],
        [f"{_COMPARED}::test_a_row_cannot_change_between_its_comparison_and_its_removal"],
        "A row that is changed between its comparison and its removal is removed.",
    ),
    Bug(
        "null-equals-anything",
        "archive",
        "pipeline/driver/comparison.py",
        [("pc.equal(one, other).fill_null(False)", "pc.equal(one, other).fill_null(True)")],
        ["tests/pipeline/test_own_columns.py::test_every_type_is_archived_as_it_is"],
        "A row is removed although a value of it was NULL when it was archived.",
    ),
    Bug(
        "erasure-excuses-every-column",
        "archive",
        "pipeline/driver/comparison.py",
        [("pc.or_(equal, erased) if name in EMPTIED else equal", "pc.or_(equal, erased)")],
        [f"{_COMPARED}::test_an_erased_version_sinks"],
        "An erased version is removed although the archive has another row at its position.",
    ),
    Bug(
        "compared-with-a-replaced-file",
        "archive",
        "pipeline/driver/comparison.py",
        [("                check(self._store, file)\n", "")],
        [f"{_COMPARED}::test_a_file_that_was_replaced_is_no_reason_to_delete"],
        "Rows are removed because of a file that no other reader accepts.",
    ),
    Bug(
        "damaged-file-of-the-same-name",
        "archive",
        "pipeline/table.py",
        [("if there.get(file.name) != file.bytes:", "if file.name not in there:")],
        ["tests/pipeline/test_archive_faults.py::test_a_damaged_file"],
        "An archiver goes on with a table of which a file was cut short.",
    ),
    Bug(
        "second-archiver-commits",
        "archive",
        "pipeline/table.py",
        [
            ("max_commit_retries=0,", "max_commit_retries=5,"),
            ("app_transactions=[Transaction(identity, mark.batches)]", "app_transactions=[]"),
        ],
        ["tests/pipeline/test_archive_faults.py::test_of_two_archivers_one_commits"],
        "Two archivers commit the same batch, and the archive has each event twice.",
    ),
]
