"""``python -m example_project.demo`` shows with real processes that nothing gets lost or leaks.

Several writers place some thousand orders and roll back a third of them. A drainer is killed with
SIGKILL at the worst moment, and so is the process that updates two views from the events of the
orders. A Celery worker executes the jobs, and the broker is emptied meanwhile. Then the demo
compares two independent accounts: the ledgers in which the writers noted the outcome of each order
after its commit or rollback, and the worker's notes of each run. It also compares the views with
the orders, row by row.

Then ten thousand buyers want a thousand pieces of one article at one moment. The process that
serves them is killed, and all buyers ask again: each must get the same answer as before.

With ``--pipeline`` Spark then archives and audits the events of the orders.
"""
