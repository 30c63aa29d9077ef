"""What secure aggregation sends beside the masked vectors themselves, in bytes: messages of its sizes, encoded as they
travel.

No key is made and nothing is signed: where a message has a key, a share or a signature, something as long stands here.
What is counted is a round in which nobody drops out, in the first attempt, with the silos' identity keys beside the
roster and none of them ever succeeded by another.
"""

from collections.abc import Iterator, Sequence

from lorica.simulation.forecast.traffic import Traffic
from lorica_security.identifiers import FederationName, SiloName
from lorica_security.identity.identity_key import public_key_from_bytes
from lorica_security.secure_aggregation.attempt import ATTEMPT_ID_BYTES, Attempt
from lorica_security.secure_aggregation.groups.release_groups import Partition, first_link
from lorica_security.secure_aggregation.keys.key_agreement import CIPHERTEXT_BYTES, KEM_KEY_BYTES, X25519_BYTES
from lorica_security.secure_aggregation.keys.pair_secret import PAIR_SECRET_BYTES, PairCopy
from lorica_security.secure_aggregation.keys.secret_sharing import SALT_BYTES, SHARE_BYTES
from lorica_security.secure_aggregation.keys.share_box import box_bytes
from lorica_security.secure_aggregation.masked_vectors.fixed_point import EXTRA_WORDS
from lorica_security.secure_aggregation.messages import (
    Advertisement,
    Agreement,
    Dealing,
    DealtLine,
    Delivery,
    MaskedInput,
    Reveal,
    SealedShare,
    SelfMaskShare,
    SharedKeys,
    SurvivorSet,
    UnmaskRequest,
)
from lorica_security.secure_aggregation.parameters import Terms
from lorica_security.secure_aggregation.roster import Roster
from lorica_security.secure_aggregation.transcript import DIGEST_BYTES
from silo_wire.codecs.masked_orders_codec import mask_answer_to_wire, mask_to_wire
from silo_wire.codecs.secure_codec import masked_input_to_wire
from silo_wire.messages import Mask, MaskAnswer, RoundKey
from silo_wire.plans.masked_ranges import ranges_of
from silo_wire.plans.noised_masks import noise_terms
from silo_wire.plans.plan import PlanBundle

_DIGEST = b"\x01" * DIGEST_BYTES
_CIPHERTEXT = b"\x01" * CIPHERTEXT_BYTES
_COPY = PairCopy(ciphertext=_CIPHERTEXT, covered=b"\x01" * PAIR_SECRET_BYTES, commitment=_DIGEST)
_LINE = DealtLine(self_mask=_DIGEST, mask_key=_DIGEST, box=_DIGEST)


def mask_traffic(bundle: PlanBundle, silos: Sequence[SiloName]) -> dict[SiloName, Traffic]:
    """Of one round of `bundle`'s plan, whose cohort is `silos`, for each of them.

    Raises MalformedMessage where the plan's masks do not hold for a cohort of this size.
    """
    cohort = _Cohort(bundle, sorted(silos))
    return {silo: cohort.traffic(silo) for silo in silos}


class _Cohort:
    """One attempt of all `silos`, in order of name."""

    def __init__(self, bundle: PlanBundle, silos: Sequence[SiloName]) -> None:
        plan = bundle.plan
        self._silos = tuple(silos)
        self._key = RoundKey(federation=FederationName(plan.federation), plan=plan.digest, round=1, attempt=1)
        self._model = plan.digest  # a digest like any other
        self._seconds = plan.schedule.masking_deadline_s
        self._words = bundle.layout.parameters + EXTRA_WORDS
        self._attempt = Attempt(
            federation=FederationName(plan.federation),
            plan=bytes.fromhex(plan.digest),
            round=1,
            number=1,
            id=b"\x01" * ATTEMPT_ID_BYTES,
        )
        section = plan.aggregation
        terms = Terms(
            model=bytes.fromhex(self._model),
            link=first_link(FederationName(plan.federation), Partition.of([silos])),
            ranges=ranges_of(bundle),
            min_cohort=plan.smallest_cohort,
            min_survivors=section.min_survivors,
            colluders=section.colluders,
            threshold=section.threshold or None,
            noise=noise_terms(plan),
        )
        self._roster = Roster(
            attempt=self._attempt,
            model=terms.model,
            link=terms.link.digest,
            parameters=terms.parameters(silos),
            members=tuple(self._advertisement(number) for number in range(len(silos))),
        )
        self._dealings = tuple(
            Dealing(roster=_DIGEST, silo=silo, seed_commitment=_DIGEST, lines=(_LINE,) * len(silos)) for silo in silos
        )
        self._agreements = tuple(Agreement(roster=_DIGEST, silo=silo, survivors=_DIGEST) for silo in silos)

    def traffic(self, silo: SiloName) -> Traffic:
        announced = MaskedInput(roster=_DIGEST, dealings=_DIGEST, silo=silo, words=self._words, vector=_DIGEST)
        return Traffic(
            down=sum(mask_to_wire(order, silo).ByteSize() for order in self._orders(silo)),
            up=sum(mask_answer_to_wire(self._key, silo, answer).ByteSize() for answer in self._answers(silo))
            + masked_input_to_wire(announced).ByteSize(),
        )

    def _orders(self, silo: SiloName) -> Iterator[Mask]:
        identity = public_key_from_bytes(_DIGEST)
        for message in (
            None,
            self._roster,
            Delivery(roster=_DIGEST, holder=silo, dealings=self._dealings, boxes=self._boxes(silo, dealt=False)),
            SurvivorSet(roster=_DIGEST, dealings=_DIGEST, silos=self._silos, inputs=(_DIGEST,) * len(self._silos)),
            UnmaskRequest(roster=_DIGEST, agreements=self._agreements),
        ):
            identities = tuple((member, identity) for member in self._silos) if message is self._roster else ()
            yield Mask(
                key=self._key,
                model=self._model,
                seconds_left=self._seconds,
                attempt=self._attempt,
                message=message,
                identities=identities,
            )

    def _answers(self, silo: SiloName) -> Iterator[MaskAnswer]:
        place = self._silos.index(silo)
        yield self._advertisement(place)
        yield SharedKeys(dealing=self._dealings[place], boxes=self._boxes(silo, dealt=True))
        yield self._agreements[place]
        share, salt = b"\x01" * SHARE_BYTES, b"\x01" * SALT_BYTES
        yield Reveal(
            roster=_DIGEST,
            silo=silo,
            shares=tuple(SelfMaskShare(dealer=dealer, share=share, salt=salt) for dealer in self._silos),
        )

    def _advertisement(self, number: int) -> Advertisement:
        """Of the silo at place `number`; no two keys of a roster are alike."""
        mask_key, box_key = (
            b"".join((2 * number + key).to_bytes(size, "big") for size in (KEM_KEY_BYTES, X25519_BYTES))
            for key in (1, 2)
        )
        return Advertisement(attempt=self._attempt, silo=self._silos[number], mask_key=mask_key, box_key=box_key)

    def _boxes(self, silo: SiloName, *, dealt: bool) -> tuple[SealedShare, ...]:
        """What `silo` sends, or gets: one for each of the others."""
        others = [other for other in self._silos if other != silo]
        return tuple(_sealed(silo, other) if dealt else _sealed(other, silo) for other in others)


def _sealed(dealer: SiloName, holder: SiloName) -> SealedShare:
    return SealedShare(
        dealer=dealer,
        holder=holder,
        ciphertext=_CIPHERTEXT,
        box=b"\x01" * box_bytes(dealer, holder),
        copy=_COPY if dealer < holder else None,
    )
