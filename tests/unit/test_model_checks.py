"""A silo that checks round models: what it takes, what it refuses, what it remembers; rounds in memory, any lie of the
coordinator."""

import hashlib
import itertools
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from hypothesis import given, settings
from hypothesis import strategies as st

from lorica_security.audit.chain import Head
from lorica_security.errors import (
    EXIT_CODES,
    ConfigurationError,
    FalseModel,
    IntegrityError,
    LoricaError,
    MalformedMessage,
    PolicyRefusal,
    StateError,
    StorageError,
    exit_code,
)
from lorica_security.identifiers import Identity, Role, SiloName
from lorica_security.identity.identity_key import public_key_bytes
from lorica_security.identity.seal import Seal
from lorica_security.identity.succession import succession_statement
from lorica_security.on_disk.log_file import AuditLog
from lorica_security.on_disk.reading import read_log
from lorica_security.secure_aggregation.model_evidence.evidence import (
    VERIFY,
    Checked,
    Evidence,
    Lineage,
    signed_evidence,
)
from lorica_security.secure_aggregation.model_evidence.verdicts import (
    Verdict,
    beyond_others,
    checkers,
    part_of,
    signed_verdict,
    uncovered,
)
from lorica_security.secure_aggregation.silo.party import Demands
from silo_agent.edges.accounts.audit_report import page, report_of
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.masks.model_checking import check_party_of
from silo_agent.edges.masks.own_copies import OwnFiles
from silo_agent.edges.memory.accepted_models import AcceptedModels, keep_proof
from silo_agent.edges.memory.trust_store import trust_store
from silo_agent.policy.rules import PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.service.audited import SiloAudit
from silo_agent.service.model_checks import CheckParty, Mode, ModelChecks
from silo_wire.canonical import Digest
from silo_wire.checkable_round import CheckableRound, FalseChunk, Proof
from silo_wire.checked_chunk import StepRule, examined
from silo_wire.codecs.evidence_codec import proof_from_bytes
from silo_wire.codecs.update_receipt import silo_uri
from silo_wire.manifest import Layout, Manifest, ParameterDtype, TensorSpec, manifest_of
from silo_wire.messages import HeldPieces
from silo_wire.plans.plan import PlanBundle
from tests.support.evidence import OPTIMIZERS, Made, Rounds, Vectors, bits_of
from tests.support.federation_peer import TestNet
from tests.support.secagg_federation import FEDERATION, PLAN, identities, identity_key, silo_names

pytestmark = pytest.mark.slow

COORDINATOR = identity_key("coordinator")
SILOS = silo_names(4)
OWN = SILOS[0]
SIZES = (30, 7, 1, 40)
"""In chunks of 16 bytes: 20 of the model, the last of them with the first words of the tail, and two more."""


def rounds_of(**changes: Any) -> Rounds:
    return Rounds(**{"optimizer": OPTIMIZERS["adam"], "sizes": SIZES, **changes})


def model_of(made: Made) -> Digest:
    return Digest(made.evidence.after.model.hex())


@dataclass
class Memory:
    """In the place of accepted.json."""

    begins: Lineage
    kept: Lineage | None = None
    draws: dict[bytes, Sequence[int]] = field(default_factory=dict)
    shown: list[Evidence] = field(default_factory=list)
    right: dict[bytes, set[int]] = field(default_factory=dict)

    def lineage(self, bundle: Any) -> Lineage:
        return self.kept or self.begins

    def save(self, lineage: Lineage) -> None:
        self.kept = lineage

    def bind(self, evidence: Evidence) -> None:
        self.shown.append(evidence)

    def drawn(self, evidence: bytes, draw: Callable[[], Sequence[int]]) -> Sequence[int]:
        return self.draws.setdefault(evidence, draw())

    def found(self, evidence: bytes, chunks: Collection[int]) -> Collection[int]:
        self.right.setdefault(evidence, set()).update(chunks)
        return self.right[evidence]


@dataclass
class OnDisk(Memory):
    """With a real file for what was shown, drawn and found, as another process would find it each time."""

    path: Path = Path()

    @property
    def _file(self) -> AcceptedModels:
        return AcceptedModels(self.path, FEDERATION, Seal(identity_key(OWN)))

    def bind(self, evidence: Evidence) -> None:
        self._file.bind(evidence)

    def drawn(self, evidence: bytes, draw: Callable[[], Sequence[int]]) -> Sequence[int]:
        return self._file.drawn(evidence, draw)

    def found(self, evidence: bytes, chunks: Collection[int]) -> Collection[int]:
        return self._file.found(evidence, chunks)


@dataclass
class Says:
    """What the coordinator says; honest where nothing is changed. `asked` has every chunk that was asked for."""

    rounds: Sequence[Made]
    others: Collection[Verdict] = ()
    asked: list[int] = field(default_factory=list)
    evidence: Callable[[CheckableRound], CheckableRound] = lambda checkable: checkable
    pieces: Callable[[int, Sequence[bytes]], Sequence[bytes]] = lambda chunk, pieces: pieces
    shared: list[Verdict] = field(default_factory=list)
    held: list[HeldPieces] = field(default_factory=list)
    kept: Collection[Verdict] = ()
    fetched: list[Digest] = field(default_factory=list)

    def made(self, model: Digest) -> Made:
        for made in self.rounds:
            if model_of(made) == model:
                return made
        raise StateError("no masked sum of this plan made it")

    async def fetch_evidence(self, plan: Digest, model: Digest) -> CheckableRound:
        self.fetched.append(model)
        return self.evidence(self.made(model).checkable(COORDINATOR))

    async def fetch_verdicts(self, plan: Digest, model: Digest) -> Collection[Verdict]:
        return self.kept

    async def fetch_pieces(
        self, plan: Digest, model: Digest, chunk: int, held: HeldPieces, most: int
    ) -> Sequence[bytes]:
        self.asked.append(chunk)
        self.held.append(held)
        made = self.made(model)
        pieces = made.pieces(made.check(), chunk)
        own = {} if held.vector_of is None else {held.vector_of: b""}
        pieces = replace(pieces, masked={**pieces.masked, **own}, master=b"" if held.master else pieces.master)
        return self.pieces(chunk, pieces.in_order)

    async def share_verdict(
        self, plan: Digest, model: Digest, verdict: Verdict, known: int
    ) -> tuple[Collection[Verdict], int]:
        self.shared.append(verdict)
        return (*self.others, verdict), len(self.shared)


@dataclass(frozen=True)
class Own:
    """What the silo still has: whole vectors, by what it would ask for. Chunks that are not as the manifest says are
    not there."""

    masked: bytes = b""
    before: bytes = b""

    def vector(self, manifest: Manifest, chunk: int) -> bytes | None:
        return _chunk(self.masked, manifest, chunk)

    def model(self, manifest: Manifest, chunk: int) -> bytes | None:
        return _chunk(self.before, manifest, chunk)


def _chunk(whole: bytes, manifest: Manifest, chunk: int) -> bytes | None:
    found = whole[chunk * manifest.chunk_bytes : (chunk + 1) * manifest.chunk_bytes]
    try:
        manifest.check_chunk(chunk, found)
    except LoricaError:
        return None
    return found


@dataclass
class Checker:
    """`ModelChecks` of one silo over `says`."""

    says: Says
    memory: Memory
    mode: Mode = "joint"
    colluders: int = 0
    by_hand: Collection[SiloName] = SILOS
    names: Sequence[SiloName] = SILOS
    silo: SiloName = OWN
    proofs: list[Proof] = field(default_factory=list)
    own: Own = Own()
    keep: Callable[[Proof], None] | None = None
    later: Sequence[str] = ("a later one",)
    keys: Mapping[SiloName, Sequence[Ed25519PublicKey]] = field(default_factory=dict)
    removed: Mapping[SiloName, Sequence[Ed25519PublicKey]] = field(default_factory=dict)
    plan: Mapping[str, int] = field(default_factory=dict)
    back: list[tuple[Digest, int, int]] = field(default_factory=list)

    async def require(self, made: Made) -> None:
        known = identities(self.names)
        checks = ModelChecks(
            self.mode,
            coordinator=self.says,
            accepted=self.memory,
            own=self.own,
            party=lambda: CheckParty(
                silo=self.silo,
                identity_key=identity_key(self.silo),
                keys={
                    silo: (*(identity_key(f"{later} of {silo}").public_key() for later in self.later), key)
                    for silo, key in known.items()
                }
                | self.keys,
                by_hand=self.by_hand,  # the silo itself among them: its own word counts from its disk alone
                removed=self.removed,
                demands=Demands(colluders=self.colluders),
                coordinator=COORDINATOR.public_key(),
            ),
            keep=self.keep or self.proofs.append,
            goes_back=lambda plan, model, made, newest: self.back.append((model, made, newest)),
            patience_s=0.0,
        )
        says = {"colluders": 0, "threshold": 0, "min_survivors": 3, "min_silos": 3, "rounds": 9, **self.plan}
        plan = SimpleNamespace(
            name="north",
            digest=Digest(PLAN.hex()),
            aggregation=SimpleNamespace(secure_aggregation=True, **says),
            schedule=SimpleNamespace(**says),
            smallest_cohort=says["min_silos"],
        )
        await checks.require(cast(PlanBundle, SimpleNamespace(plan=plan, rule=made.rule)), model_of(made))


@pytest.fixture(autouse=True)
def _rule_of_the_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepRule, "of", lambda bundle: bundle.rule)


def checker(*made: Made, rounds: Rounds, **changes: Any) -> Checker:
    return Checker(says=Says(made), memory=Memory(rounds.lineage()), **changes)


def verdicts(made: Made, silos: Collection[SiloName], chunks: Collection[int] | None = None) -> list[Verdict]:
    """Each of what it is to check, or of `chunks`."""
    survivors, count = made.evidence.survivors.silos, len(made.check().chunks)
    return [
        signed_verdict(
            made.evidence.digest,
            silo,
            part_of(silo, survivors, count, each=2) if chunks is None else chunks,
            identity_key(silo),
        )
        for silo in silos
    ]


def crafted(made: Made, element: int) -> Made:
    """It hands out a model that is another one in one element."""
    master = made.after.master.clone()
    master[element] += 1.0
    return made.told(Vectors(model=master, master=master, slots=made.after.slots))


# --- what is taken


@pytest.mark.parametrize("mode", ["spot", "joint"])
async def test_models_of_true_rounds_are_taken_and_remembered(mode: Mode) -> None:
    rounds = rounds_of()
    first, second = rounds.next(1), rounds.next(2)
    at = checker(first, second, rounds=rounds, mode=mode)
    for made in (first, second):
        await at.require(made)
        assert at.memory.lineage(None).holds(made.evidence.after.model)
    at.says.asked.clear()
    await at.require(second)
    assert at.says.asked == [], "what was accepted needs no second check"
    await Checker(says=Says(()), memory=Memory(rounds.lineage()), mode="off").require(first)


async def test_the_plans_own_model_needs_no_evidence() -> None:
    rounds = rounds_of()
    begins = rounds.lineage()
    initial = rounds.next(1)
    at = Checker(says=Says(()), memory=Memory(begins))
    own = replace(initial, evidence=replace(initial.evidence, after=replace(initial.evidence.before, steps=1)))
    await at.require(own)


async def test_a_spot_check_draws_once_and_always_takes_the_sum_of_weights() -> None:
    rounds = rounds_of()
    made = rounds.next(1)
    tail = set(made.check().tail_chunks)
    drawn = set[int]()
    for _ in range(60):
        at = checker(made, rounds=rounds, mode="spot")
        for _ in range(2):
            at.memory.kept = None
            await at.require(made)
        asked = at.says.asked
        assert tail <= set(asked)
        assert asked[: len(asked) // 2] == asked[len(asked) // 2 :], "drawn a second time"
        drawn |= set(asked)
    assert len(drawn) > 10, "it is no secret draw"


async def test_of_rounds_that_were_missed_a_spot_check_takes_the_newest_alone() -> None:
    rounds = rounds_of()
    first, second, third = (rounds.next(number) for number in (1, 2, 3))
    at = checker(first, second, third, rounds=rounds, mode="spot")
    await at.require(third)
    lineage = at.memory.lineage(None)
    assert [one.checked for one in lineage.accepted] == [
        Checked.JOINT,
        Checked.REPLAYED,
        Checked.REPLAYED,
        Checked.SPOT,
    ]
    assert not lineage.holds(second.evidence.after.model), "nobody here has looked at it"
    await at.require(second)
    assert at.memory.lineage(None).holds(second.evidence.after.model)


# --- rounds that were missed


async def test_rounds_that_were_missed_are_taken_where_enough_others_checked_every_chunk() -> None:
    rounds = rounds_of()
    made = [rounds.next(number) for number in (1, 2, 3)]
    at = checker(*made, rounds=rounds)
    at.says.kept = [verdict for one in made[:2] for verdict in verdicts(one, SILOS[1:], range(22))]
    await at.require(made[2])
    assert [one.checked for one in at.memory.lineage(None).accepted] == [Checked.JOINT] * 4
    assert len(at.says.asked) == len(made[2].check().chunks), "of the newest alone"
    assert [one.digest for one in at.memory.shown] == [one.evidence.digest for one in made]
    at.says.asked.clear()
    await at.require(made[1])
    assert at.says.asked == []


async def test_a_silo_takes_its_own_word_for_a_round_that_it_did_not_accept_from_its_disk_alone(tmp_path: Path) -> None:
    rounds = rounds_of()
    first, second = rounds.next(1), rounds.next(2)
    at = Checker(says=Says([first, second]), memory=OnDisk(rounds.lineage(), path=tmp_path / "accepted.json"))
    at.says.kept = [*verdicts(first, SILOS[:1], range(11)), *verdicts(first, SILOS[1:3], range(11, 22))]
    await refused(
        at, second, PolicyRefusal, r"evidence of round 1 .*11 \(number 0, 1, .*verdicts of silo-01, silo-02\)"
    )
    at.memory.found(first.evidence.digest, range(11))
    await at.require(second)
    assert at.memory.lineage(None).holds(first.evidence.after.model, Checked.JOINT)


async def test_chunks_that_a_silo_found_right_outlive_its_process(tmp_path: Path) -> None:
    """They are on its disk before their verdict leaves, also those before one that the coordinator does not show."""

    def shows(chunk: int, pieces: Sequence[bytes]) -> Sequence[bytes]:
        if chunk == 9:
            raise StateError("they are there no more")
        return pieces

    rounds = rounds_of()
    made = rounds.next(1)
    memory = OnDisk(rounds.lineage(), path=tmp_path / "accepted.json")
    at = Checker(says=Says([made], pieces=shows), memory=memory)
    await refused(at, made, PolicyRefusal, "shows nothing of chunk 9")
    before = sorted(set(at.says.asked) - {9})
    assert sorted(memory.found(made.evidence.digest, ())) == before
    assert before, "a check of nothing shows nothing"
    at = Checker(says=Says([made]), memory=memory)
    await at.require(made)
    assert sorted(at.says.asked) == sorted(set(range(22)) - set(before))
    assert at.says.shared[0].numbers >= set(before)


SHORT: dict[str, Callable[[Made], list[Verdict]]] = {
    "nobody": lambda made: [],
    "one alone": lambda made: verdicts(made, SILOS[1:2], range(22)),
    "on all but one chunk": lambda made: verdicts(made, SILOS[1:], set(range(22)) - {5}),
    "on one chunk one silo": lambda made: [
        *verdicts(made, SILOS[1:3], set(range(22)) - {5}),
        *verdicts(made, SILOS[3:], [5]),
    ],
    "strangers": lambda made: verdicts(made, [SiloName("mallory"), SiloName("mallet")], range(22)),
    "of other evidence": lambda made: [
        signed_verdict(bytes(32), silo, range(22), identity_key(silo)) for silo in SILOS
    ],
    "forged": lambda made: [replace(one, signature=bytes(64)) for one in verdicts(made, SILOS, range(22))],
    "its own, forged": lambda made: [
        signed_verdict(made.evidence.digest, OWN, range(22), identity_key("another")),
    ],
    "its own": lambda made: verdicts(made, SILOS[:2], range(22)),
}


@pytest.mark.parametrize("said", SHORT)
async def test_a_round_that_was_missed_and_too_few_checked_is_refused_by_name(said: str) -> None:
    rounds = rounds_of()
    first, second = rounds.next(1), rounds.next(2)
    at = checker(first, second, rounds=rounds)
    at.says.kept = SHORT[said](first)
    await refused(at, second, PolicyRefusal, r"evidence of round 1 .*of 2 silos whose keys .*begin a new plan")
    assert at.says.asked == []


async def test_verdicts_of_silos_that_nobody_compared_count_for_no_round_that_was_missed() -> None:
    rounds = rounds_of()
    first, second = rounds.next(1), rounds.next(2)
    at = checker(first, second, rounds=rounds, by_hand=SILOS[:2])
    at.says.kept = verdicts(first, SILOS[1:], range(22))
    await refused(at, second, PolicyRefusal, "evidence of round 1")


def other_state(published: ParameterDtype = "float32") -> tuple[Rounds, list[Made], list[Made]]:
    """Two rounds, and the same two by a coordinator that says that the first led to another state of the same model."""
    rounds = rounds_of(optimizer=OPTIMIZERS["momentum"], published=published)
    first, second = rounds.next(1), rounds.next(2)
    after = first.after
    master = after.master if published == "float32" else after.master + 1.0
    lie = Vectors(model=after.model, master=master, slots={"momentum": after.slots["momentum"] - 1000.0})
    rounds.vectors, rounds.steps = lie, 1
    false = [first.told(lie), rounds.next(2)]
    assert false[0].evidence.after.model == first.evidence.after.model
    assert false[1].evidence.survivors == second.evidence.survivors, "the same sum of the same attempt"
    return rounds, [first, second], false


@pytest.mark.parametrize("published", ["float32", "bfloat16"])
@pytest.mark.parametrize("colluders", [0, 1])
async def test_attack_a_missed_round_led_to_another_state_of_the_true_model(
    colluders: int, published: ParameterDtype
) -> None:
    """Survivors sign the model that they begin from: master, slots and steps behind it are the coordinator's word,
    unless others checked them."""
    rounds, true, false = other_state(published)
    at = checker(*false, rounds=rounds)
    at.says.kept = [
        *verdicts(true[0], SILOS[1:], range(22)),  # who was there checked what the coordinator showed them
        *verdicts(false[0], SILOS[1 : 1 + colluders], range(22)),
    ]
    await refused(at, false[1], PolicyRefusal, "evidence of round 1")
    at = checker(*true, rounds=rounds)
    at.says.kept = verdicts(true[0], SILOS[1:], range(22))
    await at.require(true[1])


async def test_attack_a_false_state_after_a_round_with_verify_off() -> None:
    """The model that it trained from without a check was true; the state behind it is not."""
    rounds, true, false = other_state()
    at = checker(*true, rounds=rounds, mode="off")
    await at.require(true[0])
    at.mode, at.says = "joint", Says(false)
    await refused(at, false[1], PolicyRefusal, "evidence of round 1")
    at.says = Says(true, kept=verdicts(true[0], SILOS[1:], range(22)))
    await at.require(true[1])


async def test_attack_a_false_state_that_a_spot_check_took_before_verify_was_joint() -> None:
    rounds, _, false = other_state()
    at = checker(*false, rounds=rounds, mode="spot")
    at.memory.kept = rounds.lineage().after(false[0].evidence, Checked.SPOT)
    at.mode = "joint"
    await refused(at, false[1], PolicyRefusal, "evidence of round 1")


async def test_attack_a_false_model_that_a_spot_check_took_is_not_trained_from_once_verify_is_joint() -> None:
    """It was false in a chunk that was not drawn."""
    rounds = rounds_of()
    false = crafted(rounds.next(1), 17)
    at = checker(false, rounds=rounds, mode="spot")
    at.memory.draws[false.evidence.digest] = [7]
    await at.require(false)
    at.mode = "joint"
    with pytest.raises(FalseModel, match="chunk 4 "):
        await at.require(false)


async def test_a_model_whose_vectors_are_lost_is_taken_where_enough_others_checked_it() -> None:
    """As after a restore: the coordinator has verdicts in its backup, and no masked vectors."""

    def gone(chunk: int, pieces: Sequence[bytes]) -> Sequence[bytes]:
        raise StateError("they are there no more")

    rounds = rounds_of()
    made = rounds.next(1)
    at = checker(made, rounds=rounds)
    at.says.pieces = gone
    at.says.kept = verdicts(made, SILOS[1:2], range(22))
    await refused(at, made, PolicyRefusal, "shows nothing of chunk")
    at.says.kept = verdicts(made, SILOS[1:3], set(range(22)) - {5})
    await refused(at, made, PolicyRefusal, "shows nothing of chunk")
    at.says.kept = verdicts(made, SILOS[1:3], range(22))
    await at.require(made)
    assert at.memory.lineage(None).holds(made.evidence.after.model, Checked.JOINT)


# --- one evidence for an attempt


async def test_attack_other_evidence_of_an_attempt_is_refused_once_one_was_seen(tmp_path: Path) -> None:
    """Also after a restart, and where the first came to nothing."""
    rounds, true, false = other_state()
    at = Checker(says=Says(false), memory=OnDisk(rounds.lineage(), path=tmp_path / "accepted.json"))
    await refused(at, false[1], PolicyRefusal, "evidence of round 1")
    at = Checker(says=Says(true), memory=OnDisk(rounds.lineage(), path=tmp_path / "accepted.json"))
    at.says.kept = verdicts(true[0], SILOS[1:], range(22))
    await refused(at, true[1], PolicyRefusal, "signed two that differ")
    await refused(at, true[0], PolicyRefusal, "signed two that differ")
    assert at.says.asked == []


async def test_attack_a_spot_check_is_drawn_anew_for_other_evidence_of_the_same_model(tmp_path: Path) -> None:
    """False in all chunks but one, of which alone the coordinator shows pieces: one draw, whatever it shows and however
    often."""
    rounds = rounds_of()
    made = rounds.next(1)
    good = {4, *made.check().tail_chunks}
    master = made.after.master.clone()
    for chunk in set(made.check().chunks) - good:
        master[4 * chunk : 4 * chunk + 4] += 1.0

    def shows(chunk: int, pieces: Sequence[bytes]) -> Sequence[bytes]:
        if chunk not in good:
            raise StateError("they are there no more")
        return pieces

    moment, asked = made.after.slots["first_moment"], set[int]()
    path = tmp_path / "accepted.json"
    AcceptedModels(path, FEDERATION, Seal(identity_key(OWN))).drawn(made.evidence.digest, lambda: [7])
    for number in range(4):
        slot = moment.clone()
        slot[0] += float(number)
        false = made.told(Vectors(model=master, master=master, slots={**made.after.slots, "first_moment": slot}))
        at = Checker(says=Says((false,), pieces=shows), memory=OnDisk(rounds.lineage(), path=path), mode="spot")
        if number == 0:  # the one chance in twenty that this draw is of a chunk that is shown is not what is looked at
            AcceptedModels(path, FEDERATION, Seal(identity_key(OWN))).drawn(false.evidence.digest, lambda: [9])
        with pytest.raises(
            PolicyRefusal, match="shows nothing of chunk 9" if number == 0 else "signed two that differ"
        ):
            await at.require(false)
        asked |= set(at.says.asked)
    assert asked == {9}
    for number in range(100):
        AcceptedModels(path, FEDERATION, Seal(identity_key(OWN))).drawn(number.to_bytes(32, "big"), lambda: [0])
    assert AcceptedModels(path, FEDERATION, Seal(identity_key(OWN))).drawn(made.evidence.digest, lambda: [8]) == [7]


# --- a path that does not end


async def test_attack_evidence_that_leads_round_in_a_circle_is_refused_at_its_second_round() -> None:
    rounds = rounds_of()
    one, two = rounds.next(1), rounds.next(2)

    def circle(checkable: CheckableRound) -> CheckableRound:
        other = at.says.made(model_of(one if checkable.evidence.digest == two.evidence.digest else two))
        before = replace(
            checkable.evidence.before, model=other.evidence.after.model, steps=1, slots=(("m", bytes(32)),)
        )
        after = replace(checkable.evidence.after, steps=2, slots=(("m", bytes(32)),))
        return replace(
            checkable, signed=signed_evidence(replace(checkable.evidence, before=before, after=after), COORDINATOR)
        )

    at = checker(one, two, rounds=rounds)
    at.says.evidence = circle
    await refused(at, two, PolicyRefusal, "leads to another state than the next round begins from")
    assert len(at.says.fetched) == 2


@pytest.mark.parametrize("mode", ["spot", "joint"])
async def test_attack_a_path_through_rounds_that_do_not_fall_is_refused(mode: Mode) -> None:
    rounds = rounds_of()
    first, second = rounds.next(2), rounds.next(2)
    at = checker(first, second, rounds=rounds, mode=mode)
    await refused(at, second, PolicyRefusal, "is of round 2, and has to be of one before round 2")
    late = rounds_of().next(10)
    at = checker(late, rounds=rounds, mode=mode)
    await refused(at, late, PolicyRefusal, "is of round 10, and has to be of one before round 10")


async def test_a_long_path_is_fetched_again_oldest_first_and_has_to_be_the_same() -> None:
    rounds = rounds_of()
    made = [rounds.next(number) for number in range(1, 6)]
    at = checker(*made, rounds=rounds, mode="spot")
    await at.require(made[4])
    names = [model_of(one) for one in made]
    assert at.says.fetched == [*reversed(names), *names[1:]]
    assert [one.round for one in at.memory.lineage(None).accepted] == list(range(6))

    lie = other_evidence(tail=(made[4].evidence.tail[0] + 1, *made[4].evidence.tail[1:]))
    at = checker(*made, rounds=rounds, mode="spot")
    at.says.evidence = lambda checkable: lie(checkable) if len(at.says.fetched) == 9 else checkable
    await refused(at, made[4], PolicyRefusal, "other evidence of it a moment ago")


# --- what the plan promises


PROMISES: list[tuple[dict[str, int], str]] = [
    ({"colluders": 1}, "colluders"),
    ({"min_silos": 5}, "min_cohort"),
    ({"threshold": 4}, "min_threshold"),
    ({"min_survivors": 4}, "min_survivors"),
]


@pytest.mark.parametrize(("plan", "rule"), PROMISES)
async def test_a_round_of_a_cohort_that_offers_less_than_the_plan_is_refused(plan: dict[str, int], rule: str) -> None:
    """As its roster would have been by who was there: silos that work with the coordinator can hold an attempt among
    themselves."""
    rounds = rounds_of()
    first, second = rounds.next(1), rounds.next(2)
    for made, wanted in (((first,), first), ((first, second), second)):
        at = checker(*made, rounds=rounds, plan=plan)
        at.says.kept = verdicts(first, SILOS[1:], range(22))
        with pytest.raises(PolicyRefusal) as caught:
            await at.require(wanted)
        assert caught.value.rule == rule
        assert at.says.asked == []


async def test_attack_as_many_colluders_as_the_plan_allows_for_vouch_for_a_false_chunk() -> None:
    """The policy of no silo names a number."""
    silos = silo_names(6)
    rounds = rounds_of(silos=6)
    made = rounds.next(1, colluders=2, min_survivors=4)
    chunks = len(made.check().chunks)
    colluders = set(silos[1:3])
    chunk = next(
        at for at in range(2, 18) if {one for one in silos if at in part_of(one, silos, chunks, each=2)} == colluders
    )
    false = crafted(made, 4 * chunk + 1)
    for silo in sorted({*silos} - colluders):
        at = checker(false, rounds=rounds_of(), silo=silo, names=silos, by_hand=silos, plan={"colluders": 2})
        at.says.others = [
            *verdicts(false, colluders, range(chunks)),
            *verdicts(false, {*silos} - colluders - {silo}, set(range(chunks)) - {chunk}),
        ]
        with pytest.raises(FalseModel):
            await at.require(false)


# --- back to an older model


async def test_a_silo_says_that_it_is_led_back_to_an_older_model() -> None:
    """By an order to train from it, or by evidence that begins there: an honest coordinator does so after a restore
    alone."""
    rounds = rounds_of()
    first = rounds.next(1)
    vectors, steps = rounds.vectors, rounds.steps
    second = rounds.next(2)
    at = checker(first, second, rounds=rounds)
    for made in (first, second):
        await at.require(made)
    assert at.back == []
    await at.require(first)
    assert at.back == [(model_of(first), 1, 2)]
    rounds.vectors, rounds.steps = vectors, steps
    third = rounds.next(3)
    at.says, at.back = Says((first, second, third)), []
    await at.require(third)
    assert at.back == [(model_of(first), 1, 2)]
    await at.require(third)
    assert at.back == [(model_of(first), 1, 2)]


# --- what others find


def own_of(made: Made, silo: SiloName = OWN) -> Own:
    words = made.federation.silos[silo].masked
    assert words is not None
    return Own(masked=words.tobytes(), before=bits_of(made.before.model))


@pytest.mark.parametrize("published", ["float32", "bfloat16"])
async def test_what_this_silo_has_itself_does_not_travel(published: ParameterDtype) -> None:
    rounds = rounds_of(published=published)
    made = rounds.next(1)
    at = checker(made, rounds=rounds, own=own_of(made), mode="spot")
    at.memory.draws[made.evidence.digest] = [3]  # which a model in either type has
    await at.require(made)
    with_master = [held.master for held in at.says.held]
    assert all(held.vector_of == OWN for held in at.says.held)
    chunks = made.manifests(made.before).master.chunks
    assert chunks < made.check().chunks[-1], "chunks that have words of the tail alone"
    assert with_master == [published == "float32" and chunk < chunks for chunk in at.says.asked]
    assert at.memory.lineage(None).holds(made.evidence.after.model)


async def test_copies_that_are_not_what_the_evidence_names_are_fetched() -> None:
    """Of another round, cut off, of another silo, or gone: nothing of them is believed."""
    rounds = rounds_of()
    first, made = rounds.next(1), rounds.next(2)
    whole = own_of(made)
    for own in (own_of(first), own_of(made, SILOS[1]), Own(), Own(whole.masked[:9], whole.before[:9])):
        at = checker(made, rounds=rounds, own=replace(own, before=b"x" * len(own.before)), mode="spot")
        at.memory.kept = rounds.lineage().after(first.evidence)
        await at.require(made)
        assert at.says.held == [HeldPieces()] * len(at.says.asked)


async def test_a_false_model_is_found_with_own_copies_and_the_proof_is_whole() -> None:
    rounds = rounds_of()
    honest = rounds.next(1)
    made = crafted(honest, 5)
    at = checker(made, rounds=rounds, own=own_of(honest))
    with pytest.raises(FalseChunk):
        await at.require(made)
    (proof,) = at.proofs
    found = examined(
        proof,
        made.rule,
        identities=identities(SILOS),
        coordinator=COORDINATOR.public_key(),
        demands=Demands(),
    )
    assert found.chunk == proof.chunk
    with pytest.raises(IntegrityError, match="round-evidence"):  # anybody can make up what a coordinator did not sign
        examined(
            proof,
            made.rule,
            identities=identities(SILOS),
            coordinator=identity_key("another").public_key(),
            demands=Demands(),
        )


def test_own_files_give_chunks_that_are_what_their_manifest_says(tmp_path: Path) -> None:
    folder = SiloFolder(tmp_path)
    content = bytes(range(40))
    layout = Layout("float32", (TensorSpec("all", (10,)),))
    manifest = manifest_of(layout, [content], chunk_bytes=16)
    folder.masking.mkdir()
    folder.models.mkdir()
    own = OwnFiles(folder)
    assert own.vector(manifest, 0) is None
    assert own.model(manifest, 0) is None
    (folder.masking / "spare").write_bytes(content)
    (folder.models / f"{manifest.digest}.model").write_bytes(content[:20])
    assert [own.vector(manifest, chunk) for chunk in range(3)] == [content[:16], content[16:32], content[32:]]
    assert [own.model(manifest, chunk) for chunk in range(3)] == [content[:16], None, None]
    (folder.masking / "vector").write_bytes(b"x" + content[1:])
    assert own.vector(manifest, 0) == content[:16], "the newer file is of another attempt"
    assert own.vector(manifest, 3) is None


async def test_chunks_that_others_checked_are_not_fetched() -> None:
    rounds = rounds_of()
    made = rounds.next(1)
    at = checker(made, rounds=rounds)
    at.says.others = verdicts(made, SILOS[1:])
    await at.require(made)
    own = {*part_of(OWN, made.evidence.survivors.silos, 22, each=2), *made.check().tail_chunks}
    assert set(at.says.asked) == own
    assert len(own) < 16
    assert {verdict.silo for verdict in at.says.shared} == {OWN}
    assert at.says.shared[0].numbers == own


LIES: dict[str, Callable[[Made], list[Verdict]]] = {
    "nobody": lambda made: [],
    "one alone": lambda made: verdicts(made, SILOS[1:2], range(22)),
    "one, twice": lambda made: verdicts(made, SILOS[1:2], range(22)) * 2,
    "strangers": lambda made: verdicts(made, [SiloName("mallory"), SiloName("mallet")], range(22)),
    "of other evidence": lambda made: [
        signed_verdict(bytes(32), silo, range(22), identity_key(silo)) for silo in SILOS[1:]
    ],
    "forged": lambda made: [replace(one, signature=bytes(64)) for one in verdicts(made, SILOS[1:], range(22))],
    "more than they signed": lambda made: [
        replace(one, chunks=b"\xff" * 3) for one in verdicts(made, SILOS[1:], range(4))
    ],
    "under another name": lambda made: (
        [replace(one, silo=SILOS[2]) for one in verdicts(made, SILOS[1:2], range(22))]
        + verdicts(made, SILOS[1:2], range(22))
    ),
}


@pytest.mark.parametrize("lie", LIES)
async def test_verdicts_that_prove_nothing_leave_all_chunks_to_this_silo(lie: str) -> None:
    rounds = rounds_of()
    made = rounds.next(1)
    at = checker(made, rounds=rounds)
    at.says.others = LIES[lie](made)
    await at.require(made)
    assert set(at.says.asked) == set(made.check().chunks)
    assert at.says.shared[-1].numbers == set(made.check().chunks), "the others hear of what it did in their place"


async def test_verdicts_of_silos_that_nobody_compared_count_for_nothing() -> None:
    """Pinned on first use: they may be made up."""
    rounds = rounds_of()
    made = rounds.next(1)
    at = checker(made, rounds=rounds, by_hand=[OWN, SILOS[1]])
    at.says.others = verdicts(made, SILOS[1:], range(22))
    await at.require(made)
    assert set(at.says.asked) == set(made.check().chunks)
    assert len(at.says.shared) == 1, "it waits for nobody whose word would not count"


async def test_a_verdict_more_is_needed_for_each_colluder() -> None:
    rounds = rounds_of()
    made = rounds.next(1)
    at = checker(made, rounds=rounds, colluders=2)
    at.says.others = verdicts(made, SILOS[1:3], range(22))
    with pytest.raises(PolicyRefusal):  # the cohort does not withstand as many
        await at.require(made)
    assert checkers(2) == 3
    assert checkers(0) == checkers(1) == 2


def keys_of(silos: Collection[SiloName]) -> Mapping[SiloName, Sequence[Ed25519PublicKey]]:
    return {silo: [key] for silo, key in identities(silos).items()}


@settings(max_examples=100)
@given(silos=st.integers(1, 12), chunks=st.integers(1, 60), each=st.integers(1, 4))
def test_every_chunk_is_dealt_to_as_many_silos_as_are_to_check_it(silos: int, chunks: int, each: int) -> None:
    names = silo_names(silos)
    dealt = [part_of(name, names, chunks, each=each) for name in names]
    for chunk in range(chunks):
        assert sum(chunk in part for part in dealt) == min(each, silos)
    assert max(map(len, dealt)) <= -(-chunks * min(each, silos) // silos) + each
    assert part_of(SiloName("a-stranger"), names, chunks, each=each) == frozenset()


@settings(max_examples=100)
@given(st.data())
def test_what_others_cannot_vouch_for_is_known_before_and_all_else_they_can(data: st.DataObject) -> None:
    """Where every silo that is pinned does its part, what is left is what nobody could be waited for."""
    names = silo_names(data.draw(st.integers(1, 7)))
    pinned = data.draw(st.sets(st.sampled_from(names)))
    count, each = 13, data.draw(st.integers(2, 4))
    parts = {silo: part_of(silo, names, count, each=each) for silo in names}
    others = [signed_verdict(bytes(32), silo, parts[silo], identity_key(silo)) for silo in pinned if silo != names[0]]
    left = uncovered((), others, evidence=bytes(32), chunks=count, keys=keys_of(names), each=each)
    assert left == beyond_others(names[0], names, count, pinned=pinned, each=each)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_a_chunk_is_covered_by_own_work_or_by_as_many_others_and_by_nothing_else(data: st.DataObject) -> None:
    evidence, count, each = bytes(32), 9, data.draw(st.integers(1, 4))
    own = data.draw(st.sets(st.integers(0, count - 1)))
    said = {
        silo: data.draw(st.sets(st.integers(0, count - 1)), label=silo)
        for silo in (*silo_names(5), SiloName("mallory"))
    }
    others = [signed_verdict(evidence, silo, chunks, identity_key(silo)) for silo, chunks in said.items()]
    left = uncovered(own, others * 2, evidence=evidence, chunks=count, keys=keys_of(silo_names(5)), each=each)
    for chunk in range(count):
        witnesses = sum(chunk in said[silo] for silo in silo_names(5))
        assert (chunk in left) == (chunk not in own and witnesses < each)


# --- false models


@pytest.mark.parametrize("element", [0, 17, 41, 77])
async def test_a_model_that_is_false_in_one_number_is_found_by_every_silo_together(
    element: int, tmp_path: Path
) -> None:
    """Whoever is to check the chunk finds it; the others miss verdicts on it, look themselves, and find it, too."""
    rounds = rounds_of()
    false = crafted(rounds.next(1), element)
    chunk = element // 4
    honest = verdicts(false, SILOS)
    for silo in SILOS:
        told = [  # of those who found it nothing comes
            one for one in honest if one.silo != silo and chunk not in one.numbers
        ]
        at = checker(false, rounds=rounds_of(), silo=silo)
        at.says.others = told
        with pytest.raises(FalseModel, match=f"chunk {chunk} "):
            await at.require(false)
        assert at.memory.kept is None
        (proof,) = at.proofs
        file = keep_proof(tmp_path / silo, proof)
        again = proof_from_bytes(file.read_bytes(), FEDERATION)
        found = examined(
            again,
            false.rule,
            identities=identities(SILOS),
            coordinator=COORDINATOR.public_key(),
            demands=Demands(),
        )
        assert isinstance(found, FalseChunk)
        assert found.chunk == chunk
        assert (tmp_path / silo).stat().st_mode & 0o777 == 0o700


async def test_colluders_who_vouch_for_a_false_chunk_are_one_too_few() -> None:
    """One colluder, as the silo's policy has it; two honest silos said nothing of the chunk."""
    rounds = rounds_of()
    false = crafted(rounds.next(1), 17)
    chunk = 17 // 4
    outside = next(silo for silo in SILOS if chunk not in part_of(silo, SILOS, 22, each=2))
    liar = next(silo for silo in SILOS if chunk in part_of(silo, SILOS, 22, each=2))
    at = checker(false, rounds=rounds_of(), silo=outside)
    at.says.others = [
        *verdicts(false, [liar], range(22)),
        *verdicts(false, [silo for silo in SILOS if silo not in (liar, outside)], set(range(22)) - {chunk}),
    ]
    with pytest.raises(FalseModel):
        await at.require(false)


async def test_a_false_sum_of_weights_is_found_by_every_spot_check() -> None:
    rounds = rounds_of()
    made = rounds.next(1)
    false = replace(made, evidence=replace(made.evidence, tail=(made.evidence.tail[0] - 1, *made.evidence.tail[1:])))
    at = checker(false, rounds=rounds_of(), mode="spot")
    with pytest.raises(FalseModel):
        await at.require(false)


async def test_a_model_that_is_false_everywhere_is_found_by_every_spot_check() -> None:
    rounds = rounds_of()
    made = rounds.next(1)
    zeros = torch.zeros_like(made.after.master)
    false = made.told(Vectors(model=zeros, master=zeros, slots=made.after.slots))
    for _ in range(20):
        at = checker(false, rounds=rounds_of(), mode="spot")
        with pytest.raises(FalseModel):
            await at.require(false)


# --- what is no evidence


def other_evidence(**changes: Any) -> Callable[[CheckableRound], CheckableRound]:
    def change(checkable: CheckableRound) -> CheckableRound:
        return replace(checkable, signed=signed_evidence(replace(checkable.evidence, **changes), COORDINATOR))

    return change


async def refused(at: Checker, made: Made, error: type[LoricaError], match: str) -> None:
    before = at.memory.kept
    with pytest.raises(error, match=match) as caught:
        await at.require(made)
    if isinstance(caught.value, PolicyRefusal):
        assert caught.value.rule == VERIFY
        assert "nothing was changed" in str(caught.value)
    assert not isinstance(caught.value, FalseModel), "that proves nothing"
    assert at.proofs == []
    assert at.memory.kept == before


@pytest.mark.parametrize("mode", ["spot", "joint"])
async def test_evidence_that_is_missing_of_another_round_or_unsigned_is_refused_by_name(mode: Mode) -> None:
    rounds = rounds_of()
    first, second = rounds.next(1), rounds.next(2)

    def at(**changes: Any) -> Checker:
        made = checker(first, second, rounds=rounds, mode=mode)
        made.says = replace(made.says, **changes)
        return made

    await refused(at(rounds=()), first, PolicyRefusal, "shows no evidence")
    await refused(at(rounds=(second,)), second, PolicyRefusal, "shows no evidence")
    await refused(
        at(evidence=lambda checkable: first.checkable(COORDINATOR)), second, PolicyRefusal, "of another model or state"
    )
    await refused(
        at(evidence=lambda checkable: replace(checkable, signed=replace(checkable.signed, signature=bytes(64)))),
        first,
        IntegrityError,
        "round-evidence",
    )
    await refused(
        at(evidence=other_evidence(journal=first.evidence.journal[:-1])), first, PolicyRefusal, "without a sum"
    )
    await refused(
        at(evidence=lambda checkable: replace(checkable, masked={})),
        first,
        PolicyRefusal,
        "not those that its survivors",
    )


@pytest.mark.parametrize("mode", ["spot", "joint"])
async def test_pieces_that_are_not_what_the_evidence_names_are_refused_and_prove_nothing(mode: Mode) -> None:
    rounds = rounds_of()
    made = rounds.next(1)

    def no_more(chunk: int, pieces: Sequence[bytes]) -> Sequence[bytes]:
        raise StateError("they are there no more")

    for change, error, match in (
        (lambda chunk, pieces: [bytes(len(one)) for one in pieces], PolicyRefusal, "is not what the evidence names"),
        (lambda chunk, pieces: pieces[:-1], MalformedMessage, "pieces came"),
        (lambda chunk, pieces: (*pieces, b"", b""), MalformedMessage, "pieces came"),
        (lambda chunk, pieces: (pieces[1], pieces[0], *pieces[2:]), PolicyRefusal, "is not what the evidence names"),
        (no_more, PolicyRefusal, "shows nothing of chunk"),
    ):
        at = checker(made, rounds=rounds, mode=mode)
        at.says.pieces = change  # type: ignore[assignment]
        await refused(at, made, error, match)


async def test_a_second_sum_of_a_round_is_refused_before_anything_of_it_is_fetched() -> None:
    rounds = rounds_of()
    first = rounds.next(1)
    at = checker(first, rounds=rounds_of())
    await at.require(first)
    other = crafted(first, 3)
    at.says = Says((other,))
    await refused(at, other, PolicyRefusal, "another sum of round 1 was accepted before")
    assert at.says.asked == []


# --- the file


def test_what_was_accepted_and_drawn_outlives_the_process(tmp_path: Path) -> None:
    rounds = rounds_of()
    first, second = rounds.next(1), rounds.next(2)
    lineage = rounds.lineage()
    initial: Mapping[str, str] = {"initial": lineage.accepted[0].state.master.hex()}
    plan = SimpleNamespace(
        digest=PLAN.hex(), model=SimpleNamespace(**initial), initial_model=lineage.accepted[0].state.model.hex()
    )
    bundle = cast(PlanBundle, SimpleNamespace(plan=plan))
    path = tmp_path / "accepted.json"
    seal = Seal(identity_key(OWN))
    assert AcceptedModels(path, FEDERATION, seal).lineage(bundle) == lineage
    for how_far in Checked:
        lineage = rounds.lineage().after(first.evidence, how_far).after(second.evidence)
        AcceptedModels(path, FEDERATION, seal).save(lineage)
        assert AcceptedModels(path, FEDERATION, seal).lineage(bundle) == lineage
    assert AcceptedModels(path, FEDERATION, seal).drawn(bytes(32), lambda: [4, 2]) == [4, 2]
    assert AcceptedModels(path, FEDERATION, seal).drawn(bytes(32), lambda: [9, 9]) == [4, 2]
    for chunks, all_of_them in (((), set()), ((3, 0), {0, 3}), ((9,), {0, 3, 9}), ((), {0, 3, 9})):
        assert AcceptedModels(path, FEDERATION, seal).found(first.evidence.digest, chunks) == all_of_them
    AcceptedModels(path, FEDERATION, seal).save(lineage)
    assert AcceptedModels(path, FEDERATION, seal).found(first.evidence.digest, ()) == set(), "it is accepted"
    assert AcceptedModels(path, FEDERATION, seal).lineage(bundle) == lineage
    assert path.stat().st_mode & 0o777 == 0o600
    path.write_bytes(path.read_bytes().replace(second.evidence.digest.hex().encode(), bytes(32).hex().encode()))
    with pytest.raises(ConfigurationError, match=r"the seal .* it was edited.* are then replayed"):
        AcceptedModels(path, FEDERATION, seal).lineage(bundle)


def test_bits_of_a_verdict_come_back() -> None:
    for chunks in ([], [0], [7], [8], [0, 9, 849]):
        assert signed_verdict(bytes(32), OWN, chunks, identity_key(OWN)).numbers == frozenset(chunks)
    assert bits_of(torch.zeros(1)) == bytes(4)


def test_verdicts_count_of_silos_that_people_compared_and_old_keys_for_old_evidence(tmp_path: Path) -> None:
    """Real pins: one by hand, one on first use, one that named a successor, and that one another."""
    net = TestNet.create()
    folder = SiloFolder(tmp_path / "silo")
    folder.make()
    own = net.credentials("127.0.0.1:1", OWN)
    store = trust_store(folder, own, first_use=True)
    keys = [identity_key(f"peer {number}") for number in range(5)]
    store.add(SILOS[1], keys[0].public_key())
    store.trusted_on_first_use(SILOS[2], keys[1].public_key())
    store.add(SILOS[3], keys[2].public_key())
    for old, new in itertools.pairwise(keys[2:]):
        named = succession_statement(
            old, identity=Identity(own.federation, Role.SILO, SILOS[3]), new_key=new.public_key()
        )
        store.add(SILOS[3], new.public_key(), succession=named)
    policy = SiloPolicy(rules=PolicyRules(colluders=2, trust_on_first_use=True), silo=OWN)
    party = check_party_of(folder, own, policy)()
    assert set(party.by_hand) == {SILOS[1], SILOS[3]}
    raw = {silo: [public_key_bytes(key) for key in held] for silo, held in party.keys.items()}
    assert raw == {
        OWN: [public_key_bytes(own.identity_key.public_key())],
        SILOS[1]: [public_key_bytes(keys[0].public_key())],
        SILOS[2]: [public_key_bytes(keys[1].public_key())],
        SILOS[3]: [public_key_bytes(key.public_key()) for key in reversed(keys[2:])],
    }
    without = check_party_of(folder, own, SiloPolicy(rules=PolicyRules(), silo=OWN))()
    assert set(without.keys) == {OWN, SILOS[1], SILOS[3]}, "as in release groups"
    assert party.checkers == 3
    assert party.demands == policy.demands()


async def test_evidence_and_verdicts_are_read_by_keys_that_were_succeeded_twice() -> None:
    rounds = rounds_of()
    first, second = rounds.next(1), rounds.next(2)
    at = checker(first, second, rounds=rounds)
    at.later = ["a later one", "the latest"]
    at.says.kept = verdicts(first, SILOS[1:3], range(22))
    await at.require(second)
    assert at.memory.lineage(None).holds(first.evidence.after.model, Checked.JOINT)
    false = crafted(first, 17)
    at = checker(false, rounds=rounds)
    at.later = ["a later one", "the latest"]
    with pytest.raises(FalseModel):
        await at.require(false)


async def test_a_false_model_ends_the_agent_also_where_its_proof_cannot_be_kept(tmp_path: Path) -> None:
    def full(proof: Proof) -> None:
        raise StorageError("proofs cannot be written: no space left on device")

    false = crafted(rounds_of().next(1), 17)
    at = checker(false, rounds=rounds_of(), keep=full)
    with pytest.raises(FalseModel, match=r"chunk 4 .*could not be kept: .*no space left") as caught:
        await at.require(false)
    assert exit_code(caught.value) == EXIT_CODES[FalseModel]


async def test_proofs_of_two_attempts_of_a_round_are_kept_beside_each_other(tmp_path: Path) -> None:
    files = set[Path]()
    for attempt in (crafted(rounds_of().next(1), 17), crafted(rounds_of(optimizer=OPTIMIZERS["yogi"]).next(1), 17)):
        at = checker(attempt, rounds=rounds_of())
        with pytest.raises(FalseModel):
            await at.require(attempt)
        for _ in range(2):
            files.add(keep_proof(tmp_path, at.proofs[0]))
        kept = proof_from_bytes(max(files, key=lambda file: file.stat().st_mtime_ns).read_bytes(), FEDERATION)
        assert kept == at.proofs[0]
    assert len(files) == 2
    assert {*tmp_path.iterdir()} == files


def test_that_a_model_went_back_stands_in_the_audit_log_and_in_its_report(tmp_path: Path) -> None:
    log = AuditLog(tmp_path / "audit", writer=silo_uri(FEDERATION, OWN), key=identity_key(OWN), clock=lambda: 0.0)
    audit = SiloAudit(log, federation=FEDERATION, silo=OWN, ledger_head=Head, clock=lambda: 0.0)
    for _ in range(200):
        audit.goes_back(Digest(PLAN.hex()), Digest("ab" * 32), 1, 3)
    report = report_of(read_log(tmp_path / "audit").entries)
    assert len(report.went_back) == 100, "of a flood the log counts the rest"
    line = report.went_back[0]
    assert f"back to model {'ab' * 8} of round 1, after one of round 3 was accepted" in line
    assert line in page(report, OWN)


async def test_the_proof_stands_in_the_audit_log_and_in_its_report(tmp_path: Path) -> None:
    at = checker(crafted(rounds_of().next(1), 17), rounds=rounds_of())
    with pytest.raises(FalseModel):
        await at.require(at.says.rounds[0])
    (proof,) = at.proofs
    file = keep_proof(tmp_path / "proofs", proof)
    log = AuditLog(tmp_path / "audit", writer=silo_uri(FEDERATION, OWN), key=identity_key(OWN), clock=lambda: 0.0)
    audit = SiloAudit(log, federation=FEDERATION, silo=OWN, ledger_head=Head, clock=lambda: 0.0)
    audit.proves(proof, file)
    report = report_of(read_log(tmp_path / "audit").entries)
    (line,) = report.false_models
    assert file.name in line
    assert hashlib.sha256(file.read_bytes()).hexdigest() in line
    assert line in page(report, OWN)
    assert "FALSE MODELS" in page(report, OWN)
    assert "FALSE MODELS" not in page(report_of([]), OWN)
