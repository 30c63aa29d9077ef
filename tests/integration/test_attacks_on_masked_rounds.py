"""A malicious silo in masked rounds, against the real coordinator and three honest agents.

It can spoil a sum. It cannot stop the round for ever, and what it sends falsely is pinned on it by name: in the
records, and in lorica_dropped_silos_total. Each test plays one attack as rogue-d in round 1, and sees that the models
of that round and of the next one are what the deltas of those in them give, to the last level of the encoding.

What a coordinator could learn is another matter: tests/integration/test_attacks_on_masks.py.
"""

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lorica_coordinator.rounds.states import Collecting, Masking
from lorica_coordinator.service.records import RoundRow
from lorica_security.audit.chain import Head
from lorica_security.audit.signed_head import SignedHead
from lorica_security.errors import (
    AuthorisationError,
    Conflict,
    IntegrityError,
    LoricaError,
    MalformedMessage,
    WrongTime,
)
from lorica_security.identifiers import Role, SiloName
from lorica_security.secure_aggregation.coordinator.requests import is_awaited
from lorica_security.secure_aggregation.keys.key_agreement import KEM_KEY_BYTES, PUBLIC_KEY_BYTES
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.keys.share_box import KeyShares
from lorica_security.secure_aggregation.masked_vectors.fixed_point import EXTRA_WORDS
from lorica_security.secure_aggregation.messages import (
    Advertisement,
    Agreement,
    Complaint,
    MaskedInput,
    Reveal,
    SealedShare,
    SharedKeys,
    signed,
)
from lorica_security.secure_aggregation.silo import states as silo_states
from lorica_security.secure_aggregation.silo.phases import own_dealing as silo_own_dealing
from lorica_security.secure_aggregation.silo.phases import unmasking as silo_unmasking
from silo_wire.codecs import common_codec
from silo_wire.codecs.masked_orders_codec import mask_answer_to_wire, masked_header_to_wire
from silo_wire.codecs.secure_codec import masked_input_to_wire
from silo_wire.manifest import manifest_of, masked_layout
from silo_wire.messages import MaskedHeader, RoundKey
from tests.support.coordinator import FederationTemplate
from tests.support.rogue_silos import (
    BANK,
    CLINIC,
    HONEST,
    HOSPITAL,
    LARGEST_DELTA,
    PLAIN,
    ROGUE,
    SILOS,
    WEIGHT_CAP,
    Attack,
    Declared,
    InTheClear,
    Play,
    PlayedSilo,
    honestly,
    make_rogue_template,
    played,
    summary_of,
    weight_of,
)
from tests.support.secagg_federation import identity_key

Playing = Callable[..., AbstractAsyncContextManager[Play]]
LEVELS = (2**31 - 1) // len(SILOS) - 1
"""Of the encoding, for a cohort of all: a weight of this many levels is the cap."""
ONES_SUM = sum(map(weight_of, SILOS))


@pytest.fixture(scope="session")
def rogue_template(tmp_path_factory: pytest.TempPathFactory) -> FederationTemplate:
    return make_rogue_template(tmp_path_factory.mktemp("rogue") / "coordinator")


@pytest.fixture
def playing(rogue_template: FederationTemplate, tmp_path: Path) -> Playing:
    return lambda attack, **more: played(rogue_template, tmp_path, attack, **more)


def instead(kind: type, change: Callable[[PlayedSilo, Any], Any]) -> Attack:
    """In round 1 another message in place of one of this kind; None: silence."""

    async def attack(silo: PlayedSilo, key: RoundKey, message: Any) -> None:
        if isinstance(message, kind) and key.round == 1:
            message = change(silo, message)
        if message is not None:
            await silo.send(key, message)

    return attack


def in_its_place(kind: type, act: Callable[[PlayedSilo, RoundKey, Any], Any]) -> Attack:
    """In round 1 `act` in place of sending a message of this kind."""

    async def attack(silo: PlayedSilo, key: RoundKey, message: Any) -> None:
        if isinstance(message, kind) and key.round == 1:
            await act(silo, key, message)
        else:
            await silo.send(key, message)

    return attack


async def check_caught(play: Play, offence: str, *, attempt: int = 1) -> None:
    """The rogue is named for this; this attempt at round 1, and round 2, are the honest silos' alone."""
    row = await play.closed(1)
    assert row.attempt == attempt
    play.check_made_by(row, *HONEST)
    if attempt > 1:
        play.check_without_the_rogue(row)
    await check_named(play, play.row(1, 1), offence)


async def check_named(play: Play, row: RoundRow, offence: str) -> None:
    named = play.of(row)
    assert offence in named.detail, named
    assert named.outcome == ("committed" if named.silo in play.counted(row) else "refused")
    assert play.dropped("refused") == 1
    after = await play.closed(2)
    play.check_made_by(after, *HONEST)
    play.check_without_the_rogue(after)
    play.check_nobody_else_was_named()


async def check_late(play: Play, phase: str) -> None:
    """The rogue is named for its silence, the sum is without it, and nothing is held against it afterwards."""
    row = await play.closed(1)
    play.check_made_by(row, *HONEST)
    assert (play.of(row).outcome, play.of(row).detail) == ("late", f"no answer in the phase {phase}")
    assert play.dropped("late") == 1
    play.check_made_by(await play.closed(2), *SILOS)
    play.check_nobody_else_was_named()


async def test_an_honest_federation(playing: Playing) -> None:
    async with playing(honestly) as play:
        for number in (1, 2):
            play.check_made_by(await play.closed(number), *SILOS)
        play.check_nobody_else_was_named()
        assert sum(play.dropped(outcome) for outcome in ("refused", "late", "declined")) == 0


# --- false messages ------------------------------------------------------------------------------------------------


def unsigned(silo: PlayedSilo, message: Any) -> Any:
    if isinstance(message, SharedKeys):
        return replace(message, dealing=replace(message.dealing, signature=bytes(64)))
    return replace(message, signature=bytes(64))


def by_another(silo: PlayedSilo, message: Any) -> Any:
    """Signed with a key that is not the rogue's."""
    return signed(message, identity_key("mallory"))


def complaint_about(silo: PlayedSilo, dealer: SiloName, key: bytes) -> Complaint:
    message = Complaint(roster=silo.at.roster.digest, silo=silo.name, dealer=dealer, key=key)
    return signed(message, silo.credentials.identity_key)


@pytest.mark.parametrize(
    ("kind", "forged"),
    [(Advertisement, unsigned), (Advertisement, by_another), (SharedKeys, unsigned), (MaskedInput, unsigned)],
    ids=["keys", "keys-of-another", "boxes", "vector"],
)
async def test_bad_signature_before_the_sum_is_fixed(
    playing: Playing, kind: type, forged: Callable[[PlayedSilo, Any], Any]
) -> None:
    async with playing(instead(kind, forged)) as play:
        await check_caught(play, "bad signature")


@pytest.mark.parametrize("kind", [Agreement, Reveal], ids=["survivors", "shares"])
async def test_bad_signature_when_its_vector_is_counted(playing: Playing, kind: type) -> None:
    """The others' signatures and shares are enough: the sum of all four comes out, and the next round is without it."""
    async with playing(instead(kind, unsigned)) as play:
        play.rogue_reveals_first()
        row = await play.closed(1)
        play.check_made_by(row, *SILOS)
        await check_named(play, row, "bad signature")


async def test_bad_signature_of_a_complaint(playing: Playing) -> None:
    def complaint(silo: PlayedSilo, message: Any) -> Complaint:
        return replace(complaint_about(silo, BANK, bytes(32)), signature=bytes(64))

    async with playing(instead(MaskedInput, complaint)) as play:
        await check_caught(play, "bad signature")


@pytest.mark.parametrize(
    "change",
    [
        lambda silo, it: silo.signed(it, mask_key=it.mask_key[:KEM_KEY_BYTES] + bytes(32)),
        lambda silo, it: silo.signed(it, box_key=it.box_key[:KEM_KEY_BYTES] + bytes(31) + b"\x80"),
        lambda silo, it: silo.signed(it, mask_key=it.box_key),
        lambda silo, it: silo.signed(it, mask_key=it.mask_key[:KEM_KEY_BYTES] + it.box_key[KEM_KEY_BYTES:]),
        lambda silo, it: silo.signed(it, mask_key=it.box_key[:KEM_KEY_BYTES] + it.mask_key[KEM_KEY_BYTES:]),
        lambda silo, it: silo.signed(it, box_key=b"\xff" * KEM_KEY_BYTES + it.box_key[KEM_KEY_BYTES:]),
    ],
    ids=[
        "of-small-order",
        "of-small-order-in-disguise",
        "one-key-twice",
        "one-x25519-key-twice",
        "one-ml-kem-key-twice",
        "no-ml-kem-key",
    ],
)
async def test_keys_that_agree_on_no_secret(playing: Playing, change: Callable[[PlayedSilo, Any], Any]) -> None:
    async with playing(instead(Advertisement, change)) as play:
        await check_caught(play, "bad message")


async def test_keys_of_another_silo(playing: Playing) -> None:
    """Copied from bank-b's, as soon as those are in: who comes second with a key has copied it."""

    async def copy(silo: PlayedSilo, key: RoundKey, message: Advertisement) -> None:
        await silo.play.until(lambda: silo.play.phase == "advertise keys" and not is_awaited(silo.play.secure, BANK))
        keys = silo.play.silos[BANK].said_in(1, Advertisement)
        await silo.send(key, silo.signed(message, mask_key=keys.mask_key, box_key=keys.box_key))

    async with playing(in_its_place(Advertisement, copy)) as play:
        await check_caught(play, "advertised a key that is in use")


async def test_boxes_for_fewer_holders(playing: Playing) -> None:
    async with playing(instead(SharedKeys, lambda silo, it: replace(it, boxes=it.boxes[1:]))) as play:
        await check_caught(play, "bad message")


async def test_a_survivor_set_of_its_own(playing: Playing) -> None:
    """It signs another set than it was sent: it is no witness of this one, and the others are enough."""
    async with playing(instead(Agreement, lambda silo, it: silo.signed(it, survivors=bytes(32)))) as play:
        row = await play.closed(1)
        play.check_made_by(row, *SILOS)
        await check_named(play, row, "bad message: silo rogue-d signed another survivor set")


async def test_a_silo_that_was_caught_and_then_declines_stays_named(playing: Playing) -> None:
    async def spoil(silo: PlayedSilo, key: RoundKey, message: SharedKeys) -> None:
        await silo.send(key, unsigned(silo, message))
        raise MalformedMessage("what an agent declines for")

    async with playing(in_its_place(SharedKeys, spoil)) as play:
        await check_caught(play, "bad signature")
        assert play.dropped("declined") == 0


# --- false shares --------------------------------------------------------------------------------------------------


def with_box(
    silo: PlayedSilo, shared: SharedKeys, holder: SiloName, change: Callable[[SealedShare], SealedShare]
) -> SharedKeys:
    """Another sealed share for one holder, and signed for."""
    (index,) = [index for index, one in enumerate(shared.boxes) if one.holder == holder]
    sealed = change(shared.boxes[index])
    place = silo.at.roster.place(holder) - 1
    lines = list(shared.dealing.lines)
    lines[place] = replace(lines[place], box=sealed.digest)
    return SharedKeys(
        dealing=signed(replace(shared.dealing, lines=tuple(lines)), silo.credentials.identity_key),
        boxes=(*shared.boxes[:index], sealed, *shared.boxes[index + 1 :]),
    )


def with_false_shares(silo: PlayedSilo, shared: SharedKeys) -> SharedKeys:
    """hospital-a's box opens, and one bit of a share in it is another."""

    def spoil(shares: KeyShares) -> None:
        shares.mask_key.buffer[-1] ^= 1

    return with_box(silo, shared, HOSPITAL, lambda share: silo.resealed(share, spoil))


async def test_bad_shares_in_a_box(playing: Playing) -> None:
    """hospital-a complains and shows the key of that one box: the coordinator sees for itself, and names the dealer."""
    async with playing(instead(SharedKeys, with_false_shares)) as play:
        await check_caught(play, "false shares in the box from silo rogue-d to silo hospital-a", attempt=2)
        assert "complained about silo rogue-d" in play.row(1, 1).detail
        complaint = play.silos[HOSPITAL].said_in(1, Complaint)
        assert complaint.dealer == ROGUE
        assert play.silos[HOSPITAL].said_in(1, Reveal).roster != complaint.roster, "it revealed nothing of that attempt"


async def test_boxes_that_do_not_open(playing: Playing) -> None:
    """Nobody can tell who lied, the dealer or its accuser: both are named, and one is left out. Who goes on lying needs
    another opponent, and is then the one who was in both disputes."""

    def noise(silo: PlayedSilo, shared: SharedKeys) -> SharedKeys:
        victim = HOSPITAL if HOSPITAL in silo.at.roster else BANK
        return with_box(silo, shared, victim, lambda share: replace(share, box=share.box[::-1]))

    async with playing(instead(SharedKeys, noise)) as play:
        row = await play.closed(1)
        assert row.attempt == 3
        play.check_made_by(row, *HONEST)
        play.check_without_the_rogue(row)
        for attempt, accuser in ((1, HOSPITAL), (2, BANK)):
            abandoned = play.row(1, attempt)
            assert abandoned.outcome == "abandoned"
            disputed = {item.silo for item in abandoned.silos if item.detail.startswith("disputed")}
            assert disputed == {ROGUE, accuser}
        assert [item.silo for item in play.row(1, 2).silos] == [BANK, CLINIC, ROGUE]
        assert play.dropped("refused") == 4
        after = await play.closed(2)
        play.check_made_by(after, *HONEST)
        play.check_without_the_rogue(after)


async def test_shares_of_another_secret(playing: Playing, monkeypatch: pytest.MonkeyPatch) -> None:
    """Boxes and commitments fit each other; what the shares give back is not what it committed to. That is seen when
    all have revealed theirs for this round, so that the plan goes on with the next."""
    deal, plays = silo_own_dealing.dealt_shares, list[Play]()

    def deal_another(state: silo_states.Sharing, dealer: SiloName) -> Any:
        at = plays[0].rogue.at
        if isinstance(at, silo_states.InAttempt) and state.opening is at.opening:
            state = replace(state, opening=replace(state.opening, root=Secret(bytes(32))))
        return deal(state, dealer)

    for module in (silo_own_dealing, silo_unmasking):
        monkeypatch.setattr(module, "dealt_shares", deal_another)
    async with playing(honestly) as play:
        plays.append(play)
        row = await play.closed(1)
        assert row.outcome == "abandoned"
        assert play.of(row).outcome == "refused"
        assert play.of(row).detail.startswith("bad share: the shares of silo rogue-d give back another secret")
        assert play.dropped("refused") == 1
        after = await play.closed(2)
        play.check_made_by(after, *HONEST)
        play.check_without_the_rogue(after)


def with_false_share(silo: PlayedSilo, reveal: Reveal) -> Any:
    first = reveal.shares[0]
    false = replace(first, share=first.share[:-1] + bytes([first.share[-1] ^ 1]))
    return silo.signed(reveal, shares=(false, *reveal.shares[1:]))


async def test_a_share_that_nobody_committed_to(playing: Playing) -> None:
    async with playing(instead(Reveal, with_false_share)) as play:
        play.rogue_reveals_first()
        row = await play.closed(1)
        play.check_made_by(row, *SILOS)
        await check_named(play, row, "bad share: its share of silo bank-b is not the one")


async def test_a_false_complaint(playing: Playing) -> None:
    """It shows the true key of a sound box."""

    def complaint(silo: PlayedSilo, message: Any) -> Complaint:
        return complaint_about(silo, CLINIC, bytes(silo.key_of_box(CLINIC).buffer))

    async with playing(instead(MaskedInput, complaint)) as play:
        offence = "false complaint: nothing is wrong in the box from silo clinic-c to silo rogue-d"
        await check_caught(play, offence, attempt=2)


async def test_a_false_complaint_with_a_key_of_its_own_making(playing: Playing) -> None:
    """As above: of a dispute one is left out; at first, the accuser."""
    async with playing(instead(MaskedInput, lambda silo, it: complaint_about(silo, CLINIC, bytes(32)))) as play:
        row = await play.closed(1)
        assert row.attempt == 2
        play.check_made_by(row, *HONEST)
        play.check_without_the_rogue(row)
        disputed = {item.silo for item in play.row(1, 1).silos if item.detail.startswith("disputed")}
        assert disputed == {CLINIC, ROGUE}
        play.check_made_by(await play.closed(2), *HONEST)


async def test_a_complaint_about_who_dealt_it_nothing(playing: Playing) -> None:
    async with playing(instead(MaskedInput, lambda silo, it: complaint_about(silo, ROGUE, bytes(32)))) as play:
        await check_caught(play, "bad message")


# --- the masked vector ---------------------------------------------------------------------------------------------


def with_vector(silo: PlayedSilo, announced: MaskedInput, words: Any) -> Any:
    """The announcement of another vector, which is uploaded then."""
    silo.vector = silo.vector.replaced(words)
    return silo.signed(announced, words=len(words), vector=bytes.fromhex(silo.vector.manifest.digest))


@pytest.mark.parametrize("more", [-1, 1], ids=["a-word-less", "a-word-more"])
async def test_a_vector_of_wrong_length(playing: Playing, more: int) -> None:
    """Announced and signed for as what it is: not a byte of it is taken."""

    def wrong(silo: PlayedSilo, it: MaskedInput) -> Any:
        return with_vector(silo, it, np.resize(silo.vector.words, it.words + more))

    async with playing(instead(MaskedInput, wrong)) as play:
        await check_caught(play, "wrong length")


@pytest.mark.parametrize("words", [-1, 1 << 40], ids=["fewer", "without-end"])
async def test_a_vector_that_is_not_as_long_as_it_says(playing: Playing, words: int) -> None:
    """What it announces and the manifest beside it do not go together: refused at the edge, and then it is late."""
    refusals = list[LoricaError]()

    async def lie(silo: PlayedSilo, key: RoundKey, message: MaskedInput) -> None:
        header = masked_header_to_wire(MaskedHeader(key=key, masked=message, manifest=silo.vector.manifest), ROGUE)
        header.masked_input.CopyFrom(masked_input_to_wire(silo.signed(message, words=message.words + words)))
        with pytest.raises(MalformedMessage) as caught:
            await silo.upload(header, silo.vector)
        refusals.append(caught.value)

    async with playing(in_its_place(MaskedInput, lie)) as play:
        await play.deadline("masked input")
        await check_late(play, "masked input")
        assert len(refusals) == 1


async def test_a_vector_whose_bytes_are_not_what_it_announced(playing: Playing) -> None:
    refusals = list[LoricaError]()

    async def lie(silo: PlayedSilo, key: RoundKey, message: MaskedInput) -> None:
        log = SignedHead.sign(silo.credentials.identity_key, writer=silo.credentials.identity.uri, head=Head())
        announced = MaskedHeader(key=key, masked=message, manifest=silo.vector.manifest, log=log)
        header = masked_header_to_wire(announced, ROGUE)
        words = silo.vector.words
        words[len(words) // 2] ^= 1
        words.tofile(silo.vector.file)
        with pytest.raises(IntegrityError, match="does not have the digest in its manifest") as caught:
            await silo.upload(header, silo.vector)
        refusals.append(caught.value)

    async with playing(in_its_place(MaskedInput, lie)) as play:
        await play.deadline("masked input")
        await check_late(play, "masked input")
        assert len(refusals) == 1


async def test_noise_in_place_of_a_vector(playing: Playing) -> None:
    """Masked or noise, nobody can tell: the sum is spoilt, nobody is named. What it says beside the model is noise as
    well, and shows; the model moves by no more than the range allows."""
    words = np.random.default_rng(1)

    def noise(silo: PlayedSilo, it: MaskedInput) -> Any:
        return with_vector(silo, it, words.integers(0, 1 << 32, it.words, dtype=np.uint32))

    async with playing(instead(MaskedInput, noise)) as play:
        row = await play.closed(1)
        assert [(item.outcome, item.detail) for item in row.silos if item.silo != ROGUE] == [("committed", "")] * 3
        assert row.masked is not None
        assert row.masked.saturated > 0
        if row.outcome == "applied":
            assert not np.allclose(play.step_of(row), play.mean_of(row, *SILOS), atol=1e-3)
            # 2^31 is as many levels as four silos' largest coordinates come to, which are 1 in the first round.
            assert np.abs(play.step_of(row)).max() <= len(SILOS) * WEIGHT_CAP / row.masked.weight_sum * (1 + 1e-6)
        else:
            assert row.outcome == "zero_weight", "its weight came to less than nothing"


# --- weights -------------------------------------------------------------------------------------------------------


async def test_an_absurd_weight_is_cut_to_the_cap_of_the_round_and_counted(playing: Playing) -> None:
    """The encoding caps it; that a weight was cut shows in the sum, whose it was does not."""
    async with playing(honestly) as play:
        play.rogue.trainer.summary = replace(summary_of(ROGUE), examples=10**9, loss_max=1e9, loss_first=1e9)
        row = await play.closed(1)
        assert row.outcome == "applied"
        assert row.masked is not None
        assert row.masked.weight_sum == pytest.approx(sum(map(weight_of, HONEST)) + WEIGHT_CAP, abs=1e-4)
        assert row.masked.saturated == 1
        expected = play.mean_of(row, *SILOS, weights={ROGUE: WEIGHT_CAP})
        np.testing.assert_allclose(play.step_of(row), expected, rtol=0, atol=1e-6)
        assert play.at.metrics.registry.get_sample_value("lorica_saturated_coordinates_total") == 1


def heavier(levels: int) -> Attack:
    """So much is added to the word of its weight, under the masks."""

    def change(silo: PlayedSilo, it: MaskedInput) -> Any:
        words = silo.vector.words
        words[-EXTRA_WORDS : 1 - EXTRA_WORDS] += np.uint32(levels % (1 << 32))
        return with_vector(silo, it, words)

    return instead(MaskedInput, change)


async def test_a_weight_beyond_the_cap_shows_in_the_sum(playing: Playing) -> None:
    """Who does not encode as agents do can claim as many caps as there are silos: the others' part shrinks
    accordingly."""
    async with playing(heavier(2 * LEVELS)) as play:
        row = await play.closed(1)
        assert row.outcome == "applied"
        assert row.masked is not None
        claimed = ONES_SUM + 2 * WEIGHT_CAP
        assert row.masked.weight_sum == pytest.approx(claimed, abs=1e-4)
        np.testing.assert_allclose(play.step_of(row), play.mean_of(row, *SILOS) * ONES_SUM / claimed, rtol=0, atol=1e-6)
        assert [(item.outcome, item.detail) for item in row.silos if item.silo != ROGUE] == [("committed", "")] * 3, (
            "nobody can be named"
        )


async def test_a_weight_below_zero_costs_the_round_and_no_more(playing: Playing) -> None:
    async with playing(heavier(-LEVELS)) as play:
        row = await play.closed(1)
        assert row.outcome == "zero_weight"
        assert row.model == play.base_of(row)
        play.check_made_by(await play.closed(2), *SILOS)


async def test_a_delta_beyond_the_range_is_scaled_and_counted(
    playing: Playing, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with playing(honestly) as play:
        elements = play.bundle.layout.parameters
        monkeypatch.setattr(play.rogue.trainer, "drawn", lambda bundle, key: np.full(elements, 1e30, dtype="<f4"))
        row = await play.closed(1)
        assert row.masked is not None
        assert row.masked.saturated == elements
        largest = (WEIGHT_CAP + sum(map(weight_of, HONEST)) * LARGEST_DELTA) / ONES_SUM
        assert np.abs(play.step_of(row)).max() <= largest * (1 + 1e-6)


# --- messages that are not for now ---------------------------------------------------------------------------------


async def test_messages_of_another_silo_over_its_own_certificate(playing: Playing) -> None:
    """Each of bank-b's messages, as bank-b signed it, brought by the rogue in its own name and in bank-b's."""
    brought = set[type]()

    async def attack(silo: PlayedSilo, key: RoundKey, message: Any) -> None:
        kind, bank = type(message), silo.play.silos[BANK]
        if key.round == 1 and kind is not Declared:
            await silo.play.until(lambda: bank.said_in(1, kind) is not None)
            for named, error in ((ROGUE, MalformedMessage), (BANK, AuthorisationError)):
                async with silo.play.refused(error):
                    await bring(silo, key, bank, bank.said_in(1, kind), named)
            brought.add(kind)
        await silo.send(key, message)

    async with playing(attack) as play:
        play.check_made_by(await play.closed(1), *SILOS)
        assert brought >= {Advertisement, SharedKeys, MaskedInput, Agreement}
        play.check_nobody_else_was_named()


async def bring(silo: PlayedSilo, key: RoundKey, of: PlayedSilo, message: Any, named: SiloName) -> None:
    """A message of another silo, in a call that names this one."""
    if not isinstance(message, MaskedInput):
        await silo.tell(mask_answer_to_wire(key, named, message))
        return
    manifest = of.vectors[message.vector].manifest
    header = masked_header_to_wire(MaskedHeader(key=key, masked=message, manifest=manifest), of.name)
    header.key.CopyFrom(common_codec.round_call_key(key, named))
    await silo.upload(header)


async def test_messages_of_an_earlier_attempt(playing: Playing) -> None:
    """In round 2 it says first what it said in round 1: keys, boxes, vector, signature. None of it fits."""
    said = list[type]()

    async def attack(silo: PlayedSilo, key: RoundKey, message: Any) -> None:
        earlier = silo.said_in(1, type(message))
        if key.round == 2 and not isinstance(message, Declared | Reveal):
            async with silo.play.refused(WrongTime):
                await bring(silo, key, silo, earlier, ROGUE)
            said.append(type(message))
        await silo.send(key, message)

    async with playing(attack) as play:
        for number in (1, 2):
            play.check_made_by(await play.closed(number), *SILOS)
        assert said == [Advertisement, SharedKeys, MaskedInput, Agreement]
        play.check_nobody_else_was_named()


async def test_a_second_and_different_answer(playing: Playing) -> None:
    """The first counts; nobody is dropped for the second."""
    tried = asyncio.Event()

    async def attack(silo: PlayedSilo, key: RoundKey, message: Any) -> None:
        await silo.send(key, message)
        if key.round == 1 and isinstance(message, Advertisement):
            async with silo.play.refused(Conflict):
                await silo.client.send(key, silo.signed(message, mask_key=bytes(PUBLIC_KEY_BYTES - 1) + b"\x09"))
            tried.set()

    async def waits(silo: PlayedSilo, key: RoundKey, message: Any) -> None:
        """So that the phase is still the same."""
        if isinstance(message, Advertisement):
            await tried.wait()
        await silo.send(key, message)

    async with playing(attack) as play:
        play.silos[BANK].attack = waits
        play.check_made_by(await play.closed(1), *SILOS)
        play.check_nobody_else_was_named()


async def test_a_plain_upload_in_a_masked_round(playing: Playing) -> None:
    """Before masks are agreed on and afterwards; not a byte of it is kept."""
    tried = list[str]()

    async def attack(silo: PlayedSilo, key: RoundKey, message: Any) -> None:
        if key.round == 1 and isinstance(message, Declared | MaskedInput):
            update, state = silo.service.agent.saved, silo.play.state
            assert update is not None
            assert isinstance(state, Collecting | Masking)
            async with silo.play.refused(WrongTime):
                await silo.client.send(key, InTheClear(update, silo.journal.update_file(key)))
            tried.append(state.phase)
            spools = silo.play.at.coordinator.settings.state_folder / "spools"
            assert not list(spools.rglob(f"{ROGUE}.*"))
        await silo.send(key, message)

    async with playing(attack) as play:
        play.check_made_by(await play.closed(1), *SILOS)
        assert tried == ["collecting", "masking"]
        play.check_nobody_else_was_named()


async def test_masked_messages_in_a_plain_round(playing: Playing) -> None:
    tried = list[str]()

    async def attack(silo: PlayedSilo, key: RoundKey, message: Any) -> None:
        assert isinstance(message, InTheClear)
        if key.round == 1:
            digest = bytes(32)
            async with silo.play.refused(WrongTime):
                await silo.client.send(key, Declared(message.update.model))
            async with silo.play.refused(WrongTime):
                await silo.client.send(key, silo.signed(Agreement(roster=digest, silo=ROGUE, survivors=digest)))
            manifest = manifest_of(masked_layout(5), [bytes(20)])
            vector = MaskedInput(
                roster=digest, dealings=digest, silo=ROGUE, words=5, vector=bytes.fromhex(manifest.digest)
            )
            header = MaskedHeader(key=key, masked=silo.signed(vector), manifest=manifest)
            async with silo.play.refused(WrongTime):
                await silo.upload(masked_header_to_wire(header, ROGUE))
            tried.append("all")
        await silo.send(key, message)

    async with playing(attack, plan=PLAIN) as play:
        row = await play.closed(1)
        assert (row.outcome, row.masked) == ("applied", None)
        assert [(item.silo, item.outcome) for item in row.silos] == [(silo, "committed") for silo in SILOS]
        assert tried == ["all"]
        np.testing.assert_allclose(play.step_of(row), play.mean_of(row, *SILOS), rtol=0, atol=1e-6)


# --- silence -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("phase", "kind"),
    [("advertise keys", Advertisement), ("share keys", SharedKeys), ("masked input", MaskedInput)],
    ids=["keys", "boxes", "vector"],
)
async def test_silence_before_the_sum_is_fixed(playing: Playing, phase: str, kind: type) -> None:
    """The deadline drops it from this sum; nothing is held against it afterwards."""
    async with playing(instead(kind, lambda silo, it: None)) as play:
        await play.deadline(phase)
        await check_late(play, phase)


async def test_silence_about_its_training(playing: Playing) -> None:
    async with playing(instead(Declared, lambda silo, it: None)) as play:
        await play.until(lambda: isinstance(play.state, Collecting) and set(play.state.trained) == set(HONEST))
        await play.pass_deadline()
        row = await play.closed(1)
        play.check_made_by(row, *HONEST)
        assert (play.of(row).outcome, play.dropped("late")) == ("late", 1)
        play.check_made_by(await play.closed(2), *SILOS)


async def test_silence_in_the_consistency_check(playing: Playing) -> None:
    """Three signatures are enough, and its vector counts all the same."""
    async with playing(instead(Agreement, lambda silo, it: None)) as play:
        await play.deadline("consistency check")
        row = await play.closed(1)
        play.check_made_by(row, *SILOS)
        assert play.of(row).detail == "no answer in the phase consistency check"
        assert play.dropped("late") == 1
        play.check_made_by(await play.closed(2), *SILOS)


async def test_silence_when_shares_are_asked_for(playing: Playing) -> None:
    """Three silos' shares are enough: nobody waits for it."""
    async with playing(instead(Reveal, lambda silo, it: None)) as play:
        for number in (1, 2):
            play.check_made_by(await play.closed(number), *SILOS)
        assert play.dropped("late") == 0


# --- the operator shuts a silo out in the middle of it
# -----------------------------------------------------------------


async def test_revoked_silo_of_a_masked_round_is_a_drop_out_and_the_sum_comes_out(playing: Playing) -> None:
    """Its keys are in the roster and its shares are dealt: it is revoked in place of its masked vector."""

    async def shut_out(silo: PlayedSilo, key: RoundKey, message: Any) -> None:
        await silo.play.at.service.revoke(Role.SILO, ROGUE)
        await silo.send(key, message)

    async with playing(in_its_place(MaskedInput, shut_out)) as play:
        row = await play.closed(1)
        play.check_made_by(row, *HONEST)
        assert (play.of(row).outcome, play.of(row).detail) == ("refused", "revoked by the operator")
        play.check_without_the_rogue(await play.closed(2))
        ended = await play.rogue.ended()
        assert isinstance(ended, AuthorisationError)
        assert "revoked" in str(ended)


async def test_a_vector_in_chunks_of_another_size_is_not_taken(playing: Playing) -> None:
    """Nobody could check the round's model chunk by chunk with it; without its vector the sum is the others'."""

    async def other_chunks(silo: PlayedSilo, key: RoundKey, it: MaskedInput) -> None:
        silo.vector = replace(silo.vector, chunk_bytes=1 << 14).replaced(silo.vector.words)
        announced = silo.signed(it, vector=bytes.fromhex(silo.vector.manifest.digest))
        async with silo.play.refused(MalformedMessage):
            await silo.send(key, announced)

    async with playing(in_its_place(MaskedInput, other_chunks)) as play:
        await play.deadline("masked input")
        await check_late(play, "masked input")
