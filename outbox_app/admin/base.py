"""What all pages of the outbox have in common.

Rows are read on the outbox's own alias, never written through a form, and shown with control
characters as escapes. A list reads ``MANY`` rows of its table (see ``row_range``), sorts by indexed
columns only, and does not fetch messages. The instances that a page shows are escaped, so they are
never saved.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import update_wrapper
from typing import Any, ClassVar
from urllib.parse import urlencode

import django.db
from django.contrib import admin, messages
from django.contrib.admin.utils import quote
from django.contrib.admin.views.main import ChangeList
from django.core.exceptions import ValidationError
from django.core.paginator import Paginator
from django.db import models
from django.http import HttpRequest, HttpResponseRedirect, QueryDict
from django.urls import NoReverseMatch, reverse
from django.utils.functional import cached_property
from django.utils.translation import gettext as _

from ..aliases import chosen, outbox_alias
from ..capability import is_on
from ..conf import outbox_settings
from ..models import counting
from ..text import one_line, shown
from .masking import masked_text
from .row_range import RowRange, number, row_range

#: Columns of a message or an event: shown through ``payload`` only, and not fetched for a list.
MESSAGE = ("body", "envelope", "data", "metadata")
#: Columns with the text of exceptions, which may quote anything.
WORDS = ("error", "reason", "trouble", "detail", "last_answer")
#: Query parameter of a list: it reads the rows below this value.
BEFORE = "before"
#: Query parameter of each page, and field of its forms: the outbox's alias, if several are offered.
DATABASE = "outbox"


class DatabaseAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Each page shows, and changes, the outbox that its address names: one of those offered.

    The session remembers a person's last choice only to complete addresses that name none: a form
    changes the database that its page has shown, even if another window has chosen another since.
    """

    # Named here, as Django looks for templates by app.
    change_form_template = "admin/outbox_app/change_form.html"
    change_list_template = "admin/outbox_app/change_list.html"

    def get_urls(self) -> list[Any]:
        found = super().get_urls()
        for each in found:
            each.callback = self.of_one_database(each.callback)
        return found

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return DatabaseChangeList

    def of_one_database(self, view: Callable[..., Any]) -> Callable[..., Any]:
        """Return the view, made to use the outbox that the page's address names."""

        def wrapped(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            others = [each for each in outbox_settings().ADMIN_DATABASES if is_on(each, self.model)]
            offered = list(dict.fromkeys([outbox_alias(), *others]))
            if len(offered) < 2 or not self.admin_site.has_permission(request):
                return view(request, *args, **kwargs)
            aliases = {*request.GET.getlist(DATABASE), *request.POST.getlist(DATABASE)}
            if len(aliases) != 1 or not aliases <= {*offered}:
                return _with_database(request, offered)
            [alias] = aliases
            if request.session.get(DATABASE) != alias:
                request.session[DATABASE] = alias
            request.outbox_database = alias  # type: ignore[attr-defined]
            request.outbox_databases = offered  # type: ignore[attr-defined]
            try:
                with chosen(alias) if alias != offered[0] else nullcontext():
                    response = view(request, *args, **kwargs)
                    # Rendered inside the block: a list computes its columns only then.
                    return response.render() if hasattr(response, "render") else response
            except django.db.Error:  # if it is away, the menu's links must not lead back to it
                request.session.pop(DATABASE, None)
                request.session.save()
                raise

        return update_wrapper(wrapped, view)


def _with_database(request: HttpRequest, offered: list[str]) -> HttpResponseRedirect:
    """Redirect to the page of one database. A form that names none, or two, changes nothing."""
    if request.method not in ("GET", "HEAD"):
        text = _("Nothing was done: the form did not name a database. The form here does.")
        messages.error(request, text)
    query = request.GET.copy()
    list_of_row = QueryDict(query.get("_changelist_filters", ""))
    before = (list_of_row.get(DATABASE), request.session.get(DATABASE), offered[0])
    query[DATABASE] = next(alias for alias in before if alias in offered)
    return HttpResponseRedirect(f"{request.path}?{query.urlencode()}")


class DatabaseChangeList(ChangeList):
    def get_filters_params(self, params: Any = None) -> Any:
        """Leave out BEFORE and DATABASE, which are no filters."""
        filters = super().get_filters_params(params)
        return {key: value for key, value in filters.items() if key not in (BEFORE, DATABASE)}


class BoundedPaginator(Paginator):  # type: ignore[type-arg]
    """Counts up to ``MANY`` rows; a filter reaches the rows beyond them."""

    is_cut = False

    @cached_property
    def count(self) -> int:
        # Count in the list's order: without one, PostgreSQL scans the table if many rows match.
        rows: Any = self.object_list
        found = int(rows[: counting.MANY + 1].count())
        self.is_cut = found > counting.MANY
        return min(found, counting.MANY)


class EscapedChangeList(DatabaseChangeList):
    """A list of the rows in a range of the table, with their text escaped."""

    model_admin: Any
    row_range: RowRange | None

    def get_queryset(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        rows = super().get_queryset(request, *args, **kwargs)
        names = {field.name for field in self.opts.fields}
        return rows.defer(*names.intersection(self.model_admin.not_listed))

    def url_for_result(self, result: Any) -> str:
        """Return the address of a row by its stored id, not by the escaped one."""
        return str(self.model_admin.address(stored_value(result, self.pk_attname)))

    def get_ordering_field(self, field_name: Any) -> Any:
        """Sort by the columns of ``sortable_by`` only, also if the address asks for another."""
        allowed = self.sortable_by or ()
        return super().get_ordering_field(field_name) if field_name in allowed else None

    def get_results(self, request: HttpRequest) -> None:
        """Read the rows of the range only, and escape those of the page."""
        # Not in get_queryset: an action on all rows that match also reaches rows outside the range.
        self.row_range = self.model_admin.row_range(request)
        if self.row_range:
            self.queryset = self.row_range.rows(self.queryset)
        super().get_results(request)
        self.result_list: Any = [escaped_copy(row) for row in self.result_list]
        self.model_admin.measure(self.result_list)

    @property
    def older(self) -> str:
        assert self.row_range
        return self.get_query_string({BEFORE: self.row_range.first})

    @property
    def newest(self) -> str:
        return self.get_query_string(remove=[BEFORE])

    @property
    def may_match(self) -> bool:
        """Whether a row matches, or may match in the part of the table that was not read."""
        return bool(self.result_count or (self.row_range and not self.row_range.is_all))

    @property
    def most(self) -> int:
        return counting.MANY


class OutboxAdmin(DatabaseAdmin):
    """A read-only view of a table of the outbox. Django shows all of its ``fieldsets`` as text."""

    paginator = BoundedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    sortable_by: ClassVar[Any] = ()
    ordering: ClassVar[Any] = ("-id",)
    #: Columns that a list does not fetch.
    not_listed: ClassVar[tuple[str, ...]] = MESSAGE
    #: The permission to see the rows' payload, with its app. Empty: they have none.
    payload_permission: ClassVar[str] = ""
    #: Query parameter whose rows an index returns in the order of the list. Empty: there is none.
    indexed_by: ClassVar[str] = ""

    class Media:
        css = {"all": ["outbox_app/admin.css"]}

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[Any]:
        return super().get_queryset(request).using(self.alias())

    def alias(self) -> str:
        """Return the alias that has the rows."""
        return outbox_alias()

    def address(self, key: Any = None, **filters: str) -> str:
        return address(self.admin_site.name, self.opts.label_lower, key, **filters)

    def row_range(self, request: HttpRequest) -> RowRange | None:
        """Return the range that a list reads, or None if its query is bounded without one."""
        asked = self.indexed_by and request.GET.get(self.indexed_by, "").strip()
        # Django ignores a search with a NUL, and lists all rows.
        is_indexed = asked and "\x00" not in asked
        if is_few(request) or is_indexed or not isinstance(self.opts.pk, models.AutoField):
            return None
        return row_range(self.get_queryset(request), before=number(request.GET.get(BEFORE, "")))

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        """Return the row, escaped; ``may_be_seen`` is whether this user may see its payload."""
        if "\x00" in object_id:  # PostgreSQL refuses a NUL
            return None
        row = super().get_object(request, object_id, from_field)
        if row:
            escaped_copy(row)
            self.measure([row])
            row.may_be_seen = request.user.has_perm(self.payload_permission)
        return row

    def measure(self, rows: list[Any]) -> None:
        """Add to the rows the figures that a list or a page shows beside the table's columns."""

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return EscapedChangeList

    def get_search_results(
        self, request: HttpRequest, queryset: models.QuerySet[Any], search_term: str
    ) -> tuple[models.QuerySet[Any], bool]:
        """Look for the whole value of a column, spaces included."""
        if search_term.strip() and self.search_fields:
            [column] = self.search_fields
            try:
                queryset = queryset.filter(**{column: search_term.strip()})
            except ValidationError:  # the term is no valid id
                queryset = queryset.none()
        return queryset, False

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Allow the filters that the page offers only: any other lookup may scan a whole table."""
        return lookup in {f.parameter_name for f in self.list_filter}  # type: ignore[union-attr]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


def address(site: str, model: str, key: Any = None, **filters: str) -> str:
    """Return the address of a list, or of a row's page; empty if the site does not have it.

    ``model`` is a label such as ``outbox_app.deadjob``.
    """
    page, args = ("changelist", []) if key is None else ("change", [quote(key)])
    try:
        found = reverse(f"admin:{model.replace('.', '_')}_{page}", args=args, current_app=site)
    except NoReverseMatch:
        return ""
    return f"{found}?{urlencode(filters)}" if filters else found


def few(request: HttpRequest, rows: models.QuerySet[Any], ids: list[int]) -> models.QuerySet[Any]:
    """Return the rows with these ids, which an index has found, from anywhere in the table."""
    request.outbox_few = True  # type: ignore[attr-defined]
    return rows.filter(id__in=ids)


def is_few(request: HttpRequest) -> bool:
    return bool(getattr(request, "outbox_few", False))


def column(
    description: Any, show: Callable[[Any], Any], *, ordering: str | None = None
) -> Callable[[Any, Any], Any]:
    """Return a column of a list, or a field of a page, whose text ``show`` makes from a row."""
    shown = admin.display(description=description, ordering=ordering)
    return shown(lambda _admin, row: show(row))


def class_name(path: str) -> str:
    """Return the name of a class without its path, which lists have no room for."""
    return one_line(path.rpartition(".")[2] or path, 80)


def escaped_copy(row: models.Model) -> models.Model:
    """Replace the text of an instance by text that can be shown. The database is not changed.

    In the text of an exception, sensitive values are masked if they are recognised.
    """
    for field in row._meta.concrete_fields:
        value = row.__dict__.get(field.attname)
        if isinstance(value, str) and field.name not in MESSAGE:
            text = shown(value)
            row.__dict__[field.attname] = masked_text(text) if field.name in WORDS else text
            row.__dict__.setdefault("_stored", {})[field.attname] = value
    return row


def stored_value(row: models.Model, name: str) -> Any:
    """Return a column's value as it is stored: for a lookup, not for display."""
    return row.__dict__.get("_stored", {}).get(name, getattr(row, name))
