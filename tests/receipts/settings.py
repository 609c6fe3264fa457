"""Settings of the worker processes: every task has a receipt, unless it says otherwise."""

from tests.settings import *  # noqa: F403
from tests.settings import OUTBOX

#: Long enough that no job is sent again unless a test turns its time back.
RECEIPTS = {"*": {"limit": 3600, "attempts": 3}}
OUTBOX = {**OUTBOX, "RECEIPTS": RECEIPTS, "RECEIPT_LEASE_SECONDS": 3.0}
