"""The garbage collector while a loop works: it is paused, and never left off."""

from __future__ import annotations

import gc

import pytest

from outbox_app.process.loop import collection_paused


@pytest.fixture(autouse=True)
def on_again():
    yield
    gc.enable()


def test_it_is_paused_for_the_block():
    with collection_paused():
        assert not gc.isenabled()
    assert gc.isenabled()


def test_a_project_that_has_switched_it_off():
    gc.disable()
    with collection_paused():
        pass
    assert not gc.isenabled()


def test_two_threads_leave_it_on(monkeypatch):
    """The block of one ends just after the other has looked."""
    is_enabled = gc.isenabled

    def look():
        enabled = is_enabled()
        gc.enable()
        return enabled

    gc.disable()
    monkeypatch.setattr(gc, "isenabled", look)
    with collection_paused():
        pass
    assert is_enabled()
