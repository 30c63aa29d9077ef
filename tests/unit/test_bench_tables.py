"""Tables of benchmarks: what a run wrote is read back, with where it was measured, and set beside one another."""

import json
from pathlib import Path

import pytest
from rich.console import Console

from lorica.bench import run as bench
from lorica.bench.figures import Figures, Measured, read_figures, write_figures
from lorica.bench.peers import PEERS
from lorica.documentation import bench_tables
from lorica_security.errors import ConfigurationError


def figures(system: str, *, wall_s: float, silos: int = 2) -> Figures:
    return Figures(
        system=system,
        silos=silos,
        parameters=2_000_000,
        rounds=3,
        wall_s=wall_s,
        cpu_s=2 * wall_s,
        coordinator_cpu_s=wall_s,
        coordinator_peak_bytes=50_000_000,
        agent_peak_bytes=0,
        wire_bytes=32_000_000,
        growth_bytes_per_round=0,
    )


FOUND = [figures("lorica", wall_s=2.0), figures("flwr", wall_s=5.0), figures("lorica", wall_s=4.0, silos=4)]


def test_what_is_written_says_where_it_was_measured(tmp_path: Path) -> None:
    write_figures(tmp_path / "out.json", [one.to_json() for one in FOUND])
    measured, found = read_figures(tmp_path / "out.json")
    assert found == [dict(one.to_json()) for one in FOUND]
    assert measured.cores >= 1
    assert measured.memory_gb >= 1
    assert len(measured.load_average) == 2
    assert measured.commit == Measured.now().commit


def test_a_file_of_another_form_is_not_taken_for_figures(tmp_path: Path) -> None:
    (tmp_path / "old.json").write_text(json.dumps([dict(FOUND[0].to_json())]))
    with pytest.raises(TypeError):
        read_figures(tmp_path / "old.json")


def test_systems_of_one_size_stand_beside_the_first_of_it() -> None:
    names, rows = bench_tables.rounds([one.to_json() for one in FOUND])
    told = [dict(zip(names, row, strict=True)) for row in rows]
    assert [(one["silos"], one["system"], one["wall s"]) for one in told] == [
        ("2", "lorica", "2.00"),
        ("2", "flwr", "5.00 (2.5 x)"),
        ("4", "lorica", "4.00"),
    ]
    assert told[1]["agent peak MB"] == "0", "no multiple of nothing"


def test_memory_below_the_start_is_said_and_has_no_multiple() -> None:
    shrunk = {**FOUND[1].to_json(), "coordinator_peak_bytes": -20_000_000}
    names, rows = bench_tables.rounds([FOUND[0].to_json(), shrunk])
    assert dict(zip(names, rows[1], strict=True))["coordinator peak MB"] == "less than at its start"


def test_rounds_of_many_silos_have_masking_where_there_are_masks() -> None:
    plain = {"parameters": 8_000_000, "silos": 64, "system": "lorica", "wall_s": 20.0, "agent_cpu_s": 0.5}
    plain |= {"coordinator_cpu_s": 11.4, "coordinator_peak_bytes": 141e6, "masking_s": None, "aggregate_s": 1.3}
    names, rows = bench_tables.many({"rounds": [plain, {**plain, "masking_s": 34.5}]})
    assert [row[names.index("masking s")] for row in rows] == ["", "34.5"]


def test_a_masked_round_is_set_beside_the_one_in_the_clear_of_its_run() -> None:
    alone = {**FOUND[1].to_json(), "wall_s": None}
    names, rows = bench_tables.masked_rounds([alone, FOUND[0].to_json(), FOUND[1].to_json()])
    assert [row[0] for row in rows] == ["lorica", "flwr"]
    assert rows[1][names.index("wall s") + 1] == "3.0"
    assert rows[0][names.index("wall s") + 1] == ""


@pytest.mark.parametrize("name", sorted(path.stem for path in bench_tables.FIGURES.glob("*.json")))
def test_the_figures_that_are_published_are_of_this_projects_code(name: str) -> None:
    measured, found = read_figures(bench_tables.FIGURES / f"{name}.json")
    assert measured.commit, "of a repository"
    assert not measured.commit.endswith("+"), "of code that is committed"
    assert found


# --- peers


def chosen(tmp_path: Path, *peers: str, rounds: int = 2) -> bench.Choice:
    return bench.Choice(
        silos=(2,), parameters=(2_000_000,), rounds=rounds, wire="float32", peers=peers, work=tmp_path, out=None
    )


@pytest.mark.parametrize(
    ("peers", "rounds", "words"), [(("floor", "x"), 2, "'x' is unknown"), (("floor",), 1, "ROUNDS=2")]
)
def test_peers_that_cannot_be_measured_are_refused_before_one_is_installed(
    tmp_path: Path, peers: tuple[str, ...], rounds: int, words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        bench.install_peers(chosen(tmp_path, *peers, rounds=rounds), Console(quiet=True))
    assert list(tmp_path.iterdir()) == []


def test_it_says_which_peer_is_being_installed_and_how_long_that_took(tmp_path: Path) -> None:
    console = Console(record=True, width=100, file=(tmp_path / "printed").open("w"))
    bench.install_peers(chosen(tmp_path, "floor"), console)
    assert f"floor {PEERS['floor'].version}: installed, in 0 s" in console.export_text()
