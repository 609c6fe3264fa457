"""``python -m example_project.up`` runs the example until Ctrl-C: drainer, views, worker, web.

After ``manage.py migrate``, and with some trouble to look at in the admin (``trouble``), it starts
these four. Any of them may be run on its own instead:

    python manage.py drain_outbox
    python manage.py run_subscriptions
    python -m celery -A example_project worker --concurrency 2 --loglevel INFO
    python manage.py runserver --noreload

The four share one terminal, with the name of the process before each line. A process that ends is
restarted, as by a supervisor: kill one and see what happens. If a process ends right after its
start, all of them are ended. On Ctrl-C all processes are stopped with SIGTERM.
"""

import argparse
import socket
import sys
import time
from contextlib import suppress

import django
from django.core.management import call_command

from . import data_folder, demo_user
from .processes import DRAINER, SUBSCRIPTIONS, WEB, WORKER, Child, interrupt_on_termination, stop

#: A process that ends within so many seconds is not restarted: it would end again.
SHORT_LIFE = 3.0


def main():
    """Run the example; return the argument for ``sys.exit``."""
    parser = argparse.ArgumentParser(
        prog="python -m example_project.up",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--address", default="127.0.0.1:8000", help="where the shop is served")
    options = parser.parse_args()
    with suppress(OSError):  # Python sets it, and then asks for the place in the file
        sys.stdout.reconfigure(errors="backslashreplace")  # characters that its encoding lacks
    django.setup()
    try:
        require_free(options.address)
        with data_folder.in_use():
            call_command("migrate", verbosity=0)
            demo_user.make()
            from . import trouble  # it needs the models

            trouble.make()
            return run(options.address)
    except (data_folder.InUseError, AddressError) as error:
        return f"up: {error}"


class AddressError(Exception):
    """The web server cannot listen at this address."""


def require_free(address):
    """Check that the web server will be able to listen; raise AddressError if not."""
    host, _, port = address.rpartition(":")
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        socket.create_server((host.strip("[]") or "127.0.0.1", int(port)), family=family).close()
    except (OSError, ValueError, OverflowError) as error:
        raise AddressError(
            f"The shop cannot be served at {address}: {error}. "
            'Choose another address: make up ARGS="--address 127.0.0.1:8001"'
        ) from None


def run(address):
    """Start the four processes, and restart each one that ends, until a signal arrives."""
    interrupt_on_termination()
    commands = {
        "drainer": DRAINER,
        "views": SUBSCRIPTIONS,
        "worker": [*WORKER, "--loglevel", "INFO"],
        "web": [*WEB, address],
    }
    children = {}
    started = {}

    def start(name):
        children[name], started[name] = Child(name, commands[name]), time.monotonic()
        say(f"{name} started as process {children[name].pid}.")

    try:
        for name in commands:
            start(name)
        say(
            f"The shop: http://{address}/   The admin: http://{address}/admin/ "
            f"(user {demo_user.NAME}, password {demo_user.PASSWORD})   Stop: Ctrl-C"
        )
        while True:
            time.sleep(0.2)
            for name, child in list(children.items()):
                if child.exit_code is None:
                    continue
                say(f"{name} (process {child.pid}) has ended with exit code {child.exit_code}.")
                if time.monotonic() - started[name] < SHORT_LIFE:
                    return f"up: {name} ended as soon as it had begun; its last lines say why."
                start(name)
    except KeyboardInterrupt:
        print("\nStopping.")
        return 0
    finally:
        stop(children.values())


def say(text):
    """Write a line in the format of the processes' lines."""
    print(f"{'up':>8} | {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
