"""The worker's side of receipts: the worker deletes the row of a job, not the drainer.

A message of a job with a receipt has the header ``outbox_row``. A worker that gets one inserts a
``Run`` with a lease before the body, and deletes the row and the run after the job's end: the
follow-ups are sent and the result is stored by then. What is in which module:

::

    tracer     wraps Celery's tracer of each task: where a job begins and ends
    run        one attempt of a worker: may it begin, and what becomes of the row at its end
    ledger     the statements of a worker process, on a connection of its own
    keeper     a thread that renews the leases of a process, and repeats what the database refused
    settling   the main process of a worker: ends of which no process of the pool knows

No job runs without its row: if the database is away, the message goes back to the broker. A worker
that is cut off from the database for longer than its lease goes on; another one may begin the job.
"""
