"""``SnowflakeField`` as a primary key: rows, relations, forms, JSON and migrations."""

from __future__ import annotations

import json

import pytest
from django import forms
from django.core import serializers
from django.core.exceptions import ValidationError
from django.db import connections, models
from django.db.migrations.writer import MigrationWriter
from django.test.utils import isolate_apps

from outbox_app.ids import SnowflakeField, snowflake

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def tables(alias):
    """An order and its lines, with tables on the database."""
    with isolate_apps("tests"):

        class Order(models.Model):
            id = SnowflakeField(primary_key=True)
            note = models.CharField(max_length=20)

            class Meta:
                app_label = "tests"

            def __str__(self):
                return str(self.pk)

        class Line(models.Model):
            id = SnowflakeField(primary_key=True)
            order = models.ForeignKey(Order, models.CASCADE)
            number = SnowflakeField(editable=True, default=None, null=True)

            class Meta:
                app_label = "tests"

            def __str__(self):
                return str(self.pk)

        with connections[alias].schema_editor() as editor:
            editor.create_model(Order)
            editor.create_model(Line)
        yield Order, Line
        with connections[alias].schema_editor() as editor:
            editor.delete_model(Line)
            editor.delete_model(Order)


def test_rows_have_ids_before_they_are_saved(alias, tables):
    Order, Line = tables
    order = Order(note="one")
    assert order.pk > 2**53
    order.save(using=alias)
    many = Order.objects.using(alias).bulk_create(Order(note="many") for _ in range(300))
    assert order.pk < many[0].pk
    assert [each.pk for each in many] == sorted({each.pk for each in many})
    assert Order.objects.using(alias).count() == 301
    made, created = Order.objects.using(alias).get_or_create(note="got")
    assert created
    line = Line.objects.using(alias).create(order=made)
    line.refresh_from_db()
    assert (line.order_id, line.number) == (made.pk, None)
    assert Order.objects.using(alias).get(pk=str(made.pk)) == made
    own = Order.objects.using(alias).create(pk=7, note="own")
    own.note = "changed"
    own.save()
    assert Order.objects.using(alias).get(pk=7).note == "changed"


def test_forms_leave_it_out_and_take_no_nonsense_for_a_relation(alias, tables):
    Order, Line = tables
    order = Order.objects.using(alias).create(note="one")
    form = forms.modelform_factory(Order, fields="__all__")({"note": "x", "id": "1", "pk": "1"})
    assert list(form.fields) == ["note"]
    assert form.is_valid()
    assert form.save(commit=False).pk > 1
    choice = forms.ModelChoiceField(Order.objects.using(alias))
    assert choice.clean(str(order.pk)) == order
    for value in ("-1", "abc", "1.5", str(2**63), "9" * 40, str(snowflake()), "\x00", "'"):
        with pytest.raises(ValidationError):
            choice.clean(value)
    number = Line._meta.get_field("number")
    for value in (-1, 2**63, "abc"):
        with pytest.raises(ValidationError):
            number.clean(value, None)
    assert number.clean(str(order.pk), None) == order.pk


def test_json_keeps_each_bit(alias, tables):
    Order, _ = tables
    order = Order(note="one")
    text = serializers.serialize("json", [order])
    assert json.loads(text)[0]["pk"] == order.pk
    # In JavaScript a number has 53 bits: pages are given a text.
    assert int(float(order.pk | 1)) != order.pk | 1
    assert Order._meta.pk.value_to_string(order) == str(order.pk)


def test_migrations_name_the_field_alone():
    field = SnowflakeField(primary_key=True)
    text, imports = MigrationWriter.serialize(field)
    assert text == "outbox_app.ids.SnowflakeField(primary_key=True)"
    assert imports == {"import outbox_app.ids"}
    own = SnowflakeField(default=None, null=True, editable=True)
    assert own.deconstruct()[1:] == (
        "outbox_app.ids.SnowflakeField",
        [],
        {"default": None, "null": True, "editable": True},
    )
    for each in (field, own):
        _, _, args, options = each.deconstruct()
        again = SnowflakeField(*args, **options)
        assert again.deconstruct() == each.deconstruct()
        assert (again.default, again.editable) == (each.default, each.editable)
    assert (field.default, field.editable) == (snowflake, False)
