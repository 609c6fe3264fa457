"""Signals of events. What ``outbox_app.signals`` says of receivers holds here, too.

Receivers of ``events_published`` run in the caller's transaction, before its commit; those of the
others in the process that runs the subscription.
"""

from __future__ import annotations

from django.dispatch import Signal

from ..signals import renew_locks_at_fork

#: Sent after events were written, before the commit. A receiver that raises fails the publish.
#: Arguments: ``using`` (str), ``events`` (list of instances of the log, which is the sender).
events_published = Signal()

#: Sent after a page was handled and committed. Arguments: ``using`` (str), ``subscription`` (str),
#: ``partition`` (int), ``log`` (str: its table), ``count`` (int), ``seconds`` (float).
page_handled = Signal()

#: Sent after a handler raised. Arguments: ``using``, ``subscription``, ``partition``, ``log``,
#: ``error`` (the exception), ``failures`` (int: in a row).
page_failed = Signal()

#: Sent after a stream was parked. Arguments: ``using`` (str), ``parked`` (ParkedStream).
stream_parked = Signal()

renew_locks_at_fork(globals())
