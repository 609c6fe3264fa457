"""Settings of the demo: the example's, with the payments in a second SQLite file."""

from example_project.settings import *  # noqa: F403
from example_project.settings import DATA_DIR, DATABASES, INSTALLED_APPS, OUTBOX

INSTALLED_APPS = [*INSTALLED_APPS, "example_project.payments"]
DATABASES["payments"] = {**DATABASES["default"], "NAME": str(DATA_DIR / "payments.sqlite3")}

#: Where the payments are, and who keeps their events: "" is this project.
PAYMENTS_DATABASE, PAYMENTS_KEEPER = "payments", ""

# The shop asks soon, as the demo is watched.
OUTBOX |= {"PREPARED_IMMUNE": 1.0, "INTERVAL": 0.1}
