"""A coordinator that hands out another model than its masked sum makes, or shows no evidence of it, against real agents
over gRPC."""

import asyncio
import json
from collections.abc import Callable, Generator
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from typer.testing import CliRunner

from lorica_coordinator.edges.models.model_store import Slab
from lorica_coordinator.edges.sums.next_model import NextModel
from lorica_coordinator.edges.sums.round_evidence import RoundEvidence
from lorica_coordinator.rounds.states import Collecting, Gathering
from lorica_coordinator.service.round_checks import RoundChecks
from lorica_security.errors import (
    EXIT_CODES,
    ConfigurationError,
    FalseModel,
    IntegrityError,
    MalformedMessage,
    StateError,
    exit_code,
)
from lorica_security.identity.seal import Seal
from lorica_security.secure_aggregation.messages import Reveal
from lorica_security.secure_aggregation.model_evidence.evidence import Checked, signed_evidence
from lorica_security.secure_aggregation.model_evidence.verdicts import Verdict
from lorica_security.secure_aggregation.silo.party import Demands
from silo_agent.cli import app
from silo_agent.edges.keys.key_store import store_credentials
from silo_agent.edges.masks.model_checking import examine
from silo_agent.edges.memory.accepted_models import AcceptedModels
from silo_agent.service.model_checks import Mode
from silo_wire.canonical import Digest
from silo_wire.checkable_round import CheckableRound, Pieces, Proof
from silo_wire.checked_chunk import StepRule, examined
from silo_wire.codecs.evidence_codec import checkable_from_bytes, checkable_to_bytes, proof_from_bytes, proof_to_bytes
from silo_wire.messages import DeclineReason, HeldPieces, RoundKey
from tests.support.coordinator import FEDERATION, FederationTemplate
from tests.support.rogue_silos import (
    ADAPTED,
    LONGER,
    SILOS,
    Play,
    PlayedSilo,
    honestly,
    make_rogue_template,
    played,
)

Playing = Callable[..., AbstractAsyncContextManager[Play]]
BOTH = pytest.mark.parametrize("mode", ["spot", "joint"])


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> FederationTemplate:
    return make_rogue_template(tmp_path_factory.mktemp("rogue") / "coordinator")


@pytest.fixture
def playing(template: FederationTemplate, tmp_path: Path) -> Playing:
    return lambda mode: played(template, tmp_path, honestly, verify=mode)


def one_number_is_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """In each model that the coordinator makes, by a bit or so."""
    honest = NextModel._slabs

    def slabs(self: NextModel, *given: Any) -> Generator[Slab, None, None]:
        for slab in honest(self, *given):
            values = np.frombuffer(bytes(slab.model), dtype="<f4").copy()
            values[17] = np.nextafter(values[17], np.float32(np.inf))
            yield replace(slab, model=values.tobytes())

    monkeypatch.setattr(NextModel, "_slabs", slabs)


QUORUM = 2
"""So many of the four silos end an attempt by what they find, for the others too: a sum takes three."""


async def those_who_looked(play: Play) -> dict[PlayedSilo, BaseException | None]:
    """Silos that ended with the model of a round, and with what; those whom the end of the attempt was told before they
    had looked at it wait."""
    for silo in play.silos.values():
        silo.may_end_with = (FalseModel,)
    waiting = {asyncio.create_task(silo.ended()): silo for silo in play.silos.values()}
    ended: dict[PlayedSilo, BaseException | None] = {}
    try:
        while len(ended) < QUORUM:
            done, _ = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            ended |= {waiting.pop(task): task.result() for task in done}
    finally:
        for task in waiting:
            task.cancel()
        await asyncio.gather(*waiting, return_exceptions=True)
    return ended


@BOTH
async def test_silos_check_the_model_of_an_honest_round_and_go_on(playing: Playing, mode: Mode) -> None:
    async with playing(mode) as play:
        for number in (1, 2):
            play.check_made_by(await play.closed(number), *SILOS)
        play.check_nobody_else_was_named()
        for silo in play.silos.values():
            assert silo.folder.accepted.exists()
            assert not silo.folder.proofs.exists()


@BOTH
async def test_adapters_in_bfloat16_that_step_with_momentum_are_checked(
    template: FederationTemplate, tmp_path: Path, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the second round the step begins from momentum that the first one made; then a coordinator hands out a model
    that is false in one number."""
    async with played(template, tmp_path / "honest", honestly, plan=ADAPTED, verify=mode) as play:
        assert play.bundle.base_layout is not None
        for number in (1, 2):
            assert (await play.closed(number)).outcome == "applied"
        for silo in play.silos.values():
            lineage = AcceptedModels(silo.folder.accepted, FEDERATION, Seal(silo.credentials.identity_key)).lineage(
                play.bundle
            )
            assert [one.state.steps for one in lineage.accepted if one.checked] == [0, 1]
            assert not silo.folder.proofs.exists()
    one_number_is_another(monkeypatch)
    async with played(template, tmp_path / "false", honestly, plan=ADAPTED, verify=mode) as play:
        assert (await play.closed(1)).outcome == "applied"
        for error in (await those_who_looked(play)).values():
            assert isinstance(error, FalseModel)


async def forgets_round_1(silo: PlayedSilo, key: RoundKey, message: Any) -> None:
    """It stands as one that was not there: what it accepted is gone before the model of round 2 is."""
    if key.round == 2 and isinstance(message, Reveal):
        silo.folder.accepted.unlink()
    await silo.send(key, message)


async def test_a_silo_that_missed_a_round_goes_by_what_the_others_signed_then(
    template: FederationTemplate, tmp_path: Path
) -> None:
    """The masked vectors of that round are gone; the coordinator has its evidence, and the verdicts."""
    async with played(template, tmp_path, forgets_round_1, plan=LONGER, verify="joint") as play:
        row = await play.closed(3)
        assert (row.outcome, play.counted(row)) == ("applied", list(SILOS))
        seal = Seal(play.rogue.credentials.identity_key)
        lineage = AcceptedModels(play.rogue.folder.accepted, FEDERATION, seal).lineage(play.bundle)
        assert [(one.round, one.checked) for one in lineage.accepted] == [(at, Checked.JOINT) for at in range(3)]
        assert play.rogue.notes.of("refused") == []


async def test_keeps_no_verdicts_of_a_round_that_a_silo_missed(
    template: FederationTemplate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(self: RoundChecks, plan: Digest, model: Digest) -> tuple[Verdict, ...]:
        return ()

    monkeypatch.setattr(RoundChecks, "verdicts", none)
    async with played(template, tmp_path, forgets_round_1, plan=LONGER, verify="joint") as play:
        await play.closed(2)
        rogue = play.rogue
        await rogue.notes.until(lambda: bool(rogue.notes.of("refused")))
        (refusal, *_) = rogue.notes.of("refused")
        assert refusal["rule"] == "verify"
        assert "evidence of round 1 " in refusal["detail"]
        assert "begin a new plan from an exported model" in refusal["detail"]
        assert rogue.said_in(3, object) is None, "it trained from that model"


@BOTH
async def test_hands_out_a_model_that_is_another_in_the_last_bit_of_one_number(
    playing: Playing, mode: Mode, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every agent keeps a proof, declines, and ends with an exit code of its own; nobody trains from that model."""
    one_number_is_another(monkeypatch)
    async with playing(mode) as play:
        row = await play.closed(1)
        looked = await those_who_looked(play)
        for silo, error in looked.items():
            assert isinstance(error, FalseModel), error
            assert exit_code(error) == EXIT_CODES[FalseModel] == 16
            assert silo.said_in(2, object) is None, "it trained, or said something of the next round"
            (refusal,) = silo.notes.of("refused")
            assert refusal["rule"] == "verify"
            (file,) = silo.folder.proofs.iterdir()
            found = examined(
                proof_from_bytes(file.read_bytes(), FEDERATION),
                StepRule.of(play.bundle),
                identities={name: it.credentials.identity_key.public_key() for name, it in play.silos.items()},
                coordinator=silo.credentials.coordinator_key,
                demands=Demands(),
            )
            assert found.evidence.after.model.hex() == row.model
        assert isinstance(play.state, Gathering | Collecting)
        for silo in play.silos.values():
            store_credentials(silo.folder, silo.credentials)
            for other in looked:
                (file,) = other.folder.proofs.iterdir()
                done = CliRunner().invoke(
                    app, ["audit", "examine", str(file), "--dir", str(silo.folder.root), "--json"]
                )
                assert json.loads(done.output)["model"] == row.model, done.output


async def test_a_proof_that_shows_nothing_false_is_told_from_one_that_does(
    playing: Playing, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an honest round; of pieces that were changed; of a coordinator that is not the silo's; of a plan that it does
    not have."""
    shown: list[tuple[CheckableRound, int, Pieces]] = []

    def watched(self: RoundEvidence, model: Digest, chunk: int, held: HeldPieces) -> tuple[bytes, ...]:
        checkable = checkable_from_bytes(self.read(model), FEDERATION)
        shown.append((checkable, chunk, Pieces.of(checkable, shows(self, model, chunk))))
        had.append(held)
        return shows(self, model, chunk, held)

    had: list[HeldPieces] = []
    shows = RoundEvidence.pieces
    monkeypatch.setattr(RoundEvidence, "pieces", watched)
    async with playing("spot") as play:
        await play.closed(2)
        silo = next(iter(play.silos.values()))
        checkable, chunk, pieces = shown[0]
        assert {held.vector_of for held in had} == set(SILOS), "agents still have what they masked"
        assert all(held.master for held in had), "and the model that they trained from"
        honest = Proof(checkable=checkable, chunk=chunk, pieces=pieces)
        changed = replace(pieces, master=bytes(len(pieces.master)))
        stranger = signed_evidence(checkable.evidence, Ed25519PrivateKey.generate())
        evidence = checkable.evidence
        of_another = replace(evidence, attempt=replace(evidence.attempt, plan=bytes(32)))
        for proof, error, words in (
            (honest, IntegrityError, "shows nothing false"),
            (replace(honest, pieces=changed), IntegrityError, "master before the step"),
            (replace(honest, checkable=replace(checkable, signed=stranger)), IntegrityError, "signature"),
            (
                replace(honest, checkable=replace(checkable, signed=replace(checkable.signed, evidence=of_another))),
                StateError,
                "no plan",
            ),
        ):
            file = tmp_path / "shown.proof"
            file.write_bytes(proof_to_bytes(proof))
            with pytest.raises(error, match=words):
                examine(silo.folder, silo.credentials, file)
        for content, words in ((b"", "evidence"), (b"\xff" * 40, "does not parse")):
            file.write_bytes(content)
            with pytest.raises(MalformedMessage, match=words):
                examine(silo.folder, silo.credentials, file)
        with pytest.raises(ConfigurationError, match="cannot be read"):
            examine(silo.folder, silo.credentials, tmp_path / "none.proof")


async def test_agents_that_found_a_false_model_find_it_again_after_a_restart(
    playing: Playing, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_number_is_another(monkeypatch)
    async with playing("spot") as play:
        found = await those_who_looked(play)
        for silo in play.silos.values():  # one that ended a moment later is missed by the next round as well
            await silo.restart()
        for error in (*found.values(), *(await those_who_looked(play)).values()):
            assert isinstance(error, FalseModel)
        assert [row.round for row in play.rows() if row.outcome == "applied"] == [1]


def shows_none(self: RoundEvidence, model: Digest) -> bytes:
    raise StateError("there is no evidence of that model")


def cut_off(self: RoundEvidence, model: Digest) -> bytes:
    checkable = checkable_from_bytes(HONESTLY_READ(self, model), FEDERATION)
    evidence = replace(checkable.evidence, journal=checkable.evidence.journal[:-1])
    return checkable_to_bytes(replace(checkable, signed=replace(checkable.signed, evidence=evidence)))


def without_manifests(self: RoundEvidence, model: Digest) -> bytes:
    return checkable_to_bytes(replace(checkable_from_bytes(HONESTLY_READ(self, model), FEDERATION), masked={}))


def garbage(self: RoundEvidence, model: Digest) -> bytes:
    return b"\xff" * 100


HONESTLY_READ = RoundEvidence.read


@pytest.mark.parametrize(
    ("says", "reason", "match"),
    [
        (shows_none, DeclineReason.POLICY, "shows no evidence"),
        (cut_off, DeclineReason.POLICY, "without a sum"),
        (without_manifests, DeclineReason.POLICY, "not those that its survivors signed"),
        (garbage, DeclineReason.INTEGRITY, "does not parse"),
    ],
)
async def test_evidence_that_is_none_is_a_refusal_and_no_more(
    playing: Playing, monkeypatch: pytest.MonkeyPatch, says: Any, reason: DeclineReason, match: str
) -> None:
    """The agents stay; once the coordinator shows it, the round goes on where it was."""
    monkeypatch.setattr(RoundEvidence, "read", says)
    async with playing("spot") as play:
        await play.closed(1)
        await play.until(lambda: any((row.round, row.outcome) == (2, "abandoned") for row in play.rows()))
        row = play.row(2, 1)
        told = [item.detail for item in row.silos if item.outcome == "declined"]
        assert told
        assert all(detail.startswith(reason.value) for detail in told), told
        for silo in play.silos.values():
            await silo.notes.until(lambda silo=silo: bool(silo.notes.of("refused")))  # type: ignore[misc]
            assert match in silo.notes.of("refused")[0]["detail"]
            assert not silo.folder.accepted.exists()
        monkeypatch.setattr(RoundEvidence, "read", HONESTLY_READ)
        for silo in play.silos.values():
            await silo.restart()
        play.check_made_by(await play.closed(2), *SILOS)


async def test_shows_more_pieces_of_a_chunk_than_the_round_has(
    playing: Playing, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more of them than the round has are held at any time."""
    shows, sent = RoundEvidence.pieces, 0

    def endless(self: RoundEvidence, *given: Any) -> Any:
        nonlocal sent
        yield from shows(self, *given)
        for sent in range(1 << 20):  # noqa: B007  # read below
            yield bytes(1 << 20)

    monkeypatch.setattr(RoundEvidence, "pieces", endless)
    async with playing("spot") as play:
        await play.closed(1)
        for silo in play.silos.values():
            await silo.notes.until(lambda silo=silo: bool(silo.notes.of("refused")))  # type: ignore[misc]
            assert "pieces allowed" in silo.notes.of("refused")[0]["detail"]
            assert not silo.folder.proofs.exists()
    assert sent < 1000


async def test_a_coordinator_that_keeps_no_vectors_is_refused(
    playing: Playing, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(RoundChecks, "is_kept", lambda *_: False)
    async with playing("spot") as play:
        await play.closed(1)
        for silo in play.silos.values():
            await silo.notes.until(lambda silo=silo: bool(silo.notes.of("refused")))  # type: ignore[misc]
            assert "shows nothing of chunk" in silo.notes.of("refused")[0]["detail"]
