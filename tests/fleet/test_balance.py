"""The shares of servers, ejection and its bounds, with an injected clock."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from outbox_app.fleet.balance import Balance
from outbox_app.fleet.registry import Member


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def balance(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> Balance:
    monkeypatch.setattr("outbox_app.fleet.balance.random", random.Random(7))
    return Balance(clock=clock)


def shop(name: str, weight: int = 100, **fields: Any) -> Member:
    return Member(service="shop", address=name, weight=weight, **fields)


A, B, C, D = map(shop, "ABCD")


def first(balance: Balance, servers: list[Member], kind: str = "weighted_random") -> str:
    return next(balance.attempts(servers, kind))[0].address


def order(balance: Balance, servers: list[Member]) -> str:
    return "".join(each.address for each, _ in balance.attempts(servers, "round_robin"))


@pytest.mark.parametrize(
    ("kind", "count"), [("random", 5_000), ("round_robin", 1_000), ("weighted_random", 20_000)]
)
def test_shares_are_those_of_the_weights_while_the_list_changes(
    balance: Balance, kind: str, count: int
) -> None:
    """Each fifth of the calls meets another list: expected is the sum of its shares."""
    weights = {"A": 100, "B": 60, "C": 40, "D": 80, "E": 20}
    lists = ["ABCDE", "ABCD", "BCDE", "ACE", "ABCDE"]
    found: Counter[str] = Counter()
    expected: Counter[str] = Counter()
    for names in lists:
        servers = [shop(name, weights[name]) for name in names]
        servers += [shop("drained", 0), shop("draining", 100, draining=True)]
        total = sum(weights[name] if "weighted" in kind else 1 for name in names)
        for name in names:
            expected[name] += count * (weights[name] if "weighted" in kind else 1) / total
        found.update(first(balance, servers, kind) for _ in range(count))
    assert found.keys() == expected.keys()
    assert all(abs(found[name] / expected[name] - 1) < 0.03 for name in expected), found


def test_round_robin_begins_at_another_server_in_each_process() -> None:
    begins = {first(Balance(), [A, B, C, D], "round_robin") for _ in range(50)}
    assert begins == set("ABCD")


def test_each_server_is_tried_once_and_the_last_one_is_said(balance: Balance) -> None:
    for kind in ("random", "round_robin", "weighted_random"):
        tried = list(balance.attempts([A, B, C, D], kind))
        assert sorted(each.address for each, _ in tried) == list("ABCD")
        assert [last for _, last in tried] == [False, False, False, True]
    assert list(balance.attempts([], "random")) == []
    assert list(balance.attempts([shop("A", 0)], "random")) == []


def fail(balance: Balance, address: str, times: int = 3) -> None:
    for _ in range(times):
        balance.failed(address, "cut off")


def test_three_failures_in_a_row_eject(balance: Balance, clock: Clock) -> None:
    fail(balance, "A", 2)
    balance.succeeded("A")
    fail(balance, "A", 2)
    assert balance.ejected([A, B, C, D]) == []
    fail(balance, "A", 1)
    assert balance.ejected([A, B, C, D]) == ["A"]
    assert all(order(balance, [A, B, C, D])[-1] == "A" for _ in range(8))  # the last to be tried


def chosen(balance: Balance) -> set[str]:
    return {first(balance, [A, B, C, D]) for _ in range(200)}


def test_an_ejection_ends_with_one_call_that_tries(balance: Balance, clock: Clock) -> None:
    fail(balance, "A")
    for seconds in (5, 10, 20, 40, 60, 60):
        assert "A" not in chosen(balance)
        clock.now += seconds - 0.1
        assert "A" not in chosen(balance)
        clock.now += 0.1
        calls = Counter(first(balance, [A, B, C, D]) for _ in range(200))
        assert calls["A"] == 1  # that one is under way
        fail(balance, "A", 1)
    clock.now += 60
    while first(balance, [A, B, C, D]) != "A":
        pass
    balance.succeeded("A")
    assert "A" in chosen(balance)
    assert balance.failing == {}


def test_failures_of_calls_under_way_make_no_ejection_longer(
    balance: Balance, clock: Clock
) -> None:
    fail(balance, "A", 40)
    clock.now += 5
    assert "A" in chosen(balance)


def test_half_of_the_list_at_most(balance: Balance) -> None:
    for address in "ABCD":
        fail(balance, address)
    assert len(chosen(balance)) == 2
    assert sorted(order(balance, [A, B, C, D])) == list("ABCD")
    assert first(balance, [A]) == "A"
    assert balance.ejected([A, B, C]) == ["A"]


def test_who_is_listed_no_more_is_forgotten(balance: Balance) -> None:
    """Else what a call costs would grow with each server that there has been."""
    for address in "ABC":
        fail(balance, address)
    first(balance, [shop("A", 0), B, D])
    assert balance.failing.keys() == {"A", "B"}


def test_many_threads_try_one_server_once(balance: Balance, clock: Clock) -> None:
    from concurrent.futures import ThreadPoolExecutor

    fail(balance, "A")
    clock.now += 5
    call: Callable[[int], str] = lambda _: first(balance, [A, B])  # noqa: E731
    with ThreadPoolExecutor(8) as pool:
        assert Counter(pool.map(call, range(400)))["A"] == 1
