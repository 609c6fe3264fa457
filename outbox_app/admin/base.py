"""What all pages of the outbox have in common.

Rows are read on the outbox's own alias, never written through a form, and shown with control
characters as escapes. A list counts its rows up to ``MANY`` and no further, sorts by indexed
columns only, and does not fetch messages. What a page shows of a row is a copy to look at: it is
never saved.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from django.contrib import admin
from django.contrib.admin.views.main import ChangeList
from django.core.paginator import Paginator
from django.db import models
from django.http import HttpRequest
from django.utils.functional import cached_property

from ..intake.rows import outbox_alias
from ..operations import status
from ..operations.text import shown

if TYPE_CHECKING:
    ModelAdmin = admin.ModelAdmin[Any]
    BasePaginator = Paginator[Any]
else:
    ModelAdmin = admin.ModelAdmin
    BasePaginator = Paginator

#: Columns of a message or an event: shown through ``payload`` only, and not fetched for a list.
MESSAGE = ("body", "envelope", "data", "metadata")


class BoundedPaginator(BasePaginator):
    """Counts up to ``MANY`` rows; what lies behind them is reached by a filter."""

    @cached_property
    def count(self) -> int:
        """Rows, MANY at most."""
        found = status.counted(self.object_list)  # type: ignore[arg-type]
        self.is_cut = found > status.MANY
        return min(found, status.MANY)


class HarmlessChangeList(ChangeList):
    """A list of rows that are safe to show."""

    def get_queryset(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        """Leave the messages where they are."""
        rows = super().get_queryset(request, *args, **kwargs)
        names = {field.name for field in self.opts.fields}
        return rows.defer(*names.intersection(MESSAGE))

    def get_ordering_field(self, field_name: Any) -> Any:
        """Sort by what may be sorted by, whatever the address asks for."""
        allowed = self.sortable_by or ()
        return super().get_ordering_field(field_name) if field_name in allowed else None

    def get_results(self, request: HttpRequest) -> None:
        """Make every row of the page harmless."""
        super().get_results(request)
        self.result_list: Any = [harmless(row) for row in self.result_list]


class OutboxAdmin(ModelAdmin):
    """A read-only view of a table of the outbox."""

    paginator = BoundedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    sortable_by: ClassVar[Any] = ()
    ordering: ClassVar[Any] = ("-id",)
    #: Where to look a row up by a column's whole value, for example by ``task_id``.
    searched_column = ""

    class Media:
        css = {"all": ["outbox_app/admin.css"]}

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[Any]:
        """Rows on the alias of the outbox."""
        return super().get_queryset(request).using(outbox_alias())

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        """Return the row, harmless."""
        row = super().get_object(request, object_id, from_field)
        return row and harmless(row)

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        """Return the list that makes rows harmless."""
        return HarmlessChangeList

    def get_search_fields(self, request: HttpRequest) -> tuple[str, ...]:
        """Show the search box where there is a column to search."""
        return (self.searched_column,) if self.searched_column else ()

    def get_search_results(
        self, request: HttpRequest, queryset: models.QuerySet[Any], search_term: str
    ) -> tuple[models.QuerySet[Any], bool]:
        """Look for the whole value, spaces included."""
        if search_term.strip() and self.searched_column:
            queryset = queryset.filter(**{self.searched_column: search_term.strip()})
        return queryset, False

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Filter by what the page offers only: any other lookup may read a whole table."""
        return lookup in {f.parameter_name for f in self.list_filter}  # type: ignore[union-attr]

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Nobody adds rows by hand."""
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Nobody edits rows by hand."""
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        """Rows go when their work is done."""
        return False


def harmless(row: models.Model) -> models.Model:
    """Replace the row's text by text that can be shown. What the database holds is not touched."""
    for field in row._meta.concrete_fields:
        value = row.__dict__.get(field.attname)
        if isinstance(value, str) and field.name not in MESSAGE:
            row.__dict__[field.attname] = shown(value)
    return row
