"""The command line of the demo. Exit code 0: the published events are the committed payments."""

import argparse
import os
import secrets
import socket
import sys
from contextlib import suppress
from pathlib import Path

import django

from example_project import prepared_demo


def main():
    """Run the demo; return the argument for ``sys.exit``."""
    parser = argparse.ArgumentParser(
        prog="python -m example_project.prepared_demo",
        description=prepared_demo.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--payments", type=int, default=60, help="about so many (default 60)")
    options = parser.parse_args()
    if options.payments < 1:
        parser.error("--payments must be at least 1")
    with suppress(OSError):  # Python sets it, and then asks for the place in the file
        sys.stdout.reconfigure(errors="backslashreplace")  # characters that its encoding lacks
    os.environ.pop("DATABASE_URL", None)
    os.environ.setdefault("DATA_DIR", str(Path(".demo", "prepared").resolve()))
    os.environ["DEMO_SECRET"] = secrets.token_hex(32)
    os.environ["SHOP_PORT"], os.environ["PAYMENTS_PORT"] = map(str, free_ports())
    os.environ["DJANGO_SETTINGS_MODULE"] = "example_project.prepared_demo.shop_settings"
    django.setup()

    from example_project import data_folder
    from example_project.processes import interrupt_on_termination

    from .run import run

    interrupt_on_termination()
    try:
        with data_folder.in_use():
            data_folder.empty()
            data_folder.make()
            return run(options.payments)
    except data_folder.InUseError as error:
        return f"demo-prepared: {error}"
    except KeyboardInterrupt:
        return "demo-prepared: interrupted"


def free_ports():
    """Return two ports that are free now."""
    with (
        socket.create_server(("127.0.0.1", 0)) as one,
        socket.create_server(("127.0.0.1", 0)) as two,
    ):
        return one.getsockname()[1], two.getsockname()[1]


if __name__ == "__main__":
    sys.exit(main())
