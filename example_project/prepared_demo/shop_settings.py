"""Settings of the shop, which keeps the log: the example's settings, with the payments as peer."""

import os

from example_project.settings import *  # noqa: F403
from example_project.settings import OUTBOX

ROOT_URLCONF = "example_project.prepared_demo.urls"
OUTBOX |= {
    "INTERVAL": 0.1,
    "PEERS": {
        "payments": {
            "direction": "sender",
            "address": f"http://127.0.0.1:{os.environ['PAYMENTS_PORT']}/outbox/",
            "types": ["payment.*"],
            # In production each side has a key of its own; see docs/reference/door.md.
            "keys": [{"id": "demo", "secret": "env:DEMO_SECRET"}],
        }
    },
}
