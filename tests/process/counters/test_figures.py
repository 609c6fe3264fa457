"""The table of figures: each is there once, and different labels stay different."""

from __future__ import annotations

import pytest
from django.db import IntegrityError, transaction

from outbox_app.models import Statistic
from outbox_app.models.statistic import BATCH, LABEL_LENGTH, label_of, write_figures

from .planted import NOW


def figure(label="", value=1.0):
    return Statistic(
        source="one", minute=NOW, name="handled", dimension="subscription", label=label, value=value
    )


def values(alias):
    return dict(Statistic.objects.using(alias).values_list("label", "value"))


def test_a_figure_is_there_once(alias):
    figure("a").save(using=alias)
    with pytest.raises(IntegrityError), transaction.atomic(using=alias):
        figure("a", 2.0).save(using=alias)


def test_what_is_there_is_updated(alias):
    write_figures([figure("a"), figure("b")], using=alias)
    write_figures([figure("a", 2.0), figure("c")], using=alias)
    assert values(alias) == {"a": 2.0, "b": 1.0, "c": 1.0}


def test_figures_of_several_statements(alias):
    write_figures([figure(str(n)) for n in range(3 * BATCH + 7)], using=alias)
    assert len(values(alias)) == 3 * BATCH + 7


def test_labels_are_compared_byte_by_byte(alias):
    labels = ["a", "A", "a ", "ä", "a\u0308", "😀", "", "a" * 299, "😀" * 255]
    write_figures([figure(label) for label in labels], using=alias)
    assert {*values(alias)} == {*labels}


def test_long_labels_are_cut_and_stay_different(alias):
    write_figures([figure(label_of("😀" * 400 + end)) for end in "ab"], using=alias)
    labels = [*values(alias)]
    assert len(labels) == 2
    assert all(label.startswith("😀" * 200) for label in labels)


class TestLabels:
    def test_shorter_ones_stay(self):
        for text in ("", "a", "a" * (LABEL_LENGTH - 1)):
            assert label_of(text) == text

    def test_a_cut_one_is_nobody_elses(self):
        """A text that looks like a cut label is cut itself."""
        cut = label_of("a" * 1000)
        assert len(cut) == LABEL_LENGTH
        assert label_of(cut) != cut
        assert len({label_of("a" * length) for length in range(290, 400)}) == 110
