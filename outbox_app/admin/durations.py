"""Durations for people.

Two units at most, never rounded up: what is shown as an hour has lasted an hour.
"""

from __future__ import annotations

from django.utils.translation import gettext as _


def duration(seconds: float, *, fine: bool = False) -> str:
    """Return a duration for people: ``4 s``, ``12 min``, ``3 h 5 min``, ``2 d 1 h``.

    Args:
        seconds: How long.
        fine: Show less than ten seconds in milliseconds.
    """
    if fine and seconds < 10:
        return _("%(milliseconds).0f ms") % {"milliseconds": seconds * 1000}
    if seconds < 60:
        return _("%(seconds).0f s") % {"seconds": seconds}
    minutes, hours, days = int(seconds // 60), int(seconds // 3600), int(seconds // 86400)
    if not hours:
        return _("%(minutes)d min") % {"minutes": minutes}
    if not days:
        return _("%(hours)d h %(minutes)d min") % {"hours": hours, "minutes": minutes % 60}
    return _("%(days)d d %(hours)d h") % {"days": days, "hours": hours % 24}
