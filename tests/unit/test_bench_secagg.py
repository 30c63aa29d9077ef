"""The benchmark of secure aggregation: its cryptography at a small size, its stand-ins, its figures and what it
refuses."""

import json
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PublicKey
from rich.console import Console

from lorica.bench.figures import Figures, Run, read_figures
from lorica.bench.masked import cryptography, run
from lorica.bench.masked.availability import DROP_OUT, availability
from lorica.bench.masked.checks import ModelCheck
from lorica.bench.masked.costs import Cost
from lorica.bench.masked.cryptography import MaskFigures, Unmasked, measure
from lorica.bench.masked.deltas import PERIOD, SCALES, Deltas
from lorica.bench.masked.figures import Entry, growth
from lorica.bench.masked.hybrid import watched
from lorica.bench.masked.run import FEDERATIONS, SILOS, choice, run_bench_secagg
from lorica.bench.masked.stand_ins import Encoded, net_masks, write_delta, write_sum, write_zeros
from lorica.bench.model import T5_BASE_PARAMETERS
from lorica.bench.peers.app.constant_work import initial, relative_error
from lorica.bench.peers.flwr_secagg import PeerMasks
from lorica.secure_aggregation.in_memory import AttemptInMemory
from lorica_security.errors import ConfigurationError, StateError
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.coordinator.effects import Unmask
from lorica_security.secure_aggregation.groups.release_groups import Partition, first_link
from lorica_security.secure_aggregation.keys import key_agreement
from lorica_security.secure_aggregation.keys.key_agreement import KeyPair
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.masked_vectors import mask_stream
from lorica_security.secure_aggregation.masked_vectors.fixed_point import EXTRA_WORDS, Ranges, decode, decode_tail
from lorica_security.secure_aggregation.masked_vectors.mask_stream import KeyStream, MaskSum, Words
from lorica_security.secure_aggregation.parameters import Terms
from lorica_security.secure_aggregation.silo.effects import MaskVector
from silo_agent.training.update.masked_vector import write_masked_vector
from silo_wire.checkable_round import FalseChunk
from silo_wire.manifest import CHUNK_BYTES, Layout, TensorSpec, manifest_of, masked_layout
from silo_wire.server_step.apply_mean import apply_mean
from tests.support import secagg_federation
from tests.support.secagg_federation import ALONE

pytestmark = pytest.mark.slow

PARAMETERS = 2_000_000
SIZES = (3, PERIOD + 5, 1, 300_001)
LAYOUT = Layout("float32", tuple(TensorSpec(f"tensor {index}", (size,)) for index, size in enumerate(SIZES)))
RANGES = Ranges.of(sizes=SIZES, largest_delta=[1.0] * len(SIZES), largest_weight=500.0)
KEYS_OF_THE_OTHER_BENCHMARK = (
    *("system", "silos", "parameters", "wall_s", "cpu_s", "coordinator_peak_bytes", "agent_peak_bytes"),
    *("coordinator_cpu_s", "wire_bytes", "growth_bytes_per_round"),
)


def silo_names(count: int) -> list[SiloName]:
    return [SiloName(f"silo-{index:02}") for index in range(count)]


# --- what release groups cost in rounds


@pytest.mark.parametrize("sizes", [(4,), (3, 3), (4, 3)], ids=str)
def test_the_machines_lose_the_attempts_that_the_table_counts(sizes: tuple[int, ...]) -> None:
    """With each set of silent silos that has at most two, and each with one more, which no sum of these survives."""
    names = tuple(secagg_federation.silo_names(sum(sizes)))
    link = first_link(secagg_federation.FEDERATION, Partition.of(_in_groups(names, sizes)))
    lost, summed = 0.0, 0.0
    for count in range(len(names) + 1):
        chance = DROP_OUT**count * (1 - DROP_OUT) ** (len(names) - count)
        for silent in combinations(names, count):
            if count > 2:
                lost += chance
                continue
            run = secagg_federation.Federation(len(names), link=link).run(drops=dict.fromkeys(silent, "masked input"))
            if run.unmask is None:
                lost += chance
            else:
                summed += chance * len(run.unmask.survivors) / len(names)
    found = availability(sizes)
    assert found.lost == pytest.approx(lost, abs=1e-4)
    assert found.summed == pytest.approx(summed, abs=1e-4)


def _in_groups(names: tuple[SiloName, ...], sizes: tuple[int, ...]) -> Iterator[tuple[SiloName, ...]]:
    rest = iter(names)
    for size in sizes:
        yield tuple(islice(rest, size))


# --- the whole of it


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> MaskFigures:
    return measure(tmp_path_factory.mktemp("three"), silos=3, parameters=PARAMETERS)


def test_three_silos_at_two_million_parameters(three: MaskFigures) -> None:
    assert (three.silos, three.parameters, three.lost) == (3, PARAMETERS, None)
    for cost in (three.keys, three.mask, three.plain, three.whole.mean, three.whole.aggregate):
        assert cost.cpu_s > 0
        assert cost.wall_s > 0
        assert cost.peak_bytes >= 0
    assert 0 < three.whole.relative_l2_error < 1e-5


def test_a_silo_checks_the_model_of_that_round(three: MaskFigures) -> None:
    """8 chunks, the last of them shorter; of each come the pieces of the two other silos: the rest it has itself."""
    chunk, last = 2 * CHUNK_BYTES, 2 * (4 * PARAMETERS % CHUNK_BYTES)
    assert three.spot.chunks in (1, 2), "one by choice, and the last one with the sum of weights"
    assert three.joint.chunks == 6, "two of three silos check each chunk, and all check the last one"
    for check in (three.spot, three.joint):
        assert 0 < check.fetched_bytes - (check.chunks - 1) * chunk - last < 100_000, "evidence comes to the rest"
        assert check.silo.cpu_s > 0
        assert check.shown_cpu_s > 0
    assert 0 < three.kem_cpu_s < three.keys.cpu_s


def test_a_model_that_its_sum_did_not_make_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def another(*given: Any, **named: Any) -> None:
        apply_mean(*given, **named)
        given[0][0] += 1.0

    monkeypatch.setattr("lorica_coordinator.edges.sums.next_model.apply_mean", another)
    monkeypatch.setattr(cryptography, "WORST_ERROR", 1e9)
    with pytest.raises(FalseChunk):
        measure(tmp_path, silos=3, parameters=1_000_000)


def test_only_the_work_given_is_watched_for_ml_kem() -> None:
    pairs = (KeyPair(Secret(bytes(32))), KeyPair(Secret(bytes(range(32)))))

    def work() -> bytes:
        sent = key_agreement.encapsulated(pairs[0].public)
        assert bytes(pairs[0].decapsulated(sent.ciphertext).buffer) == bytes(sent.secret.buffer)
        return pairs[0].public

    public, spent = watched(work)
    assert public == pairs[0].public
    assert spent > 0
    assert key_agreement.MLKEM768PublicKey is MLKEM768PublicKey
    _, nothing = watched(lambda: pairs[1].agreed(pairs[0].public, SiloName("a")))
    assert nothing == 0


def test_with_seven_silos_two_may_be_lost(tmp_path: Path) -> None:
    figures = measure(tmp_path, silos=7, parameters=1_000_000)
    assert figures.lost is not None
    assert 0 < figures.lost.relative_l2_error < 1e-4
    assert figures.lost.mean.cpu_s > 0


def test_the_masks_that_are_left_on_are_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: AttemptInMemory, vectors: dict[SiloName, bytes]) -> Unmask:
        unmask = whole(self, vectors)
        return replace(unmask, masks=replace(unmask.masks, subtracted=unmask.masks.subtracted[1:]))

    whole = AttemptInMemory.unmask
    monkeypatch.setattr(AttemptInMemory, "unmask", forgetful)
    with pytest.raises(StateError, match="not that of their deltas"):
        measure(tmp_path, silos=3, parameters=1_000_000)


def test_an_error_above_the_bound_ends_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cryptography, "WORST_ERROR", 1e-12)
    with pytest.raises(StateError, match="relative L2 error"):
        measure(tmp_path, silos=3, parameters=1_000_000)


# --- the attempt


def attempt_of(count: int) -> AttemptInMemory:
    return AttemptInMemory(silo_names(count), Terms(model=bytes(32), link=ALONE, ranges=RANGES))


def test_every_silo_shares_a_mask_with_every_other_and_has_one_of_its_own() -> None:
    attempt = attempt_of(5)
    assert sorted(attempt.works) == silo_names(5)
    assert all(len(one.masks.added) + len(one.masks.subtracted) == 5 for one in attempt.works.values())


def test_the_sum_can_be_asked_for_with_and_without_those_that_are_lost() -> None:
    attempt, names = attempt_of(8), silo_names(8)
    whole = attempt.unmask(dict.fromkeys(names, bytes(32)))
    partly = attempt.unmask(dict.fromkeys(names[:6], bytes(32)))
    assert (whole.survivors, whole.dropped) == (tuple(names), ())
    assert (partly.survivors, partly.dropped) == (tuple(names[:6]), tuple(names[6:]))
    assert len(whole.masks.added) + len(whole.masks.subtracted) == 8
    assert len(partly.masks.added) + len(partly.masks.subtracted) == 6 + 2 * 6


def test_too_few_survivors_give_no_sum() -> None:
    with pytest.raises(StateError, match="abandoned"):
        attempt_of(3).unmask(dict.fromkeys(silo_names(2), bytes(32)))


# --- the deltas


def read(deltas: Deltas, silo: int) -> np.ndarray:
    out = np.zeros(deltas.elements, dtype="<f4")
    for first, last in ((0, 1), (1, 900_000), (900_000, deltas.elements)):
        deltas.read(silo, out[first:last], first)
    return out


def test_the_mean_is_the_weighted_mean_of_the_deltas() -> None:
    deltas = Deltas(4, SIZES)
    for silos in (range(4), range(1, 3)):
        mean = np.zeros(deltas.elements)
        deltas.mean(silos)(mean, 0)
        weights = [deltas.weights[silo] for silo in silos]
        expected = np.average([read(deltas, silo).astype(np.float64) for silo in silos], axis=0, weights=weights)
        assert np.allclose(mean, expected, rtol=1e-12, atol=0)


def test_deltas_differ_from_silo_to_silo_and_their_tensors_in_scale() -> None:
    deltas = Deltas(3, SIZES)
    one, other = read(deltas, 0), read(deltas, 1)
    assert 0.2 < np.corrcoef(one[: PERIOD // 2], other[: PERIOD // 2])[0, 1] < 0.8
    large, small = one[3 : 3 + PERIOD], one[-300_001:]
    assert np.std(small) / np.std(large) == pytest.approx(SCALES[3] / SCALES[1], rel=0.2)
    assert max(deltas.weights) / min(deltas.weights) == pytest.approx(50)


# --- the stand-ins


def copied(work: MaskVector) -> MaskVector:
    """With secrets of its own: masking erases them."""

    def again(stream: KeyStream) -> KeyStream:
        return KeyStream(Secret(stream.key.buffer))

    masks = MaskSum(tuple(map(again, work.masks.added)), tuple(map(again, work.masks.subtracted)))
    return MaskVector(
        parameters=work.parameters, rounding=again(work.rounding), noise=Secret(work.noise.buffer), masks=masks
    )


def test_a_stand_in_is_the_sum_of_the_vectors_that_the_silos_would_have_sent(tmp_path: Path) -> None:
    deltas = Deltas(5, SIZES)
    attempt = AttemptInMemory(silo_names(5), Terms(model=bytes(32), link=ALONE, ranges=RANGES, min_survivors=3))
    works = [attempt.works[name] for name in silo_names(5)]
    expected: Words = np.zeros(deltas.elements + EXTRA_WORDS, dtype="<u4")
    for silo in (1, 2, 4):
        path, delta = tmp_path / f"{silo}", write_delta(tmp_path / "delta", deltas, silo, LAYOUT)
        write_masked_vector(path, copied(works[silo]), delta, weight=deltas.weights[silo])
        expected += np.fromfile(path, dtype="<u4")
    vector = write_sum(tmp_path / "sum", deltas, [Encoded(silo, works[silo]) for silo in (1, 2, 4)])
    found = np.fromfile(tmp_path / "sum", dtype="<u4")
    assert np.array_equal(found, expected)
    assert vector.manifest == manifest_of(masked_layout(len(found)), [found.tobytes()])
    assert all(works[silo].rounding.key.erased for silo in (1, 2, 4))


def test_the_sum_of_all_stand_ins_decodes_to_the_mean(tmp_path: Path) -> None:
    """Without an aggregator: the words, the masks of the protocol, the decoding."""
    deltas = Deltas(4, SIZES)
    attempt = AttemptInMemory(silo_names(4), Terms(model=bytes(32), link=ALONE, ranges=RANGES))
    works = [Encoded(silo, attempt.works[name]) for silo, name in enumerate(silo_names(4))]
    write_sum(tmp_path / "some", deltas, works[:1])
    write_sum(tmp_path / "others", deltas, works[1:])
    total = np.fromfile(tmp_path / "some", dtype="<u4") + np.fromfile(tmp_path / "others", dtype="<u4")
    unmask = attempt.unmask(dict.fromkeys(silo_names(4), bytes(32)))
    unmask.masks.apply(total, 0, mask_stream.Workspace())
    weight_sum = decode_tail(unmask.fixed_point, total[-EXTRA_WORDS:]).weight_sum
    assert weight_sum == pytest.approx(sum(deltas.weights), rel=1e-6)
    found, expected = np.zeros(deltas.elements), np.zeros(deltas.elements)
    decode(unmask.fixed_point, total[:-EXTRA_WORDS], 0, found)
    deltas.mean(range(4))(expected, 0)
    assert np.linalg.norm(found / weight_sum - expected) < 1e-3 * np.linalg.norm(expected)


def test_masks_among_those_who_stand_together_cancel() -> None:
    works = attempt_of(6).works
    together = net_masks([works[name].masks for name in silo_names(3)])
    assert len(together.added) + len(together.subtracted) == 3 + 3 * 3  # their own, and those with the three others


def test_zeros_are_a_vector_that_takes_no_room(tmp_path: Path) -> None:
    words = 1_000_003
    vector = write_zeros(tmp_path / "zeros", words)
    assert vector.manifest == manifest_of(masked_layout(words), [bytes(4 * words)])
    assert (tmp_path / "zeros").stat().st_size == 4 * words
    assert vector.chunk(vector.manifest.chunks - 1) == bytes(4 * words % (1 << 20))


# --- figures


def cost(cpu_s: float) -> Cost:
    return Cost(cpu_s=cpu_s, wall_s=cpu_s / 2, peak_bytes=1_000_000)


def masks_of(silos: int, *, mask_s: float = 1.0, unmask_s: float = 2.0) -> MaskFigures:
    unmasked = Unmasked(mean=cost(unmask_s), aggregate=cost(4.0), relative_l2_error=1e-6)
    return MaskFigures(
        silos=silos,
        parameters=PARAMETERS,
        keys=cost(0.1),
        kem_cpu_s=0.002 * silos,
        mask=cost(mask_s),
        plain=cost(3.0),
        spot=ModelCheck(silo=cost(0.05), shown_cpu_s=0.01, chunks=2, fetched_bytes=18_000_000),
        joint=ModelCheck(silo=cost(3.0), shown_cpu_s=0.5, chunks=4, fetched_bytes=2 * 4 * PARAMETERS),
        whole=unmasked,
        lost=unmasked if silos >= 7 else None,
    )


def rounds_of(system: str, silos: int) -> Figures:
    return Figures(
        system=system,
        silos=silos,
        parameters=PARAMETERS,
        rounds=2,
        wall_s=3.5,
        cpu_s=7.25,
        coordinator_cpu_s=2.5,
        coordinator_peak_bytes=50_000_000,
        agent_peak_bytes=60_000_000,
        wire_bytes=48_000_000,
        growth_bytes_per_round=-7,
    )


def test_an_entry_has_the_keys_of_the_other_benchmark_and_its_own() -> None:
    entry = Entry(
        system="lorica masked",
        silos=8,
        parameters=PARAMETERS,
        rounds=rounds_of("lorica masked", 8),
        masks=masks_of(8),
    ).to_json()
    assert set(entry) > {*KEYS_OF_THE_OTHER_BENCHMARK, "mask_cpu_s", "unmask_cpu_s", "relative_l2_error"}
    assert {name: entry[name] for name in KEYS_OF_THE_OTHER_BENCHMARK} == {
        name: value for name, value in rounds_of("lorica masked", 8).to_json().items() if name != "rounds"
    }
    assert (entry["mask_cpu_s"], entry["unmask_cpu_s"], entry["relative_l2_error"]) == (1.0, 2.0, 1e-6)
    assert (entry["lost_unmask_cpu_s"], entry["plain_aggregate_cpu_s"]) == (2.0, 3.0)
    assert (entry["spot_cpu_s"], entry["joint_fetched_bytes"]) == (0.05, 8 * PARAMETERS)
    assert entry["kem_cpu_s_a_silo"] == 0.002
    json.dumps(entry)


def test_what_was_not_measured_is_null() -> None:
    alone = Entry(system="lorica masked", silos=3, parameters=PARAMETERS, masks=masks_of(3)).to_json()
    assert [alone[name] for name in KEYS_OF_THE_OTHER_BENCHMARK[3:]] == [None] * 7
    assert alone["lost_unmask_cpu_s"] is None
    plain = Entry(system="lorica", silos=3, parameters=PARAMETERS, rounds=rounds_of("lorica", 3)).to_json()
    assert (plain["mask_cpu_s"], plain["unmask_cpu_s"], plain["relative_l2_error"]) == (None, None, None)
    assert plain["cpu_s"] == 7.25


def test_a_peer_has_its_own_masks() -> None:
    theirs = Run(
        system="flwr SecAgg+",
        silos=3,
        parameters=PARAMETERS,
        readings=[],
        coordinator_imports_bytes=0,
        agent_imports_bytes=0,
    )
    of_peer = Entry(
        system="flwr SecAgg+",
        silos=3,
        parameters=PARAMETERS,
        rounds=rounds_of("flwr SecAgg+", 3),
        masks=PeerMasks(run=theirs, mask_cpu_s=5.0, unmask_cpu_s=6.0, relative_l2_error=1e-7),
    ).to_json()
    assert (of_peer["mask_cpu_s"], of_peer["unmask_cpu_s"], of_peer["relative_l2_error"]) == (5.0, 6.0, 1e-7)


def test_growth_is_the_slope_over_cohorts() -> None:
    found = growth([masks_of(silos, mask_s=1 + 0.25 * silos, unmask_s=0.5 * silos) for silos in (3, 8, 16)])
    assert found is not None
    assert found.mask_s == pytest.approx(0.25)
    assert found.unmask_s == pytest.approx(0.5)
    assert growth([masks_of(3)]) is None


def test_a_peers_error_is_beside_the_growth_of_its_model() -> None:
    layout = [("a", (1000,)), ("b", (3, 4))]
    grown = [tensor + np.float32(4) for _, tensor in initial(layout)]
    assert relative_error(layout, grown, 4) < 1e-6
    assert relative_error(layout, [tensor + np.float32(0.5) for tensor in grown], 4) == pytest.approx(0.125, rel=1e-4)


# --- the command


def chosen(tmp_path: Path, **more: object) -> run.Choice:
    given = {"silos": None, "parameters": None, "rounds": 2, "peer": None, "work": tmp_path, "out": None, **more}
    return choice(**given)  # type: ignore[arg-type]


def test_what_is_measured_unless_said_otherwise(tmp_path: Path) -> None:
    every = chosen(tmp_path)
    assert (every.silos, every.federations, every.parameters) == (SILOS, FEDERATIONS, (T5_BASE_PARAMETERS,))
    beside = chosen(tmp_path, peer="flwr")
    assert (beside.silos, beside.federations) == ((3,), (3,))
    assert max(beside.parameters) == 25_000_000
    said = chosen(tmp_path, silos=[16], parameters=[PARAMETERS])
    assert (said.silos, said.federations, said.parameters) == ([16], [16], [PARAMETERS])


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"silos": [2]}, "at least 3 silos"),
        ({"peer": "nvflare"}, "use flwr"),
        ({"peer": "flwr", "rounds": 1}, "ROUNDS=2"),
        ({"peer": "flwr", "parameters": [25_000_001]}, "PARAMETERS=25000000"),
    ],
)
def test_what_cannot_be_measured_is_refused_with_the_remedy(
    tmp_path: Path, more: dict[str, object], words: str
) -> None:
    with pytest.raises(ConfigurationError, match=words):
        chosen(tmp_path, **more)


def test_the_run_prints_and_writes_what_it_found(tmp_path: Path) -> None:
    out, printed = tmp_path / "figures.json", Console(record=True, width=200, file=(tmp_path / "printed").open("w"))
    asked = chosen(tmp_path / "work", silos=[3, 4], parameters=[PARAMETERS], rounds=0, out=out)
    found = run_bench_secagg(asked, printed)
    written = read_figures(out)[1]
    assert [(one["system"], one["silos"], one["parameters"]) for one in written] == [
        ("lorica masked", 3, PARAMETERS),
        ("lorica masked", 4, PARAMETERS),
    ]
    assert written == [json.loads(json.dumps(one.to_json())) for one in found]
    text = printed.export_text()
    assert "4 silos, 2,000,000 parameters: masks alone" in text
    assert "masking one silo" in text
    assert "one more silo costs every silo" in text
    assert not any((tmp_path / "work").rglob("*.masked")), "vectors were left behind"
