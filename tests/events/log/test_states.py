"""States of cursors can be stored and read back, and invalid states are refused."""

from __future__ import annotations

import json

import pytest

from outbox_app.events.exceptions import DamagedCursor
from tests.one_database import no_statement

from .conformance import commit, reading

pytestmark = pytest.mark.django_db(transaction=True)


def test_states_survive_the_table(alias):
    with reading(alias) as reader:
        commit(alias, "a", "b", "c")
        state = reader.window.start(0)
        for _ in range(3):
            assert reader.load(state.dump()) == state
            assert reader.load(state.dump()).dump() == state.dump()
            state = reader.read(state, 1).page.state


NO_STATES = [
    "",
    "{",
    "null",
    "5",
    "[]",
    '"x"',
    "{}",
    '{"window": "other"}',
    "[" * 100_000,
    None,
    b"\xff",
]


@pytest.mark.any_database
def test_what_is_no_state(alias):
    with reading(alias) as reader, no_statement(alias):
        for text in NO_STATES:
            with pytest.raises(DamagedCursor, match="nothing was delivered"):
                reader.load(text)


def test_states_that_were_edited(alias):
    with reading(alias) as reader:
        values = json.loads(reader.window.start(0).dump())
        for name in values:
            for damaged in ({**values, name: [5]}, {**values, name: {"x": 1}}):
                with pytest.raises(DamagedCursor):
                    reader.load(json.dumps(damaged))
            if name != "rebased":
                with pytest.raises(DamagedCursor):
                    reader.load(json.dumps({**values, name: None}))
            if type(values[name]) is int:
                for nonsense in (-1, True, 1.5, "1", 2**63):
                    with pytest.raises(DamagedCursor):
                        reader.load(json.dumps({**values, name: nonsense}))
            with pytest.raises(DamagedCursor):
                reader.load(json.dumps({key: values[key] for key in values if key != name}))
        with pytest.raises(DamagedCursor):
            reader.load(json.dumps({**values, "more": 1}))
        others = {"postgresql", "mysql", "sqlite"} - {values["window"]}
        for other in others:
            with pytest.raises(DamagedCursor, match="it was made on"):
                reader.load(json.dumps({**values, "window": other}))
