"""Bugs with which an event is deleted that the archive does not hold."""

from .seeded import Bug

_ARCHIVE = ["tests/pipeline/test_archive.py", "tests/pipeline/test_archive_faults.py"]

BUGS = [
    Bug(
        "batch-not-compared",
        "archive",
        "pipeline/archiver.py",
        [
            (
                "self._spread(partial(_compare, *of_all), list(zip(parts, copied, strict=True)))",
                "pass",
            )
        ],
        ["tests/pipeline/test_archive_faults.py::test_a_row_that_changes_before_it_is_compared"],
        "A row that was changed, or damaged on its way, while it was copied is committed.",
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
        "pipeline/driver/archive_lookup.py",
        [("ids.get(position) == _plain(message_id) for", "position in ids for")],
        ["tests/pipeline/test_prune_archived.py::test_a_row_that_is_another_one_by_now_stays"],
        "A log that gave positions out again is pruned by the archive of the old events.",
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
