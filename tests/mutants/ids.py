"""Bugs with which two ids are equal."""

from .seeded import Bug

BUGS = [
    Bug(
        "node-taken-by-two",
        "P13",
        "ids/generator.py",
        [("node=pair[1], reserved_ms=seen)\n            if", "node=pair[1])\n            if")],
        ["tests/ids/test_nodes.py::test_of_two_who_see_a_node_as_free_one_has_it"],
        "Two processes that have read the same row both own the node and its time.",
    ),
    Bug(
        "child-goes-on-with-its-parents-time",
        "P13",
        "ids/generator.py",
        [("os.register_at_fork(after_in_child=_ids.begin)\n", "")],
        ["tests/ids/test_processes.py::test_no_id_comes_twice"],
        "A forked process makes the same ids as its parent.",
    ),
    Bug(
        "clock-set-back-repeats-a-millisecond",
        "P13",
        "ids/generator.py",
        [("reserved.low + 1, self._last + 1)", "reserved.low + 1)")],
        ["tests/ids/test_ids.py::test_ids_grow_and_know_what_they_are_made_of"],
        "In a millisecond that has been used up, or came again, ids are made again.",
    ),
    Bug(
        "new-time-below-the-old-owners",
        "P13",
        "ids/generator.py",
        [("low = max(seen, now, self._last)", "low = max(now, self._last)")],
        [
            "tests/ids/test_nodes.py::test_a_clock_of_the_database_that_is_set_back_makes_no_id_again"
        ],
        "The next owner of a node begins inside the time that the last one had reserved.",
    ),
]
