"""The benchmark of a coordinator whose state and files are elsewhere: what it writes into the settings, what is run
twice, what it refuses, what is read of it."""

import os
from pathlib import Path

import pytest
from rich.console import Console

from lorica.bench import run as bench
from lorica.bench.elsewhere.storage import Storage, storage
from lorica.bench.figures import Reading, Run, read_figures
from lorica.documentation import bench_tables
from lorica_coordinator.settings import Settings, settings_text
from lorica_security.errors import ConfigurationError, StorageError

DATABASE = 'postgresql+psycopg://lorica@/x?host=/run/"pg"'
BLOBS = "s3://lorica/x?endpoint=http://127.0.0.1:9&credentials=/x"


def test_the_settings_that_init_writes_get_each_place_and_nothing_else(tmp_path: Path) -> None:
    file, keys = tmp_path / "federation.toml", tmp_path / "keys"
    file.write_text(settings_text("bench", ["127.0.0.1"]))
    before = Settings.read(file)
    Storage(database=DATABASE, blobs=BLOBS, attempt_keys=str(keys)).write_into(file)
    after = Settings.read(file)
    assert (after.storage.database, after.storage.blobs, after.storage.attempt_keys) == (DATABASE, BLOBS, str(keys))
    assert after.model_copy(update={"storage": before.storage}) == before
    assert os.stat(keys).st_mode & 0o777 == 0o700
    assert os.stat(file).st_mode & 0o777 == 0o600, "the database's URL may have a password"


def test_a_place_that_settings_refuse_leaves_them_as_they_were(tmp_path: Path) -> None:
    file = tmp_path / "federation.toml"
    file.write_text(settings_text("bench", ["127.0.0.1"]))
    before = file.read_bytes()
    with pytest.raises(ConfigurationError, match="attempt_keys = 'keys' is no path from / on"):
        Storage(database=DATABASE, attempt_keys="keys").write_into(file)
    assert file.read_bytes() == before


def test_what_would_fail_after_the_first_federation_is_refused_before_it(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir(mode=0o755)
    with pytest.raises(ConfigurationError, match="keys has mode 0755"):
        Storage(database=DATABASE, attempt_keys=str(keys)).require_usable(tmp_path)
    with pytest.raises(StorageError, match="/x cannot be read"):
        Storage(database=DATABASE, blobs=BLOBS).require_usable(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["keys"]


def test_a_bucket_or_keys_without_a_database_are_refused_by_name() -> None:
    assert storage("", "", "") is None
    assert storage(DATABASE, BLOBS, "") == Storage(database=DATABASE, blobs=BLOBS)
    with pytest.raises(ConfigurationError, match=r"--blobs s3://lorica/x.* name one by --database"):
        storage("", BLOBS, "")
    with pytest.raises(ConfigurationError, match=r"--attempt-keys /keys .* name one by --database"):
        storage("", "", "/keys")


def chosen(work: Path, **changes: object) -> bench.Choice:
    asked = {"silos": (2,), "parameters": (1000,), "rounds": 1, "wire": "float32", "peers": (), "work": work}
    return bench.Choice(**{**asked, "out": work / "out.json", **changes})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"masked": "off"}, "SILOS=2: a masked sum takes at least 3"),
        ({"masked": "off", "silos": (3,), "peers": ("floor",)}, "leave MASKED or PEER out"),
        ({"storage": Storage(database=DATABASE), "silos": (2, 4)}, "by SILOS and PARAMETERS"),
        ({"storage": Storage(database=DATABASE), "parameters": (1, 2)}, "by SILOS and PARAMETERS"),
    ],
)
def test_what_cannot_be_measured_is_refused(tmp_path: Path, changes: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigurationError, match=words):
        chosen(tmp_path, **changes)


def test_the_same_federation_runs_twice_and_its_coordinator_is_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[tuple[object, object]] = []

    def ran(
        _: Path, *, silos: int, parameters: int, rounds: int, wire: str, masked: object, storage: Storage | None
    ) -> Run:
        asked.append((masked, storage))
        coordinator_s = 3.0 if storage is None else 7.5
        readings = [
            Reading(
                at_s=10.0 * number,
                cpu_s=number * (20.0 + coordinator_s),
                agents_cpu_s=number * 20.0,
                wire_bytes=0,
                coordinator_bytes=0,
                coordinator_peak_bytes=50_000_000,
                agent_peak_bytes=0,
            )
            for number in (0, 1)
        ]
        return Run(
            system=f"lorica {storage.words}" if storage else "lorica",
            silos=silos,
            parameters=parameters,
            readings=readings,
            coordinator_imports_bytes=0,
            agent_imports_bytes=0,
        )

    monkeypatch.setattr(bench, "run_lorica", ran)
    place = Storage(database=DATABASE, attempt_keys=str(tmp_path / "keys"))
    bench.run_bench(chosen(tmp_path, silos=(3,), masked="off", storage=place), Console(quiet=True))
    assert asked == [("off", None), ("off", place)]
    found = read_figures(tmp_path / "out.json")[1]
    assert [one["coordinator_cpu_s"] for one in found] == [3.0, 7.5]
    names, rows = bench_tables.elsewhere(found)
    told = [dict(zip(names, row, strict=True)) for row in rows]
    assert [(one["way"], one["coordinator's CPU s"], one["more, a silo"]) for one in told] == [
        ("lorica", "3.00", ""),
        ("lorica over PostgreSQL, shared keys", "7.50 (2.5 x)", "1.50"),
    ]
