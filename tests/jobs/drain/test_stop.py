"""Stopping from a signal handler, at any moment, without a deadlock."""

from __future__ import annotations

import signal
import threading

from outbox_app.process.waiting import StopFlag
from tests.patience import patience


def test_a_handler_may_interrupt_anything():
    """``threading.Event`` takes a lock that the interrupted thread may hold."""
    current = StopFlag()
    ended = threading.Event()
    main = threading.get_ident()

    def interrupt():
        while not ended.is_set():
            signal.pthread_kill(main, signal.SIGUSR1)
            ended.wait(0.0002)

    before = signal.signal(signal.SIGUSR1, lambda *_: current.set())
    thread = threading.Thread(target=interrupt)
    thread.start()
    try:
        for _ in range(500):
            current = StopFlag()
            while not current.wait(0.00005):
                pass
    finally:
        ended.set()
        thread.join()
        signal.signal(signal.SIGUSR1, before)


def test_it_wakes_whoever_waits():
    stop = StopFlag()
    waiter = threading.Thread(target=lambda: stop.wait(60))
    waiter.start()
    stop.set()
    waiter.join(patience(20))
    assert not waiter.is_alive()
    assert stop.wait(60)  # and whoever comes later
    assert stop.is_set()


def test_how_long_it_has_been_set():
    stop = StopFlag()
    assert not stop.is_set_for(0)
    stop.set()
    assert stop.is_set_for(0)
    assert not stop.is_set_for(3600)
