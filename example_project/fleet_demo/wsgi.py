"""The WSGI application of a server. The server registers as soon as this module is imported."""

from django.core.wsgi import get_wsgi_application

from outbox_app.fleet.gunicorn import announce

application = get_wsgi_application()
announce(None)  # as gunicorn's post_worker_init does
