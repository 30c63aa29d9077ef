"""Robust reducers over files: the same bits in any order, slab and number of threads, and again after a restart."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.edges.sums.reducers import nearest_neighbour_mixing as mixing
from lorica_coordinator.edges.sums.reducers import reducer as reducer_module
from lorica_coordinator.edges.sums.reducers import trimmed_mean as trimmed_mean_module
from lorica_coordinator.rounds.updates import Outcome
from lorica_coordinator.service.unusable import UnusableUpdate
from lorica_security.errors import IntegrityError, StateError, StorageError
from silo_wire.plans.robust import CENTRE, ROBUST_RULES
from tests.support import int8_by_hand
from tests.support.coordinator_edges import Vector, Workplace, stored_vector
from tests.support.robust_rounds import SETTINGS, drawn, mean_of, place_of, reduced, section_of, sent, state_of

NAMES = [rule.name for rule in ROBUST_RULES]
ELEMENTS = 6000
"""Of two chunks on the wire, and more than one slab."""


@pytest.fixture
def one_thread_at_first() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def rows(*values: list[float]) -> dict[str, Vector]:
    return {f"silo-{index}": np.array(row, dtype="<f4") for index, row in enumerate(values)}


def test_every_rule_of_a_plan_is_tried_here() -> None:
    assert sorted(SETTINGS) == sorted(NAMES)


# --- by hand

HONEST = [[1.0, 0.0, 2.0], [2.0, 0.0, 1.0], [3.0, 0.0, 0.0], [2.0, 0.0, 1.0]]
"""And a fifth silo that is far off."""
FAR = [500.0, -500.0, 500.0]


@pytest.mark.parametrize(
    ("reducer", "expected"),
    [
        ("trimmed_mean", [7 / 3, 0.0, 4 / 3]),
        ("median", [2.0, 0.0, 1.0]),
        ("multi_krum", [2.0, 0.0, 1.0]),
        # FAR is 500 times the root of 3 long, of which 3 counts: the root of 3 in each place, and a fifth of that.
        ("centred_clipping", [1.6 + 3**0.5 / 5, -(3**0.5) / 5, 0.8 + 3**0.5 / 5]),
        # Each honest delta is mixed to their mean, FAR to a quarter of it and three others, which is trimmed.
        ("nearest_neighbour_mixing", [2.0, 0.0, 1.0]),
        # From (2, 0, 1), where two are, the others on its line pull to either side, and FAR pulls less than two hold.
        ("geometric_median", [2.0, 0.0, 1.0]),
    ],
)
def test_a_round_by_hand(tmp_path: Path, reducer: str, expected: list[float]) -> None:
    found = mean_of(place_of(tmp_path, 3), section_of(reducer), rows(*HONEST, FAR))
    assert found == pytest.approx(expected, rel=1e-6, abs=1e-6)


# --- what changes no bit


@pytest.mark.parametrize("reducer", NAMES)
def test_neither_order_slab_nor_threads_change_a_bit(tmp_path: Path, reducer: str, one_thread_at_first: None) -> None:
    place, deltas = place_of(tmp_path, ELEMENTS), drawn(5, ELEMENTS, seed=1)
    updates, section = sent(place, deltas), section_of(reducer)
    torch.set_num_threads(1)
    first = reduced(place, section, updates).model
    torch.set_num_threads(2)
    assert reduced(place, section, updates[::-1], slab_bytes=404).model == first
    assert reduced(place, section, updates, slab_bytes=1 << 20).model == first


@pytest.mark.parametrize(
    ("reducer", "module", "tables"),
    [
        ("trimmed_mean", trimmed_mean_module, 1),
        ("median", trimmed_mean_module, 1),
        ("nearest_neighbour_mixing", mixing, 2),
    ],
)
def test_a_slab_is_no_longer_than_memory_for_all_silos_allows(
    tmp_path: Path, reducer: str, module: ModuleType, tables: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    place, deltas = place_of(tmp_path, 100), drawn(5, 100, seed=2)
    updates, section = sent(place, deltas), section_of(reducer)
    expected = reduced(place, section, updates).model
    longest, of_rows = [], trimmed_mean_module.trimmed_mean

    def looked_at(table: torch.Tensor, trimmed: int, out: torch.Tensor) -> torch.Tensor:
        longest.append(table.numel() * 4)
        return of_rows(table, trimmed, out)

    monkeypatch.setattr(module, "trimmed_mean", looked_at)
    monkeypatch.setattr(reducer_module, "MOST_BYTES", tables * 5 * 4 * 7)
    assert reduced(place, section, updates).model == expected
    assert max(longest) == 5 * 4 * 7
    assert len(longest) == 15


@pytest.mark.parametrize("reducer", NAMES)
def test_bfloat16_on_the_wire_is_what_it_says_in_float32(tmp_path: Path, reducer: str) -> None:
    deltas = {silo: torch.from_numpy(delta).bfloat16().float().numpy() for silo, delta in drawn(5, 500, seed=3).items()}
    short = mean_of(place_of(tmp_path / "short", 500, update="bfloat16"), section_of(reducer), deltas)
    assert (short == mean_of(place_of(tmp_path / "long", 500), section_of(reducer), deltas)).all()


@pytest.mark.parametrize("reducer", NAMES)
def test_int8_on_the_wire_is_what_it_says_in_float32(tmp_path: Path, reducer: str) -> None:
    """In slabs that end within blocks."""
    deltas = drawn(5, 2500, seed=3)
    said = {silo: int8_by_hand.read(int8_by_hand.written(delta)) for silo, delta in deltas.items()}
    short, whole = place_of(tmp_path / "short", 2500, update="int8"), place_of(tmp_path / "long", 2500)
    made = reduced(short, section_of(reducer), sent(short, deltas), slab_bytes=4 * 700).model
    assert (stored_vector(short.models, made) == mean_of(whole, section_of(reducer), said)).all()


def two_rounds(place: Workplace, section: dict[str, Any], *, restart: bool) -> tuple[str, dict[str, bytes]]:
    """The model after two rounds, the latter again by whoever starts after a crash."""
    first = reduced(place, section, sent(place, drawn(5, 500, seed=4)))
    updates = sent(place, drawn(5, 500, seed=5), round_number=2)
    if restart:
        place = Workplace(place.state, place.bundle, place_of(place.state, 500).models, Spools(place.state / "spools"))
    second = reduced(place, section, updates, base=first.model, round_number=2)
    return second.model, state_of(place, second.model)


@pytest.mark.parametrize("reducer", NAMES)
def test_a_restart_between_or_in_rounds_changes_no_bit(tmp_path: Path, reducer: str) -> None:
    section = section_of(reducer, momentum=0.5)
    assert two_rounds(place_of(tmp_path / "a", 500), section, restart=True) == two_rounds(
        place_of(tmp_path / "b", 500), section, restart=False
    )


# --- ordinary and odd rounds


@pytest.mark.parametrize("reducer", NAMES)
def test_silos_that_agree_are_followed(tmp_path: Path, reducer: str) -> None:
    delta = [0.5, -0.25, 0.0]
    assert mean_of(place_of(tmp_path, 3), section_of(reducer), rows(*[delta] * 5)) == pytest.approx(delta)


@pytest.mark.parametrize("reducer", NAMES)
def test_silos_count_the_same_and_what_they_tell_changes_nothing(tmp_path: Path, reducer: str) -> None:
    place, deltas = place_of(tmp_path, 50), drawn(5, 50, seed=6)
    plain = reduced(place, section_of(reducer), sent(place, deltas))
    boasted = [
        place.send(place.key(2), update.silo, delta, examples=10**9 if index == 3 else 1, reduction=1e6 * index)
        for index, (update, delta) in enumerate(zip(sent(place, deltas), deltas.values(), strict=True))
    ]
    again = reduced(place, section_of(reducer), boasted, round_number=2)
    assert (again.model, again.weights) == (plain.model, plain.weights)
    assert plain.outcome is Outcome.APPLIED
    assert {it.weight for it in plain.weights} <= {0.0, 1.0}


@pytest.mark.parametrize("reducer", NAMES)
def test_a_spool_that_was_damaged_costs_its_silo_the_round(tmp_path: Path, reducer: str) -> None:
    place = place_of(tmp_path, 50)
    updates = sent(place, drawn(5, 50, seed=8))
    victim = next(
        path
        for path in place.state.rglob("*")
        if path.is_file() and "silo-01" in str(path) and path.stat().st_size == 200
    )
    victim.write_bytes(bytes(200))
    with pytest.raises(UnusableUpdate) as found:
        reduced(place, section_of(reducer), updates)
    assert found.value.silo == "silo-01"


@pytest.mark.parametrize(
    ("reducer", "least"),
    [
        ("trimmed_mean", 5),
        ("median", 3),
        ("multi_krum", 5),
        ("centred_clipping", 3),
        ("nearest_neighbour_mixing", 3),
        ("geometric_median", 3),
    ],
)
def test_fewer_silos_than_a_rule_needs_are_never_reduced(tmp_path: Path, reducer: str, least: int) -> None:
    place = place_of(tmp_path, 3)
    updates = sent(place, drawn(least, 3, seed=9))
    assert reduced(place, section_of(reducer), updates).outcome is Outcome.APPLIED
    with pytest.raises(StateError, match=rf'{least - 1} updates came for reducer "{reducer}", which needs {least}'):
        reduced(place, section_of(reducer), updates[1:])


def test_what_multi_krum_leaves_out_weighs_nothing(tmp_path: Path) -> None:
    place = place_of(tmp_path, 3)
    weights = reduced(place, section_of("multi_krum"), sent(place, rows(FAR, *HONEST))).weights
    assert [it.left_out for it in weights] == [not it.weight for it in weights]
    assert [(it.silo, it.weight, it.share) for it in weights] == [
        ("silo-0", 0.0, 0.0),
        *((f"silo-{index}", 1.0, 0.25) for index in range(1, 5)),
    ]


def test_a_long_delta_is_compared_as_it_is_capped(tmp_path: Path) -> None:
    """A thousand times an honest delta, which is an honest one once it is as short."""
    deltas = rows([1.0, 0.0], [1000.0, 0.0], [1.0, 0.0], [0.9, 0.0], [-1.0, 0.0])
    place = place_of(tmp_path, 2)
    weights = reduced(place, section_of("multi_krum", max_delta_norm=1.0), sent(place, deltas)).weights
    assert [(it.weight, it.capped) for it in weights] == [
        (1.0, False),
        (1.0, True),
        (1.0, False),
        (1.0, False),
        (0.0, False),
    ]


def test_the_second_round_is_clipped_about_the_mean_of_the_first(tmp_path: Path) -> None:
    """With momentum and half a step, which the centre has nothing to do with: (1, 0), then (4, 0) and (7, 0), of which
    the latter counts as far as (4, 0)."""
    place = place_of(tmp_path, 2)
    section = section_of("centred_clipping", server_learning_rate=0.5, momentum=0.5)
    first = reduced(place, section, sent(place, rows(*[[1.0, 0.0]] * 3)))
    assert np.frombuffer(state_of(place, first.model)[CENTRE], dtype="<f4").tolist() == [1.0, 0.0]
    deltas = rows([4.0, 0.0], [7.0, 0.0], [4.0, 0.0])
    second = reduced(place, section, sent(place, deltas, 2), base=first.model, round_number=2)
    assert [it.share for it in second.weights] == pytest.approx([1 / 3, 1 / 6, 1 / 3])
    assert [it.capped for it in second.weights] == [False, True, False]
    state = state_of(place, second.model)
    assert np.frombuffer(state[CENTRE], dtype="<f4").tolist() == pytest.approx([4.0, 0.0])
    assert set(state) == {CENTRE, "momentum"}
    assert stored_vector(place.models, second.model).tolist() == pytest.approx([0.5 + 0.5 * (0.5 + 4.0), 0.0])


def test_a_centre_that_is_lost_is_not_begun_anew_in_silence(tmp_path: Path) -> None:
    place, section = place_of(tmp_path, 3), section_of("centred_clipping")
    first = reduced(place, section, sent(place, drawn(5, 3, seed=10))).model
    with pytest.raises(IntegrityError, match=r"holds \['centre'\], this plan's server step needs \[\]"):
        reduced(place, section_of("median"), sent(place, drawn(5, 3, seed=11), 2), base=first, round_number=2)
    next(place.state.rglob("centre.f32")).unlink()
    with pytest.raises(StorageError, match=r"centre.f32 is missing: restore it from a backup"):
        reduced(place, section, sent(place, drawn(5, 3, seed=11), 2), base=first, round_number=2)


def test_a_coordinator_that_is_killed_as_it_stores_the_sum_makes_the_same_bits_again(tmp_path: Path) -> None:
    """SIGKILL when the state is in its place and the model is not: the worst moment that there is."""
    expected, section = place_of(tmp_path / "a", 500), section_of("centred_clipping", momentum=0.5)
    wanted = two_rounds(expected, section, restart=False)
    place = place_of(tmp_path / "b", 500)
    first = reduced(place, section, sent(place, drawn(5, 500, seed=4))).model
    updates = sent(place, drawn(5, 500, seed=5), round_number=2)
    script = f"""
import os, signal
from pathlib import Path
from lorica_coordinator.edges.models import model_store
from tests.support.robust_rounds import drawn, place_of, reduced, sent
place = place_of(Path({str(place.state)!r}), 500)
updates = sent(place, drawn(5, 500, seed=5), round_number=2)
model_store.files.replace = lambda *of, **how: os.kill(os.getpid(), signal.SIGKILL)
reduced(place, {section!r}, updates, base={first!r}, round_number=2)
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path)}
    done = subprocess.run([sys.executable, "-c", script], env=environment, check=False, timeout=120)
    assert done.returncode == -signal.SIGKILL
    assert len(list(place.state.rglob("centre.f32"))) == 2, "the state of the model that is not there"
    again = place_of(place.state, 500)
    second = reduced(again, section, updates, base=first, round_number=2).model
    assert (second, state_of(again, second)) == wanted


def test_a_step_out_of_range_is_blamed_on_the_longest_delta(tmp_path: Path) -> None:
    place = place_of(tmp_path, 3)
    deltas = rows([3e38] * 3, [2.9e38] * 3, [3e38, 3e38, 3.1e38], [3e38] * 3, [3e38] * 3)
    section = section_of("median", max_delta_norm=0.0)
    first = reduced(place, section, sent(place, deltas))
    with pytest.raises(UnusableUpdate, match="out of float32's range") as found:
        reduced(place, section, sent(place, deltas, 2), base=first.model, round_number=2)
    assert found.value.silo == "silo-2"
    assert (stored_vector(place.models, first.model) == np.float32(3e38)).all()
