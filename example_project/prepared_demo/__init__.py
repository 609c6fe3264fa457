"""``python -m example_project.prepared_demo``: an event is published if its sender has committed.

A shop has the log. Another project takes the payments, with its own database; the two talk over
signed HTTP. Each payment prepares the event ``payment.taken`` with the shop before its transaction.
Each payment is a separate process, because transactions end in every possible way: they commit,
roll back, hang, are killed before COMMIT or right after it, or never learn whether COMMIT worked.
The shop asks about payments from which it hears nothing, and publishes or cancels their events.

Then the demo compares two databases: the committed payments, and the events in the shop's log. Exit
code 0 only if both are the same, each once.
"""
