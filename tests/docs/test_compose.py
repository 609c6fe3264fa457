"""``compose.yaml`` of the example: its commands and settings exist.

These tests run no container. Other tests run the same commands on the same servers.
"""

from __future__ import annotations

import configparser
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml
from django.core.management import get_commands

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "example_project"
COMPOSE: dict[str, Any] = yaml.safe_load((EXAMPLE / "compose.yaml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
OURS = {name: service for name, service in SERVICES.items() if "build" in service}


@pytest.mark.parametrize("name", OURS)
def test_its_command_exists(name: str) -> None:
    python, program, *arguments = OURS[name]["command"]
    assert python == "python"
    if program == "manage.py":
        assert arguments[0] in get_commands()
    else:
        assert (program, arguments[:3]) == ("-m", ["celery", "-A", "example_project"])


@pytest.mark.parametrize("name", OURS)
def test_its_settings_are_read(name: str) -> None:
    read = set(re.findall(r'env\.\w+\(\s*"(\w+)"', (EXAMPLE / "settings.py").read_text()))
    assert OURS[name]["environment"].keys() <= read


@pytest.mark.parametrize("name", SERVICES)
def test_what_it_waits_for_is_there_and_says_when_it_is_ready(name: str) -> None:
    for needed, how in SERVICES[name].get("depends_on", {}).items():
        if how["condition"] == "service_healthy":
            assert "healthcheck" in SERVICES[needed]
        else:
            assert how["condition"] == "service_completed_successfully"
            assert SERVICES[needed]["restart"] == "no"


def test_the_image_installs_extras_that_exist() -> None:
    text = (EXAMPLE / "Dockerfile").read_text()
    [line] = re.findall(r"^RUN pip install (.*)$", text, re.MULTILINE)
    [extras] = re.findall(r"\.\[(.*)\]", " ".join(shlex.split(line)))
    config = configparser.ConfigParser()
    config.read(ROOT / "setup.cfg")
    assert set(extras.split(",")) <= set(config["options.extras_require"])
    assert OURS["web"]["build"]["dockerfile"] == "example_project/Dockerfile"
    assert (EXAMPLE / OURS["web"]["build"]["context"]).resolve() == ROOT
