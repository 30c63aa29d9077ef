"""Whose keys evidence and verdicts count under: never one that was given up before, and no reader's own choice of
keys."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from lorica_coordinator.edges.sums.round_evidence import RoundEvidence
from lorica_coordinator.service.round_checks import RoundChecks
from lorica_coordinator.vectors.kept_files import FOLDER_ALONE
from lorica_security.errors import IntegrityError, PolicyRefusal, StateError
from lorica_security.identifiers import Identity, Role, SiloName
from lorica_security.identity.succession import succession_statement
from lorica_security.secure_aggregation.coordinator.events import PhaseClosed
from lorica_security.secure_aggregation.messages import Advertisement, signed
from lorica_security.secure_aggregation.model_evidence.evidence import Checked
from lorica_security.secure_aggregation.model_evidence.verdicts import Verdict, signed_verdict
from silo_agent.edges.disk.silo_folder import SiloFolder
from silo_agent.edges.groups.release_groups import group_chain
from silo_agent.edges.masks.masking_party import party_of
from silo_agent.edges.masks.model_checking import check_party_of
from silo_agent.edges.memory.trust_store import trust_store
from silo_agent.policy.rules import PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_wire.canonical import Digest
from silo_wire.checkable_round import CheckableRound
from silo_wire.messages import Mask, RoundKey
from tests.support.evidence import Made, Rounds, Vectors
from tests.support.federation_peer import TestNet
from tests.support.secagg_federation import FEDERATION, MODEL, PLAN, attempt, identities, identity_key
from tests.unit.test_model_checks import (
    OWN,
    SILOS,
    Checker,
    Memory,
    Says,
    checker,
    model_of,
    refused,
    rounds_of,
    verdicts,
)
from tests.unit.test_model_checks import _rule_of_the_round as _rule_of_the_round

ROGUE = SILOS[3]


def key_of(silo: SiloName, which: str = "") -> Ed25519PublicKey:
    """The key that `silo` signs with, or another one of its."""
    return identity_key(f"{which} of {silo}" if which else silo).public_key()


def gone(chunk: int, pieces: Sequence[bytes]) -> Sequence[bytes]:
    raise StateError("they are there no more")


def false_everywhere(rounds: Rounds) -> Made:
    made = rounds.next(1)
    master = made.after.master + 1.0
    return made.told(Vectors(model=master, master=master, slots=made.after.slots))


# --- verdicts


class KeptAt(RoundEvidence):
    """The coordinator's own store of verdicts, on evidence in memory."""

    def __init__(self, folder: Path, rounds: Sequence[Made]) -> None:
        self._kept_in, self._rounds, self._kept = folder, rounds, FOLDER_ALONE

    def _parsed(self, model: Digest) -> CheckableRound:
        return next(one for one in self._rounds if model_of(one) == model).checkable(identity_key("coordinator"))

    def _verdicts(self, model: Digest) -> Path:
        return self._kept_in / f"{model}.verdicts"


@dataclass
class Relays(Says):
    """What it hands out of verdicts is what the coordinator keeps."""

    checks: RoundChecks | None = None

    async def fetch_verdicts(self, plan: Digest, model: Digest) -> Collection[Verdict]:
        assert self.checks is not None
        return await self.checks.verdicts(plan, model)

    async def share_verdict(
        self, plan: Digest, model: Digest, verdict: Verdict, known: int
    ) -> tuple[Collection[Verdict], int]:
        assert self.checks is not None
        return await self.checks.share(verdict.silo, plan, model, verdict, -1, identity_key=key_of(verdict.silo))


@pytest.mark.parametrize("how", ["unsigned", "on other chunks"])
async def test_attack_a_silo_takes_its_verdict_back_once_others_went_on_by_it(tmp_path: Path, how: str) -> None:
    """Whoever missed the round finds no vectors of it any more: nothing but signatures shows it that the model is
    true."""
    rounds = rounds_of()
    first, second = rounds.next(1), rounds.next(2)
    digest, plan, model = first.evidence.digest, Digest(PLAN.hex()), model_of(first)

    async def opened(plan: Digest) -> SimpleNamespace:
        return SimpleNamespace(parts=SimpleNamespace(evidence=KeptAt(tmp_path, [first, second])))

    desk, nothing = cast(Any, SimpleNamespace(opened=opened)), cast(Any, None)
    checks = RoundChecks(desk=desk, keys=nothing, spools=nothing, wait_s=0.0)

    async def share(verdict: Verdict) -> None:
        await checks.share(ROGUE, plan, model, verdict, -1, identity_key=key_of(ROGUE))

    def silo(name: SiloName) -> Checker:
        says = Relays([first, second], checks=checks)
        return Checker(says=says, memory=Memory(rounds_of().lineage()), silo=name)

    vouched = signed_verdict(digest, ROGUE, range(22) if how == "unsigned" else range(11, 22), identity_key(ROGUE))
    await share(vouched)
    for name in (SILOS[2], SILOS[1]):
        at = silo(name)
        await at.require(first)
    assert len(at.says.asked) < 22, "it went on by the verdict"
    if how == "unsigned":
        with pytest.raises(IntegrityError, match="is not signed by the identity key"):
            await share(replace(vouched, signature=bytes(64)))
    else:
        await share(signed_verdict(digest, ROGUE, range(11), identity_key(ROGUE)))
    assert vouched in await checks.verdicts(plan, model)
    await silo(OWN).require(second)


@pytest.mark.parametrize("key", ["given up", ""], ids=["that it gave up", "that it has"])
@pytest.mark.parametrize("missed", [False, True], ids=["newest", "missed"])
async def test_attack_a_verdict_in_this_silos_own_name_vouches_for_a_false_model(key: str, missed: bool) -> None:
    """The coordinator withholds the pieces, and hands back a verdict by a key of this silo's."""
    rounds = rounds_of()
    false = false_everywhere(rounds)
    rounds.vectors = false.after
    second = rounds.next(2)
    at = checker(false, second, rounds=rounds_of(), keys={OWN: (key_of(OWN), key_of(OWN, "given up"))})
    at.says.pieces = gone
    signer = identity_key(f"{key} of {OWN}" if key else OWN)
    at.says.kept = at.says.others = [signed_verdict(false.evidence.digest, OWN, range(22), signer)]
    await refused(at, second if missed else false, PolicyRefusal, "round 1 .* have not" if missed else "shows nothing")


@pytest.mark.parametrize("missed", [False, True], ids=["newest", "missed"])
async def test_attack_keys_that_two_others_gave_up_vouch_for_a_false_model(missed: bool) -> None:
    rounds = rounds_of()
    false = false_everywhere(rounds)
    rounds.vectors = false.after
    second = rounds.next(2)
    keys = {silo: (key_of(silo), key_of(silo, "given up")) for silo in SILOS[1:3]}
    at = checker(false, second, rounds=rounds_of(), keys=keys)
    at.says.pieces = gone
    at.says.kept = at.says.others = [
        signed_verdict(false.evidence.digest, silo, range(22), identity_key(f"given up of {silo}")) for silo in keys
    ]
    await refused(at, second if missed else false, PolicyRefusal, "round 1 .* have not" if missed else "shows nothing")


async def test_verdicts_count_under_the_key_of_the_attempt_and_under_every_later_one() -> None:
    rounds = rounds_of()
    made = rounds.next(1)
    later = dict.fromkeys(SILOS[1:3], ("the latest", "a later one", ""))
    keys = {
        silo: (*(key_of(silo, which) for which in chain), key_of(silo, "given up")) for silo, chain in later.items()
    }
    for first, other in (("", "the latest"), ("a later one", ""), ("the latest", "a later one")):
        at = checker(made, rounds=rounds_of(), keys=keys)
        at.says.pieces = gone
        signers = [
            identity_key(f"{which} of {silo}" if which else silo)
            for silo, which in zip(later, (first, other), strict=True)
        ]
        at.says.kept = [
            signed_verdict(made.evidence.digest, silo, range(22), key) for silo, key in zip(later, signers, strict=True)
        ]
        await at.require(made)
        assert at.memory.lineage(None).holds(made.evidence.after.model, Checked.JOINT)


def with_refused_keys_of_the_rogue(made: Made) -> Made:
    """The same evidence, whose journal has the rogue advertise keys of another silo, signed with a key that it gave
    up."""
    opening, *keys = made.evidence.journal[:4]
    copied = replace(cast(Advertisement, keys[0]), silo=ROGUE)
    forged = signed(copied, identity_key(f"given up of {ROGUE}"))
    assert isinstance(made.evidence.journal[4], PhaseClosed)
    journal = (opening, *keys, forged, *made.evidence.journal[5:])
    return replace(made, evidence=replace(made.evidence, journal=journal))


@pytest.mark.parametrize("change", [lambda made: made, with_refused_keys_of_the_rogue], ids=["true", "refused keys"])
async def test_a_silo_that_had_no_part_in_the_attempt_vouches_by_its_pinned_key_alone(
    change: Callable[[Made], Made],
) -> None:
    rounds = rounds_of()
    made = change(rounds.next(1, drops={ROGUE: "advertise keys"}))
    keys = {ROGUE: (key_of(ROGUE), key_of(ROGUE, "given up"))}
    for which, counts in (("", True), ("given up", False)):
        at = checker(made, rounds=rounds_of(), keys=keys)
        at.says.pieces = gone
        signer = identity_key(f"{which} of {ROGUE}" if which else ROGUE)
        at.says.kept = [
            signed_verdict(made.evidence.digest, ROGUE, range(22), signer),
            *verdicts(made, SILOS[1:2], range(22)),
        ]
        if counts:
            await at.require(made)
        else:
            await refused(at, made, PolicyRefusal, "shows nothing of chunk")


# --- evidence


READERS = {
    "its successor alone": (key_of(ROGUE, "successor"),),
    "both": (key_of(ROGUE, "successor"), key_of(ROGUE)),
    "the one before": (key_of(ROGUE),),
    "none": (),
}


@pytest.mark.parametrize("reader", READERS)
async def test_attack_a_silo_signs_with_the_key_before_its_successor_to_end_the_plan(reader: str) -> None:
    """The coordinator names it, and the others' sum comes out: whichever of its keys a reader knows, the evidence is
    good."""
    rounds = rounds_of()
    known = {ROGUE: key_of(ROGUE, "successor")}
    made = rounds.next(1, known=known)
    assert ROGUE not in made.evidence.survivors.silos
    assert [blame.silo for blame in made.federation.blames] == [ROGUE]
    assert not [it for it in made.evidence.journal if isinstance(it, Advertisement) and it.silo == ROGUE]
    keys = READERS[reader]
    names = SILOS if keys else SILOS[:3]
    at = checker(made, rounds=rounds_of(), keys={ROGUE: keys} if keys else {}, names=names, by_hand=SILOS[:3])
    await at.require(made)
    assert at.memory.lineage(None).holds(made.evidence.after.model, Checked.JOINT)


# --- keys whose pins were removed


async def test_a_key_whose_pin_was_removed_reads_rounds_that_this_silo_helped_to_sum_and_no_others() -> None:
    rounds = rounds_of()
    made = rounds.next(1)
    anew = {ROGUE: (key_of(ROGUE, "anew"),)}
    removed = {ROGUE: (key_of(ROGUE),)}
    await refused(checker(made, rounds=rounds_of(), keys=anew), made, PolicyRefusal, "bad signature|not signed|silo-03")
    at = checker(made, rounds=rounds_of(), keys=anew, removed=removed)
    await at.require(made)
    assert at.memory.lineage(None).holds(made.evidence.after.model, Checked.JOINT)
    at = checker(made, rounds=rounds_of(), keys=anew, removed=removed)
    at.says.pieces = gone
    at.says.kept = verdicts(made, [ROGUE, SILOS[1]], range(22))
    await refused(at, made, PolicyRefusal, "shows nothing of chunk")

    rounds = rounds_of()
    made = rounds.next(1, drops={OWN: "masked input"})
    await refused(checker(made, rounds=rounds_of(), keys=anew, removed=removed), made, PolicyRefusal, "silo-03")


def test_keys_stay_for_old_evidence_when_people_remove_their_pin_and_for_nothing_else(tmp_path: Path) -> None:
    own = TestNet.create().credentials("127.0.0.1:1", OWN)
    folder = SiloFolder(tmp_path / "silo")
    folder.make()
    store = trust_store(folder, own)
    first, second, third, anew = (identity_key(name) for name in ("first", "second", "third", "anew"))
    identity = Identity(own.federation, Role.SILO, ROGUE)
    store.add(ROGUE, first.public_key())
    named = succession_statement(first, identity=identity, new_key=second.public_key())
    store.add(ROGUE, second.public_key(), succession=named)
    store.remove(ROGUE)
    store.add(ROGUE, third.public_key())
    store.remove(ROGUE)
    policy = SiloPolicy(rules=PolicyRules(), silo=OWN)
    for pinned in ((), (anew.public_key(),)):
        for key in pinned:
            store.add(ROGUE, key)
        party = check_party_of(folder, own, policy)()
        assert party.removed == {ROGUE: tuple(key.public_key() for key in (third, second, first))}
        assert party.keys.get(ROGUE, ()) == pinned
        assert list(party.by_hand) == ([ROGUE] if pinned else [])
        masks = party_of(folder, own, policy)(order())
        assert masks.pinned == dict.fromkeys([ROGUE] if pinned else [], anew.public_key())


# --- pins of first use


def order() -> Mask:
    """To send keys: no roster comes with it."""
    key = RoundKey(federation=FEDERATION, plan=Digest(PLAN.hex()), round=1, attempt=1)
    return Mask(key=key, model=Digest(MODEL.hex()), seconds_left=60.0, attempt=attempt())


def test_attack_a_pin_of_first_use_counts_for_masks_after_people_turned_first_use_off(tmp_path: Path) -> None:
    """They count alike everywhere: in masks, release groups and evidence."""
    own = TestNet.create().credentials("127.0.0.1:1", OWN)
    folder = SiloFolder(tmp_path / "silo")
    folder.make()
    store = trust_store(folder, own, first_use=True)
    store.add(SILOS[1], key_of(SILOS[1]))
    store.trusted_on_first_use(SILOS[2], key_of(SILOS[2]))
    for first_use, counts in ((True, SILOS[1:3]), (False, SILOS[1:2])):
        policy = SiloPolicy(rules=PolicyRules(trust_on_first_use=first_use), silo=OWN)
        assert party_of(folder, own, policy)(order()).pinned == identities(counts)
        assert set(check_party_of(folder, own, policy)().keys) == {OWN, *counts}
        assert set(group_chain(folder, own, policy)._pinned()) == set(counts)
    store.add(SILOS[2], key_of(SILOS[2]))
    assert party_of(folder, own, policy)(order()).pinned == identities(SILOS[1:3])
