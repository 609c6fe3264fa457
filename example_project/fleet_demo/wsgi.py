"""The WSGI application of a server. The server registers as soon as this module is imported."""

from django.core.wsgi import get_wsgi_application

from outbox_app.fleet.gunicorn import register

application = get_wsgi_application()
register(None)  # as gunicorn's post_worker_init does
