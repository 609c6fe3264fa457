"""A browser in a thread of its own, and pages that notice whatever goes wrong on them.

Playwright keeps an event loop running in the thread that uses it, and Django refuses to touch a
database there. So it gets a thread: ``Browser.run`` calls a function in it, and the tests that take
a page are run there whole (see ``conftest``).
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from urllib.parse import urlsplit

from playwright.sync_api import BrowserContext, expect, sync_playwright

from tests.patience import patience

#: Milliseconds to wait for what has to come; a slow machine takes its time.
MILLISECONDS = 30_000
#: Of the thread.
NAME = "chromium"
OPTIONS = (
    "--no-sandbox",
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
#: Runs in each page before anything else does.
FIRST = """
    document.addEventListener("securitypolicyviolation", event => {
        const what = `${event.violatedDirective} ${event.blockedURI} ${event.sourceFile}`;
        console.error(`policy violated: ${what} ${event.sample}`);
    });
"""


class Browser:
    """Chromium, headless.

    Args:
        program: Its path.
    """

    def __init__(self, program: str) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix=NAME)
        self.run(self._launch, program)

    def run(self, function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        """Return what a function says that runs in the browser's thread; call it from anywhere."""
        if threading.current_thread().name.startswith(NAME):
            return function(*arguments, **options)
        return self._thread.submit(function, *arguments, **options).result()

    def close(self) -> None:
        self.run(self._close)
        self._thread.shutdown()

    def context(self, url: str, **options: Any) -> BrowserContext:
        """A new session of the browser. Call it in the browser's thread."""
        options = {"viewport": {"width": 1280, "height": 900}, "locale": "en-GB", **options}
        context = self._browser.new_context(base_url=url, timezone_id="UTC", **options)
        context.set_default_timeout(patience(MILLISECONDS))
        context.add_init_script(FIRST)
        return context

    def _launch(self, program: str) -> None:
        expect.set_options(timeout=patience(MILLISECONDS))
        self._playwright = sync_playwright().start()
        self._browser = self._playwright.chromium.launch(
            executable_path=program, args=[*OPTIONS], timeout=patience(2 * MILLISECONDS)
        )

    def _close(self) -> None:
        self._browser.close()
        self._playwright.stop()


class Watch:
    """Notes what must not happen on the pages of a session: errors, refusals, strange hosts."""

    def __init__(self, context: BrowserContext, url: str) -> None:
        self.trouble: list[str] = []
        self._ended = False
        self._host = urlsplit(url).netloc
        context.on("console", self._console)
        context.on("dialog", self._dialog)
        context.on("weberror", lambda error: self._note("error", error.error))
        context.on("request", self._request)
        context.on("requestfailed", self._failed)
        context.on("response", self._response)

    def end(self) -> None:
        """Forget what was noted, and note nothing any more: what follows goes wrong on purpose."""
        self._ended = True
        self.trouble.clear()

    def _note(self, *words: Any) -> None:
        if not self._ended:
            self.trouble.append(" ".join(map(str, words)))

    def _console(self, message: Any) -> None:
        # The example has no icon; Chromium asks by itself.
        is_icon = message.location.get("url", "").endswith("/favicon.ico")
        if message.type in ("error", "warning", "assert") and not is_icon:
            self._note("console", message.type, message.text, message.location)

    def _dialog(self, dialog: Any) -> None:
        self._note("dialog", dialog.message)
        dialog.dismiss()

    def _request(self, request: Any) -> None:
        parts = urlsplit(request.url)
        if (parts.scheme, parts.netloc) != ("http", self._host):
            self._note("request to", request.url[:200])

    def _failed(self, request: Any) -> None:
        # A page that is left in the middle of a request ends that request.
        if request.failure != "net::ERR_ABORTED":
            self._note("failed", request.failure, request.url[:200])

    def _response(self, response: Any) -> None:
        if response.status >= 400 and not response.url.endswith("/favicon.ico"):
            self._note(response.status, response.request.method, response.url[:200])
