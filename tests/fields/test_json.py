"""JSON is read as it was written: MySQL's own type makes floats of integers beyond 64 bits."""

from __future__ import annotations

import pytest
from django.db import DatabaseError, connections, models, transaction
from django.db.models.fields.json import KT
from django.test.utils import isolate_apps

from outbox_app.fields import JSONField

pytestmark = pytest.mark.django_db(transaction=True)


@pytest.fixture
def notes(alias):
    with isolate_apps("tests"):

        class Note(models.Model):
            data = JSONField(default=dict)
            more = JSONField(null=True)

            class Meta:
                app_label = "tests"

            def __str__(self):
                return str(self.data)

        with connections[alias].schema_editor() as editor:
            editor.create_model(Note)
        yield Note.objects.using(alias)
        with connections[alias].schema_editor() as editor:
            editor.delete_model(Note)


def test_integers_of_any_size(notes):
    numbers = [2**63, 2**64, -(2**63) - 1, 10**30, 10**300]
    notes.create(data={"n": numbers, "🎉": "é"})
    note = notes.get()
    assert note.data == {"n": numbers, "🎉": "é"}
    assert note.more is None


def test_the_lookups_of_django(notes, alias):
    notes.create(data={"name": "ann", "age": 30, "tags": ["a"]})
    notes.create(data={"name": "Ann"}, more=[1])
    vendor = connections[alias].vendor
    assert notes.get(data={"name": "Ann"}).more == [1]
    assert notes.get(more=[1]).data == {"name": "Ann"}
    assert notes.get(data__name="ann").data["age"] == 30
    assert notes.get(data__age__gt=29).data["age"] == 30
    assert notes.get(data__has_key="age").data["age"] == 30
    assert notes.filter(more__isnull=True).count() == 1
    assert notes.filter(data__name__in=["ann", "Ann"]).count() == 2
    names = notes.annotate(n=KT("data__name")).values_list("n", flat=True)
    assert sorted(names) == ["Ann", "ann"]
    if vendor != "sqlite":
        assert notes.get(data__contains={"age": 30}).data["name"] == "ann"
    notes.filter(data__name="Ann").update(data={"name": "bob"})
    assert notes.filter(data={"name": "bob"}).count() == 1


def test_a_text_that_is_no_json_is_refused_by_the_database(notes, alias):
    with (
        pytest.raises(DatabaseError),
        transaction.atomic(using=alias),
        connections[alias].cursor() as cursor,
    ):
        cursor.execute("INSERT INTO tests_note (data) VALUES ('{')")
    assert not notes.exists()
