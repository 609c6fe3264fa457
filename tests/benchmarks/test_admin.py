"""The benchmark of the admin requests existing pages, and all lists."""

from __future__ import annotations

import pytest
from django.contrib import admin
from django.test import Client

from benchmarks.admin import lists, plan_of


@pytest.mark.django_db
def test_each_list_of_the_admin_is_asked_for_and_answers(admin_client: Client) -> None:
    asked = dict(lists())
    answers = {name: admin_client.get(url).status_code for name, url in asked.items()}
    assert {name: code for name, code in answers.items() if code != 200} == {}
    mine = [
        each._meta for each in admin.site._registry if each._meta.app_label.startswith("outbox_")
    ]
    assert {each.model_name for each in mine} <= {name.split()[0] for name in asked}


def test_a_plan_is_read_whose_condition_has_quotes() -> None:
    text = """{
      "table_name": "outbox_deadjob",
      "attached_condition": "envelope like '\"task\": \"rare\"'",
      "r_rows": 7
    }"""
    found = {"table_name": "outbox_deadjob", "attached_condition": "", "r_rows": 7}
    assert plan_of(text) == found
