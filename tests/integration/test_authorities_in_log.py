"""A folder whose authorities are others than the log of the database tells of is not served: of coordinators with
folders of their own, one may have made or retired one."""

import json
import shutil
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from lorica_coordinator.edges.check.misconfigurations import Mistake
from lorica_coordinator.edges.keys.authorities import Authorities, Stage
from lorica_coordinator.edges.upkeep.authorities_in_log import in_entry, require_newest
from lorica_coordinator.edges.upkeep.newest_in_log import newest_groups, newest_told
from lorica_security.audit.entry import Event
from lorica_security.errors import ConfigurationError
from lorica_security.identity.identity_key import new_identity_key
from lorica_security.on_disk.log_file import AuditLog
from lorica_security.on_disk.log_place import Line
from tests.integration.test_postgresql_settled import Federation
from tests.support.coordinator import initialise
from tests.support.postgresql import PostgresqlServer, running_postgresql
from tests.support.rounds import FEDERATION

NOW = datetime.now(UTC)
STEPS = 6  # two successions, each of three steps
FORKED = 4


def take_a_step(keys: Path, day: int) -> None:
    """A successor joins, issues, and its predecessor is retired."""
    authorities = Authorities.load(keys)
    named = {member.stage: member.name for member in authorities.members}
    if Stage.SUCCESSOR in named:
        authorities.activate()
    elif Stage.TRUSTED in named:
        authorities.retire(named[Stage.TRUSTED], NOW + timedelta(days=day))
    else:
        authorities.rotate(NOW + timedelta(days=day))


def history(begun: Path, steps: int) -> list[Path]:
    """The folder as it is, and copies as they are after each of `steps`."""
    found = [begun]
    for day in range(1, steps + 1):
        found.append(begun.with_name(f"{begun.name}.{day}"))
        shutil.copytree(found[-2], found[-1])
        take_a_step(found[-1], day)
    return found


@pytest.fixture(scope="module")
def main(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    keys = tmp_path_factory.mktemp("main") / "keys"
    keys.mkdir(mode=0o700)
    Authorities.create(keys, FEDERATION, NOW)
    return history(keys, STEPS)


def log_after(folder: Path, keys: list[Path], *, digests: bool = True) -> AuditLog:
    """What is told of each step; with something else before and after."""
    log = AuditLog(folder, writer="lorica:test", key=new_identity_key(), clock=time.time)
    log.append(Event.REFUSED)
    for one in keys:
        said = in_entry(Authorities.load(one).standings())
        log.append(Event.AUTHORITY_CHANGED, **{key: said[key] for key in said if digests or key.startswith("is_")})
    log.append(Event.REFUSED, what="authority changed")
    return log


@pytest.fixture(scope="module")
def logs(main: list[Path], tmp_path_factory: pytest.TempPathFactory) -> list[AuditLog]:
    """After none of the steps, after the first, and so on."""
    folder = tmp_path_factory.mktemp("logs")
    return [log_after(folder / str(entered), main[1 : entered + 1]) for entered in range(STEPS + 1)]


def refused(log: AuditLog, keys: Path) -> bool:
    try:
        require_newest(newest_told(log.place), Authorities.load(keys), keys)
    except ConfigurationError as error:
        said = str(error)
    else:
        return False
    assert f"{keys} has other authorities" in said
    assert f"copy all of its keys/ to {keys}" in said
    return True


@pytest.mark.parametrize("entered", range(STEPS + 1))
def test_a_folder_is_served_that_has_what_the_log_tells_of_or_one_step_more(
    main: list[Path], logs: list[AuditLog], entered: int
) -> None:
    served = [index for index, keys in enumerate(main) if not refused(logs[entered], keys)]
    assert served == (
        list(range(STEPS + 1)) if entered == 0 else [one for one in (entered, entered + 1) if one <= STEPS]
    )


@pytest.mark.parametrize("entered", range(1, STEPS + 1))
def test_names_and_stages_are_what_an_entry_of_an_earlier_release_is_held_to(
    main: list[Path], tmp_path: Path, entered: int
) -> None:
    log = log_after(tmp_path / "log", main[1 : entered + 1], digests=False)
    served = [index for index, keys in enumerate(main) if not refused(log, keys)]
    assert served == [one for one in (entered, entered + 1) if one <= STEPS]


@pytest.mark.parametrize("at", range(STEPS))
def test_a_folder_that_went_its_own_way_is_served_where_its_own_steps_are_told_alone(
    main: list[Path], logs: list[AuditLog], tmp_path: Path, at: int
) -> None:
    """Each folder that parted from the others at `at`, beside each log of theirs."""
    parted = tmp_path / "parted"
    shutil.copytree(main[at], parted)
    own = history(parted, FORKED)
    for entered in range(1, STEPS + 1):
        last = in_entry(Authorities.load(main[entered]).standings())
        for steps, keys in enumerate(own):
            was = [in_entry(Authorities.load(one).standings()) for one in (*main[: at + 1], *own[1 : steps + 1])][-2:]
            assert refused(logs[entered], keys) == (last not in was), (entered, steps)


def test_groups_and_authorities_are_found_in_one_look_from_the_newest_entry(main: list[Path], tmp_path: Path) -> None:
    log = log_after(tmp_path / "log", main[1:3])
    log.append(Event.GROUPS_STAND, number=1, digest="1" * 64, groups="a, b, c")
    log.append(Event.GROUPS_STAND, number=2, digest="2" * 64, groups="a, b, c")
    looks: list[list[str]] = []

    class Looked:
        def telling(self, *texts: str) -> Iterator[Line]:
            looks.append([])
            for line in log.place.telling(*texts):
                looks[-1].append(line.where)
                yield line

    found = newest_told(Looked())  # type: ignore[arg-type]
    groups = newest_groups(found)
    assert groups is not None
    assert groups.number == 2
    require_newest(found, Authorities.load(main[2]), main[2])
    assert [len(look) for look in looks] == [4], "two of groups, one that merely says so, and the newest of authorities"


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresqlServer]:
    with running_postgresql() as running:
        yield running


def test_the_other_folder_of_one_database_is_not_led_with_before_it_has_the_new_authority(
    server: PostgresqlServer, tmp_path: Path
) -> None:
    """As an operator types it, on coordinators that do not run."""
    first = Federation(server, initialise(tmp_path / "first"), "authorities")
    first.enrol()
    second = shutil.copytree(tmp_path / "first", tmp_path / "second")
    other = Federation.__new__(Federation)
    other.server, other.name, other.folder = server, first.name, type(first.folder)(second)
    assert other.command("ca", "show").code == 0
    assert first.command("ca", "rotate").code == 0
    other.command("ca", "rotate").is_refusal(ConfigurationError, str(second / "keys"), "ca-2", "copy all of its keys/")
    (found,) = [one for one in json.loads(other.command("check", "--json").out) if one["name"] == "state database"]
    assert found["misconfiguration"] == Mistake.KEYS_OLDER.value.name
    assert "copy all of its keys/" in found["detail"]
    shutil.rmtree(second / "keys")
    shutil.copytree(tmp_path / "first" / "keys", second / "keys")
    done = other.command("ca", "show")
    assert done.code == 0, done.err
    assert "ca-2" in done.out
