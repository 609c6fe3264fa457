"""The table of entities on the overview.

The figures are of all types.
"""

from __future__ import annotations

from django.utils.translation import gettext as _

from ..admin.tables import Table, durations, numbers, pairs
from ..monitoring.figures import number
from .series import Commands


def entities(commands: Commands) -> Table:
    sizes = ", ".join("-" if each is None else number(each) for each in commands.batch_size)
    times = durations(commands.commit_seconds)
    figures = [
        (_("Commands per minute"), number(commands.recorded)),
        (_("Conflicts per minute"), number(commands.conflicts)),
        (_("Waiting now"), number(commands.waiting)),
        (_("Commands per batch, p50 and p95"), sizes),
        (_("Time of a batch's transaction, p50 and p95"), times),
    ]
    groups = [
        pairs(_("Figure"), _("Value"), figures),
        pairs(_("Code of rejections"), _("Per minute"), numbers(commands.rejected)),
    ]
    if commands.passed_on or commands.elsewhere:
        figures += [
            (_("Passed on to the leading server, per minute"), number(commands.passed_on)),
            (_("Executed by a server that does not lead, per minute"), number(commands.elsewhere)),
        ]
    return Table(_("Entities"), groups)
