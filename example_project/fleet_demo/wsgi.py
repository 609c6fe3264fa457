"""The application of a server, which registers as soon as it is loaded."""

from django.core.wsgi import get_wsgi_application

from outbox_app.fleet.gunicorn import announce

application = get_wsgi_application()
announce(None)  # as gunicorn's post_worker_init does
