"""`coordinator check` on a folder whose state is in PostgreSQL: what is as it should be there is no failure."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lorica_coordinator.opened import Coordinator, leading
from silo_wire.plans.plan import PlanBundle
from tests.integration.test_postgresql_settled import COLLECTING, Federation
from tests.support.coordinator import initialise
from tests.support.coordinator_edges import make_plan
from tests.support.postgresql import PostgresqlServer, running_postgresql
from tests.support.rounds import T0, A

BUCKET = "s3://lorica/north?endpoint=http://127.0.0.1:1&region=eu-central-1&credentials=/nowhere"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with running_postgresql() as running:
        yield running


def checked(federation: Federation, name: str) -> tuple[str, str, str]:
    (one,) = [it for it in json.loads(federation.command("check", "--json").out) if it["name"] == name]
    return one["outcome"], one["misconfiguration"], one["detail"]


def test_a_database_without_tables_is_a_failure_only_where_it_had_some(
    server: PostgresqlServer, tmp_path: Path
) -> None:
    one = Federation(server, initialise(tmp_path / "net"), "without_tables")
    outcome, _, said = checked(one, "state database")
    assert outcome == "passed"
    assert "answers and has no tables yet: the first coordinator serve makes them" in said
    one.enrol(A)
    outcome, _, said = checked(one, "state database")
    assert outcome == "passed"
    assert "enrolled: 1" in said
    server.execute("DROP SCHEMA public CASCADE", "CREATE SCHEMA public", database=one.name)
    outcome, mistake, said = checked(one, "state database")
    assert (outcome, mistake) == ("failed", "database-server")
    assert "has no tables yet" in said


def test_a_plan_under_way_that_another_folder_began_is_none_that_is_missing(
    server: PostgresqlServer, tmp_path: Path
) -> None:
    one = Federation(server, initialise(tmp_path / "net"), "under_way")
    bundle = begun(one)
    outcome, _, said = checked(one, "plan")
    assert outcome == "passed"
    assert f"{bundle.plan.name} ({bundle.plan.digest[:16]}) is under way and whole, by the copy in state" in said
    shutil.rmtree(one.folder.root / "state" / "bundles")
    outcome, mistake, said = checked(one, "plan")
    assert (outcome, mistake) == ("failed", "plan-missing")
    assert "copy state/bundles of the folder that has it" in said
    text = one.folder.settings.read_text()
    one.folder.settings.write_text(text.replace('blobs = ""', f'blobs = "{BUCKET}"'))
    outcome, _, said = checked(one, "plan")
    assert outcome == "passed"
    assert said.endswith("is under way: who leads on this folder has it from the bucket")
    assert checked(one, "cohort")[0] == "skipped"
    outcome, _, said = checked(one, "attempt keys")
    assert outcome == "notice"
    assert "goes on with the round without the updates that it had" in said


def begun(federation: Federation) -> PlanBundle:
    """Its plan is under way, and the folder has the copy alone."""
    state = federation.folder.root / "state"
    with leading(Coordinator.load(federation.folder)) as leader:
        bundle = make_plan(state)
        leader.shelf.compile(bundle.plan.name)
        shutil.rmtree(state / "plans")
        at: Any = COLLECTING
        terms = replace(at.course.terms, plan=bundle.plan.digest, name=bundle.plan.name)
        store = leader.open_store()
        store.transition(replace(at, course=replace(at.course, terms=terms)), [], at=T0, now=T0)
        store.close()
    return bundle
