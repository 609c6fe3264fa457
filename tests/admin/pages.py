"""Addresses of the admin's pages, and what is said on them."""

from __future__ import annotations

import html
import re

from django.contrib.messages import get_messages
from django.urls import reverse

from outbox_app.jobs.bulk import START

STAGED = reverse("admin:outbox_app_stagedjob_changelist")
DEAD = reverse("admin:outbox_app_deadjob_changelist")
DRAINERS = reverse("admin:outbox_app_process_changelist")
INCIDENTS = reverse("admin:outbox_app_incident_changelist")
OVERVIEW = reverse("admin:outbox_app_overview")
APP = reverse("admin:app_list", args=["outbox_app"])


def page(row, name="change"):
    """The address of a row's page: change, delete, history."""
    return reverse(f"admin:{row._meta.app_label}_{row._meta.model_name}_{name}", args=[row.pk])


def body(response):
    assert response.status_code == 200, response
    return response.content.decode()


def text(response):
    """What can be read on a page: no tags, entities resolved, white space folded."""
    return " ".join(html.unescape(re.sub(r"<[^>]*>", " ", body(response))).split())


def said(response):
    return [str(message) for message in get_messages(response.wsgi_request)]


def selection(action, *rows, **fields):
    """What the form of a list posts when rows are selected."""
    return {"action": action, "_selected_action": [row.pk for row in rows], "index": 0, **fields}


def batch(until, reason="why"):
    """What the answer to the question about a batched action posts."""
    return {"until": until, "after": START, "done": 0, "confirmed": "yes", "reason": reason}


def hidden(response):
    """The hidden fields of the question that a page asks."""
    found = re.findall(r'<input type="hidden" name="(\w+)" value="([^"]*)"', body(response))
    fields = {}
    for name, value in found:
        fields.setdefault(name, []).append(html.unescape(value))
    return fields
