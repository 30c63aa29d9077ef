"""The catalogue of planted breaks: each can be planted, what is to find it exists, and a few are planted here; `make
breaks` plants all."""

from dataclasses import replace

import pytest

from tests.breaks.catalogue import PAGE, ROOT, Break, all_breaks, named_tests, page, subjects
from tests.breaks.plant import Copy, plant

BREAKS = all_breaks()
BY_NAME = {one.name: one for one in BREAKS}
SUBJECTS = {
    "accounting",
    "adapters",
    "after_noise",
    "blobs",
    "certificates",
    "clipping",
    "dask",
    "drift",
    "durability",
    "export",
    "family",
    "int8",
    "jail",
    "joint",
    "larger_than_memory",
    "ledger",
    "masked_journal",
    "masks",
    "noise",
    "own_models",
    "policy",
    "postgresql",
    "ranks",
    "release_groups",
    "round_models",
    "rows",
    "sampling",
    "scores",
    "silo_noise",
    "standby",
    "status_page",
    "studies",
    "tasks",
    "tokens",
    "tracking",
    "units",
    "views",
    "weight",
    "without_labels",
}
AUDIT = sorted((ROOT / "ops/lorica/privacy_audit").rglob("*.py"))
PLANTED = ("entries that were edited", "max_weight that cuts nothing", "invitations that never expire")
"""Their tests load neither torch nor grpc's servers."""


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Copy:
    return Copy(tmp_path_factory.mktemp("breaks"))


@pytest.mark.parametrize("one", BREAKS, ids=lambda one: one.name)
def test_a_break_can_be_planted_and_says_what_an_adversary_gains(one: Break) -> None:
    content = (ROOT / one.file).read_text(encoding="utf-8")
    assert one.planted(content) != content
    assert one.why.endswith(".")


@pytest.mark.parametrize("file", sorted({test.split("::")[0] for one in BREAKS for test in one.caught_by}))
def test_every_test_that_is_to_find_a_break_exists(file: str) -> None:
    there = set(named_tests(file))
    named = {test.split("[")[0] for one in BREAKS for test in one.caught_by if test.startswith(f"{file}::")}
    assert named - there == set()


def test_every_parameter_that_is_to_find_a_break_exists(pytestconfig: pytest.Config, collected: frozenset[str]) -> None:
    """As far as whole modules were collected. pytest runs a function that is named beside a parameter that it has not,
    and says nothing."""
    if any("::" in argument for argument in pytestconfig.args):
        pytest.skip("single tests were asked for")
    modules = {test.split("::")[0] for test in collected}
    named = {test for one in BREAKS for test in one.caught_by if "[" in test and test.split("::")[0] in modules}
    assert named - collected == set()


def test_every_promise_that_is_to_be_found_broken_is_one_of_the_audit() -> None:
    source = "".join(path.read_text(encoding="utf-8") for path in AUDIT)
    assert {promise for one in BREAKS for promise in one.audit if f'"{promise}"' not in source} == set()


def test_there_are_breaks_of_each_subject_and_enough_of_them() -> None:
    assert set(subjects()) == SUBJECTS
    assert len(BREAKS) >= 40
    assert sum(bool(one.audit) and not one.caught_by for one in BREAKS) >= 15


def test_the_page_counts_them_right() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run python -m tests.breaks.plant --page"


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_break_is_caught(name: str, copy: Copy) -> None:
    outcome = plant(copy, BY_NAME[name])
    assert outcome.caught, outcome.told
    content = (ROOT / BY_NAME[name].file).read_text(encoding="utf-8")
    assert (copy.root / BY_NAME[name].file).read_text(encoding="utf-8") == content


def test_a_break_that_its_test_does_not_see_survives(copy: Copy) -> None:
    one = BY_NAME["entries that were edited"]
    harmless = replace(one, after=f"{one.before}  # the same")
    outcome = plant(copy, harmless)
    assert not outcome.caught
    assert f"{one.caught_by[0]} passes" in outcome.told


def test_a_break_whose_text_is_gone_is_told(copy: Copy) -> None:
    outcome = plant(copy, replace(BY_NAME["entries that were edited"], before="no such text"))
    assert not outcome.caught
    assert "occurs 0 times" in outcome.told


def test_code_that_does_not_run_is_no_break_that_was_caught(copy: Copy) -> None:
    one = BY_NAME["entries that were edited"]
    outcome = plant(copy, replace(one, after="    if no_such_name:"))
    assert not outcome.caught
    assert "does not run" in outcome.told
