"""The Celery app of the shop. The outbox changes one line of it: OutboxCelery instead of Celery.

The alias makes ``embedded://`` a broker URL, so that the example runs without a server. A project
with Redis or RabbitMQ needs no alias.
"""

import os

from kombu.transport import TRANSPORT_ALIASES

from outbox_app.celery import OutboxCelery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
TRANSPORT_ALIASES["embedded"] = "example_project.broker:Transport"

app = OutboxCelery("example_project")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
