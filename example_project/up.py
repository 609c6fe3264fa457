"""``python -m example_project.up`` runs the example until Ctrl-C: drainer, worker and web server.

After ``manage.py migrate`` it starts these three, and any of them may be run on its own instead:

    python manage.py drain_outbox
    python -m celery -A example_project worker --concurrency 2 --loglevel INFO
    python manage.py runserver --noreload

They share one terminal, each line with the name of its process before it. When one of them ends, or
on Ctrl-C, all are stopped with SIGTERM.
"""

import argparse
import sys
import time

import django
from django.core.management import call_command

from . import data_folder, demo_user
from .processes import DRAINER, WEB, WORKER, Child, interrupt_on_termination, stop


def main():
    """Run the example; return what ``sys.exit`` takes."""
    parser = argparse.ArgumentParser(
        prog="python -m example_project.up",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--address", default="127.0.0.1:8000", help="where the shop is served")
    options = parser.parse_args()
    django.setup()
    try:
        with data_folder.in_use():
            call_command("migrate", verbosity=0)
            demo_user.make()
            return run(options.address)
    except data_folder.InUseError as error:
        return f"up: {error}"


def run(address):
    """Start the three processes and wait for a signal, or for one of them to end."""
    interrupt_on_termination()
    commands = {
        "drainer": DRAINER,
        "worker": [*WORKER, "--loglevel", "INFO"],
        "web": [*WEB, address],
    }
    children = []
    try:
        children.extend(Child(name, command) for name, command in commands.items())
        print(
            f"The shop: http://{address}/   The admin: http://{address}/admin/ "
            f"(user {demo_user.NAME}, password {demo_user.PASSWORD})   Stop: Ctrl-C"
        )
        while all(child.exit_code is None for child in children):
            time.sleep(0.2)
        ended = [f"{c.name} ended with {c.exit_code}" for c in children if c.exit_code is not None]
        return f"up: {', '.join(ended)}"
    except KeyboardInterrupt:
        print("\nStopping.")
        return 0
    finally:
        stop(children)


if __name__ == "__main__":
    sys.exit(main())
