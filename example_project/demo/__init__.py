"""``python -m example_project.demo`` shows with real processes that nothing gets lost or leaks.

Several writers place some thousand orders and roll back a third of them; a drainer is killed with
SIGKILL at the worst moment, and so is the process that keeps two views up to date from the events
of the orders; a Celery worker executes what arrives. Then two independent accounts are compared:
the ledgers in which the writers noted, after each commit or rollback, what became of an order, and
the notes that the worker made of each run. The views are compared with the orders, row by row.

Then ten thousand buyers want a thousand pieces of one article at one moment. The process that
serves them is killed, and all ask again: each must be told what it was told before.

With ``--pipeline`` Spark then archives and audits the events of the orders.
"""
