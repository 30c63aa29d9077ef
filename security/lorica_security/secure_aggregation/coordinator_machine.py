"""The coordinator's side: `step(state, event, identities) -> (state, effects)`, by one table, for one attempt.

    Idle         --OpenAttempt----> Advertising    wait for the keys of those invited
    Advertising  --Advertisement--> Sharing        all are there: send the Roster
    Sharing      --SharedKeys-----> Masking        send a Delivery to all who dealt
    Masking      --MaskedInput----> Agreeing       send the SurvivorSet, whole release groups, to all whose vector is whole
    Agreeing     --Agreement------> Unmasking      send the UnmaskRequest to all who signed
    Unmasking    --Reveal---------> Unmasked       `threshold` good replies: how to unmask the sum
    any phase    --Complaint------> Abandoned      a dealer dealt falsely, or was falsely accused

A phase ends when all it waits for have answered, were dropped (SiloDropped: its connection is gone for good) or are late
(PhaseClosed: the deadline has passed); with fewer than it needs, the attempt is abandoned and the reason names everybody
who is missing. One attempt has one course: what comes late does not fit the state any more.

Nobody has to trust this side; it checks in order to know whom to leave out. A silo whose message is false is named (Blame),
dropped from the attempt, and not waited for. Shares that come back are held against the commitments that their dealer
signed, so that the culprit is the one who altered them; secrets that do not fit what was advertised convict the dealer.

`Journal` effects are durable before anything after them is sent: the list of an attempt's events, replayed by `restored`,
gives the same state and the same messages. A message that was refused is not among them: its sender's SiloDropped stands there.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Any

from lorica_security.errors import Conflict, LoricaError, MalformedMessage, WrongTime
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.groups.release_groups import Link
from lorica_security.secure_aggregation.keys import key_agreement, pair_secret, secret_sharing, share_box
from lorica_security.secure_aggregation.keys.key_agreement import KeyPair, halves
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.keys.secret_sharing import MASK_KEY, SELF_MASK, share_commitment
from lorica_security.secure_aggregation.masked_vectors.fixed_point import FixedPoint
from lorica_security.secure_aggregation.masked_vectors.mask_stream import KeyStream, MaskSum
from lorica_security.secure_aggregation.messages import (
    OWN_BOX,
    Advertisement,
    Agreement,
    Complaint,
    Delivery,
    Identities,
    MaskedInput,
    MaskKeyShare,
    Reveal,
    RevealedShare,
    SelfMaskShare,
    SharedKeys,
    SurvivorSet,
    UnmaskRequest,
    check_names,
    check_signed,
    dealings_digest,
)
from lorica_security.secure_aggregation.parameters import Terms
from lorica_security.secure_aggregation.roster import Roster
from lorica_security.secure_aggregation.silo_machine import box_is_sound, check_dealing, too_few


class Offence(Enum):
    """What a silo is named for."""

    SILENCE = "silence"
    BAD_SIGNATURE = "bad signature"
    BAD_MESSAGE = "bad message"
    WRONG_LENGTH = "wrong length"
    BAD_SHARE = "bad share"
    FALSE_COMPLAINT = "false complaint"
    DISPUTED = "disputed"  # one of two lied, and the box cannot show which


# --- events -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class OpenAttempt:
    """`invited` by name: those who may advertise keys."""

    attempt: Attempt
    terms: Terms
    invited: tuple[SiloName, ...]

    def __post_init__(self) -> None:
        check_names("invitation", *self.invited)


@dataclass(frozen=True, slots=True)
class SiloDropped:
    """This silo will not answer in this attempt: it declined, left, its upload failed, or it was blamed for a message."""

    silo: SiloName
    detail: str


@dataclass(frozen=True, slots=True)
class PhaseClosed:
    """The deadline of the phase that `phase` names has passed."""

    phase: str


Event = (
    OpenAttempt | Advertisement | SharedKeys | Complaint | MaskedInput | Agreement | Reveal | SiloDropped | PhaseClosed
)
EVENTS: tuple[type[Event], ...] = (
    OpenAttempt,
    Advertisement,
    SharedKeys,
    Complaint,
    MaskedInput,
    Agreement,
    Reveal,
    SiloDropped,
    PhaseClosed,
)


# --- effects ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Journal:
    event: Event


@dataclass(frozen=True, slots=True, kw_only=True)
class Send:
    to: SiloName
    message: "Request"


@dataclass(frozen=True, slots=True, kw_only=True)
class Blame:
    silo: SiloName
    offence: Offence
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Unmask:
    """Add up the vectors of `survivors`, mod 2^32, then apply `masks`: what is left is the encoded sum. Then erase `masks`."""

    attempt: Attempt
    survivors: tuple[SiloName, ...]
    dropped: tuple[SiloName, ...]
    fixed_point: FixedPoint
    masks: MaskSum


@dataclass(frozen=True, slots=True, kw_only=True)
class Abandon:
    """No sum comes out of this attempt. Tell the silos, so that they erase; discard their vectors."""

    attempt: Attempt
    reason: str


Effect = Journal | Send | Blame | Unmask | Abandon


# --- states -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Idle:
    phase = "idle"


@dataclass(frozen=True, kw_only=True)
class Advertising:
    opening: OpenAttempt
    awaited: frozenset[SiloName]
    advertisements: tuple[Advertisement, ...] = ()

    phase = "advertise keys"

    @property
    def attempt(self) -> Attempt:
        return self.opening.attempt


@dataclass(frozen=True, kw_only=True)
class Sharing:
    roster: Roster
    link: Link
    awaited: frozenset[SiloName]
    shared: tuple[SharedKeys, ...] = ()

    phase = "share keys"

    @property
    def attempt(self) -> Attempt:
        return self.roster.attempt


@dataclass(frozen=True, kw_only=True)
class Masking(Sharing):
    """`shared` is complete from here on: those who dealt, by name."""

    inputs: tuple[MaskedInput, ...] = ()

    phase = "masked input"

    @property
    def dealings_digest(self) -> bytes:
        return dealings_digest(tuple(item.dealing for item in self.shared))


@dataclass(frozen=True, kw_only=True)
class Agreeing(Masking):
    survivors: SurvivorSet
    agreements: tuple[Agreement, ...] = ()

    phase = "consistency check"


@dataclass(frozen=True, kw_only=True)
class Unmasking(Agreeing):
    reveals: tuple[Reveal, ...] = ()

    phase = "unmasking"


@dataclass(frozen=True, kw_only=True)
class Unmasked:
    attempt: Attempt
    roster: Roster
    survivors: SurvivorSet

    phase = "unmasked"


@dataclass(frozen=True, kw_only=True)
class Abandoned:
    attempt: Attempt
    reason: str

    phase = "abandoned"


State = Idle | Advertising | Sharing | Masking | Agreeing | Unmasking | Unmasked | Abandoned
STATES: tuple[type[State], ...] = (
    Idle,
    Advertising,
    Sharing,
    Masking,
    Agreeing,
    Unmasking,
    Unmasked,
    Abandoned,
)

Step = tuple[State, tuple[Effect, ...]]


def step(state: State, event: Event, identities: Identities) -> Step:
    """The state after `event`, and what to do, in this order; `identities` are the enrolled silos' identity keys.

    Raises WrongTime or Conflict, and changes nothing. A false message does not raise: its sender is blamed and dropped.
    """
    handler = TABLE.get((type(state), type(event)))
    if handler is None:
        raise WrongTime(f"{type(event).__name__} does not fit the phase {state.phase}: nothing was changed")
    return handler(state, event, identities)


def restored(journal: tuple[Event, ...], identities: Identities) -> Step:
    """Where a restarted coordinator stands, and the last event's effects but for the journal's, to be done again."""
    state: State = Idle()
    effects: tuple[Effect, ...] = ()
    for event in journal:
        state, effects = step(state, event, identities)
    return state, tuple(effect for effect in effects if not isinstance(effect, Journal))


# --- 1. advertise keys ------------------------------------------------------------------------------------------------


def _open(state: Idle, event: OpenAttempt, identities: Identities) -> Step:
    event.terms.parameters(event.invited)
    return Advertising(opening=event, awaited=frozenset(event.invited)), (Journal(event),)


def _advertise(state: Advertising, event: Advertisement, identities: Identities) -> Step:
    if event.attempt != state.attempt:
        raise WrongTime(f"keys for {event.attempt} came in {state.attempt}")
    if _is_repeated(state, event, state.advertisements):
        return state, ()
    try:
        check_signed(event, identities)
        held = {half for it in state.advertisements for half in (*halves(it.mask_key), *halves(it.box_key))}
        fresh = {*halves(event.mask_key), *halves(event.box_key)}
        if len(fresh) != 4 or held & fresh:
            raise MalformedMessage(f"silo {event.silo} advertised a key that is in use: each silo makes two fresh ones")
        key_agreement.check_public(event.silo, event.mask_key, event.box_key)
    except LoricaError as error:
        return _blamed(state, event.silo, error)
    return _settled(
        replace(
            state,
            awaited=state.awaited - {event.silo},
            advertisements=tuple(sorted((*state.advertisements, event), key=lambda it: it.silo)),
        ),
        (Journal(event),),
    )


def _to_sharing(state: Advertising) -> Step:
    try:
        roster = Roster(
            attempt=state.attempt,
            model=state.opening.terms.model,
            link=state.opening.terms.link.digest,
            parameters=state.opening.terms.parameters([it.silo for it in state.advertisements]),
            members=state.advertisements,
        )
    except MalformedMessage as error:
        return _abandoned(state, str(error))
    after = Sharing(roster=roster, link=state.opening.terms.link, awaited=frozenset(roster.silos))
    return after, _asked(after)


# --- 2. share keys ----------------------------------------------------------------------------------------------------


def _share(state: Sharing, event: SharedKeys, identities: Identities) -> Step:
    _check_roster(state, event.dealing.roster)
    if _is_repeated(state, event, state.shared):
        return state, ()
    try:
        check_dealing(state.roster, event.dealing, identities)
        others = tuple(silo for silo in state.roster.silos if silo != event.silo)
        if tuple(share.holder for share in event.boxes) != others:
            raise MalformedMessage(f"silo {event.silo} sent boxes for other holders than the rest of the roster")
        digests = {share.holder: share.digest for share in event.boxes} | {event.silo: OWN_BOX}
        if any(line.box != digests[silo] for silo, line in zip(state.roster.silos, event.dealing.lines, strict=True)):
            raise MalformedMessage(f"silo {event.silo} sent other boxes than it signed")
    except LoricaError as error:
        return _blamed(state, event.silo, error)
    return _settled(
        replace(
            state,
            awaited=state.awaited - {event.silo},
            shared=tuple(sorted((*state.shared, event), key=lambda it: it.silo)),
        ),
        (Journal(event),),
    )


def _to_masking(state: Sharing) -> Step:
    dealers = tuple(item.silo for item in state.shared)
    if (lacking := too_few(state.link.partition, state.roster.parameters, dealers)) is not None:
        return _abandoned(state, f"{len(dealers)} of {len(state.roster.silos)} silos shared keys: {lacking}")
    after = Masking(roster=state.roster, link=state.link, shared=state.shared, awaited=frozenset(dealers))
    return after, _asked(after)


def delivery_to(state: Masking, holder: SiloName) -> Delivery:
    return Delivery(
        roster=state.roster.digest,
        holder=holder,
        dealings=tuple(item.dealing for item in state.shared),
        boxes=tuple(share for item in state.shared for share in item.boxes if share.holder == holder),
    )


def _complain(state: Masking, event: Complaint, identities: Identities) -> Step:
    """Whoever lied is named, and the attempt is over: others may hold false shares of the same dealer."""
    _check_roster(state, event.roster)
    _check_dealt(state, event.silo)
    try:
        check_signed(event, identities)
        if event.dealer == event.silo or event.dealer not in _dealers(state):
            raise MalformedMessage(f"silo {event.silo} complains about {event.dealer}, who dealt it nothing")
    except LoricaError as error:
        return _blamed(state, event.silo, error)
    accused = next(item for item in state.shared if item.silo == event.dealer)
    share = next(share for share in accused.boxes if share.holder == event.silo)
    between = f"in the box from silo {event.dealer} to silo {event.silo}"
    verdict: tuple[Blame, ...]
    key = Secret(event.key)
    if box_is_sound(state.roster, accused.dealing, share, key):
        verdict = (Blame(silo=event.silo, offence=Offence.FALSE_COMPLAINT, detail=f"nothing is wrong {between}"),)
    elif share_box.opens(share.box, key, roster=state.roster.digest, dealer=share.dealer, holder=share.holder):
        verdict = (Blame(silo=event.dealer, offence=Offence.BAD_SHARE, detail=f"false shares {between}"),)
    else:
        detail = f"the key that was shown does not open it, {between}"
        verdict = tuple(
            Blame(silo=silo, offence=Offence.DISPUTED, detail=detail) for silo in sorted((event.silo, event.dealer))
        )
    key.erase()
    after, effects = _abandoned(state, f"silo {event.silo} complained about silo {event.dealer}: {verdict[0].detail}")
    return after, (Journal(event), *verdict, *effects)


# --- 3. masked input --------------------------------------------------------------------------------------------------


def _take_input(state: Masking, event: MaskedInput, identities: Identities) -> Step:
    """The vector itself was received whole, and fits its digest: the edge has seen to that."""
    _check_roster(state, event.roster)
    _check_dealt(state, event.silo)
    if _is_repeated(state, event, state.inputs):
        return state, ()
    words = state.roster.parameters.fixed_point.words
    try:
        check_signed(event, identities)
        if event.dealings != state.dealings_digest:
            raise MalformedMessage(f"silo {event.silo} masked for other dealings than it was sent")
    except LoricaError as error:
        return _blamed(state, event.silo, error)
    if event.words != words:
        blame = Blame(silo=event.silo, offence=Offence.WRONG_LENGTH, detail=f"{event.words} words, expected {words}")
        return _without(state, event.silo, (Journal(event), blame))
    return _settled(
        replace(
            state,
            awaited=state.awaited - {event.silo},
            inputs=tuple(sorted((*state.inputs, event), key=lambda it: it.silo)),
        ),
        (Journal(event),),
    )


def _to_agreeing(state: Masking) -> Step:
    """Who sent a vector and is in an incomplete group counts as dropped, and helps to unmask the others' sum."""
    vectors = {item.silo: item.vector for item in state.inputs}
    if (lacking := too_few(state.link.partition, state.roster.parameters, vectors)) is not None:
        return _abandoned(state, f"{len(vectors)} silos sent a masked vector: {lacking}")
    silos = state.link.partition.whole(vectors)
    survivors = SurvivorSet(
        roster=state.roster.digest,
        dealings=state.dealings_digest,
        silos=silos,
        inputs=tuple(vectors[silo] for silo in silos),
    )
    after = Agreeing(
        roster=state.roster,
        link=state.link,
        shared=state.shared,
        inputs=state.inputs,
        survivors=survivors,
        awaited=frozenset(vectors),
    )
    return after, _asked(after)


# --- 4. consistency check ---------------------------------------------------------------------------------------------


def _take_agreement(state: Agreeing, event: Agreement, identities: Identities) -> Step:
    _check_roster(state, event.roster)
    _check_sent(state, event.silo)
    if _is_repeated(state, event, state.agreements):
        return state, ()
    try:
        check_signed(event, identities)
        if event.survivors != state.survivors.digest:
            raise MalformedMessage(f"silo {event.silo} signed another survivor set than it was sent")
    except LoricaError as error:
        return _blamed(state, event.silo, error)
    return _settled(
        replace(
            state,
            awaited=state.awaited - {event.silo},
            agreements=tuple(sorted((*state.agreements, event), key=lambda it: it.silo)),
        ),
        (Journal(event),),
    )


def _to_unmasking(state: Agreeing) -> Step:
    threshold = state.roster.parameters.threshold
    if len(state.agreements) < threshold:
        return _abandoned(state, f"{len(state.agreements)} silos signed the survivor set, at least {threshold} must")
    signers = tuple(item.silo for item in state.agreements)
    after = Unmasking(
        roster=state.roster,
        link=state.link,
        shared=state.shared,
        inputs=state.inputs,
        survivors=state.survivors,
        agreements=state.agreements,
        awaited=frozenset(signers),
    )
    return after, _asked(after)


# --- 5. unmasking -----------------------------------------------------------------------------------------------------


def _take_reveal(state: Unmasking, event: Reveal, identities: Identities) -> Step:
    _check_roster(state, event.roster)
    if event.silo not in (item.silo for item in state.agreements):
        raise WrongTime(f"silo {event.silo} reveals shares, and was not asked")
    if _is_repeated(state, event, state.reveals):
        return state, ()
    try:
        check_signed(event, identities)
        _check_kinds(state, event)
    except LoricaError as error:
        return _blamed(state, event.silo, error)
    for share in event.shares:
        if not _is_as_committed(state, event.silo, share):
            detail = f"its share of silo {share.dealer} is not the one that {share.dealer} committed to"
            blame = Blame(silo=event.silo, offence=Offence.BAD_SHARE, detail=detail)
            return _without(state, event.silo, (Journal(event), blame))
    after = replace(
        state,
        awaited=state.awaited - {event.silo},
        reveals=tuple(sorted((*state.reveals, event), key=lambda it: it.silo)),
    )
    if len(after.reveals) < state.roster.parameters.threshold:
        return _settled(after, (Journal(event),))
    done, effects = _to_unmasked(after)
    return done, (Journal(event), *effects)


def _late_reveal(state: Unmasked, event: Reveal, identities: Identities) -> Step:
    """More than was needed; nobody's fault."""
    return state, ()


def _check_kinds(state: Unmasking, reveal: Reveal) -> None:
    expected = tuple(
        (dealer, SelfMaskShare if dealer in state.survivors.silos else MaskKeyShare) for dealer in _dealers(state)
    )
    if tuple((share.dealer, type(share)) for share in reveal.shares) != expected:
        raise MalformedMessage(f"silo {reveal.silo} reveals other shares than the survivor set asks for")


def _is_as_committed(state: Unmasking, holder: SiloName, revealed: RevealedShare) -> bool:
    dealing = next(item.dealing for item in state.shared if item.silo == revealed.dealer)
    line = dealing.lines[state.roster.place(holder) - 1]
    kind, commitment = (SELF_MASK, line.self_mask) if isinstance(revealed, SelfMaskShare) else (MASK_KEY, line.mask_key)
    return commitment == share_commitment(
        roster=state.roster.digest,
        kind=kind,
        dealer=revealed.dealer,
        holder=holder,
        salt=revealed.salt,
        share=revealed.share,
    )


class _FalseDealing(MalformedMessage):
    """What `dealer` dealt does not lead to what it advertised or committed to."""

    def __init__(self, dealer: SiloName, message: str) -> None:
        super().__init__(message)
        self.dealer = dealer


def _to_unmasked(state: Unmasking) -> Step:
    """Put the secrets together; a dealer whose shares or copies do not give back what it committed to ends the attempt."""
    recovered: dict[SiloName, Secret] = {}
    try:
        for dealer in _dealers(state):
            recovered[dealer] = _recovered(state, dealer)
        masks = _mask_sum(state, recovered)
    except _FalseDealing as error:
        blame = Blame(silo=error.dealer, offence=Offence.BAD_SHARE, detail=str(error))
        after, effects = _abandoned(state, str(error))
        return after, (blame, *effects)
    finally:
        for secret in recovered.values():
            secret.erase()
    survivors = state.survivors.silos
    unmask = Unmask(
        attempt=state.attempt,
        survivors=survivors,
        dropped=tuple(dealer for dealer in _dealers(state) if dealer not in survivors),
        fixed_point=state.roster.parameters.fixed_point,
        masks=masks,
    )
    return Unmasked(attempt=state.attempt, roster=state.roster, survivors=state.survivors), (unmask,)


def _recovered(state: Unmasking, dealer: SiloName) -> Secret:
    threshold = state.roster.parameters.threshold
    shares = {
        state.roster.place(reveal.silo): share.share
        for reveal in state.reveals[:threshold]
        for share in reveal.shares
        if share.dealer == dealer
    }
    try:
        secret = secret_sharing.combined(shares, threshold=threshold)
    except MalformedMessage as error:
        raise _FalseDealing(dealer, str(error)) from error
    if dealer in state.survivors.silos:
        dealing = next(item.dealing for item in state.shared if item.silo == dealer)
        committed = secret_sharing.seed_commitment(roster=state.roster.digest, dealer=dealer, seed=secret)
        sound = committed == dealing.seed_commitment
    else:
        sound = KeyPair(secret).public == state.roster.member(dealer).mask_key
    if not sound:
        secret.erase()
        raise _FalseDealing(dealer, f"the shares of silo {dealer} give back another secret than it committed to")
    return secret


def _mask_sum(state: Unmasking, recovered: Mapping[SiloName, Secret]) -> MaskSum:
    """What takes the masks off the sum: self masks of the survivors, and what they agreed on with the dropped."""
    roster, dealings, survivors = state.roster, state.dealings_digest, state.survivors.silos
    added: list[KeyStream] = []
    subtracted: list[KeyStream] = []
    try:
        for dealer, secret in recovered.items():
            if dealer in survivors:
                key = key_agreement.self_mask_key(secret, own=dealer, roster=roster.digest, dealings=dealings)
                subtracted.append(KeyStream(key))
                continue
            keys = KeyPair(secret)
            for survivor in survivors:
                key = _pairwise_key(state, dealer, survivor, secret, keys)
                (subtracted if survivor < dealer else added).append(KeyStream(key))
    except _FalseDealing:
        MaskSum(added=tuple(added), subtracted=tuple(subtracted)).erase()
        raise
    return MaskSum(added=tuple(added), subtracted=tuple(subtracted))


def _pairwise_key(state: Unmasking, dropped: SiloName, survivor: SiloName, secret: Secret, keys: KeyPair) -> Secret:
    """By the recovered mask secret of `dropped`, and its keys. Where it was the second, the first's copy has the pair secret."""
    link = state.roster.pair_link(dropped, survivor)
    first, second = link.silos
    dealt = next(item for item in state.shared if item.silo == first)
    copy = next(share for share in dealt.boxes if share.holder == second).copy
    assert copy is not None, "the first by name of two sends a pair copy"
    shared = pair_secret.pair_secret(secret, link) if dropped == first else pair_secret.uncovered(copy, link, keys)
    try:
        if not pair_secret.is_committed(shared, copy, link):
            raise _FalseDealing(
                first, f"silo {first} gave silo {second} another pair secret than the one it committed to"
            )
        return key_agreement.pairwise_mask_key(
            keys, link, own=dropped, pair_secret=shared, copy=copy.digest, dealings=state.dealings_digest
        )
    finally:
        shared.erase()


def _to_nothing(state: Unmasking) -> Step:
    threshold = state.roster.parameters.threshold
    return _abandoned(state, f"{len(state.reveals)} silos revealed their shares, at least {threshold} must")


# --- what stands for a silo -------------------------------------------------------------------------------------------

Request = Roster | Delivery | SurvivorSet | UnmaskRequest


def is_awaited(state: State, silo: SiloName) -> bool:
    """Whether the present phase waits for an answer of `silo`, to `request_to` it."""
    return isinstance(state, Advertising | Sharing) and silo in state.awaited


def request_to(state: State, silo: SiloName) -> Request | None:
    """What a silo that is awaited has to answer, however often it asks; None: to advertise keys."""
    match state:
        case Unmasking():
            return UnmaskRequest(roster=state.roster.digest, agreements=state.agreements)
        case Agreeing():
            return state.survivors
        case Masking():
            return delivery_to(state, silo)
        case Sharing():
            return state.roster
        case _:
            return None


def _asked(state: Sharing) -> tuple[Send, ...]:
    requests = ((silo, request_to(state, silo)) for silo in sorted(state.awaited))
    return tuple(Send(to=silo, message=request) for silo, request in requests if request is not None)


def takes_part(state: State, silo: SiloName) -> bool:
    """Whether `silo` has answered in the present phase or is awaited: it was neither dropped nor left out."""
    answers: tuple[Any, ...]
    match state:
        case Unmasked():
            return silo in state.survivors.silos
        case Unmasking():
            answers = state.reveals
        case Agreeing():
            answers = state.agreements
        case Masking():
            answers = state.inputs
        case Sharing():
            answers = state.shared
        case Advertising():
            answers = state.advertisements
        case _:
            return False
    return silo in state.awaited or any(answer.silo == silo for answer in answers)


# --- every phase ------------------------------------------------------------------------------------------------------

Phase = Advertising | Sharing | Masking | Agreeing | Unmasking

_CLOSING: dict[type[Phase], Callable[[Any], Step]] = {
    Advertising: _to_sharing,
    Sharing: _to_masking,
    Masking: _to_agreeing,
    Agreeing: _to_unmasking,
    Unmasking: _to_nothing,
}


def _settled(state: Phase, effects: tuple[Effect, ...]) -> Step:
    """On to the next phase once nobody is awaited."""
    if state.awaited:
        return state, effects
    after, further = _CLOSING[type(state)](state)
    return after, (*effects, *further)


def _drop(state: Phase, event: SiloDropped, identities: Identities) -> Step:
    if event.silo not in state.awaited:
        return state, ()
    blame = Blame(silo=event.silo, offence=Offence.SILENCE, detail=event.detail)
    return _without(state, event.silo, (Journal(event), blame))


def _close(state: Phase, event: PhaseClosed, identities: Identities) -> Step:
    if event.phase != state.phase:
        raise WrongTime(f"the deadline of the phase {event.phase} came in the phase {state.phase}")
    late = tuple(
        Blame(silo=silo, offence=Offence.SILENCE, detail=f"no answer in the phase {state.phase}")
        for silo in sorted(state.awaited)
    )
    return _settled(replace(state, awaited=frozenset()), (Journal(event), *late))


def _blamed(state: Phase, silo: SiloName, error: LoricaError) -> Step:
    """A message that was refused is no event of the journal: that `silo` was dropped is.

    Who replays the journal may know other keys of this silo, and must not come to another end by them.
    """
    offence = Offence.BAD_SIGNATURE if not isinstance(error, MalformedMessage) else Offence.BAD_MESSAGE
    blame = Blame(silo=silo, offence=offence, detail=str(error))
    if silo not in state.awaited:
        return state, (blame,)
    return _without(state, silo, (Journal(SiloDropped(silo, f"{offence.value}: {error}")), blame))


def _without(state: Phase, silo: SiloName, effects: tuple[Effect, ...]) -> Step:
    return _settled(replace(state, awaited=state.awaited - {silo}), effects)


def _abandoned(state: Phase, reason: str) -> Step:
    abandoned = Abandoned(attempt=state.attempt, reason=reason)
    return abandoned, (Abandon(attempt=state.attempt, reason=reason),)


def _is_repeated(state: Phase, event: Any, held: tuple[Any, ...]) -> bool:
    """Whether this very answer is there already. Raises Conflict for another one, WrongTime for one not waited for."""
    for item in held:
        if item.silo == event.silo:
            if item != event:
                raise Conflict(f"silo {event.silo} sent a second, different {type(event).__name__}: the first counts")
            return True
    if event.silo not in state.awaited:
        raise WrongTime(
            f"silo {event.silo} is not waited for in the phase {state.phase}: it was dropped, or never asked"
        )
    return False


def _check_roster(state: Sharing, roster: bytes) -> None:
    if roster != state.roster.digest:
        raise WrongTime(f"a message for another roster came in {state.attempt}")


def _dealers(state: Masking) -> tuple[SiloName, ...]:
    return tuple(item.silo for item in state.shared)


def _check_dealt(state: Masking, silo: SiloName) -> None:
    if silo not in _dealers(state):
        raise WrongTime(f"silo {silo} dealt no keys in {state.attempt}: it waits for the next")


def _check_sent(state: Agreeing, silo: SiloName) -> None:
    if all(item.silo != silo for item in state.inputs):
        raise WrongTime(f"silo {silo} sent no masked vector in {state.attempt}: it waits for the next")


TABLE: dict[tuple[type[State], type[Event]], Callable[[Any, Any, Identities], Step]] = {
    (Idle, OpenAttempt): _open,
    (Advertising, Advertisement): _advertise,
    (Advertising, SiloDropped): _drop,
    (Advertising, PhaseClosed): _close,
    (Sharing, SharedKeys): _share,
    (Sharing, SiloDropped): _drop,
    (Sharing, PhaseClosed): _close,
    (Masking, MaskedInput): _take_input,
    (Masking, Complaint): _complain,
    (Masking, SiloDropped): _drop,
    (Masking, PhaseClosed): _close,
    (Agreeing, Agreement): _take_agreement,
    (Agreeing, SiloDropped): _drop,
    (Agreeing, PhaseClosed): _close,
    (Unmasking, Reveal): _take_reveal,
    (Unmasking, SiloDropped): _drop,
    (Unmasking, PhaseClosed): _close,
    (Unmasked, Reveal): _late_reveal,
}
