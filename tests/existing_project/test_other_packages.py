"""The statements of docs/howto/other-packages.md, with the real packages."""

from __future__ import annotations

import json
import logging
from io import StringIO

import pytest
import structlog
from celery import Celery
from django.db import connections, transaction
from django.test import Client, override_settings
from django.urls import path
from pythonjsonlogger.json import JsonFormatter
from rest_framework.exceptions import ValidationError
from rest_framework.response import Response
from rest_framework.views import APIView

from outbox_app.models import StagedJob
from outbox_app.text import get_logger


class Order(APIView):
    authentication_classes = permission_classes = ()

    def get(self, request, total):
        app.tasks["send_receipt"].delay(total)
        if total > 100:
            raise ValidationError("too much")
        return Response({"total": total})


app: Celery
urlpatterns = [path("order/<int:total>/", Order.as_view())]


@pytest.mark.django_db(transaction=True)
def test_rest_framework_rolls_back_what_a_refused_request_has_staged(
    alias, make_named_app, monkeypatch
):
    global app
    app = make_named_app("memory://")

    @app.task(name="send_receipt")
    def send_receipt(total): ...

    monkeypatch.setitem(connections[alias].settings_dict, "ATOMIC_REQUESTS", True)
    rest = {"UNAUTHENTICATED_USER": None, "DEFAULT_RENDERER_CLASSES": [JSON]}
    with override_settings(ROOT_URLCONF=__name__, REST_FRAMEWORK=rest):
        codes = [Client().get(f"/order/{total}/").status_code for total in (10, 1000, 20)]
    assert codes == [200, 400, 200]
    assert not transaction.get_connection(alias).in_atomic_block
    assert [row.task for row in StagedJob.objects.using(alias)] == ["send_receipt"] * 2


JSON = "rest_framework.renderers.JSONRenderer"
STRUCTLOG = structlog.stdlib.ProcessorFormatter(
    foreign_pre_chain=[structlog.stdlib.add_log_level, structlog.stdlib.ExtraAdder()],
    processor=structlog.processors.JSONRenderer(),
)


@pytest.mark.parametrize(
    ("formatter", "message"), [(STRUCTLOG, "event"), (JsonFormatter(), "message")]
)
def test_fields_are_keys_of_json(formatter, message, caplog):
    stream = StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(formatter)
    logger = get_logger("outbox_app.drain")
    logger.addHandler(handler)
    try:
        logger.warning("Not published event_id=%s jobs=%d error=%s", "a b", 3, ValueError("x"))
    finally:
        logger.removeHandler(handler)
    line = json.loads(stream.getvalue())
    assert line[message] == 'Not published event_id="a b" jobs=3 error="ValueError: x"'
    assert (line["event_id"], line["jobs"], line["error"]) == ("a b", 3, "ValueError: x")
