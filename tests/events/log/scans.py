"""Reading scans: batch after batch, each cut into parts, as several processes would."""

from __future__ import annotations

import json

from .harness import Row

EVERYTHING = "SELECT id, stream, version, data FROM outbox_event WHERE"


def rows(scan, start, end, count=1):
    """Read a scan in so many parts, as other processes would. No row may be in two of them."""
    start, end = (scan.state.load(state.dump()) for state in (start, end))
    parts = scan.parts(start, end, count)
    assert len(parts) <= count
    assert all(parts)
    found = [
        Row(*row[:-1], json.loads(row[-1]))
        for part in parts
        for condition in part
        for row in scan.run(f"{EVERYTHING} ({condition})", [])
    ]
    assert len({row.id for row in found}) == len(found)
    return sorted(found)


def names(found):
    return [f"{row.stream}{row.version}" for row in found]


def batch(scan, start, end):
    """Read a scan, cut into several numbers of parts: the same rows."""
    found = rows(scan, start, end)
    for count in (2, 7):
        assert rows(scan, start, end, count) == found
    return found


def batches(scan, state, limit=None, bound=None):
    """Read until nothing comes. Returns names, and the states before, between and after."""
    states, result = [state], []
    while (end := scan.end(states[-1], limit, bound)) != states[-1]:
        found = names(batch(scan, states[-1], end))
        assert found
        result += found
        states.append(end)
    return result, states


def read_all(scan, state, limit=None, bound=None):
    result, states = batches(scan, state, limit, bound)
    return result, states[-1]
