"""What all pages of the outbox have in common.

Rows are read on the outbox's own alias, never written through a form, and shown with control
characters as escapes. A list looks at ``MANY`` rows of its table (see ``row_range``),
sorts by indexed columns only, and does not fetch messages. What a page shows of a row is a copy to
look at: it is never saved.
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
from django.urls import reverse
from django.utils.functional import cached_property
from django.utils.translation import gettext as _

from ..aliases import chosen, log_alias, outbox_alias
from ..conf import outbox_settings
from ..models import Event, counting
from ..text import shown
from .masking import masked_text
from .row_range import RowRange, number, row_range

#: Columns of a message or an event: shown through ``payload`` only, and not fetched for a list.
MESSAGE = ("body", "envelope", "data", "metadata")
#: Columns of exceptions' words, which may quote anything.
WORDS = ("error", "reason", "trouble", "detail", "last_answer")
#: In the address of a list: where the rows end that it looks at.
BEFORE = "before"
#: In the address of each page, and in its forms: the alias of the outbox, of several.
DATABASE = "outbox"


class DatabaseAdmin(admin.ModelAdmin):  # type: ignore[type-arg]
    """Pages show, and change, the outbox that their own address names: one of those offered.

    What a person has chosen last is remembered by the session, and only completes addresses: a form
    goes to the database that its page has shown, whichever was chosen meanwhile in another window.
    """

    def get_urls(self) -> list[Any]:
        found = super().get_urls()
        for each in found:
            each.callback = self.of_one_database(each.callback)
        return found

    def get_changelist(self, request: HttpRequest, **kwargs: Any) -> type[ChangeList]:
        return DatabaseChangeList

    def of_one_database(self, view: Callable[..., Any]) -> Callable[..., Any]:
        """Return the view with the outbox of the page's address in the place of the setting's."""

        def wrapped(request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
            offered = list(dict.fromkeys([outbox_alias(), *outbox_settings().ADMIN_DATABASES]))
            if len(offered) < 2 or not self.admin_site.has_permission(request):
                return view(request, *args, **kwargs)
            given = {*request.GET.getlist(DATABASE), *request.POST.getlist(DATABASE)}
            if len(given) != 1 or not given <= {*offered}:
                return _with_database(request, offered)
            [alias] = given
            if request.session.get(DATABASE) != alias:
                request.session[DATABASE] = alias
            request.outbox_database = alias  # type: ignore[attr-defined]
            request.outbox_databases = offered  # type: ignore[attr-defined]
            try:
                with chosen(alias) if alias != offered[0] else nullcontext():
                    response = view(request, *args, **kwargs)
                    # A list makes its columns when it is rendered.
                    return response.render() if hasattr(response, "render") else response
            except django.db.Error:  # it may be away: the menu's links would lead back to it
                request.session.pop(DATABASE, None)
                request.session.save()
                raise

        return update_wrapper(wrapped, view)


def _with_database(request: HttpRequest, offered: list[str]) -> HttpResponseRedirect:
    """Show the page of one database. A form that names none, or two, changes nothing."""
    if request.method not in ("GET", "HEAD"):
        text = _("Nothing was done: the form did not say on which database. Here it does.")
        messages.error(request, text)
    query = request.GET.copy()
    list_of_row = QueryDict(query.get("_changelist_filters", ""))
    before = (list_of_row.get(DATABASE), request.session.get(DATABASE), offered[0])
    query[DATABASE] = next(alias for alias in before if alias in offered)
    return HttpResponseRedirect(f"{request.path}?{query.urlencode()}")


class DatabaseChangeList(ChangeList):
    def get_filters_params(self, params: Any = None) -> Any:
        """Leave out the end of the range and the database, which are no filters."""
        given = super().get_filters_params(params)
        return {key: value for key, value in given.items() if key not in (BEFORE, DATABASE)}


class BoundedPaginator(Paginator):  # type: ignore[type-arg]
    """Counts up to ``MANY`` rows; what lies behind them is reached by a filter."""

    is_cut = False

    @cached_property
    def count(self) -> int:
        # In the order of the list: without one, PostgreSQL reads the table where many rows match.
        rows: Any = self.object_list
        found = int(rows[: counting.MANY + 1].count())
        self.is_cut = found > counting.MANY
        return min(found, counting.MANY)


class EscapedChangeList(DatabaseChangeList):
    """A list of rows that are safe to show, of a range of the table."""

    model_admin: Any
    row_range: RowRange | None

    def get_queryset(self, request: HttpRequest, *args: Any, **kwargs: Any) -> Any:
        rows = super().get_queryset(request, *args, **kwargs)
        names = {field.name for field in self.opts.fields}
        return rows.defer(*names.intersection(self.model_admin.not_listed))

    def url_for_result(self, result: Any) -> str:
        """Return the address of a row by its own id, not by the one that is shown."""
        return str(self.model_admin.address(given(result, self.pk_attname)))

    def get_ordering_field(self, field_name: Any) -> Any:
        """Sort by the columns of ``sortable_by`` only, also if the address asks for another."""
        allowed = self.sortable_by or ()
        return super().get_ordering_field(field_name) if field_name in allowed else None

    def get_results(self, request: HttpRequest) -> None:
        """Look at the range only, and escape every row of the page."""
        # Here, not in get_queryset: an action on all rows that match reaches those outside too.
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
        """Whether a row matches, here or in the part of the table that was not looked at."""
        return bool(self.result_count or (self.row_range and not self.row_range.is_all))

    @property
    def most(self) -> int:
        return counting.MANY


class OutboxAdmin(DatabaseAdmin):
    """A read-only view of a table of the outbox. Django shows all of its ``fieldsets`` as text."""

    # Also of models of the project.
    change_form_template = "admin/outbox_app/change_form.html"
    change_list_template = "admin/outbox_app/change_list.html"
    paginator = BoundedPaginator
    show_full_result_count = False
    show_facets = admin.ShowFacets.NEVER
    sortable_by: ClassVar[Any] = ()
    ordering: ClassVar[Any] = ("-id",)
    #: Columns that a list does not fetch.
    not_listed: ClassVar[tuple[str, ...]] = MESSAGE
    #: Whether the rows are on the alias of the log, not on that of the jobs.
    of_the_log: ClassVar[bool] = False
    #: Codename of the permission to see what the rows carry. Empty: they carry nothing.
    payload_permission: ClassVar[str] = ""
    #: What the address asks for, where an index has the rows in the order of the list.
    indexed_by: ClassVar[str] = ""

    class Media:
        css = {"all": ["outbox_app/admin.css"]}

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[Any]:
        return super().get_queryset(request).using(self.alias())

    def alias(self) -> str:
        return log_alias(Event) if self.of_the_log else outbox_alias()

    def address(self, key: Any = None, **filters: str) -> str:
        site, app, model = self.admin_site.name, self.opts.app_label, str(self.opts.model_name)
        return address(site, model, key, app=app, **filters)

    def row_range(self, request: HttpRequest) -> RowRange | None:
        """Return what a list looks at; None where that is bounded anyway."""
        asked = self.indexed_by and request.GET.get(self.indexed_by, "").strip()
        # With a NUL Django refuses the search, and the list is that of all rows.
        is_indexed = asked and "\x00" not in asked
        if is_few(request) or is_indexed or not isinstance(self.opts.pk, models.AutoField):
            return None
        return row_range(self.get_queryset(request), before=number(request.GET.get(BEFORE, "")))

    def get_object(self, request: HttpRequest, object_id: str, from_field: Any = None) -> Any:
        """Return the row, harmless, with a note of whether this person may see what it carries."""
        row = super().get_object(request, object_id, from_field)
        if row:
            escaped_copy(row)
            self.measure([row])
            row.may_be_seen = request.user.has_perm(f"outbox_app.{self.payload_permission}")
        return row

    def measure(self, rows: list[Any]) -> None:
        """Add to rows what a list or a page shows besides the columns of the table."""

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
            except ValidationError:  # no id
                queryset = queryset.none()
        return queryset, False

    def lookup_allowed(self, lookup: str, value: str, request: HttpRequest | None = None) -> bool:
        """Filter by what the page offers only: any other lookup may read a whole table."""
        return lookup in {f.parameter_name for f in self.list_filter}  # type: ignore[union-attr]

    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


def address(
    site: str, model: str, key: Any = None, *, app: str = "outbox_app", **filters: str
) -> str:
    """Return the address on a site of a model's list, or of the page of the row with this key."""
    page, args = ("changelist", []) if key is None else ("change", [quote(key)])
    found = reverse(f"admin:{app}_{model}_{page}", args=args, current_app=site)
    return f"{found}?{urlencode(filters)}" if filters else found


def few(request: HttpRequest, rows: models.QuerySet[Any], ids: list[int]) -> models.QuerySet[Any]:
    """Return those with the ids that an index led to, wherever in the table they are."""
    request.outbox_few = True  # type: ignore[attr-defined]
    return rows.filter(id__in=ids)


def is_few(request: HttpRequest) -> bool:
    return bool(getattr(request, "outbox_few", False))


def column(description: Any, show: Callable[[Any], Any]) -> Callable[[Any, Any], Any]:
    """Return a column of a list, or a field of a page, that is made of a row."""
    return admin.display(description=description)(lambda _admin, row: show(row))


def escaped_copy(row: models.Model) -> models.Model:
    """Replace the row's text by text that can be shown. What the database holds is not touched.

    In an exception's words sensitive values are masked, as far as they are seen.
    """
    for field in row._meta.concrete_fields:
        value = row.__dict__.get(field.attname)
        if isinstance(value, str) and field.name not in MESSAGE:
            text = shown(value)
            row.__dict__[field.attname] = masked_text(text) if field.name in WORDS else text
            row.__dict__.setdefault("_given", {})[field.attname] = value
    return row


def given(row: models.Model, name: str) -> Any:
    """Return a column as the database holds it: for a look-up, not for a page."""
    return row.__dict__.get("_given", {}).get(name, getattr(row, name))
