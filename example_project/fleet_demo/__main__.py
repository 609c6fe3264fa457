"""The command line of the demo. Exit code 0: each call that fails over was answered once."""

import argparse
import os
import secrets
import sys
from contextlib import suppress
from pathlib import Path

import django

from example_project import fleet_demo


def main():
    """Run the demo; return the argument for ``sys.exit``."""
    parser = argparse.ArgumentParser(
        prog="python -m example_project.fleet_demo",
        description=fleet_demo.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--calls", type=int, default=300, help="of each stage (default 300)")
    options = parser.parse_args()
    if options.calls < 20:
        parser.error("--calls must be at least 20")
    with suppress(OSError):  # Python sets it, and then asks for the place in the file
        sys.stdout.reconfigure(errors="backslashreplace")  # characters that its encoding lacks
    for name in ("DATABASE_URL", "PORT"):
        os.environ.pop(name, None)
    os.environ.setdefault("DATA_DIR", str(Path(".demo", "fleet").resolve()))
    os.environ["DEMO_SECRET"] = secrets.token_hex(32)
    os.environ["FLEET_SECRET"] = secrets.token_hex(32)
    os.environ["DJANGO_SETTINGS_MODULE"] = "example_project.fleet_demo.settings"
    django.setup()

    from example_project import data_folder
    from example_project.processes import interrupt_on_termination

    from .run import run

    interrupt_on_termination()
    try:
        with data_folder.in_use():
            data_folder.empty()
            data_folder.make()
            return run(options.calls)
    except data_folder.InUseError as error:
        return f"demo-fleet: {error}"
    except KeyboardInterrupt:
        return "demo-fleet: interrupted"


if __name__ == "__main__":
    sys.exit(main())
