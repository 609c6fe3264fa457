"""The command line: starts private servers unless POSTGRES_URL and REDIS_URL name some."""

from __future__ import annotations

import argparse
import importlib
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.servers import PostgreSQL, Redis

NAMES = ("drain",)


def main() -> None:
    """Run one benchmark, print its ratios, and write the raw rounds where asked."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description=__doc__)
    parser.add_argument("name", choices=NAMES)
    parser.add_argument("--quick", action="store_true", help="fewer and smaller rounds")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write ratios and raw rounds")
    options = parser.parse_args()
    with ExitStack() as stack:
        for variable, server in (("POSTGRES_URL", PostgreSQL), ("REDIS_URL", Redis)):
            if variable not in os.environ:
                os.environ[variable] = stack.enter_context(server()).url
        os.environ["DJANGO_SETTINGS_MODULE"] = "benchmarks.settings"
        result = importlib.import_module(f"benchmarks.{options.name}").run(quick=options.quick)
    show(result)
    if options.json:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


def show(result: dict[str, Any]) -> None:
    """Print each ratio beside what is asked of it."""
    for name, value in result["ratios"].items():
        print(f"{name:24} {value:8.4f}   {result['asked'].get(name, '')}")


if __name__ == "__main__":
    main()
