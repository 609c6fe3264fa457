"""``python -m example_project.prepared_demo``: an event is published if its sender has committed.

A shop has the log. Its orders are paid in another project, with a database of its own; the two talk
over signed HTTP. Each payment prepares the event ``payment.taken`` with the shop before its
transaction, and is a process of its own, since a transaction may end in every way there is: it
commits, rolls back, hangs, is killed before its COMMIT or right after it, or never learns whether
its COMMIT worked. The shop asks about those of which it hears nothing, and publishes or cancels
their events.

Then two databases are compared: the payments that were committed, and the events that the shop's
log has. Exit code 0 only if they are the same, each once.
"""
