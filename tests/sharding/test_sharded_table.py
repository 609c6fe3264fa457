"""``ShardedTable`` and ``KeyIndex``: what a table keeps, what is refused, and kills."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from threading import Event, Thread

import pytest
from django.apps.registry import Apps
from django.db import DataError, IntegrityError, OperationalError, connections, models, transaction
from django.test.utils import CaptureQueriesContext
from django.utils import timezone

from outbox_app.database.transactions import own_connection
from outbox_app.exceptions import InvalidArgument
from outbox_app.sharding import KeyIndex, ShardedTable, find_by_key, table
from outbox_app.sharding.key_index import index_table
from tests import forking
from tests.events.log.sessions import Session
from tests.faults.tools import alias_for
from tests.patience import patience
from tests.servers.mysql import MARIADB, MARIADB_SERVER
from tests.splitting import partitions_read, partitions_read_by, run_operation, table_of

from .splitter import SHARDS, order_model

servers = pytest.mark.parametrize("alias", ["postgres", "mariadb"], indirect=True)
commits = pytest.mark.django_db(transaction=True)


@pytest.fixture
def order(alias):
    model = order_model()
    with connections[alias].schema_editor(atomic=False) as editor:
        editor.create_model(model)
    yield model
    with connections[alias].cursor() as cursor:
        cursor.execute("DROP TABLE split_order")
        for name in connections[alias].introspection.table_names(cursor):
            if name.startswith("split_order"):
                cursor.execute(f"DROP TABLE {name}")
        if alias == "postgres":
            cursor.execute("SELECT proname FROM pg_proc WHERE proname LIKE 'split_order%'")
            for (name,) in cursor.fetchall():
                cursor.execute(f'DROP FUNCTION "{name}" CASCADE')


@servers
@commits
@pytest.mark.timeout(240)
def test_killed_before_each_statement(alias, order, environment):
    """The table is as it was or split; a run finds what is left, and ends the work."""
    rows = order._default_manager.using(alias)
    rows.bulk_create(order(shop=f"shop-{n % 20}", number=str(n), place=n + 1) for n in range(300))
    expected = {row.number: row.shop for row in rows.all()}
    command = [sys.executable, "-m", "tests.sharding.splitter", alias]
    run = forking.run(
        command, env=environment(alias), capture_output=True, text=True, timeout=patience(100)
    )
    assert run.returncode == 0, run.stdout + run.stderr
    with connections[alias].cursor() as cursor:
        tables = connections[alias].introspection.table_names(cursor)
        index = index_table(order, "number")
        assert not any("outbox_split" in name for name in tables)
        cursor.execute(f"SELECT number, shop FROM {index}")
        assert dict(cursor.fetchall()) == expected
        constraints = connections[alias].introspection.get_constraints(cursor, "split_order")
    assert constraints["split_order_place"]["columns"] == ["place"]
    assert constraints["split_order_once"]["unique"]

    # The model, its numbers and its constraints are as before; look-ups read one partition.
    new = rows.create(shop="shop-new", number="new", place=1000)
    assert new.pk > 300
    for change in {"number": "new"}, {"place": 0}, {"place": 1000, "shop": "shop-new"}:
        row = order(**{"shop": "other", "number": "other", "place": 10**6, **change})
        with pytest.raises((IntegrityError, OperationalError)), transaction.atomic(using=alias):
            row.save(using=alias)
    assert partitions_read(rows.filter(shop="shop-new")) == 1
    assert partitions_read(rows.filter(number="new")) == SHARDS
    with CaptureQueriesContext(connections[alias]) as asked:
        assert find_by_key(order, number="new", using=alias) == new
    assert partitions_read_by(alias, asked[-1]["sql"]) == 1
    assert find_by_key(order, number="new", using=alias).double == 2000
    rows.filter(pk=new.pk).update(shop="elsewhere", number="A")
    assert find_by_key(order, number="A", using=alias).shop == "elsewhere"
    rows.filter(pk=new.pk).delete()
    for number in ("A", "new"):
        with pytest.raises(order.DoesNotExist):
            find_by_key(order, number=number, using=alias)
    with pytest.raises(InvalidArgument, match="one key"):
        find_by_key(order, using=alias)

    # Done is done; PostgreSQL would lose the index's triggers; and it goes back.
    operation = ShardedTable("Order", by="shop", shards=SHARDS, giving_up=["number"])
    with CaptureQueriesContext(connections[alias]) as asked:
        run_operation(operation, order, alias)
    assert not [each["sql"] for each in asked if each["sql"].startswith(("CREATE", "ALTER"))]
    again = ShardedTable("Order", by="shop", shards=2)
    if alias == "postgres":
        with pytest.raises(InvalidArgument, match="trigger"):
            run_operation(again, order, alias)
    run_operation(OPERATIONS[1], order, alias, back=True)
    assert index not in connections[alias].introspection.table_names()
    run_operation(again, order, alias)
    assert partitions_read(rows.filter(number="A")) == 2
    assert {row.number: row.shop for row in rows.all()} == expected


@servers
@commits
def test_nothing_is_lost_if_others_write_meanwhile(alias, order):
    """They wait, and go on in the new table."""
    rows, stop, wrote, errors = order._default_manager.using(alias), Event(), {}, []
    rows.bulk_create(order(shop="a", number=f"old-{n}", place=n + 1) for n in range(2000))

    def write():
        try:
            while not stop.is_set():
                n = len(wrote)
                made = rows.create(shop="b", number=str(n), place=n + 1)
                rows.filter(pk=made.pk).update(shop=f"c{n}")
                wrote[str(n)] = f"c{n}"
        except Exception as error:
            errors.append(error)
        finally:
            connections.close_all()

    thread = Thread(target=write)
    thread.start()
    try:
        for operation in OPERATIONS:
            run_operation(operation, order, alias)
    finally:
        stop.set()
        thread.join()
    assert errors == []
    assert wrote
    there = dict(rows.exclude(shop="a").values_list("number", "shop"))
    assert there == wrote
    assert rows.count() == 2000 + len(wrote)
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SELECT number, shop FROM {index_table(order, 'number')}")
        assert dict(cursor.fetchall()) == dict(rows.values_list("number", "shop"))


@servers
@commits
@pytest.mark.parametrize("number", [0, 1], ids=["split", "index"])
def test_a_table_that_is_in_use_stays_as_it_is(alias, order, number, monkeypatch):
    rows = three_rows(order, alias)
    monkeypatch.setattr(table, "LOCK_WAIT", 1)
    with Session(alias) as other:
        other.begin().sql("UPDATE split_order SET note = 'x' WHERE number = '1'")
        with pytest.raises(OperationalError):
            run_operation(OPERATIONS[number], order, alias)
        other.commit()
    assert rows.get(number="1").note == "x"
    run_operation(OPERATIONS[number], order, alias)
    assert rows.count() == 3


@servers
@commits
def test_two_runs_at_once(alias, order, monkeypatch):
    """The second one would drop the index to which the triggers of the first one write."""
    rows = three_rows(order, alias)
    monkeypatch.setattr(table, "LOCK_WAIT", int(patience(30)))
    drops, other_has_ended, failed = Event(), Event(), []

    def slow(execute, sql, *args):
        if sql.startswith("DROP TABLE"):
            drops.set()
            other_has_ended.wait(2)  # it does not end if it waits for this run
        return execute(sql, *args)

    def run(*wrappers):
        try:
            with ExitStack() as stack:
                for each in wrappers:
                    stack.enter_context(connections[alias].execute_wrapper(each))
                run_operation(OPERATIONS[1], order, alias)
        except Exception as error:
            failed.append(error)
        finally:
            connections.close_all()

    first = Thread(target=run, args=(slow,))
    first.start()
    assert drops.wait(patience())
    second = Thread(target=run)
    second.start()
    second.join(1)
    if not second.is_alive():
        other_has_ended.set()
    first.join()
    second.join()
    assert failed == []
    rows.create(shop="b", number="new", place=9)
    with connections[alias].cursor() as cursor:
        cursor.execute(f"SELECT number, shop FROM {index_table(order, 'number')}")
        assert dict(cursor.fetchall()) == dict(rows.values_list("number", "shop"))


@servers
@commits
def test_rows_that_are_committed_while_the_lock_is_waited_for(alias, order, monkeypatch):
    """A snapshot from before would lack them."""
    rows, connection = three_rows(order, alias), connections[alias]
    if alias == "postgres":
        from psycopg import IsolationLevel as levels

        monkeypatch.setitem(
            connection.settings_dict["OPTIONS"], "isolation_level", levels.REPEATABLE_READ
        )
        connection.close()
    with Session(alias) as other:
        other.begin().sql("UPDATE split_order SET note = 'x' WHERE number = '1'")
        timer = Thread(target=lambda: (Event().wait(0.3), other.commit()))
        timer.start()
        run_operation(OPERATIONS[0], order, alias)
        timer.join()
    connection.close()
    assert rows.get(number="1").note == "x"


@commits
@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
def test_a_writer_with_rights_on_the_table_only(alias, order):
    """Nor does its search_path lead to what the triggers write to."""
    for operation in OPERATIONS:
        run_operation(operation, order, alias)
    with connections[alias].cursor() as cursor:
        cursor.execute("CREATE ROLE split_writer; GRANT INSERT ON split_order TO split_writer")
        try:
            cursor.execute("SET ROLE split_writer; SET search_path = pg_catalog")
            try:
                cursor.execute(
                    "INSERT INTO public.split_order (shop, number, place) VALUES ('a', 'x', 3)"
                )
            finally:
                cursor.execute("RESET ROLE; RESET search_path")
        finally:
            cursor.execute("DROP OWNED BY split_writer; DROP ROLE split_writer")
    assert find_by_key(order, number="x", using=alias).place == 3


@servers
@commits
def test_what_a_split_would_break_is_refused(alias, order):
    def refused(match, **options):
        with pytest.raises(InvalidArgument, match=match):
            run_operation(ShardedTable("Order", **options), order, alias)

    refused(r"would lose .*number.* \(number\)", by="shop")
    refused(r"split_order_once \(shop, place\)", by="note", giving_up=["number"])
    refused("giving_up names other", by="shop", giving_up=["number", "other"])
    refused("has no column 'colour'; it has id", by="colour")
    for shards in (1, 1025, "4", True):
        with pytest.raises(InvalidArgument, match="2 to 1024"):
            ShardedTable("Order", by="shop", shards=shards)
    with pytest.raises(InvalidArgument, match="list of names"):
        ShardedTable("Order", by="shop", giving_up="number")
    with transaction.atomic(using=alias):
        refused("atomic = False", by="shop")
    with connections[alias].cursor() as cursor:
        cursor.execute(
            "CREATE TABLE split_order_line (id int, of_order bigint, "
            "FOREIGN KEY (of_order) REFERENCES split_order (id))"
        )
    refused("foreign key .* of split_order_line", by="shop", giving_up=["number"])
    with connections[alias].cursor() as cursor:
        cursor.execute("DROP TABLE split_order_line")
    order(shop="a", number="x", place=1).save(using=alias)
    run_operation(ShardedTable("O", by="shop", shards=2, giving_up=["number"]), order, alias)
    order(shop="b", number="x", place=1).save(using=alias)
    with pytest.raises(IntegrityError):
        run_operation(KeyIndex("Order", key="number", by="shop"), order, alias)
    with pytest.raises(InvalidArgument, match="is split by shop itself"):
        run_operation(KeyIndex("Order", key="shop", by="shop"), order, alias)


@servers
@commits
def test_what_goes_by_a_unique_constraint(alias, order):
    """As the how-to says it."""
    rows = order._default_manager.using(alias)
    made = rows.create(shop="a", number="x", place=1)
    for operation in OPERATIONS:
        run_operation(operation, order, alias)

    def upsert(**values):
        unique = ["id", "shop"] if alias == "postgres" else None
        options = {"update_conflicts": True, "update_fields": ["place"], "unique_fields": unique}
        rows.bulk_create([order(number="x", place=2, **values)], **options)

    upsert(id=made.pk, shop="a")
    with pytest.raises(IntegrityError):
        upsert(shop="b")
    with pytest.raises(IntegrityError):
        rows.bulk_create([order(shop="b", number="x", place=3)], ignore_conflicts=True)
    assert list(rows.values_list("pk", "place")) == [(made.pk, 2)]


@servers
@commits
def test_numbers_stay_and_are_not_given_out_again(alias, order):
    rows = order._default_manager.using(alias)
    rows.create(shop="a", number="1", place=1)
    with connections[alias].cursor() as cursor:  # MySQL gives out another one for 0
        cursor.execute("UPDATE split_order SET id = 0")
    last = rows.create(shop="a", number="2", place=2).pk
    rows.filter(pk=last).delete()
    run_operation(OPERATIONS[0], order, alias)
    assert rows.get().pk == 0
    assert rows.create(shop="a", number="3", place=3).pk > last


@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
@commits
@pytest.mark.parametrize("is_serial", [False, True], ids=["identity", "serial"])
def test_a_sequence_keeps_its_name_and_goes_on(alias, order, is_serial):
    """Django before 4.1 has made columns of the type ``serial``."""
    rows = order._default_manager.using(alias)
    with connections[alias].cursor() as cursor:
        if is_serial:
            cursor.execute(
                "ALTER TABLE split_order ALTER id DROP IDENTITY; "
                "CREATE SEQUENCE split_order_id_seq OWNED BY split_order.id; "
                "ALTER TABLE split_order ALTER id SET DEFAULT nextval('split_order_id_seq')"
            )
        last = rows.create(shop="a", number="1", place=1).pk
        run_operation(OPERATIONS[0], order, alias)
        run_operation(ShardedTable("Order", by="shop", shards=3), order, alias)
        assert last < rows.create(shop="a", number="2", place=2).pk <= last + 3
        cursor.execute("SELECT pg_get_serial_sequence('split_order', 'id')")
        assert cursor.fetchone() == ("public.split_order_id_seq",)


@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
@commits
def test_an_index_that_could_not_be_made_is_left_out(alias, order):
    """As a unique one it would keep rows out of the copy."""
    rows = three_rows(order, alias)
    with connections[alias].cursor() as cursor, pytest.raises(IntegrityError):
        cursor.execute("CREATE UNIQUE INDEX CONCURRENTLY split_odd ON split_order (shop, note)")
    run_operation(OPERATIONS[0], order, alias)
    assert sorted(rows.values_list("number", flat=True)) == ["0", "1", "2"]


@servers
@commits
def test_columns_that_the_model_does_not_have(alias, order):
    """SELECT * leaves out invisible ones, and generated ones take no value."""
    rows = order._default_manager.using(alias)
    rows.create(shop="a", number="x", place=1)
    invisible = "INVISIBLE" if alias == MARIADB else ""
    with connections[alias].cursor() as cursor:
        cursor.execute(
            f"ALTER TABLE split_order ADD seen INT {invisible} DEFAULT 1, "
            "ADD treble INT GENERATED ALWAYS AS (place * 3) STORED"
        )
        cursor.execute("UPDATE split_order SET seen = 7")
    run_operation(OPERATIONS[0], order, alias)
    with connections[alias].cursor() as cursor:
        cursor.execute("SELECT seen, treble FROM split_order")
        assert cursor.fetchone() == (7, 3)


@pytest.mark.parametrize("alias", ["mariadb"], indirect=True)
@commits
@pytest.mark.parametrize("breaks", [True, False])
def test_rows_that_could_not_be_inserted_now(alias, order, breaks):
    """A row that breaks a CHECK was left out of the copy without an error."""
    rows = order._default_manager.using(alias)
    with connections[alias].cursor() as cursor:
        cursor.execute("SET check_constraint_checks = 0, sql_mode = ''")
        cursor.execute("ALTER TABLE split_order ADD day DATE NOT NULL DEFAULT '0000-00-00'")
        rows.create(shop="a", number="x", place=-1 if breaks else 1)
    connections[alias].close()
    if breaks:
        with pytest.raises(IntegrityError, match="split_order_positive"):
            run_operation(OPERATIONS[0], order, alias)
    else:
        run_operation(OPERATIONS[0], order, alias)
    assert rows.count() == 1


@servers
@commits
def test_a_table_that_has_no_numbers(alias):
    """Its primary key is unique as long as the database says so."""

    class Word(models.Model):  # noqa: DJ008
        word = models.CharField(max_length=20, primary_key=True)
        n = models.IntegerField()

        class Meta:
            apps = Apps()
            app_label = "shop"
            db_table = "split_word"

    with table_of(Word, alias):
        rows = Word._default_manager.using(alias)
        rows.create(word="a", n=1)
        with pytest.raises(InvalidArgument, match=r"would lose .* \(word\)"):
            run_operation(ShardedTable("Word", by="n", shards=2), Word, alias)
        for options in {"by": "word"}, {"by": "n", "giving_up": ["word"]}:
            run_operation(ShardedTable("Word", shards=2, **options), Word, alias)
            assert rows.get().word == "a"


@servers
@commits
def test_an_index_of_a_table_that_is_split_by_a_time(alias):
    """MySQL gives times without their zone, which is not that of the settings."""

    class Visit(models.Model):  # noqa: DJ008
        number = models.CharField(max_length=20)
        at = models.DateTimeField()

        class Meta:
            apps = Apps()
            app_label = "shop"
            db_table = "split_Visit"  # triggers of MySQL have names in small letters

    with table_of(Visit, alias):
        made = Visit._default_manager.using(alias).create(number="x", at=timezone.now())
        run_operation(ShardedTable("Visit", by="at", shards=2), Visit, alias)
        index = KeyIndex("Visit", key="number", by="at")
        run_operation(index, Visit, alias)
        assert find_by_key(Visit, number="x", using=alias) == made
        run_operation(index, Visit, alias, back=True)


@servers
@commits
def test_a_row_that_moves_while_it_is_looked_up(alias, order):
    rows = order._default_manager.using(alias)
    made = rows.create(shop="a", number="x", place=1)
    run_operation(KeyIndex("Order", key="number", by="shop"), order, alias)
    index, shops = index_table(order, "number"), iter("bc")

    def move(execute, sql, *args):
        answer = execute(sql, *args)
        if index in sql and (shop := next(shops, "")):
            with own_connection(alias, seconds=5):
                rows.filter(pk=made.pk).update(shop=shop)
        return answer

    with connections[alias].execute_wrapper(move):
        assert find_by_key(order, number="x", using=alias).shop == "c"
    with connections[alias].cursor() as cursor:
        cursor.execute(f"INSERT INTO {index} (number, shop) VALUES ('y', 'a')")
    with pytest.raises(order.DoesNotExist):  # what the index alone has is not looked for for ever
        find_by_key(order, number="y", using=alias)


@servers
@commits
def test_a_key_that_a_trigger_of_the_project_changes(alias, order):
    """The UPDATE names another column."""
    rows = order._default_manager.using(alias)
    made = rows.create(shop="a", number="x", place=1)
    run_operation(KeyIndex("Order", key="number", by="shop"), order, alias)
    with connections[alias].cursor() as cursor:
        if alias == "postgres":
            cursor.execute(
                "CREATE FUNCTION split_order_odd() RETURNS trigger LANGUAGE plpgsql AS "
                "$$ BEGIN NEW.number = NEW.note; RETURN NEW; END $$"
            )
            action = "EXECUTE FUNCTION split_order_odd()"
        else:
            action = "SET NEW.number = NEW.note"
        cursor.execute(f"CREATE TRIGGER odd BEFORE UPDATE ON split_order FOR EACH ROW {action}")
    rows.filter(pk=made.pk).update(note="y")
    assert find_by_key(order, number="y", using=alias) == made


@servers
@commits
def test_an_index_of_long_names(alias):
    """PostgreSQL cuts names after 63 bytes."""

    class Order(models.Model):  # noqa: DJ008
        number_of_orders = models.CharField(max_length=20)
        shop = models.CharField(max_length=20)

        class Meta:
            apps = Apps()
            app_label = "shop"
            db_table = f"split_{'öü' * 10}"

    with table_of(Order, alias):
        rows = Order._default_manager.using(alias)
        index = KeyIndex("Order", key="number_of_orders", by="shop")
        run_operation(index, Order, alias)
        made = rows.create(number_of_orders="x", shop="a")
        rows.update(shop="b")
        assert find_by_key(Order, number_of_orders="x", using=alias) == made
        rows.all().delete()
        with pytest.raises(Order.DoesNotExist):
            find_by_key(Order, number_of_orders="x", using=alias)
        run_operation(index, Order, alias, back=True)


@pytest.mark.parametrize("alias", ["mariadb"], indirect=True)
@commits
def test_a_key_that_the_index_cannot_hold_is_refused(alias, order):
    """The migration that made the column wider has left the index as it was."""
    rows = order._default_manager.using(alias)
    made = rows.create(shop="a", number="x", place=1)
    run_operation(KeyIndex("Order", key="number", by="shop"), order, alias)
    with connections[alias].cursor() as cursor:
        cursor.execute("ALTER TABLE split_order MODIFY number VARCHAR(40) NOT NULL")
    with pytest.raises(DataError):
        rows.create(shop="a", number="y" * 30, place=2)
    with pytest.raises(DataError):
        rows.filter(pk=made.pk).update(number="y" * 30)


@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
@pytest.mark.parametrize(
    ("what", "made", "undone"),
    [
        (
            "policy mine",
            "CREATE POLICY mine ON split_order USING (true)",
            "DROP POLICY mine ON split_order",
        ),
        (
            "row security",  # without a policy the owner alone sees rows
            "ALTER TABLE split_order ENABLE ROW LEVEL SECURITY",
            "ALTER TABLE split_order DISABLE ROW LEVEL SECURITY",
        ),
        (
            "rule kept",
            "CREATE RULE kept AS ON DELETE TO split_order DO INSTEAD NOTHING",
            "DROP RULE kept ON split_order",
        ),
        (
            "inheritance from split_parent",
            "CREATE TABLE split_parent (id bigint NOT NULL); "
            "ALTER TABLE split_order INHERIT split_parent",
            "ALTER TABLE split_order NO INHERIT split_parent; DROP TABLE split_parent",
        ),
        (
            "view split_view",
            "CREATE VIEW split_view AS SELECT id FROM split_order",
            "DROP VIEW split_view",
        ),
        (
            "schema public, not the first of search_path,",  # it would move into the other one
            'CREATE SCHEMA "Mine"; SET search_path = "Mine", public',
            'SET search_path = DEFAULT; DROP SCHEMA "Mine"',
        ),
    ],
)
@commits
def test_what_postgresql_would_lose_is_refused(alias, order, what, made, undone):
    with connections[alias].cursor() as cursor:
        cursor.execute(made)
    try:
        with pytest.raises(InvalidArgument, match=f"cannot be split: {what} would be lost"):
            run_operation(OPERATIONS[0], order, alias)
    finally:
        with connections[alias].cursor() as cursor:
            cursor.execute(undone)


@pytest.fixture
def line(order, alias):
    class Line(models.Model):  # noqa: DJ008
        of = models.ForeignKey(order, models.CASCADE)

        class Meta:
            apps = order._meta.apps
            app_label = "shop"
            db_table = "split_Line"

    with connections[alias].schema_editor(atomic=False) as editor:
        editor.create_model(Line)
    yield Line
    with connections[alias].schema_editor(atomic=False) as editor:
        editor.delete_model(Line)


@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
@commits
def test_foreign_keys_a_deferrable_constraint_and_a_comment_stay(alias, order, line):
    with connections[alias].cursor() as cursor:
        cursor.execute("COMMENT ON TABLE \"split_Line\" IS 'It''s ours'")
        cursor.execute('ALTER TABLE "split_Line" ADD CONSTRAINT l UNIQUE (of_id) DEFERRABLE')
    lines, made = line._default_manager.using(alias), three_rows(order, alias)
    lines.create(of=made.first())
    run_operation(ShardedTable("Line", by="of", shards=2), line, alias)
    with connections[alias].cursor() as cursor:
        found = connections[alias].introspection.get_constraints(cursor, "split_Line")
        keys = [each["foreign_key"] for each in found.values() if each["foreign_key"]]
        assert keys == [("split_order", "id")]
        cursor.execute(
            "SELECT condeferrable FROM pg_constraint WHERE conname = 'l' "
            "AND conrelid = '\"split_Line\"'::regclass"
        )
        assert cursor.fetchone() == (True,)
        cursor.execute("SELECT obj_description('\"split_Line\"'::regclass, 'pg_class')")
        assert cursor.fetchone() == ("It's ours",)
    with pytest.raises(IntegrityError), transaction.atomic(using=alias):
        lines.create(of_id=0)


@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
@commits
def test_a_foreign_key_that_is_not_valid_is_refused(alias, order, line):
    with connections[alias].cursor() as cursor:
        cursor.execute(
            'ALTER TABLE "split_Line" ADD CONSTRAINT later FOREIGN KEY (of_id) '
            "REFERENCES split_order NOT VALID"
        )
    with pytest.raises(InvalidArgument, match="split: foreign key that is not valid later would"):
        run_operation(ShardedTable("Line", by="of", shards=2), line, alias)


@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
@commits
def test_the_grants_of_a_table_stay(alias, order):
    seen = (
        "SELECT relacl::text, array(SELECT attname || attacl::text "
        "FROM pg_attribute WHERE attrelid = oid AND attacl IS NOT NULL ORDER BY 1) "
        "FROM pg_class WHERE relname = 'split_order'"
    )

    def run(sql):
        with connections[alias].cursor() as cursor:
            cursor.execute(sql)
            return cursor.fetchall() if cursor.description else None

    run("CREATE ROLE split_reports")
    try:
        run("GRANT SELECT (shop, place) ON split_order TO split_reports")
        run("GRANT UPDATE (note) ON split_order TO split_reports WITH GRANT OPTION")
        run("GRANT INSERT ON split_order TO split_reports WITH GRANT OPTION")
        run("GRANT DELETE ON split_order TO PUBLIC")
        before = run(seen)
        run_operation(OPERATIONS[0], order, alias)
        assert run(seen) == before
    finally:
        run("DROP OWNED BY split_reports")
        run("DROP ROLE split_reports")


@servers
@commits
@pytest.mark.parametrize(
    "name",
    [f"split_{'long' * 14}x", f"split_{'ö' * 28}", "Split.it"],
    ids=["long", "bytes", "dot"],
)
def test_a_table_with_a_name_that_is_long_or_odd(alias, name):
    class Long(models.Model):  # noqa: DJ008
        class Meta:
            apps = Apps()
            app_label = "shop"
            db_table = name

    with table_of(Long, alias):
        run_operation(ShardedTable("Long", by="id", shards=12), Long, alias)
        assert Long._default_manager.using(alias).create().pk


@pytest.mark.parametrize("kind", ["mariadb"])
def test_names_in_double_quotes_and_in_small_letters(kind, django_db_blocker):
    """ANSI_QUOTES, and a server on Windows: a table that is split is seen to be."""

    class Visit(models.Model):  # noqa: DJ008
        shop = models.CharField(max_length=20)

        class Meta:
            apps = Apps()
            app_label = "shop"
            db_table = "split_Visit"

    if MARIADB not in connections:
        pytest.skip("no mariadb")
    small = MARIADB_SERVER(extra_arguments=("--lower-case-table-names=1",))
    with small as server, django_db_blocker.unblock(), alias_for(server.url) as alias:
        connection = connections[alias]
        mode = "SET sql_mode = 'STRICT_TRANS_TABLES,ANSI_QUOTES'"
        connection.settings_dict["OPTIONS"]["init_command"] = mode
        with connection.schema_editor(atomic=False) as editor:
            editor.create_model(Visit)
        for _ in range(2):
            run_operation(ShardedTable("Visit", by="shop", shards=3), Visit, alias)
        with CaptureQueriesContext(connection) as seen:
            run_operation(ShardedTable("Visit", by="shop", shards=3), Visit, alias)
        assert not [each["sql"] for each in seen if "CREATE" in each["sql"]]


OPERATIONS = [
    ShardedTable("Order", by="shop", shards=2, giving_up=["number"]),
    KeyIndex("Order", key="number", by="shop"),
]


@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
@commits
def test_parameters_that_the_server_binds(alias, order, monkeypatch):
    """OPTIONS = {"server_side_binding": True}: each parameter has to have a type."""
    connection = connections[alias]
    monkeypatch.setitem(connection.settings_dict["OPTIONS"], "server_side_binding", True)
    connection.close()
    try:
        three_rows(order, alias)
        for operation in OPERATIONS:
            run_operation(operation, order, alias)
        assert find_by_key(order, number="1", using=alias).place == 2
    finally:
        connection.close()


def three_rows(order, alias):
    """Make the rows "0" to "2"; return those of the table."""
    rows = order._default_manager.using(alias)
    rows.bulk_create(order(shop="a", number=n, place=n + 1) for n in range(3))
    return rows


@commits
@pytest.mark.parametrize("alias", ["postgres"], indirect=True)
def test_an_index_is_emptied_with_its_table(alias, order):
    for operation in OPERATIONS:
        run_operation(operation, order, alias)
    rows = order._default_manager.using(alias)
    for _ in range(2):
        made = rows.create(shop="a", number="x", place=1)
        assert find_by_key(order, number="x", using=alias) == made
        with connections[alias].cursor() as cursor:
            cursor.execute("TRUNCATE split_order")
    run_operation(OPERATIONS[1], order, alias, back=True)
    with connections[alias].cursor() as cursor:
        cursor.execute("TRUNCATE split_order")


@commits
@pytest.mark.parametrize("alias", ["default"], indirect=True)
def test_sqlite_has_no_partitions(alias, order):
    run_operation(ShardedTable("Order", by="shop"), order, alias)
    run_operation(KeyIndex("Order", key="number", by="shop"), order, alias)
    row = order(shop="a", number="x", place=1)
    row.save(using=alias)
    assert find_by_key(order, number="x", using=alias) == row


def test_fields_that_may_be_null_and_several_keys_are_refused():
    from outbox_app.events.models import StreamHead
    from outbox_app.prepared.models import PreparedEvent
    from outbox_app.sharding.sharded_table import field_of

    with pytest.raises(InvalidArgument, match="decided_at may be null"):
        field_of(PreparedEvent, "decided_at")
    with pytest.raises(InvalidArgument, match="several columns"):
        field_of(StreamHead, "stream")
    assert isinstance(field_of(PreparedEvent, "event_id"), models.UUIDField)
