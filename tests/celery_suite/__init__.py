"""Celery's own tests of apps and tasks, run with ``Celery`` and with ``OutboxCelery``.

``python -m tests.celery_suite`` fetches the tests of the installed Celery from its source
distribution, so it needs a package registry; it is no part of the suite.
"""
