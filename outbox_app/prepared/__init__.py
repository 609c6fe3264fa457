"""Prepared events: recorded before the sender's transaction, published only if it commits.

Import it where models may be imported: it imports models itself.
"""

from .fences import COMMITTED, IN_PROGRESS, check_back, fence
from .request import NewPrepared
from .sender import (
    acancel,
    aconfirm,
    aprepare,
    aprepare_many,
    cancel,
    confirm,
    confirm_on_commit,
    prepare,
    prepare_many,
    prepared,
    prepared_many,
)

__all__ = [
    "COMMITTED",
    "IN_PROGRESS",
    "NewPrepared",
    "acancel",
    "aconfirm",
    "aprepare",
    "aprepare_many",
    "cancel",
    "check_back",
    "confirm",
    "confirm_on_commit",
    "fence",
    "prepare",
    "prepare_many",
    "prepared",
    "prepared_many",
]
