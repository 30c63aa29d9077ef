"""A silo's side of secure aggregation: `step(state, event, party) -> (state, effects)`, by one table.

    Resting     --OpenAttempt--> Advertised     remember the attempt, journal; send the Advertisement
    Advertised  --Roster-------> Sharing        check the roster, journal; encapsulate to all keys, seal the boxes
    Sharing     --SharedKeys---> Dealt          journal what was made; send it
    Dealt       --Delivery-----> Masking        check all dealings and boxes; remember who dealt, journal; mask the vector
    Dealt       --Delivery-----> Resting        a dealer dealt falsely: send a Complaint, erase
    Masking     --VectorMasked-> Masked         journal the digest; send the MaskedInput
    Masked      --SurvivorSet--> Agreed         journal the set; sign it, once
    Agreed      --UnmaskRequest> Revealed       at least `threshold` signatures on that set; remember, journal; send the Reveal
    any attempt --AttemptEnded-> Resting        erase

A message that was answered may come again, the very same, and is answered by the very same bytes; another in its place is a
Conflict. All else raises and changes nothing. A handler checks everything, then commits.

Effects stand in the order in which they must be done: `Remember` and `Journal` are durable before anything is sent. The
journal of an attempt is the list of its events; `restored` replays it, and since all that is random comes from the root in
OpenAttempt, but for what was encapsulated, which is in the journalled SharedKeys, gives the same state and the same bytes. `Erase` ends it: root and journal go, in memory and on disk. The root
must not outlive the attempt; whoever has it and the boxes can open them.

What this machine holds a coordinator to (DESIGN section 4), by rule:
- every member's keys are signed by the identity key that this silo's own people pinned, so that phantoms cannot fill a cohort;
- model, tensors and parameters are what this silo expects and demands, and are bound to every key by the roster digest;
- the roster is bound to the newest release groups that this silo holds, and nobody in its own has seen keys of this silo that
  it does not remember: else it forgot what it took part in, or its disk went back;
- masks go only to those who dealt, and are bound to who dealt what; survivors are whole release groups of them, with the vectors
  that they announced. A silo whose group is incomplete counts as dropped; it signs and reveals like the others;
- one survivor set per attempt is signed, and nothing is revealed but for that set, signed by `threshold` dealers;
- one share per dealer: of the self mask for a survivor, of the mask key for all others.
"""

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from lorica_security.errors import (
    Conflict,
    IntegrityError,
    MalformedMessage,
    PolicyRefusal,
    StateError,
    WrongTime,
)
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.groups.release_groups import (
    RELEASE_GROUPS,
    Group,
    Link,
    Partition,
    Promise,
    least_group,
    too_little,
)
from lorica_security.secure_aggregation.keys import key_agreement, pair_secret, secret_sharing, share_box
from lorica_security.secure_aggregation.keys.key_agreement import ROOT_BYTES, Encapsulate, Encapsulation, KeyPair
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.keys.secret_sharing import MASK_KEY, SALT_BYTES, SELF_MASK, share_commitment
from lorica_security.secure_aggregation.keys.share_box import KeyShares
from lorica_security.secure_aggregation.masked_vectors.fixed_point import FixedPoint
from lorica_security.secure_aggregation.masked_vectors.mask_stream import KeyStream, MaskSum
from lorica_security.secure_aggregation.messages import (
    OWN_BOX,
    Advertisement,
    Agreement,
    Complaint,
    Dealing,
    DealtLine,
    Delivery,
    Identities,
    MaskedInput,
    MaskKeyShare,
    Reveal,
    RevealedShare,
    SealedShare,
    SelfMaskShare,
    SharedKeys,
    SurvivorSet,
    UnmaskRequest,
    check_signed,
    signed,
)
from lorica_security.secure_aggregation.parameters import LEAST_COHORT, Parameters
from lorica_security.secure_aggregation.roster import Roster
from lorica_security.secure_aggregation.silo_memory import MASKING_MEMORY, Seen, SiloMemory
from lorica_security.secure_aggregation.transcript import DIGEST_BYTES, check_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Demands:
    """What this silo's own policy asks of a cohort; the coordinator can ask for more, never for less.

    `colluders` is how many members may work against it, whatever the size of the cohort: see `parameters`. `smallest_group` is of
    release groups, and of sets that sums can be subtracted down to.
    """

    min_cohort: int = LEAST_COHORT
    min_threshold: int = LEAST_COHORT
    min_survivors: int = LEAST_COHORT
    colluders: int = 0
    smallest_group: int = LEAST_COHORT

    @property
    def least_group(self) -> int:
        """The fewest silos of a release group; all colluders may sit in one."""
        return max(self.smallest_group, least_group(self.colluders))

    @property
    def promise(self) -> Promise:
        """What release groups have to promise, at least."""
        return Promise(colluders=self.colluders, smallest_group=self.least_group)

    def check(self, parameters: Parameters) -> None:
        """Raises PolicyRefusal, which names the rule."""
        for rule, offered, demanded in (
            ("min_cohort", parameters.cohort, max(self.min_cohort, LEAST_COHORT)),
            ("min_threshold", parameters.threshold, max(self.min_threshold, LEAST_COHORT)),
            ("min_survivors", parameters.min_survivors, max(self.min_survivors, LEAST_COHORT)),
            ("colluders", parameters.colluders, self.colluders),
        ):
            if offered < demanded:
                raise PolicyRefusal(rule, f"{rule} of this silo is {demanded}, the roster offers {offered}")


@dataclass(frozen=True, kw_only=True)
class Party:
    """Who this silo is, and whom its people pinned (itself need not be among them).

    `link` has the newest release groups that this silo holds. `approved` are smaller groups, and `approved_atoms` smaller sets
    that sums can be subtracted down to, that its people allowed.
    """

    federation: FederationName
    silo: SiloName
    identity_key: Ed25519PrivateKey
    pinned: Identities
    demands: Demands = Demands()
    link: Link | None = None
    approved: frozenset[Group] = frozenset()
    approved_atoms: frozenset[Group] = frozenset()

    @property
    def identities(self) -> Identities:
        return {**self.pinned, self.silo: self.identity_key.public_key()}


# --- events: from the silo's own side, and from the coordinator (messages, roster) -----------------------------------


@dataclass(frozen=True, kw_only=True)
class OpenAttempt:
    """The agent takes part: `model` and `tensors` are what it trained from; `root` is 32 fresh bytes of OS entropy.

    `seen` is the machine's to fill in: what this silo says in its advertisement of others.
    """

    attempt: Attempt
    model: bytes
    tensors: tuple[int, ...]
    root: Secret
    seen: Seen = ()

    def __post_init__(self) -> None:
        check_bytes("attempt", DIGEST_BYTES, model=self.model)
        if len(self.root) != ROOT_BYTES:
            raise StateError(f"the root of an attempt has {len(self.root)} bytes: draw {ROOT_BYTES}")


@dataclass(frozen=True, slots=True)
class VectorMasked:
    """The masked vector is on disk; `vector` is its digest (of its manifest). It also pins the encoding, masks being fixed."""

    vector: bytes

    def __post_init__(self) -> None:
        check_bytes("masked vector", DIGEST_BYTES, digest=self.vector)


@dataclass(frozen=True, slots=True)
class AttemptEnded:
    """The sum came out, or the attempt was abandoned, by whichever side."""

    attempt: Attempt


Event = OpenAttempt | Roster | SharedKeys | Delivery | VectorMasked | SurvivorSet | UnmaskRequest | AttemptEnded


# --- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Remember:
    """Replace what is remembered, durably, before any later effect."""

    memory: SiloMemory


@dataclass(frozen=True, slots=True)
class Journal:
    """Append to the attempt's journal, durably, before any later effect; OpenAttempt holds the root (mode 0600)."""

    event: Event


@dataclass(frozen=True, slots=True)
class Send:
    message: Advertisement | SharedKeys | Complaint | MaskedInput | Agreement | Reveal


@dataclass(frozen=True, slots=True)
class ShareKeys:
    """Have `shared_keys` make what this silo deals, with fresh encapsulations: gives SharedKeys."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MaskVector:
    """Encode the delta with `rounding`, add noise of `noise` where the plan wants it, add `masks`, write to disk: gives VectorMasked.

    `parameters` are the roster's. Erase all three when done.
    """

    parameters: Parameters
    rounding: KeyStream
    noise: Secret
    masks: MaskSum

    @property
    def fixed_point(self) -> FixedPoint:
        return self.parameters.fixed_point

    def erase(self) -> None:
        self.rounding.erase()
        self.noise.erase()
        self.masks.erase()


@dataclass(frozen=True, slots=True, kw_only=True)
class Erase:
    """Erase `root` in memory, and the attempt's journal, root and masked vector on disk."""

    attempt: Attempt
    root: Secret


Effect = Remember | Journal | Send | ShareKeys | MaskVector | Erase


# --- states -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Resting:
    memory: SiloMemory


@dataclass(frozen=True, kw_only=True)
class Advertised:
    memory: SiloMemory
    opening: OpenAttempt

    @property
    def attempt(self) -> Attempt:
        return self.opening.attempt


@dataclass(frozen=True, kw_only=True)
class Sharing(Advertised):
    roster: Roster


@dataclass(frozen=True, kw_only=True)
class Dealt(Sharing):
    shared: SharedKeys


@dataclass(frozen=True, kw_only=True)
class Masking(Dealt):
    delivery: Delivery


@dataclass(frozen=True, kw_only=True)
class Masked(Masking):
    vector: bytes


@dataclass(frozen=True, kw_only=True)
class Agreed(Masked):
    survivors: SurvivorSet


@dataclass(frozen=True, kw_only=True)
class Revealed(Agreed):
    pass


State = Resting | Advertised | Sharing | Dealt | Masking | Masked | Agreed | Revealed
STATES: tuple[type[State], ...] = (Resting, Advertised, Sharing, Dealt, Masking, Masked, Agreed, Revealed)
EVENTS: tuple[type[Event], ...] = (
    OpenAttempt,
    Roster,
    SharedKeys,
    Delivery,
    VectorMasked,
    SurvivorSet,
    UnmaskRequest,
    AttemptEnded,
)

Step = tuple[State, tuple[Effect, ...]]


def step(state: State, event: Event, party: Party) -> Step:
    """The state after `event`, and what to do, in this order.

    Raises WrongTime (does not fit the state), Conflict (a second, different answer was asked for), PolicyRefusal (this
    silo's rules; the roster is to be refused for good), AuthenticationError, IntegrityError or MalformedMessage.
    """
    handler = TABLE.get((type(state), type(event)))
    if handler is None:
        raise WrongTime(f"{type(event).__name__} does not fit the state {type(state).__name__}: nothing was changed")
    return handler(state, event, party)


def restored(memory: SiloMemory, journal: tuple[Event, ...], party: Party) -> Step:
    """Where a restarted agent stands: the state that the journal leads to, and the last event's effects, to be done again.

    Remember and Journal effects among them are already done and are left out. An empty journal gives a silo at rest.
    Raises PolicyRefusal for a journal that `memory` is not of: of another attempt than the last that was joined, or one that
    says less than this silo has done. It was put back, or the memory was.
    """
    if not journal:
        return Resting(memory), ()
    opening, *events = journal
    if not isinstance(opening, OpenAttempt):
        raise IntegrityError(
            f"the journal of a secure aggregation begins with {type(opening).__name__}: forfeit the attempt"
        )
    advertisement = _advertisement(opening, party)
    _check_is_last(memory, opening.attempt, advertisement)
    state: State = Advertised(memory=memory, opening=opening)
    effects: tuple[Effect, ...] = (Send(advertisement),)
    for event in events:
        _erase_work(effects)  # of a step that was done before the one to be done again
        state, effects = step(state, event, party)
    last = memory.of(opening.attempt.plan)
    answered = last is not None and last.answered
    if answered and not isinstance(state, Agreed):
        _erase_work(effects)
        raise _not_of_today(
            f"the journal of {opening.attempt} comes to {type(state).__name__}, and by its memory this silo answered it"
        )
    state = replace(state, memory=memory)  # which has what playing it again remembers
    return state, tuple(effect for effect in effects if not isinstance(effect, Remember | Journal))


def _erase_work(effects: tuple[Effect, ...]) -> None:
    for effect in effects:
        if isinstance(effect, MaskVector):
            effect.erase()


def _check_is_last(memory: SiloMemory, attempt: Attempt, advertisement: Advertisement) -> None:
    last = memory.of(attempt.plan)
    if last is None or (last.round, last.number) != (attempt.round, attempt.number):
        came = "to none of its plan" if last is None else f"to attempt {last.number} of round {last.round}"
        raise _not_of_today(f"the journal is of {attempt}, and by its memory this silo came {came}")
    if advertisement.digest not in memory.announced:
        raise _not_of_today(f"the memory does not have the keys that the journal of {attempt} begins with")


def _not_of_today(what: str) -> PolicyRefusal:
    return PolicyRefusal(
        MASKING_MEMORY,
        f"{what}: one of the two was put back, and could lead to two sums over one delta; forfeit the attempt",
    )


# --- 1. advertise keys ------------------------------------------------------------------------------------------------


def _open(state: Resting, event: OpenAttempt, party: Party) -> Step:
    if event.attempt.federation != party.federation:
        raise PolicyRefusal(
            "federation", f"attempt of federation {event.attempt.federation}: this silo is in {party.federation}"
        )
    state.memory.check_may_join(event.attempt)
    others = _own_group(party) - {party.silo}
    opening = replace(event, seen=tuple((silo, digest) for silo, digest in state.memory.seen if silo in others))
    advertisement = _advertisement(opening, party)
    memory = state.memory.joined(event.attempt, advertisement.digest)
    after = Advertised(memory=memory, opening=opening)
    return after, (Remember(memory), Journal(opening), Send(advertisement))


def _own_group(party: Party) -> frozenset[SiloName]:
    group = None if party.link is None else party.link.partition.group_of(party.silo)
    return frozenset(group or ())


def _open_again(state: Advertised, event: OpenAttempt, party: Party) -> Step:
    """The root that it began with stays; the one that came with the repetition is not used."""
    opening = state.opening
    if (event.attempt, event.model, event.tensors) != (opening.attempt, opening.model, opening.tensors):
        raise Conflict(f"{event.attempt} was opened during {state.attempt}: end that one first")
    return state, (Send(_advertisement(opening, party)),)


def _advertisement(opening: OpenAttempt, party: Party) -> Advertisement:
    masks = KeyPair(key_agreement.mask_secret(opening.root, opening.attempt))
    boxes = KeyPair(key_agreement.box_secret(opening.root, opening.attempt))
    advertisement = Advertisement(
        attempt=opening.attempt,
        silo=party.silo,
        mask_key=masks.public,
        box_key=boxes.public,
        seen=opening.seen,
    )
    _erase(masks, boxes)
    return signed(advertisement, party.identity_key)


# --- 2. share keys ----------------------------------------------------------------------------------------------------


def _deal(state: Advertised, roster: Roster, party: Party) -> Step:
    check_roster(roster, state.opening, party)
    others = [member for member in roster.members if member.silo in _own_group(party) - {party.silo}]
    told = {member.silo: dict(member.seen).get(party.silo) or None for member in others}
    state.memory.check_remembers({f"silo {name}": last for name, last in told.items() if last is not None})
    members = frozenset() if party.link is None else party.link.members
    memory = state.memory.with_dealt(roster.member(party.silo).digest, told, members=members)
    after = Sharing(memory=memory, opening=state.opening, roster=roster)
    return after, (Remember(memory), Journal(roster), ShareKeys())


def check_roster(roster: Roster, opening: OpenAttempt, party: Party) -> None:
    """Raise unless this silo may share keys with this roster; every rule that a roster must meet stands here."""
    if roster.attempt != opening.attempt:
        raise WrongTime(f"a roster of {roster.attempt} came for {opening.attempt}: an old or a foreign one")
    if roster.model != opening.model:
        raise PolicyRefusal(
            "one_model",
            f"the roster is for model {roster.model.hex()[:16]}, this silo trained {opening.model.hex()[:16]}",
        )
    if roster.parameters.fixed_point.ranges.sizes != opening.tensors:
        raise PolicyRefusal("allowed_tensors", "the roster's ranges are for other tensors than the model's")
    party.demands.check(roster.parameters)
    strangers = [silo for silo in roster.silos if silo not in party.identities]
    if strangers:
        raise PolicyRefusal(
            "trusted_peers", f"the roster names {', '.join(strangers)}, whose identity keys this silo has not pinned"
        )
    check_groups(roster, party)
    for member in roster.members:
        check_signed(member, party.identities)
    if party.silo not in roster or roster.member(party.silo) != _advertisement(opening, party):
        raise IntegrityError(
            "the roster does not hold the keys that this silo advertised: they were swapped or left out"
        )
    for member in roster.members:
        key_agreement.check_public(member.silo, member.mask_key, member.box_key)


def check_groups(roster: Roster, party: Party) -> Partition:
    """The partition that the roster is bound to. Raises PolicyRefusal unless it is the newest that this silo holds and allows."""
    link = party.link
    if link is None:
        raise PolicyRefusal(
            RELEASE_GROUPS,
            "this silo holds no release groups, so that nothing says which sums may come out: `silo-agent groups show`",
        )
    if roster.link != link.digest:
        raise PolicyRefusal(
            RELEASE_GROUPS,
            f"the roster is for release groups {roster.link.hex()[:16]}, this silo holds {link.digest.hex()[:16]} "
            f"(number {link.number}): `silo-agent groups show`",
        )
    own = link.atom_of(party.silo)
    if own is None or party.silo not in link.members:
        raise PolicyRefusal(
            RELEASE_GROUPS, f"silo {party.silo} is in none of release groups {link.number}: it masks nothing"
        )
    least = party.demands.least_group
    allowed_atoms = party.approved | party.approved_atoms  # a group that is allowed may be told apart
    for group, allowed in ((own, allowed_atoms), *((group, party.approved) for group in link.partition.groups)):
        if len(group) < least and group not in allowed:
            raise PolicyRefusal(
                RELEASE_GROUPS,
                f"release group {', '.join(group)} has {len(group)} silos, smallest_group of this silo is {least}: "
                "larger groups, or `silo-agent groups approve`",
            )
    offered = roster.parameters
    if reason := too_little(link, party.demands.promise):
        raise PolicyRefusal(RELEASE_GROUPS, reason)
    if offered.colluders > link.promise.colluders:
        raise PolicyRefusal(
            RELEASE_GROUPS,
            f"the roster is to hold against {offered.colluders} colluders, release groups {link.number} hold against "
            f"{link.promise.colluders}: have the operator propose others, with --colluders {offered.colluders}",
        )
    outside = [silo for silo in roster.silos if silo not in link.members]
    if outside:
        raise PolicyRefusal(RELEASE_GROUPS, f"the roster names {', '.join(outside)}, who are in no release group")
    expected = link.partition.least_sum(roster.silos, threshold=offered.threshold, min_survivors=offered.min_survivors)
    if offered.least_sum != expected:
        raise PolicyRefusal(
            RELEASE_GROUPS, f"the roster's least sum is of {offered.least_sum} silos, that of its groups is {expected}"
        )
    return link.partition


def too_few(partition: Partition, parameters: Parameters, silos: Collection[SiloName]) -> str | None:
    """What is wanting for a sum over those of `silos` whose groups are among them whole; None: nothing."""
    if len(silos) < parameters.threshold:
        return f"at least {parameters.threshold} must"
    whole = len(partition.whole(silos))
    if whole < parameters.least_sum:
        return f"at least {parameters.least_sum} must, in whole release groups: {whole} of these are"
    return None


def _deal_again(state: Sharing, roster: Roster, party: Party) -> Step:
    _check_same_roster(state, roster)
    return state, (ShareKeys(),)


def _share_again(state: Dealt, roster: Roster, party: Party) -> Step:
    _check_same_roster(state, roster)
    return state, (Send(state.shared),)


def _check_same_roster(state: Sharing, roster: Roster) -> None:
    if roster != state.roster:
        raise Conflict(f"a second roster came for {state.attempt}: this silo deals to the first")


def _share(state: Sharing, shared: SharedKeys, party: Party) -> Step:
    """From `shared_keys`, which took it from the root but for its encapsulations: these are in no other place than here."""
    check_dealing(state.roster, shared.dealing, party.identities)
    if shared.silo != party.silo:
        raise IntegrityError(f"what silo {shared.silo} dealt stands for what this silo dealt: forfeit the attempt")
    after = Dealt(memory=state.memory, opening=state.opening, roster=state.roster, shared=shared)
    return after, (Journal(shared), Send(shared))


def _share_once(state: Dealt, shared: SharedKeys, party: Party) -> Step:
    if shared != state.shared:
        raise Conflict(f"keys were shared a second time for {state.attempt}: what was dealt first stands")
    return state, (Send(shared),)


def shared_keys(state: Sharing, party: Party, encapsulate: Encapsulate) -> SharedKeys:
    """What this silo deals: expanded from the root, but for what `encapsulate` draws."""
    roster, root = state.roster, state.opening.root
    keys = _box_keys(state)
    seed = key_agreement.self_mask_seed(root, state.attempt, roster.digest)
    lines, boxes = [], []
    for holder, shares in zip(roster.silos, _dealt_shares(state, party.silo), strict=True):
        box = OWN_BOX
        if holder != party.silo:
            boxes.append(_sealed(roster, party.silo, holder, shares, keys, encapsulate))
            box = boxes[-1].digest
        lines.append(_dealt_line(roster, party.silo, holder, shares, box))
        shares.erase()
    dealing = Dealing(
        roster=roster.digest,
        silo=party.silo,
        seed_commitment=secret_sharing.seed_commitment(roster=roster.digest, dealer=party.silo, seed=seed),
        lines=tuple(lines),
    )
    _erase(keys, seed)
    return SharedKeys(dealing=signed(dealing, party.identity_key), boxes=tuple(boxes))


def _sealed(
    roster: Roster, dealer: SiloName, holder: SiloName, shares: KeyShares, keys: KeyPair, encapsulate: Encapsulate
) -> SealedShare:
    link = roster.box_link(dealer, holder)
    kem = encapsulate(roster.member(holder).box_key)
    key = key_agreement.box_key(keys, link, own=dealer, kem=kem)
    box = share_box.sealed(shares, key, roster=roster.digest, dealer=dealer, holder=holder)
    _erase(key, kem.secret)
    copy = None
    if shares.pair_secret is not None:
        copy_kem = encapsulate(roster.member(holder).mask_key)
        copy = pair_secret.copied(shares.pair_secret, roster.pair_link(dealer, holder), copy_kem)
        copy_kem.secret.erase()
    return SealedShare(dealer=dealer, holder=holder, ciphertext=kem.ciphertext, box=box, copy=copy)


def _dealt_shares(state: Sharing, dealer: SiloName) -> tuple[KeyShares, ...]:
    """What this silo deals, in the order of the roster."""
    roster, root = state.roster, state.opening.root
    threshold, holders = roster.parameters.threshold, len(roster.members)
    secrets = {
        SELF_MASK: key_agreement.self_mask_seed(root, state.attempt, roster.digest),
        MASK_KEY: key_agreement.mask_secret(root, state.attempt),
    }
    pairs = [
        pair_secret.pair_secret(secrets[MASK_KEY], roster.pair_link(dealer, holder)) if dealer < holder else None
        for holder in roster.silos
    ]
    shares, salts = {}, {}
    for kind, secret in secrets.items():
        size = secret_sharing.coefficients_bytes(threshold)
        entropy = _expanded(root, f"polynomial/{kind}", roster.digest, size=size)
        shares[kind] = secret_sharing.split(secret, threshold=threshold, holders=holders, entropy=entropy)
        salts[kind] = [
            key_agreement.derived(root, f"salt/{kind}", roster.digest, silo, length=SALT_BYTES) for silo in roster.silos
        ]
        _erase(entropy, secret)
    return tuple(
        KeyShares(
            self_mask=shares[SELF_MASK][index],
            self_mask_salt=salts[SELF_MASK][index],
            mask_key=shares[MASK_KEY][index],
            mask_key_salt=salts[MASK_KEY][index],
            pair_secret=pairs[index],
        )
        for index in range(holders)
    )


def _expanded(root: Secret, purpose: str, roster: bytes, *, size: int) -> Secret:
    """`size` bytes, of which HKDF gives 255 * 32 at a time."""
    out, most = bytearray(size), 255 * 32
    for at in range(0, size, most):
        piece = key_agreement.derived(root, purpose, roster, at, length=min(most, size - at))
        out[at : at + len(piece)] = piece.buffer
        piece.erase()
    return Secret.taking(out)


def _dealt_line(roster: Roster, dealer: SiloName, holder: SiloName, shares: KeyShares, box: bytes) -> DealtLine:
    def commitment(kind: str, salt: Secret, share: Secret) -> bytes:
        return share_commitment(
            roster=roster.digest,
            kind=kind,
            dealer=dealer,
            holder=holder,
            salt=bytes(salt.buffer),
            share=bytes(share.buffer),
        )

    return DealtLine(
        self_mask=commitment(SELF_MASK, shares.self_mask_salt, shares.self_mask),
        mask_key=commitment(MASK_KEY, shares.mask_key_salt, shares.mask_key),
        box=box,
    )


# --- 3. masked input --------------------------------------------------------------------------------------------------


def _receive(state: Dealt, delivery: Delivery, party: Party) -> Step:
    check_delivery(state, delivery, party)
    keys = _box_keys(state)
    for share in delivery.boxes:
        key = _key_of_box(state, share, keys)
        sound = box_is_sound(state.roster, _dealing(delivery, share.dealer), share, key)
        if not sound:
            complaint = Complaint(
                roster=state.roster.digest, silo=party.silo, dealer=share.dealer, key=bytes(key.buffer)
            )
            _erase(key, keys)
            ended, effects = _end(state, AttemptEnded(state.attempt), party)
            return ended, (Send(signed(complaint, party.identity_key)), *effects)
        key.erase()
    keys.erase()
    memory = _having_seen(state, delivery, party)
    after = Masking(memory=memory, opening=state.opening, roster=state.roster, shared=state.shared, delivery=delivery)
    return after, (Remember(memory), Journal(delivery), _mask_vector(after, party))


def _having_seen(state: Dealt, delivery: Delivery, party: Party) -> SiloMemory:
    """With the keys of those of its release group that dealt.

    Of who did not deal an older advertisement stays: it may have forgotten that one, and this silo is to say so again.
    """
    dealt = (_own_group(party) - {party.silo}).intersection(delivery.dealers)
    members = frozenset() if party.link is None else party.link.members
    return state.memory.with_seen({silo: state.roster.member(silo).digest for silo in dealt}, members=members)


def check_delivery(state: Dealt, delivery: Delivery, party: Party) -> None:
    """Raise unless the delivery is complete, signed by its dealers, and unaltered on the way."""
    roster = state.roster
    if delivery.roster != roster.digest or delivery.holder != party.silo:
        raise WrongTime(f"a delivery for silo {delivery.holder} and another roster came for {state.attempt}")
    for dealing in delivery.dealings:
        check_dealing(roster, dealing, party.identities)
    if party.silo not in delivery.dealers or _dealing(delivery, party.silo) != state.shared.dealing:
        raise IntegrityError("the delivery does not hold what this silo dealt: it was altered or left out")
    lacking = too_few(check_groups(roster, party), roster.parameters, delivery.dealers)
    if lacking is not None:
        raise PolicyRefusal("min_survivors", f"{len(delivery.dealers)} silos dealt, for a sum to come out {lacking}")
    if tuple(share.dealer for share in delivery.boxes) != tuple(it for it in delivery.dealers if it != party.silo):
        raise MalformedMessage("the delivery does not hold one box of each other dealer")
    for share in delivery.boxes:
        if _line(roster, _dealing(delivery, share.dealer), party.silo).box != share.digest:
            raise IntegrityError(f"the box of silo {share.dealer} is not the one that it signed: altered on the way")


def check_dealing(roster: Roster, dealing: Dealing, identities: Identities) -> None:
    """Raise unless `dealing` was signed by a member of `roster`, for it, with a line for each member."""
    if dealing.silo not in roster or dealing.roster != roster.digest:
        raise MalformedMessage(f"the dealing of silo {dealing.silo} is for another roster, or by no member of this one")
    if len(dealing.lines) != len(roster.members):
        raise MalformedMessage(
            f"the dealing of silo {dealing.silo} has {len(dealing.lines)} lines for {len(roster.members)} members"
        )
    check_signed(dealing, identities)


def box_is_sound(roster: Roster, dealing: Dealing, share: SealedShare, key: Secret) -> bool:
    """Whether the box opens with `key` and holds the shares, and the pair secret, that its dealer signed commitments to."""
    try:
        shares = share_box.opened(share.box, key, roster=roster.digest, dealer=share.dealer, holder=share.holder)
    except IntegrityError:
        return False
    sound = _dealt_line(roster, share.dealer, share.holder, shares, share.digest) == _line(
        roster, dealing, share.holder
    )
    try:
        secret_sharing.check_share(bytes(shares.self_mask.buffer))
        secret_sharing.check_share(bytes(shares.mask_key.buffer))
    except MalformedMessage:
        sound = False
    if shares.pair_secret is not None:
        assert share.copy is not None, "a sealed share has a copy where its box has a pair secret"
        link = roster.pair_link(share.dealer, share.holder)
        sound = sound and pair_secret.is_committed(shares.pair_secret, share.copy, link)
    shares.erase()
    return sound


def _line(roster: Roster, dealing: Dealing, holder: SiloName) -> DealtLine:
    return dealing.lines[roster.place(holder) - 1]


def _dealing(delivery: Delivery, dealer: SiloName) -> Dealing:
    return delivery.dealings[delivery.dealers.index(dealer)]


def _box_keys(state: Sharing) -> KeyPair:
    return KeyPair(key_agreement.box_secret(state.opening.root, state.attempt))


def _key_of_box(state: Sharing, share: SealedShare, keys: KeyPair) -> Secret:
    """By the box keys of the holder."""
    kem = Encapsulation(keys.decapsulated(share.ciphertext), share.ciphertext)
    link = state.roster.box_link(share.dealer, share.holder)
    key = key_agreement.box_key(keys, link, own=share.holder, kem=kem)
    kem.secret.erase()
    return key


def _opened(state: Masking, share: SealedShare, keys: KeyPair) -> KeyShares:
    key = _key_of_box(state, share, keys)
    shares = share_box.opened(share.box, key, roster=state.roster.digest, dealer=share.dealer, holder=share.holder)
    key.erase()
    return shares


def _receive_again(state: Masking, delivery: Delivery, party: Party) -> Step:
    _check_same_delivery(state, delivery)
    return state, (_mask_vector(state, party),)


def _receive_after_masking(state: Masked, delivery: Delivery, party: Party) -> Step:
    _check_same_delivery(state, delivery)
    return state, (Send(_masked_input(state, party)),)


def _check_same_delivery(state: Masking, delivery: Delivery) -> None:
    if delivery != state.delivery:
        raise Conflict(f"a second delivery came for {state.attempt}: this silo masks for the first")


def _mask_vector(state: Masking, party: Party) -> MaskVector:
    roster, root = state.roster, state.opening.root
    seed = key_agreement.self_mask_seed(root, state.attempt, roster.digest)
    secret = key_agreement.mask_secret(root, state.attempt)
    dealings = state.delivery.dealings_digest
    added = [KeyStream(key_agreement.self_mask_key(seed, own=party.silo, roster=roster.digest, dealings=dealings))]
    subtracted: list[KeyStream] = []
    keys, box_keys = KeyPair(secret), _box_keys(state)
    sent = {share.holder: share for share in state.shared.boxes}
    for share in state.delivery.boxes:
        peer = share.dealer
        link = roster.pair_link(party.silo, peer)
        if party.silo < peer:
            pair, copy = pair_secret.pair_secret(secret, link), sent[peer].copy
        else:
            pair, copy = _received_pair_secret(state, share, box_keys), share.copy
        assert copy is not None, "the first by name of two sends a copy of their pair secret"
        key = key_agreement.pairwise_mask_key(
            keys, link, own=party.silo, pair_secret=pair, copy=copy.digest, dealings=dealings
        )
        pair.erase()
        (added if party.silo < peer else subtracted).append(KeyStream(key))
    _erase(seed, keys, box_keys)
    return MaskVector(
        parameters=roster.parameters,
        rounding=KeyStream(key_agreement.rounding_key(root, state.attempt, roster.model)),
        noise=key_agreement.noise_key(root, state.attempt, roster.digest),
        masks=MaskSum(added=tuple(added), subtracted=tuple(subtracted)),
    )


def _received_pair_secret(state: Masking, share: SealedShare, keys: KeyPair) -> Secret:
    shares = _opened(state, share, keys)
    assert shares.pair_secret is not None, "the first by name of two sends their pair secret"
    pair = Secret(shares.pair_secret.buffer)
    shares.erase()
    return pair


def _upload(state: Masking, event: VectorMasked, party: Party) -> Step:
    after = Masked(
        memory=state.memory,
        opening=state.opening,
        roster=state.roster,
        shared=state.shared,
        delivery=state.delivery,
        vector=event.vector,
    )
    return after, (Journal(event), Send(_masked_input(after, party)))


def _upload_again(state: Masked, event: VectorMasked, party: Party) -> Step:
    if event.vector != state.vector:
        raise Conflict(
            f"the vector of {state.attempt} was masked again and differs: forfeit the attempt, never send both"
        )
    return state, (Send(_masked_input(state, party)),)


def _masked_input(state: Masked, party: Party) -> MaskedInput:
    return signed(
        MaskedInput(
            roster=state.roster.digest,
            dealings=state.delivery.dealings_digest,
            silo=party.silo,
            words=state.roster.parameters.fixed_point.words,
            vector=state.vector,
        ),
        party.identity_key,
    )


# --- 4. consistency check ---------------------------------------------------------------------------------------------


def _agree(state: Masked, survivors: SurvivorSet, party: Party) -> Step:
    if survivors.roster != state.roster.digest or survivors.dealings != state.delivery.dealings_digest:
        raise WrongTime(f"a survivor set of another roster, or of other dealings, came for {state.attempt}")
    strangers = [silo for silo in survivors.silos if silo not in state.delivery.dealers]
    if strangers:
        raise MalformedMessage(f"the survivor set names {', '.join(strangers)}, who dealt no keys")
    partition = check_groups(state.roster, party)
    if not partition.is_union(survivors.silos):
        broken = [silo for silo in survivors.silos if silo not in partition.whole(survivors.silos)]
        raise PolicyRefusal(
            RELEASE_GROUPS,
            f"the survivor set has {', '.join(broken)} without the rest of their release groups: only whole groups are summed",
        )
    least = max(state.roster.parameters.least_sum, party.demands.min_survivors)
    if len(survivors.silos) < least:
        raise PolicyRefusal(
            "min_survivors", f"the survivor set has {len(survivors.silos)} silos, at least {least} are needed"
        )
    if dict(zip(survivors.silos, survivors.inputs, strict=True)).get(party.silo, state.vector) != state.vector:
        raise IntegrityError("the survivor set has another vector for this silo than it sent: nothing is signed")
    after = Agreed(
        memory=state.memory,
        opening=state.opening,
        roster=state.roster,
        shared=state.shared,
        delivery=state.delivery,
        vector=state.vector,
        survivors=survivors,
    )
    return after, (Journal(survivors), Send(_agreement(after, party)))


def _agree_again(state: Agreed, survivors: SurvivorSet, party: Party) -> Step:
    if survivors != state.survivors:
        raise Conflict(f"a second survivor set came for {state.attempt}: this silo signs one per attempt")
    return state, (Send(_agreement(state, party)),)


def _agreement(state: Agreed, party: Party) -> Agreement:
    return signed(
        Agreement(roster=state.roster.digest, silo=party.silo, survivors=state.survivors.digest), party.identity_key
    )


# --- 5. unmasking -----------------------------------------------------------------------------------------------------


def _reveal(state: Agreed, request: UnmaskRequest, party: Party) -> Step:
    check_agreements(state, request, party)
    memory = state.memory.answered(state.attempt)
    after = Revealed(
        memory=memory,
        opening=state.opening,
        roster=state.roster,
        shared=state.shared,
        delivery=state.delivery,
        vector=state.vector,
        survivors=state.survivors,
    )
    return after, (Remember(memory), Journal(request), Send(_revealed(after, party)))


def check_agreements(state: Agreed, request: UnmaskRequest, party: Party) -> None:
    """Raise unless at least `threshold` dealers signed the very set that this silo signed."""
    if request.roster != state.roster.digest:
        raise WrongTime(f"an unmask request of another roster came for {state.attempt}")
    check_groups(state.roster, party)
    for agreement in request.agreements:
        if agreement.silo not in state.delivery.dealers:
            raise MalformedMessage(f"the unmask request has a signature of silo {agreement.silo}, who dealt no keys")
        if agreement.roster != state.roster.digest or agreement.survivors != state.survivors.digest:
            raise IntegrityError(
                f"silo {agreement.silo} signed another survivor set than this silo: nothing is revealed"
            )
        check_signed(agreement, party.identities)
    threshold = max(state.roster.parameters.threshold, party.demands.min_threshold)
    if len(request.agreements) < threshold:
        raise PolicyRefusal(
            "min_threshold",
            f"{len(request.agreements)} silos signed the survivor set, at least {threshold} must before any share is shown",
        )


def _reveal_again(state: Revealed, request: UnmaskRequest, party: Party) -> Step:
    check_agreements(state, request, party)
    return state, (Send(_revealed(state, party)),)


def _revealed(state: Agreed, party: Party) -> Reveal:
    dealt = _dealt_shares(state, party.silo)
    own = dealt[state.roster.place(party.silo) - 1]
    revealed: list[RevealedShare] = []
    boxes, keys = {share.dealer: share for share in state.delivery.boxes}, _box_keys(state)
    for dealer in state.delivery.dealers:
        if dealer == party.silo:
            shares = own
        else:
            shares = _opened(state, boxes[dealer], keys)
        if dealer in state.survivors.silos:
            share, salt = shares.self_mask, shares.self_mask_salt
            revealed.append(SelfMaskShare(dealer=dealer, share=bytes(share.buffer), salt=bytes(salt.buffer)))
        else:
            share, salt = shares.mask_key, shares.mask_key_salt
            revealed.append(MaskKeyShare(dealer=dealer, share=bytes(share.buffer), salt=bytes(salt.buffer)))
        shares.erase()
    for shares in dealt:
        shares.erase()
    keys.erase()
    reveal = Reveal(roster=state.roster.digest, silo=party.silo, shares=tuple(revealed))
    return signed(reveal, party.identity_key)


# --- the end ----------------------------------------------------------------------------------------------------------


def _end(state: Advertised, event: AttemptEnded, party: Party) -> Step:
    if event.attempt != state.attempt:
        raise WrongTime(f"the end of {event.attempt} came during {state.attempt}")
    return Resting(state.memory), (Erase(attempt=state.attempt, root=state.opening.root),)


def _ended_already(state: Resting, event: AttemptEnded, party: Party) -> Step:
    return state, ()


def _erase(*secrets: Secret | KeyPair) -> None:
    for secret in secrets:
        secret.erase()


TABLE: dict[tuple[type[State], type[Event]], Callable[[Any, Any, Party], Step]] = {
    (Resting, OpenAttempt): _open,
    (Resting, AttemptEnded): _ended_already,
    (Advertised, OpenAttempt): _open_again,
    (Advertised, Roster): _deal,
    (Advertised, AttemptEnded): _end,
    (Sharing, Roster): _deal_again,
    (Sharing, SharedKeys): _share,
    (Sharing, AttemptEnded): _end,
    (Dealt, Roster): _share_again,
    (Dealt, SharedKeys): _share_once,
    (Dealt, Delivery): _receive,
    (Dealt, AttemptEnded): _end,
    (Masking, Delivery): _receive_again,
    (Masking, VectorMasked): _upload,
    (Masking, AttemptEnded): _end,
    (Masked, Delivery): _receive_after_masking,
    (Masked, VectorMasked): _upload_again,
    (Masked, SurvivorSet): _agree,
    (Masked, AttemptEnded): _end,
    (Agreed, SurvivorSet): _agree_again,
    (Agreed, UnmaskRequest): _reveal,
    (Agreed, AttemptEnded): _end,
    (Revealed, UnmaskRequest): _reveal_again,
    (Revealed, AttemptEnded): _end,
}
