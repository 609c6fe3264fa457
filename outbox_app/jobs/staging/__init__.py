"""Staging: a call of Celery becomes a row in the transaction of its caller."""
