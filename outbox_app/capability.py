"""What a capability adds to the core: problems, metrics, a section of the status, loops, retention.

A capability has one ``DOORS`` in its module ``doors``. The core asks the doors of all capabilities
by these few hooks, and knows none of them by its name. It has doors of its own, for its problems.
Nothing here reads a database.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from functools import lru_cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple

from django.apps import AppConfig, apps
from django.conf import settings
from django.core import checks
from django.core.exceptions import ImproperlyConfigured
from django.core.signals import setting_changed
from django.db import router
from django.dispatch import receiver
from django.utils.functional import cached_property

from .conf import read
from .text import one_line

if TYPE_CHECKING:
    from _typeshed import DataclassInstance
    from django.db.models import Model
    from django.urls import URLPattern
    from django.utils.safestring import SafeString

    from .admin.tables import Table
    from .models import StagedJob
    from .monitoring.status import Question
    from .process.lease import LeaseHolder
    from .retention.rows import Kept

BAD, WARNING = "bad", "warning"
#: The id of the error of a check that an app is missing.
NEEDED = "outbox.E049"
#: A metric's name, the values of its labels, and its value.
Sample = tuple[str, tuple[str, ...], float]


class Loop(NamedTuple):
    """A loop of ``run_outbox``."""

    #: ``run(once=…, listen=…)`` returns an exit code. ``listen`` gets the function that stops it.
    run: Callable[..., int]
    #: Whether it only removes old rows: it runs last, and a stop does not wait for it.
    cleanup: bool = False


@dataclass(frozen=True, slots=True)
class Figure:
    """A figure, for each place that shows it. A place for which it has no name leaves it out."""

    #: A number, or numbers by label; for JSON alone anything. None: it was not measured.
    value: Any
    #: Name of its metric: a counter if it ends in ``_total``, otherwise a gauge.
    metric: str = ""
    help: str = ""
    #: Labels of the metric beside ``database``. They are the keys of the value, several as a tuple;
    #: those of ``percentile`` are ``p50``, ``p95`` and ``p99``.
    labels: tuple[str, ...] = ()
    _: KW_ONLY
    #: Its key in ``outbox_status --json``, and its lines in the text.
    json: str = ""
    lines: Iterable[str] = ()
    #: Its name on the overview, its value for people, a note, and the list behind it: a model of
    #: the admin, and a filter.
    title: Any = ""
    shown: str = ""
    note: Any = ""
    place: tuple[str, Mapping[str, str]] | None = None

    def samples(self) -> Iterator[Sample]:
        """Yield the samples of the metric."""
        values: Mapping[Any, float | None] = self.value if self.labels else {(): self.value}
        for key, value in values.items():
            if value is not None:
                label = key.removeprefix("p") if self.labels == ("percentile",) else key
                yield self.metric, label if isinstance(label, tuple) else (label,), value


class ProblemKind(NamedTuple):
    """A problem that an outbox can have."""

    #: Problems are listed by it, the lowest and most urgent first. It is unique.
    rank: int
    severity: str
    #: A sentence. Its values are numbers only; ``n`` decides between singular and plural.
    text: Any
    #: What to do.
    action: Any
    #: Where it is fixed: a model of the admin and a filter of its list, or a table of the overview.
    place: tuple[str, Mapping[str, str]] | str = ("outbox_app.process", {})
    #: Whether what its subjects say is the cause, which belongs into a headline.
    has_cause: bool = False
    #: The sentence if ``n`` is 0; without one, that is no problem.
    none: Any = None


@dataclass(frozen=True, slots=True)
class Subject:
    """What has the problem: a drainer, a subscription, a table."""

    name: str
    #: Why, in the words of the exception if there is one.
    why: str = ""
    #: Where it is fixed, within the problem's place: the primary key of its row, or filters.
    key: str = ""
    filters: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Problem:
    """Something that needs a person."""

    #: A key of ``kinds()``, for programs.
    code: str
    values: dict[str, Any]
    subjects: tuple[Subject, ...] = ()

    @property
    def kind(self) -> ProblemKind:
        return kinds()[self.code]

    @property
    def severity(self) -> str:
        """``bad`` or ``warning``."""
        return self.kind.severity

    @property
    def text(self) -> str:
        """A sentence that anybody may see: it holds numbers, and no names."""
        kind = self.kind
        return str((kind.none if kind.none and not self.values["n"] else kind.text) % self.values)

    @property
    def action(self) -> str:
        """What to do."""
        return str(self.kind.action % self.values)

    @property
    def detail(self) -> str:
        """Names, and once the exceptions' own words, for the operators of the project."""
        names: dict[str, list[str]] = {}
        for each in self.subjects:
            names.setdefault(one_line(each.why, 200), []).append(one_line(each.name, 100))
        return "; ".join(f"{', '.join(same)}: {why}" for why, same in names.items())

    def as_json(self) -> dict[str, str]:
        """Return the problem for programs."""
        names = ("code", "severity", "text", "detail", "action")
        return {name: getattr(self, name) for name in names}


class Section:
    """The facts of a capability, and how each place of the core shows them."""

    def figures(self) -> Iterable[Figure]:
        """Return the figures for JSON, text, metrics and overview, in the order of each of them.

        Those with a metric are returned without facts, too: see ``Doors.empty``.
        """
        return ()

    def problems(self, on: str) -> Iterable[Problem]:
        """Return what is wrong. ``on`` is the option of a command that names the database."""
        return ()

    def charts(self) -> Iterable[SafeString]:
        return ()

    def tables(self, site: str) -> Iterable[Table]:
        """Return tables of the overview, from what was read: all of it may be viewed."""
        return ()


class Doors:
    """What a capability adds. A class attribute or method that is left out adds nothing."""

    name = ""
    #: Pages show the doors in this order.
    rank = 0
    #: The dataclass of its keys in OUTBOX.
    settings: type[DataclassInstance] | None = None
    kinds: Mapping[str, ProblemKind] = {}
    #: Its section without facts: its figures declare the metrics.
    empty: Section | None = None
    #: Names of its counters, which the processes write to the table of statistics.
    counters: Collection[str] = ()

    def parts(self) -> Mapping[str, Collection[type[Model]]]:
        """Return parts of its section. The overview shows one to who may view a model of it."""
        return {}

    def read(self, question: Question) -> Section | None:
        """Read the section, or return None if there is nothing to show."""
        return None

    def aliases(self) -> Iterable[str]:
        """Return the aliases on which it has rows, beside those of a sender."""
        return ()

    def models(self) -> Iterable[type[Model]]:
        """Return the project's models that derive from its models: checks look at their tables."""
        return ()

    def kept(self) -> Mapping[str, Kept]:
        """Return the kinds of rows that ``outbox_prune`` removes when they are old."""
        return {}

    #: The options of ``outbox_prune`` beside those of ``kept``, as an error names them.
    prunes: Collection[str] = ()

    def prune_arguments(self, add: Callable[..., Any]) -> None:
        """Add options of ``outbox_prune`` beside those of ``kept``."""

    def pruning(self, options: Mapping[str, Any]) -> Callable[..., int] | None:
        """Return what these options remove, or None. Wrong options are refused here.

        The function takes ``older_than``, ``batch_size``, ``dry_run`` and ``write``.
        """
        return None

    def removals(self, using: str) -> Mapping[str, Callable[..., int]]:
        """Return what ``run_outbox`` removes once an hour, each as a function of ``write``."""
        return {}

    def routes(self) -> Iterable[URLPattern]:
        """Return the addresses that it adds to those of the door."""
        return ()

    def cancel(self, task_id: str, *, using: str) -> None:
        """Follow a job that is being cancelled, in the transaction that deletes its rows."""

    def postpone(self, jobs: Iterable[StagedJob], moment: Any, *, using: str) -> None:
        """Follow jobs that get another time, in its transaction: requeued or rescheduled ones."""

    #: The module that records the calls of shadow mode.
    recorder: Any = None

    def chores(self, holder: LeaseHolder) -> Iterable[Callable[[], None]]:
        """Return what a drainer calls at each turn, beside draining. It raises nothing."""
        return ()

    def loops(self, using: str, *, only: str | None) -> Mapping[str, Loop]:
        """Return loops of ``run_outbox``, by name.

        Args:
            using: Alias of the outbox.
            only: The alias that was asked for, of everything; None: each model's own.
        """
        return {}


class Capability(AppConfig):
    """The app of a capability. Its module ``apps`` imports this module, and not this class:
    Django would take the class for a second app."""

    default_auto_field = "django.db.models.BigAutoField"
    #: Names of the apps that it needs beside ``outbox_app``.
    needs: tuple[str, ...] = ()

    @cached_property
    def doors(self) -> Doors:
        found: Doors = import_module(f"{self.name}.doors").DOORS
        return found

    @property
    def missing(self) -> list[str]:
        """Return the names of needed apps that are not installed."""
        return [name for name in ("outbox_app", *self.needs) if not apps.is_installed(name)]

    def import_models(self) -> None:
        if self.missing:  # Django and the admin find no module in it, so that ``check`` can run
            self.module = ModuleType(self.name)
            # Without its models ``makemigrations`` would write that they are deleted.
            settings.MIGRATION_MODULES = {**settings.MIGRATION_MODULES, self.label: None}
        super().import_models()

    def ready(self) -> None:
        """Do what the app does at the start of each process, or let ``check`` say what it needs."""
        if self.missing:
            checks.register(check_needs, "outbox")
        else:
            self.start()

    def start(self) -> None:
        """Do what the app does at the start of each process. All apps that it needs are there."""


def lines_to_add(names: Iterable[str]) -> str:
    """Return what to do about apps that are not installed."""
    lines = ", ".join(f'"{name}"' for name in names)
    return f"Add {lines} to INSTALLED_APPS, and run manage.py migrate."


def require_app(name: str) -> None:
    """Refuse to import models of an app that is not installed: they would have no tables.

    Raises:
        ImproperlyConfigured: It is not in INSTALLED_APPS.
    """
    if not apps.is_installed(name):
        raise ImproperlyConfigured(f"INSTALLED_APPS does not have {name}. {lines_to_add([name])}")


def needed(by: str, names: Sequence[str]) -> checks.Error:
    """Return the error of a check that something needs apps which are not installed."""
    what = f"{by} needs {', '.join(names)}, which INSTALLED_APPS does not have."
    return checks.Error(what, hint=lines_to_add(names), id=NEEDED)


def check_needs(**kwargs: Any) -> list[checks.CheckMessage]:
    """Report each app of the package whose needed apps are not installed."""
    ours = [app for app in apps.get_app_configs() if isinstance(app, Capability)]
    return [needed(app.name, app.missing) for app in ours if app.missing]


def check_app(**kwargs: Any) -> list[checks.CheckMessage]:
    """Report that a project has an OutboxCelery, and not the app with its tables and commands."""
    ours = [app for app in apps.get_app_configs() if isinstance(app, Capability)]
    return [] if ours else [needed("OutboxCelery", ["outbox_app"])]  # else see check_needs


def is_on(alias: str, model: type[Model]) -> bool:
    """Return whether an app has its table there: routers may place it on another alias than jobs.

    Where they allow no table of jobs either, they say nothing: such an alias is migrated by another
    one, with another user of the database, or past a pooler.
    """
    allow, jobs = router.allow_migrate_model, apps.get_model("outbox_app.StagedJob")
    return allow(alias, model) or not allow(alias, jobs)


def capabilities() -> list[Capability]:
    """Return the installed apps of the package that can work, in the order of pages."""
    ours = [app for app in apps.get_app_configs() if isinstance(app, Capability)]
    found = [app for app in ours if not app.missing]  # a check reports the others
    return sorted(found, key=lambda app: app.doors.rank)


@lru_cache(maxsize=1)
def all_doors() -> tuple[Doors, ...]:
    """Return the doors of the core and of all capabilities, in the order in which pages show them.

    Django's apps must be loaded.
    """
    return tuple(app.doors for app in capabilities())


@lru_cache(maxsize=1)
def kinds() -> dict[str, ProblemKind]:
    """Return all problems by code, the most urgent first."""
    found = [item for doors in all_doors() for item in doors.kinds.items()]
    return dict(sorted(found, key=lambda item: item[1].rank))


def setting(name: str) -> Any:
    """Return the value of a key of OUTBOX that an installed app has."""
    for doors in all_doors():
        if doors.settings and name in {each.name for each in fields(doors.settings)}:
            return getattr(read(doors.settings), name)
    raise LookupError(name)


@receiver(setting_changed, dispatch_uid="outbox_app.capability")
def _forget_doors(setting: str, **kwargs: Any) -> None:
    if setting == "INSTALLED_APPS":
        all_doors.cache_clear()
        kinds.cache_clear()
