"""How the list of servers follows the registry: a pure function, so each case is a line."""

from __future__ import annotations

from typing import Any

import pytest

from outbox_app.fleet.registry import CLIENT, Member
from outbox_app.fleet.watch import KEEP, Listing


def a(port: int, **fields: Any) -> Member:
    return Member(service="shop", address=f"http://127.0.0.1:{port}/", **fields)


def ports(listing: Listing) -> list[int]:
    return [int(each.address.rsplit(":")[-1].strip("/")) for each in listing.servers]


@pytest.mark.parametrize(
    ("before", "after", "listed", "kept"),
    [
        ([], [], [], 0),
        ([], [1, 2], [1, 2], 0),
        ([1, 2], [2], [2], 0),  # half
        ([1, 2, 3], [3], [1, 2, 3], 2),  # more than half
        ([1, 2, 3], [], [1, 2, 3], 3),
        ([1], [2], [1, 2], 1),  # what is new is called at once
        ([1, 2, 3, 4], [3, 4], [3, 4], 0),
    ],
)
def test_one_step(before: list[int], after: list[int], listed: list[int], kept: int) -> None:
    known = {port: a(port) for port in {*before, *after}}
    first = Listing().after([known[each] for each in before], 0)
    second = first.after([known[each] for each in after], 1)
    assert (ports(second), len(second.kept)) == (listed, kept)


def test_what_is_kept_comes_back_or_goes() -> None:
    four = [a(port) for port in (1, 2, 3, 4)]
    full = Listing().after(four, 0)
    emptied = full.after([], 10)
    assert emptied.servers == full.servers
    assert emptied.after([], 10 + KEEP - 1).servers == full.servers
    gone = emptied.after([], 10 + KEEP)
    assert (gone.servers, gone.kept) == ((), frozenset())
    back = emptied.after(four[:2], 20)
    assert (ports(back), back.kept, back.kept_since) == ([1, 2], frozenset(), None)


def test_what_is_no_server_is_left_out() -> None:
    wrong = [
        a(1, kind=CLIENT),
        Member(service="shop", address="http://shop.example/"),
        Member(service="shop", address="nonsense"),
        Member(service="shop"),
    ]
    assert ports(Listing().after([*wrong, a(2)], 0)) == [2]


def test_a_wrong_address_is_logged_once(caplog: Any) -> None:
    """A list is pulled every two seconds."""
    wrong, listing = Member(service="shop", address="http://once.example/"), Listing()
    for now in range(3):
        listing = listing.after([wrong], now)
    assert caplog.text.count("Server left out, its address is invalid") == 1


def test_processes_behind_one_address_are_one_server() -> None:
    strong, weak, draining = a(1, weight=90), a(1, weight=10), a(1, weight=100, draining=True)
    for given in ([strong, weak, draining], [draining, weak, strong]):
        assert Listing().after(given, 0).servers == (strong,)
    assert Listing().after([draining], 0).servers == (draining,)
