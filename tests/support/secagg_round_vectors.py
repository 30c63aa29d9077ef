"""Vectors of whole sums and of what follows from them: made into files by secagg_vectors.

sums.json     attempts of other courses than exchange.json: the coordinator's events, what silos drew and encoded, what came of it
rounds.json   evidence of rounds and the server's step in them, by every optimizer; verdicts; release groups; noise
"""

from collections.abc import Callable, Mapping
from dataclasses import asdict, replace
from typing import Any

from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation import messages
from lorica_security.secure_aggregation.coordinator import states as coordinator_states
from lorica_security.secure_aggregation.groups import release_groups
from lorica_security.secure_aggregation.groups.release_groups import Link, Partition, Promise
from lorica_security.secure_aggregation.masked_vectors.noise_shares import NoiseShares
from lorica_security.secure_aggregation.model_evidence.evidence import ModelState
from lorica_security.secure_aggregation.model_evidence.verdicts import part_of, signed_verdict
from lorica_security.secure_aggregation.parameters import NoiseTerms, Terms
from silo_wire.plans.noised_masks import GRADIENT_STEPS
from silo_wire.plans.sections.server_rates import ServerRates
from silo_wire.plans.sections.who_trains import WhoTrains
from silo_wire.server_step.server_optimizer import Sgd
from tests.support.evidence import OPTIMIZERS, Made, ManifestSilo, Rounds, Vectors, bits_of
from tests.support.secagg_federation import FEDERATION, Federation, alone, entropy, identity_key, silo_names, terms

Json = Callable[[Any], Any]
Alter = Callable[[str, Any], Any]


def sums(federation_of: Callable[..., Federation], to_json: Json) -> list[dict[str, Any]]:
    """`federation_of` makes a federation whose silos encapsulate what can be made again."""
    six, seven = silo_names(6), silo_names(7)
    groups = release_groups.first_link(FEDERATION, Partition.of([seven[:3], seven[3:]]))
    four_names = silo_names(4)
    four = alone(four_names)
    noised = replace(terms(link=four), noise=NoiseTerms(noise_multiplier=0.7))
    joint = replace(
        terms(link=four), noise=NoiseTerms(noise_multiplier=0.9, makers=2, reach=40.0, grain=1 / GRADIENT_STEPS)
    )
    courses: list[tuple[str, int, Link, Terms | None, Mapping[SiloName, str], Alter]] = [
        (
            "two silos drop out, one before it deals and one before it masks",
            6,
            alone(six),
            terms(link=alone(six), threshold=4),
            {six[1]: "share keys", six[4]: "masked input"},
            _nothing,
        ),
        ("a release group is incomplete", 7, groups, None, {seven[5]: "masked input"}, _nothing),
        ("one that does not mask agrees with nobody", 7, groups, None, {seven[2]: "consistency check"}, _nothing),
        ("silos add noise", 4, four, noised, {}, _nothing),
        ("silos make joint noise", 4, four, joint, {four_names[1]: "masked input"}, _nothing),
        ("a dealer commits to another share than it deals", 4, four, None, {}, _false_commitment),
        ("a box that opens by no key that is shown", 4, four, None, {}, _damaged_box),
    ]
    return [_course(federation_of, to_json, *course) for course in courses]


def _nothing(to: str, message: Any) -> Any:
    return message


DEALER, HOLDER = silo_names(3)[1:]


def _false_commitment(to: str, message: Any) -> Any:
    if to == DEALER and isinstance(message, messages.Delivery):
        return None  # it would see what was made of its dealing
    if not isinstance(message, messages.SharedKeys) or message.silo != DEALER:
        return message
    lines = list(message.dealing.lines)
    lines[2] = replace(lines[2], self_mask=bytes(32))
    return replace(message, dealing=_signed_anew(message.dealing, tuple(lines)))


def _damaged_box(to: str, message: Any) -> Any:
    if to == DEALER and isinstance(message, messages.Delivery):
        return None  # it would see what was made of its dealing
    if not isinstance(message, messages.SharedKeys) or message.silo != DEALER:
        return message
    boxes = tuple(
        replace(box, box=bytes([box.box[0] ^ 1]) + box.box[1:]) if box.holder == HOLDER else box
        for box in message.boxes
    )
    (damaged,) = (box for box in boxes if box.holder == HOLDER)
    lines = list(message.dealing.lines)
    lines[2] = replace(lines[2], box=damaged.digest)
    return messages.SharedKeys(dealing=_signed_anew(message.dealing, tuple(lines)), boxes=boxes)


def _signed_anew(dealing: messages.Dealing, lines: tuple[messages.DealtLine, ...]) -> messages.Dealing:
    return messages.signed(replace(dealing, lines=lines), identity_key(dealing.silo))


def _course(
    federation_of: Callable[..., Federation],
    to_json: Json,
    name: str,
    count: int,
    link: Link,
    terms_: Terms | None,
    drops: Mapping[SiloName, str],
    alter: Alter,
) -> dict[str, Any]:
    federation = federation_of(count, link=link, terms_=terms_)
    federation.alter = alter
    federation.run(drops=drops)
    state = federation.coordinator
    roots = {each.name: entropy("root", each.name, federation.attempt.id.hex()) for each in federation.silos.values()}
    outcome: dict[str, Any]
    if isinstance(state, coordinator_states.Unmasked):
        assert federation.unmask is not None
        words = federation.sum()
        outcome = {
            "survivors": list(federation.unmask.survivors),
            "dropped": list(federation.unmask.dropped),
            "sum": to_json(words),
            "survivors_digest": to_json(state.survivors.digest),
        }
    else:
        assert isinstance(state, coordinator_states.Abandoned)
        outcome = {"abandoned": True}
    return {
        "name": name,
        "release_groups": to_json(link),
        "release_groups_digest": to_json(link.digest),
        "identity_keys": {silo: {"secret": identity_key(silo).private_bytes_raw().hex()} for silo in federation.names},
        "roots": {silo: {"secret": root.hex()} for silo, root in roots.items()},
        "encoded": {silo: to_json(each.encoded) for silo, each in federation.silos.items() if each.encoded is not None},
        "masked": {silo: to_json(each.masked) for silo, each in federation.silos.items() if each.masked is not None},
        "events": [to_json(event) for event in federation.journal],
        "blamed": [[blame.silo, blame.offence.value] for blame in federation.blames],
        **outcome,
    }


# --- rounds -----------------------------------------------------------------------------------------------------------


def rounds(kind: type[ManifestSilo], to_json: Json) -> dict[str, Any]:
    made = {
        name: [rounds_.next(number) for number in (1, 2)]
        for name, rounds_ in (
            (
                name,
                Rounds(
                    optimizer, sizes=(2, 3), silos=3, published="bfloat16" if name == "adam" else "float32", kind=kind
                ),
            )
            for name, optimizer in OPTIMIZERS.items()
        )
    }
    made["in turn"] = _in_turn(kind)
    made["falling"] = _falling(kind)
    return {
        "rounds": {name: [_round(one, to_json) for one in both] for name, both in made.items()},
        "verdicts": _verdicts(made["fedavg"][0].evidence.digest, to_json),
        "release_groups": _release_groups(to_json),
        "noise": _noise(),
    }


def _in_turn(kind: type[ManifestSilo]) -> list[Made]:
    """A round of silos with labels and one of silos without, of which one drops out: K are those that are left."""
    names = silo_names(4)
    who = WhoTrains(unlabelled=tuple(names), labelled_alone="in_turn")
    rates = ServerRates(who=who)
    rounds_ = Rounds(Sgd(learning_rate=1.0), sizes=(2, 3), silos=len(names), kind=kind, rates=rates)
    return [rounds_.next(1), rounds_.next(2, drops={names[1]: "masked input"})]


def _falling(kind: type[ManifestSilo]) -> list[Made]:
    """Rounds 1, 2 and 4 of four."""
    rates = ServerRates(at_end=0.3, rounds=4)
    rounds_ = Rounds(OPTIMIZERS["adam"], sizes=(2, 3), silos=3, kind=kind, rates=rates)
    return [rounds_.next(number) for number in (1, 2, 4)]


def _round(made: Made, to_json: Json) -> dict[str, Any]:
    evidence, signed = made.evidence, made.checkable().signed
    assert made.federation.unmask is not None
    return {
        "takes_turns": made.rule.rates.who.labelled_alone == "in_turn",
        "rate_at_end": made.rule.rates.at_end,
        "rounds_of_plan": made.rule.rates.rounds,
        "round": evidence.attempt.round,
        "survivors": list(made.federation.unmask.survivors),
        "optimizer": {"name": type(made.rule.optimizer).__name__.lower(), **asdict(made.rule.optimizer)},
        "fixed_point": to_json(made.federation.unmask.fixed_point),
        "tensors": [[spec.name, *spec.shape] for spec in made.rule.layout.tensors],
        "chunk_bytes": made.chunk_bytes,
        "sum": to_json(made.federation.true_sum()),
        "before": _vectors(made, made.before, evidence.before, to_json),
        "after": _vectors(made, made.after, evidence.after, to_json),
        "attempt_digest": to_json(evidence.attempt.digest),
        "survivors_digest": to_json(evidence.survivors.digest),
        "tail": list(evidence.tail),
        "evidence_digest": to_json(evidence.digest),
        "coordinator_key": {"secret": identity_key("coordinator").private_bytes_raw().hex()},
        "signature": to_json(signed.signature),
    }


def _vectors(made: Made, vectors: Vectors, state: ModelState, to_json: Json) -> dict[str, Any]:
    manifests = made.manifests(vectors)
    return {
        "model": to_json(bits_of(vectors.model)),
        "model_dtype": made.rule.model_layout.dtype,
        "master": to_json(bits_of(vectors.master)),
        "slots": {name: to_json(bits_of(values)) for name, values in sorted(vectors.slots.items())},
        "model_manifest": manifests.model.digest,
        "master_manifest": manifests.master.digest,
        "slot_manifests": {name: manifests.slots[name].digest for name in sorted(manifests.slots)},
        "state": to_json(state),
        "state_digest": to_json(state.digest),
    }


def _verdicts(evidence: bytes, to_json: Json) -> dict[str, Any]:
    (silo,) = silo_names(1)
    verdict = signed_verdict(evidence, silo, [0, 3, 9, 17], identity_key(silo))
    names = silo_names(5)
    return {
        "identity_key": {"secret": identity_key(silo).private_bytes_raw().hex()},
        "numbers": [0, 3, 9, 17],
        "verdict": to_json(verdict),
        "survivors": list(names),
        "chunks": 11,
        "parts": {
            f"{colluders} colluders": {
                name: sorted(part_of(name, names, 11, each=max(2, colluders + 1))) for name in names
            }
            for colluders in (0, 1, 2, 3)
        },
    }


def _release_groups(to_json: Json) -> dict[str, Any]:
    names = silo_names(8)
    partitions = [[names[:7]], [names[:4], names[4:7]], [names[:3], names[4:]]]
    promises = [Promise(), Promise(colluders=2, smallest_group=4), Promise(colluders=2, smallest_group=5)]
    links = [release_groups.first_link(FEDERATION, Partition.of(partitions[0]), promises[0])]
    for groups, promise in zip(partitions[1:], promises[1:], strict=True):
        links.append(release_groups.successor(links[-1], Partition.of(groups), promise))
    return {
        "links": [
            {
                "link": to_json(link),
                "digest": to_json(link.digest),
                "signature": to_json(release_groups.signature_of(link, identity_key(names[0]))),
                "signatures_needed": release_groups.missing_signatures(previous, link, ())[1],
            }
            for previous, link in zip([None, *links], links, strict=False)
        ],
        "identity_key": {"secret": identity_key(names[0]).private_bytes_raw().hex()},
        "least_sums": [
            {
                "groups": [list(group) for group in link.partition.groups],
                "cohort": list(cohort),
                "threshold": threshold,
                "min_survivors": least,
                "least_sum": link.partition.least_sum(cohort, threshold=threshold, min_survivors=least),
            }
            for link in links
            for cohort in (names[:7], names[:6])
            for threshold in (4, 5)
            for least in (3, 4)
        ],
    }


def _noise() -> list[dict[str, Any]]:
    return [
        {
            "cohort": shares.cohort,
            "honest": shares.honest,
            "noise_multiplier": shares.noise_multiplier,
            "elements": shares.elements,
            "reach": shares.reach,
            "grain": shares.grain,
            "sigma_bits": shares.sigma_bits,
            "levels": shares.levels,
        }
        for shares in (
            NoiseShares(
                cohort=cohort, honest=honest, noise_multiplier=multiplier, elements=elements, reach=reach, grain=grain
            )
            for cohort, honest, multiplier, elements, reach, grain in (
                (3, 2, 0.5, 21, 1.0, 0.0),
                (8, 6, 1.0, 1_000_000, 1.0, 0.0),
                (8, 3, 4.0, 222_903_552, 1.0, 0.0),
                (32, 20, 2.5, 60_506_624, 1.0, 0.0),
                (8, 5, 1.38, 222_903_552, 1000.0, 1 / GRADIENT_STEPS),
                (3, 2, 0.7, 21, 12.5, 1 / GRADIENT_STEPS),
            )
        )
    ]
