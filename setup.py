"""What setup.cfg cannot say: the addresses of ``outbox_app.URLS``, and a README whose links work.

On a package index the README stands alone, so its links into ``docs`` lead to the documentation.
"""

import ast
import re
from pathlib import Path

from setuptools import setup

ROOT = Path(__file__).parent


def addresses() -> dict[str, str]:
    """Return ``outbox_app.URLS`` without importing the package."""
    for node in ast.parse((ROOT / "outbox_app" / "__init__.py").read_text()).body:
        if isinstance(node, ast.AnnAssign) and getattr(node.target, "id", "") == "URLS":
            return ast.literal_eval(node.value)
    raise LookupError("outbox_app.URLS")


def readme(urls: dict[str, str]) -> str:
    """Return the README; its links stay as they are where what they lead to has no address."""
    text = (ROOT / "README.md").read_text()
    if site := urls.get("Documentation"):
        text = re.sub(r"\]\(docs/([^)#]+)\.md", rf"]({site}\1.html", text)
        text = re.sub(r"\]\(docs/(?:\w+/)*([\w.-]+\.svg)", rf"]({site}_images/\1", text)
    if changes := urls.get("Changes"):
        text = text.replace("](CHANGELOG.md)", f"]({changes})")
    return text


if __name__ == "__main__":
    urls = {name: url for name, url in addresses().items() if url}
    setup(project_urls=urls, long_description=readme(urls))
