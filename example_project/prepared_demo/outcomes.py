"""Every way in which a transaction may end, grouped by how the keeper learns of the outcome."""

import os
import signal
import time
from collections.abc import Callable
from typing import NamedTuple

from django.db import OperationalError, connection, transaction

#: Seconds for which a transaction hangs: longer than the shop waits before it asks.
HANGS = 2.5


class DeclinedError(Exception):
    """The bank said no."""


def commits():
    """Do nothing: the transaction commits."""


def rolls_back():
    raise DeclinedError


def dies():
    os.kill(os.getpid(), signal.SIGKILL)


def dies_after_commit():
    # Registered inside the prepared() block, so it is called before the block confirms the event.
    transaction.on_commit(dies)


def loses_reply():
    """Make the connection break after COMMIT has arrived, before its reply."""
    commit = connection._commit

    def lose():
        commit()
        break_connection()

    connection._commit = lose


def loses_commit():
    """Make the connection break before COMMIT arrives. The sender sees the same error as above."""
    connection._commit = break_connection


def break_connection():
    connection.connection.close()
    raise OperationalError("the connection was lost during COMMIT")


def hangs():
    time.sleep(HANGS)


def hangs_and_dies():
    hangs()
    dies()


class Outcome(NamedTuple):
    """One way in which a transaction ends."""

    name: str
    happens: Callable[[], None]
    #: How many of a hundred payments end like this.
    share: int


#: The sender knows the outcome, or reads it from the fence, and tells the shop.
TOLD = [
    Outcome("commits", commits, 30),
    Outcome("rolls back", rolls_back, 16),
    Outcome("COMMIT arrives, reply lost", loses_reply, 16),
    Outcome("COMMIT lost", loses_commit, 10),
]
#: The shop hears nothing from the sender, so it asks.
SILENT = [
    Outcome("killed before COMMIT", dies, 12),
    Outcome("killed after COMMIT", dies_after_commit, 12),
]
#: The shop asks while the transaction is open, and the answer says that it is open.
OPEN = [
    Outcome("hangs, then commits", hangs, 2),
    Outcome("hangs, then is killed", hangs_and_dies, 2),
]
OUTCOMES = {outcome.name: outcome for outcome in (*TOLD, *SILENT, *OPEN)}
