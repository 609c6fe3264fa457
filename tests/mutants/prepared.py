"""Bugs with which an event is published though its sender rolled back, or not though it did not."""

from .seeded import Bug

BUGS = [
    Bug(
        "answer-without-a-fence",
        "P10",
        "prepared/fences.py",
        [
            (
                "_insert(id, own or ROLLED_BACK, keeper, using=using)",
                "answers[id] = own or ROLLED_BACK",
            )
        ],
        ["tests/prepared/test_fences.py::test_an_open_transaction_is_in_progress"],
        "The keeper is told 'rolled back' about a transaction that commits a moment later.",
    ),
    Bug(
        "fence-of-another-keeper",
        "P10",
        "prepared/fences.py",
        [("OF_ANOTHER if outcome == COMMITTED and by != keeper else outcome", "outcome")],
        ["tests/door/test_messages.py::test_an_id_that_has_committed_with_another_keeper"],
        "One transaction publishes the events of two keepers that have the same id.",
    ),
    Bug(
        "pruned-fence-means-rolled-back",
        "P10",
        "prepared/fences.py",
        [("asked[id].prepared_at < mark + CLOCKS", "asked[id].prepared_at < mark - CLOCKS")],
        ["tests/prepared/test_retention.py::test_fences_go_after_30_days_batch_by_batch"],
        "A fence was removed: an event whose transaction committed is cancelled.",
    ),
    Bug(
        "decided-by-two",
        "P10",
        "prepared/keeper.py",
        [
            (
                "events.filter(**still).open().update(**changes)",
                "events.filter(**still).update(**changes)",
            )
        ],
        ["tests/prepared/test_keeper.py::test_confirm_and_cancel_are_raced"],
        "A confirm and a cancel at the same moment both take effect.",
    ),
    Bug(
        "cancel-leaves-no-row",
        "P10",
        "prepared/keeper.py",
        [("for id in unknown])", "for id in ()])")],
        ["tests/prepared/test_keeper.py::test_a_prepare_that_comes_after_its_cancel_is_dead"],
        "A prepare that arrives after its cancel is recorded, and may be published.",
    ),
    Bug(
        "policy-before-its-time",
        "P10",
        "prepared/keeper.py",
        [
            (
                "and by == POLICY and row.decide_by > row.now:",
                "and by == POLICY and row.decide_by < row.now:",
            )
        ],
        ["tests/prepared/test_keeper.py::test_a_policy_decides_no_event_whose_time_was_extended"],
        "The policy decides events that a person has given more time.",
    ),
]
