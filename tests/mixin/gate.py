"""A gate in a module that two threads import: it says when one is inside, and lets it go on."""

from __future__ import annotations

import threading

entered = threading.Event()
opened = threading.Event()
