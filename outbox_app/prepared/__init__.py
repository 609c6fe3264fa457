"""Prepared events: recorded before the sender's transaction, published only if it commits."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..exports import lazy

if TYPE_CHECKING:
    from .fences import COMMITTED as COMMITTED
    from .fences import IN_PROGRESS as IN_PROGRESS
    from .fences import check_back as check_back
    from .fences import fence as fence
    from .request import NewPrepared as NewPrepared
    from .sender import acancel as acancel
    from .sender import aconfirm as aconfirm
    from .sender import aprepare as aprepare
    from .sender import aprepare_many as aprepare_many
    from .sender import cancel as cancel
    from .sender import confirm as confirm
    from .sender import confirm_on_commit as confirm_on_commit
    from .sender import prepare as prepare
    from .sender import prepare_many as prepare_many
    from .sender import prepared as prepared
    from .sender import prepared_many as prepared_many
else:
    __getattr__, __dir__, __all__ = lazy(
        __name__,
        {
            ".fences": ["COMMITTED", "IN_PROGRESS", "check_back", "fence"],
            ".request": ["NewPrepared"],
            ".sender": [
                *("acancel", "aconfirm", "aprepare", "aprepare_many", "cancel", "confirm"),
                *("confirm_on_commit", "prepare", "prepare_many", "prepared", "prepared_many"),
            ],
        },
    )
