"""Keys between two silos take a secret of X25519 and one of ML-KEM-768: neither kind alone leads to a mask or into a
box.

What a recorder may break one day is played by handing out one kind's secrets: with all of X25519, or all of ML-KEM, the
keys that come out must be others than the true ones. The dealers' side is played by rogues that encapsulate, copy and
commit as they like.
"""

from collections.abc import Callable
from dataclasses import fields, replace
from itertools import combinations
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorica_security.errors import IntegrityError, MalformedMessage
from lorica_security.secure_aggregation import roster as silo_roster
from lorica_security.secure_aggregation.coordinator import states as coordinator_states
from lorica_security.secure_aggregation.coordinator.effects import Offence
from lorica_security.secure_aggregation.keys import key_agreement, pair_secret, share_box
from lorica_security.secure_aggregation.keys.key_agreement import (
    KEM_KEY_BYTES,
    Encapsulation,
    KeyPair,
    Link,
    encapsulated,
    halves,
)
from lorica_security.secure_aggregation.keys.pair_secret import PairCopy
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.keys.secret_sharing import SALT_BYTES, SHARE_BYTES
from lorica_security.secure_aggregation.messages import Advertisement, SharedKeys, signed
from tests.support import ml_kem
from tests.support.secagg_federation import Federation, entropy, identity_key, silo_names

FIRST, SECOND, THIRD, FOURTH = NAMES = silo_names(4)


def keys_of(name: str) -> tuple[Secret, KeyPair]:
    return Secret(entropy("hybrid", name)), KeyPair(Secret(entropy("hybrid", name)))


def link_of(first: KeyPair, second: KeyPair, roster: bytes = bytes(32)) -> Link:
    return Link(roster=roster, silos=(FIRST, SECOND), keys=(first.public, second.public))


class OneKind(KeyPair):
    """Somebody who broke one kind, and has to guess the secrets of the other."""

    def __init__(self, keys: KeyPair, *, broke: str) -> None:
        self._keys, self._broke = keys, broke

    def agreed(self, public: bytes, peer: object) -> Secret:
        return self._keys.agreed(public, peer) if self._broke == "x25519" else Secret(bytes(32))  # type: ignore[arg-type]

    def decapsulated(self, ciphertext: bytes) -> Secret:
        return self._keys.decapsulated(ciphertext) if self._broke == "ml-kem" else Secret(bytes(32))


@pytest.mark.parametrize("broke", ["x25519", "ml-kem"])
def test_one_kind_alone_opens_no_box_and_makes_no_mask(broke: str) -> None:
    (secret, first), (_, second) = keys_of("one"), keys_of("two")
    link, thief = link_of(first, second), OneKind(second, broke=broke)
    kem = encapsulated(second.public)
    box = key_agreement.box_key(first, link, own=FIRST, kem=kem)
    taken = Encapsulation(thief.decapsulated(kem.ciphertext), kem.ciphertext)
    assert key_agreement.box_key(thief, link, own=SECOND, kem=taken) != box
    pair = pair_secret.pair_secret(secret, link)
    copy = pair_secret.copied(pair, link, encapsulated(second.public))
    bound_to = {"copy": copy.digest, "dealings": bytes(32)}
    mask = key_agreement.pairwise_mask_key(first, link, own=FIRST, pair_secret=pair, **bound_to)
    found = pair_secret.uncovered(copy, link, thief)
    assert key_agreement.pairwise_mask_key(thief, link, own=SECOND, pair_secret=found, **bound_to) != mask
    found = pair_secret.uncovered(copy, link, second)
    assert key_agreement.pairwise_mask_key(second, link, own=SECOND, pair_secret=found, **bound_to) == mask


@settings(max_examples=40)
@given(st.sampled_from(["roster", "names", "first key", "second key", "kem", "copy", "dealings"]), st.integers(0, 255))
def test_every_input_of_a_key_changes_it(which: str, at: int) -> None:
    (secret, first), (_, second) = keys_of("one"), keys_of("two")
    link = link_of(first, second)
    pair, copy, dealings, ciphertext = pair_secret.pair_secret(secret, link), bytes(32), bytes(32), bytes(1088)

    def flipped(data: bytes) -> bytes:
        place = at % len(data)
        return data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :]

    # KEM halves alone: another X25519 half is another agreement, which is another key already
    changed = {
        "roster": lambda: replace(link, roster=flipped(link.roster)),
        "names": lambda: replace(link, silos=(FIRST, THIRD)),
        "first key": lambda: replace(link, keys=(flipped(link.keys[0]), link.keys[1])),
        "second key": lambda: replace(link, keys=(link.keys[0], flipped(link.keys[1]))),
    }.get(which, lambda: link)()
    kem = flipped(ciphertext) if which == "kem" else ciphertext
    masks = [
        key_agreement.pairwise_mask_key(first, using, own=FIRST, pair_secret=pair, copy=told, dealings=all_of)
        for using, told, all_of in (
            (link, copy, dealings),
            (
                changed,
                flipped(copy) if which == "copy" else copy,
                flipped(dealings) if which == "dealings" else dealings,
            ),
        )
    ]
    boxes = [
        key_agreement.box_key(first, using, own=FIRST, kem=Encapsulation(Secret(bytes(32)), text))
        for using, text in ((link, ciphertext), (changed, kem))
    ]
    assert (masks[0] != masks[1]) == (which != "kem")
    assert (boxes[0] != boxes[1]) == (which not in ("copy", "dealings"))


@settings(max_examples=10)
@given(st.binary(min_size=32, max_size=32), st.binary(min_size=32, max_size=32))
def test_encapsulation_is_that_of_fips_203(seed: bytes, coins: bytes) -> None:
    """OpenSSL decapsulates what a second implementation, from the standard's text, encapsulates."""
    keys = KeyPair(Secret(seed))
    secret, ciphertext = ml_kem.encapsulate(halves(keys.public)[0], coins)
    assert bytes(keys.decapsulated(ciphertext).buffer) == secret


def test_each_encapsulation_is_drawn_anew() -> None:
    _, keys = keys_of("one")
    one, other = encapsulated(keys.public), encapsulated(keys.public)
    assert one.ciphertext != other.ciphertext
    assert one.secret != other.secret
    assert keys.decapsulated(one.ciphertext) == one.secret


@pytest.mark.parametrize("dropped", [*combinations(NAMES, 1), (FIRST, FOURTH)], ids="-".join)
def test_masks_of_whoever_drops_are_taken_out_wherever_its_name_stands(dropped: tuple[str, ...]) -> None:
    """First of all its pairs, second of all, or both: its mask secret leads to every pair secret."""
    names = silo_names(7)
    gone = {names[NAMES.index(name)]: "masked input" for name in dropped}  # type: ignore[arg-type]
    federation = Federation(7).run(drops=gone)
    assert federation.unmask is not None
    assert federation.sum().tolist() == federation.true_sum().tolist()


def spoilt(data: bytes) -> bytes:
    return data[:-1] + bytes([data[-1] ^ 1])


def resealed(federation: Federation, shared: SharedKeys, change: Callable[[PairCopy], PairCopy]) -> SharedKeys:
    """What the first silo deals, with another copy for the second, and signed like that."""
    index = next(index for index, box in enumerate(shared.boxes) if box.holder == SECOND)
    copy = shared.boxes[index].copy
    assert copy is not None
    box = replace(shared.boxes[index], copy=change(copy))
    roster = federation.coordinator.roster  # type: ignore[union-attr]
    place = roster.place(SECOND) - 1
    lines = (*shared.dealing.lines[:place], replace(shared.dealing.lines[place], box=box.digest))
    dealing = replace(shared.dealing, lines=(*lines, *shared.dealing.lines[place + 1 :]))
    boxes = (*shared.boxes[:index], box, *shared.boxes[index + 1 :])
    return SharedKeys(dealing=signed(dealing, identity_key(FIRST)), boxes=boxes)


def dealt_with(change: Callable[[PairCopy], PairCopy]) -> Federation:
    federation = Federation(5)

    def alter(to: str, message: object) -> object:
        if not to and isinstance(message, SharedKeys) and message.silo == FIRST:
            made = resealed(federation, message, change)
            rogue = federation.silos[FIRST]
            rogue.state = replace(rogue.state, shared=made)  # type: ignore[call-arg]
            return made
        return message

    federation.alter = alter  # type: ignore[assignment]
    return federation


def test_a_commitment_to_another_pair_secret_than_the_box_holds_is_complained_of() -> None:
    """The second tells at once, so that no mask is made that nobody could take out."""
    federation = dealt_with(lambda copy: replace(copy, commitment=spoilt(copy.commitment))).run()
    assert (FIRST, Offence.BAD_SHARE) in [(it.silo, it.offence) for it in federation.blames]


@pytest.mark.parametrize("part", ["covered", "ciphertext"])
def test_a_copy_of_another_pair_secret_convicts_its_dealer_when_the_second_drops(part: str) -> None:
    """Box and commitment fit; what the second's mask secret leads to does not. Nothing is unmasked, and the first is
    named."""
    change = {part: spoilt}
    federation = dealt_with(lambda copy: replace(copy, **{part: change[part](getattr(copy, part))}))
    federation.run(drops={SECOND: "masked input"})
    assert isinstance(federation.coordinator, coordinator_states.Abandoned)
    assert federation.unmask is None
    lied = [(it.silo, it.offence) for it in federation.blames if it.offence is not Offence.SILENCE]
    assert lied == [(FIRST, Offence.BAD_SHARE)]


@pytest.mark.parametrize("part", ["mask_key", "box_key"])
@pytest.mark.parametrize("size", [32, KEM_KEY_BYTES, KEM_KEY_BYTES + 33])
def test_a_key_of_one_kind_alone_is_no_key(part: str, size: int) -> None:
    """An agent of before, or a coordinator that takes the other half out: there is no message in which one kind is
    enough."""
    federation = Federation(4).run(until="share keys")
    advertised = next(message for message in federation.seen if isinstance(message, Advertisement))
    with pytest.raises(MalformedMessage, match=r"bytes|without ML-KEM-768: upgrade its agent"):
        replace(advertised, **{part: bytes(size)})


@pytest.mark.parametrize("part", ["mask_key", "box_key"])
@pytest.mark.parametrize("half", [0, 1])
def test_a_silo_refuses_a_roster_in_which_one_half_of_a_key_is_another(part: str, half: int) -> None:
    federation = Federation(4)
    _, keys = keys_of("of the coordinator")

    def alter(to: str, message: object) -> object:
        if not isinstance(message, silo_roster.Roster):
            return message
        member = message.members[2]
        mixed = list(halves(getattr(member, part)))
        mixed[half] = halves(keys.public)[half]
        members = (*message.members[:2], replace(member, **{part: b"".join(mixed)}), *message.members[3:])
        return replace(message, members=members)

    federation.alter = alter  # type: ignore[assignment]
    with pytest.raises(IntegrityError, match="silo-02"):
        federation.run()


def test_what_was_encapsulated_is_durable_before_it_is_sent() -> None:
    """Drawn anew after a restart, it would be a second dealing: then two masks of one pair could differ."""
    federation = Federation(4).run(until="masked input")
    each = federation.silos[SECOND]
    sent = [message for message in each.sent if isinstance(message, SharedKeys)]
    assert any(isinstance(event, SharedKeys) for event in each.journal)
    again = [message for message in each.restart() if isinstance(message, SharedKeys)]
    assert again == [sent[0]] * len(again)
    assert each.state.shared == sent[0]  # type: ignore[union-attr]
    federation.run()
    assert federation.sum().tolist() == federation.true_sum().tolist()


def test_a_dealing_is_bound_to_every_part_of_a_sealed_share() -> None:
    federation = Federation(4).run(until="masked input")
    shared = next(message for message in federation.silos[FIRST].sent if isinstance(message, SharedKeys))
    share = shared.boxes[0]
    copy = share.copy
    assert copy is not None
    digests = {share.digest}
    for change in (
        {"ciphertext": spoilt(share.ciphertext)},
        {"box": spoilt(share.box)},
        *({"copy": replace(copy, **{it.name: spoilt(getattr(copy, it.name))})} for it in fields(PairCopy)),
    ):
        digests.add(replace(share, **change).digest)  # type: ignore[arg-type]
    assert len(digests) == 6


@pytest.mark.parametrize(
    "changed",
    [{"roster": bytes(31) + b"\1"}, {"dealer": SECOND}, {"holder": SECOND}],
    ids=["roster", "dealer", "holder"],
)
def test_a_box_opens_for_its_own_roster_dealer_and_holder_alone(changed: dict[str, Any]) -> None:
    """By the associated data also under its own key; the changed names leave its length as it is."""
    key, bound_to = Secret(bytes(32)), {"roster": bytes(32), "dealer": THIRD, "holder": FIRST}
    shares = share_box.KeyShares(
        self_mask=Secret(bytes(SHARE_BYTES)),
        self_mask_salt=Secret(bytes(SALT_BYTES)),
        mask_key=Secret(bytes(SHARE_BYTES)),
        mask_key_salt=Secret(bytes(SALT_BYTES)),
    )
    box = share_box.sealed(shares, key, **bound_to)  # type: ignore[arg-type]
    assert share_box.opened(box, key, **bound_to) == shares  # type: ignore[arg-type]
    with pytest.raises(IntegrityError, match="does not open"):
        share_box.opened(box, key, **(bound_to | changed))
