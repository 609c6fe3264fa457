"""The dictionary ``OUTBOX["FLEET"]``, and servers that no server can call.

``manage.py outbox_fleet servers`` shows whether the registry answers, and which servers it lists. A
command that cannot be passed on is not lost: it is executed where it arrives.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import fields
from typing import Any
from urllib.parse import urlsplit

from django.core.checks import CheckMessage, Error, Warning
from django.core.exceptions import ImproperlyConfigured
from django.utils.module_loading import import_string

from ..conf import outbox_settings
from ..door.peers import address_fault, is_name, is_this_host
from .cluster import CHOICES
from .conf import FleetSettings, fleet_settings
from .registry import Registry

KEYS = ", ".join(each.name for each in fields(FleetSettings))
HINT = f"Correct it, or leave it out. The keys of FLEET are {KEYS}."


def check_fleet(**kwargs: Any) -> Iterator[CheckMessage]:
    outbox_settings()  # if this raises, check_settings reports it
    try:
        conf = fleet_settings()
    except ImproperlyConfigured as error:
        yield Error(str(error), hint=HINT, id="outbox.E046")
        return
    faults = list(_faults(conf))
    for name, fault in faults:
        text = f"OUTBOX['FLEET'][{name!r}] is {getattr(conf, name)!r}, which {fault}."
        yield Error(text, hint=HINT, id="outbox.E046")
    if faults or not conf.ADDRESS:
        return
    if isinstance(conf.TOPOLOGY, list | tuple) and conf.ADDRESS not in conf.TOPOLOGY:
        yield Warning(
            f"OUTBOX['FLEET']['TOPOLOGY'] does not list this server's own ADDRESS, {conf.ADDRESS!r}"
            ": the server leads no entity, and passes on all commands of routed types.",
            hint="Add the address. Silence this if the server is to lead no entity.",
            id="outbox.W037",
        )
    is_listed = conf.ADDRESS in conf.SERVERS.get(conf.SERVICE, ())
    if conf.REGISTRY.endswith("StaticRegistry") and not is_listed:
        yield Warning(
            f"OUTBOX['FLEET']['SERVERS'] does not list this server's own ADDRESS, {conf.ADDRESS!r}:"
            " clients with this list never call the server.",
            hint=f"Add the address to the addresses of {conf.SERVICE!r}.",
            id="outbox.W037",
        )


def _faults(conf: FleetSettings) -> Iterator[tuple[str, str]]:
    if conf.SERVICE != "" and not is_name(conf.SERVICE):
        yield "SERVICE", "is not a name of up to 80 characters without colon, slash and space"
    if conf.ADDRESS != "" and (fault := address_fault(conf.ADDRESS)):
        yield "ADDRESS", fault
    elif urlsplit(conf.ADDRESS).hostname in ("0.0.0.0", "::"):
        yield "ADDRESS", "is an address to listen on, not one to call"
    elif conf.ADDRESS and not conf.SERVICE:
        yield "ADDRESS", "no client can find, because SERVICE is empty"
    if type(conf.WEIGHT) is not int or not 0 <= conf.WEIGHT <= 100:
        yield "WEIGHT", "is not an integer from 0 to 100"
    if type(conf.DEADLINE) not in (int, float) or not 0 < conf.DEADLINE < 1_000_000:
        yield "DEADLINE", "is not a number of seconds above 0 and below 1,000,000"
    leading = conf.TOPOLOGY
    if leading not in (None, "registered") and (
        not isinstance(leading, list | tuple)
        or any(map(address_fault, leading))
        or not 0 < len(leading) == len(set(leading))
    ):
        yield "TOPOLOGY", "is neither 'registered', nor None, nor a list of different addresses"
    for name, known in CHOICES.items():
        if getattr(conf, name) not in known:
            yield name, f"is none of {', '.join(map(repr, known))}"
    try:
        if not issubclass(import_string(conf.REGISTRY), Registry):
            yield "REGISTRY", "is not a subclass of Registry"
    except (ImportError, AttributeError, TypeError, ValueError) as error:
        yield "REGISTRY", f"cannot be imported: {error}"
    if not isinstance(conf.REGISTRY_URL, str):
        yield "REGISTRY_URL", "is not a string"
    elif not conf.REGISTRY_URL and str(conf.REGISTRY).endswith("ToozRegistry"):
        yield "REGISTRY_URL", "is not the address of a registry, such as redis://host:6379/0"
    if not isinstance(conf.SERVERS, Mapping) or not all(map(is_name, conf.SERVERS)):
        yield "SERVERS", "is not a dictionary of service names and lists of addresses"
        return
    for name, addresses in conf.SERVERS.items():
        if not isinstance(addresses, list | tuple) or len({*map(str, addresses)}) < len(addresses):
            yield "SERVERS", f"has no list of different addresses for {name!r}"
        elif wrong := [each for each in addresses if address_fault(each)]:
            yield "SERVERS", f"has the address {wrong[0]!r}, which {address_fault(wrong[0])}"


def check_reach(**kwargs: Any) -> Iterator[CheckMessage]:
    """Report, before a deploy, settings that keep servers from being called."""
    if any(isinstance(each, Error) for each in check_fleet()):
        return
    conf = fleet_settings()
    host = urlsplit(conf.ADDRESS).hostname
    if host and is_this_host(host):
        yield Warning(
            f"OUTBOX['FLEET']['ADDRESS'] is {conf.ADDRESS!r}: no other host can call it.",
            hint="Give each server the address at which the other servers reach it.",
            id="outbox.W041",
        )


ALWAYS = (check_fleet,)
DEPLOY = (check_reach,)
