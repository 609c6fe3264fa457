"""Bugs with which a command runs twice, or its caller is told something untrue."""

from .seeded import Bug

BUGS = [
    Bug(
        "an-id-answers-another-request",
        "P9",
        "entities/batch.py",
        [
            (
                "        if hash != call.hash:\n            raise call.conflict(command",
                "        if False:\n            raise call.conflict(command",
            )
        ],
        ["tests/entities/test_answers.py::test_another_request_with_the_same_id_is_a_conflict"],
        "A caller that uses an id again for other arguments is told that they were executed.",
    ),
    Bug(
        "answer-before-the-commit",
        "P9",
        "entities/batch.py",
        [
            (
                "            call.answer = self._known(call) or self._handle(call)\n",
                "            call.answer = self._known(call) or self._handle(call)\n"
                "            if hasattr(call.waits, 'is_set'):\n                call.waits.set()\n",
            )
        ],
        ["tests/entities/test_queue.py::test_a_leader_that_ends_leaves_its_batch_to_the_next"],
        "The caller goes on before the transaction of its command has committed.",
    ),
    Bug(
        "version-read-before-the-lock",
        "P9",
        "entities/batch.py",
        [
            (
                "(list(range(seen + 1, head + 1)))\n        return head",
                "(list(range(seen + 1, head + 1)))\n        return seen or head",
            )
        ],
        [
            "tests/entities/test_conflicts.py::test_after_a_command_of_its_own_the_snapshot_of_a_caller_hides_the_twin"
        ],
        "A command that waited for the lock takes the version from before for the newest.",
    ),
    Bug(
        "compare-and-set-from-a-version-on",
        "P9",
        "events/log/heads.py",
        [
            (
                '"WHERE log = %s AND stream = %s AND version = %s"',
                '"WHERE log = %s AND stream = %s AND version >= %s"',
            )
        ],
        ["tests/events/log/test_publish_races.py::test_of_two_with_one_expectation_one_wins"],
        "Of two commands that expect the same version both succeed.",
    ),
    Bug(
        "expected-means-the-version-of-the-batch",
        "P9",
        "entities/batch.py",
        [
            (
                "if call.expected not in (None, self.version):",
                "if call.expected not in (None, self.loaded):",
            )
        ],
        ["tests/entities/test_batches.py::test_a_batch_of_n_is_n_batches_of_one"],
        "Two commands of one batch that expect the same version both succeed.",
    ),
    Bug(
        "pruned-command-runs-again",
        "P9",
        "entities/store.py",
        [("found = [(*ids, None, None, pruned, None, None)]", "found = []")],
        ["tests/entities/test_pruned.py::test_an_answer_that_was_erased_is_gone"],
        "A command whose version retention has removed is executed a second time.",
    ),
    Bug(
        "lost-reply-taken-for-a-commit",
        "P9",
        "entities/transaction.py",
        [
            (
                "for call in recorded:\n                    call.begun, call.answer = True, None",
                "return ()",
            )
        ],
        ["tests/entities/test_conflicts.py::test_a_commit_whose_reply_is_lost"],
        "The connection broke during COMMIT: callers are told that it has committed.",
    ),
    Bug(
        "refused-command-refuses-its-batch",
        "P12",
        "entities/transaction.py",
        [("if len(calls) == 1 or blames_none:", "if calls:")],
        [
            "tests/entities/test_batches.py::test_a_handler_that_closes_its_connection_costs_no_other_its_answer"
        ],
        "The database refuses what one command writes, and the whole batch fails.",
    ),
    Bug(
        "state-shared-with-the-next-handler",
        "P12",
        "entities/batch.py",
        [("        self._fresh = None\n        return instance", "        return instance")],
        ["tests/entities/test_batches.py::test_the_rows_of_a_batch_are_written_by_few_statements"],
        "A command that raises leaves its changes in the state of the next one.",
    ),
    Bug(
        "answer-to-another-service-before-the-commit",
        "P9",
        "entities/forwarding.py",
        [
            (
                "            answers.append(error)\n",
                "            answers.append(call.answer or error)\n",
            )
        ],
        [
            "tests/door/test_many_commands.py::test_an_answer_of_a_batch_that_goes_on_is_not_told",
        ],
        "A service is told the answer of a command whose transaction may still be undone.",
    ),
    Bug(
        "key-of-a-list-without-its-peer",
        "P9",
        "entities/messages.py",
        [("f\"{peer}:{checked_key(asked['key'])}\"", "checked_key(asked['key'])")],
        ["tests/door/test_many_commands.py::test_a_key_is_the_same_alone_and_among_others"],
        "A command that is repeated in a list is executed again, or gets another peer's answer.",
    ),
    Bug(
        "list-of-commands-that-were-not-granted",
        "P9",
        "entities/views.py",
        [
            (
                "            entity = _granted(peer, type, call.command)\n            calls",
                "            entity = entity_named(type)\n            calls",
            )
        ],
        ["tests/door/test_many_commands.py::test_an_element_that_has_no_meaning"],
        "A peer executes any command, if it sends it in a list.",
    ),
    Bug(
        "half-of-a-list-refuses-the-other",
        "P9",
        "entities/remote.py",
        [("if status == 413 and len(part) > 1:", "if False:")],
        ["tests/door/test_many_commands.py::test_less_than_others_may_send"],
        "A command that is too large costs the others of its list their execution.",
    ),
    Bug(
        "plain-signature-of-fewer-components",
        "P9",
        "door/plain.py",
        [
            (
                "if sorted(names) != sorted(values) or len(",
                "if not set(names) <= set(values) or len(",
            )
        ],
        ["tests/door/test_forged_requests.py::test_what_is_forged"],
        "Who sees a request of a peer sends its signature with another body or key.",
    ),
    Bug(
        "plain-signature-without-its-time",
        "P9",
        "door/plain.py",
        [
            (
                '    if not _is_timely(parameters["created"], parameters["expires"]):\n',
                "    if False:\n",
            )
        ],
        ["tests/door/test_plain.py::test_what_is_signed_by_hand"],
        "A request that was recorded is believed years later, when its key's answers are pruned.",
    ),
    Bug(
        "connection-with-a-rest-is-used-again",
        "P13",
        "door/connections.py",
        [("if stream.is_silent():", "if True:")],
        ["tests/door/test_connections.py::test_a_connection_that_is_not_used_again"],
        "A call goes over a connection that its server has closed, and its outcome is unknown.",
    ),
]
