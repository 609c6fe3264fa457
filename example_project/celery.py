"""The Celery app of the shop. The outbox is the one changed line: OutboxCelery instead of Celery.

The alias makes ``embedded://`` a broker URL, so that the example runs without a server. A project
with Redis or RabbitMQ needs nothing of the kind.
"""

import os

from kombu.transport import TRANSPORT_ALIASES

from outbox_app.celery import OutboxCelery

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "example_project.settings")
TRANSPORT_ALIASES["embedded"] = "example_project.broker:Transport"

app = OutboxCelery("example_project")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()
