"""The comparison of two runs. The runs themselves need a package registry."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.celery_suite.comparison import lost, outcomes

REPORT = """<testsuites><testsuite>
<testcase classname="a" name="fine"/>
<testcase classname="a" name="wrong"><failure/></testcase>
<testcase classname="a" name="broken"><error/></testcase>
<testcase classname="a" name="left_out"><skipped/></testcase>
<testcase classname="a" name="of_parts"/>
<testcase classname="a" name="of_parts"><failure/></testcase>
<testcase classname="a" name="of_parts"/>
<testcase classname="b" name="fine"><properties/><system-out/></testcase>
</testsuite></testsuites>"""


def test_each_test_has_its_worst_outcome(tmp_path):
    report = tmp_path / "report.xml"
    report.write_text(REPORT)
    assert outcomes(report) == {
        "a::fine": "passed",
        "a::wrong": "failure",
        "a::broken": "error",
        "a::left_out": "skipped",
        "a::of_parts": "failure",
        "b::fine": "passed",
    }


def test_lost_is_what_passes_with_celery_alone():
    plain = dict.fromkeys("abcde", "passed") | {"f": "failure", "g": "skipped"}
    staging = {"a": "passed", "b": "failure", "c": "error", "d": "skipped", "f": "error"}
    assert lost(plain, staging) == {"b": "failure", "c": "error", "d": "skipped", "e": "missing"}
    assert lost(plain, plain) == {}


def test_a_first_run_without_a_passed_test_proves_nothing():
    with pytest.raises(ValueError, match="No test passes with Celery itself"):
        lost({"a": "error"}, {"a": "error"})


def test_the_substitution_reaches_the_class_of_the_apps_in_celerys_tests(environment):
    code = (
        "import tests.celery_suite.substitution as plugin, celery, celery.app.base;"
        "assert celery.Celery is celery.app.base.Celery is plugin.OutboxCelery;"
        "plugin.pytest_sessionstart()"
    )
    variables = environment("default")
    del variables["DJANGO_SETTINGS_MODULE"]
    subprocess.run([sys.executable, "-c", code], env=variables, check=True)
