"""Prepared events: recorded before the sender's transaction, published only if it commits.

Import it where models may be imported: it imports models itself.
"""

from .fences import fence as fence
from .questions import COMMITTED as COMMITTED
from .questions import IN_PROGRESS as IN_PROGRESS
from .questions import check_back as check_back
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
