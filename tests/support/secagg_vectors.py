"""Test vectors of secure aggregation, for this implementation and for others: `python -m tests.support.secagg_vectors`.

tests/vectors/secure_aggregation/primitives.json   each building block, with tampered inputs and what they lead to
tests/vectors/secure_aggregation/exchange.json     one attempt of four silos, of which one drops out, event by event; then
                                                   tampered events, with the outcome expected of each
tests/vectors/secure_aggregation/sums.json, rounds.json     see secagg_round_vectors

In the files, bytes are {"hex": ...}, secrets {"secret": ...}, a dataclass is its fields and its "type". A `Journal`
effect repeats the event and is written without it. Everything random is expanded from texts, so the files come out byte
for byte the same whenever they are made.
"""

import dataclasses
import json
from enum import Enum
from pathlib import Path
from typing import Any

import numpy as np

from lorica_security.errors import LoricaError
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation import attempt as attempt_module
from lorica_security.secure_aggregation import messages, parameters, roster, transcript
from lorica_security.secure_aggregation.coordinator import effects as coordinator_effects
from lorica_security.secure_aggregation.coordinator import events as coordinator_events
from lorica_security.secure_aggregation.coordinator import machine as coordinator_machine
from lorica_security.secure_aggregation.coordinator import states as coordinator_states
from lorica_security.secure_aggregation.groups import release_groups
from lorica_security.secure_aggregation.keys import key_agreement, pair_secret, secret_sharing, share_box
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.masked_vectors import fixed_point, mask_stream, scores
from lorica_security.secure_aggregation.silo import effects as silo_effects
from lorica_security.secure_aggregation.silo import events as silo_events
from lorica_security.secure_aggregation.silo import machine as silo_machine
from lorica_security.secure_aggregation.silo import memory as silo_memory
from lorica_security.secure_aggregation.silo import party as silo_party
from lorica_security.secure_aggregation.silo import states as silo_states
from lorica_security.secure_aggregation.silo.phases import own_dealing as silo_own_dealing
from tests.support import ml_kem
from tests.support.evidence import ManifestSilo
from tests.support.secagg_federation import (
    MODEL,
    Federation,
    Silo,
    alone,
    attempt,
    delta_of,
    encoded,
    entropy,
    identity_key,
    party,
    scores_of,
    silo_names,
    weight_of,
)
from tests.support.secagg_round_vectors import rounds, sums

FOLDER = Path(__file__).resolve().parents[1] / "vectors" / "secure_aggregation"

_SHARED = (
    *(attempt_module, fixed_point, key_agreement, mask_stream, messages, pair_secret, parameters),
    *(release_groups, roster, scores, silo_memory),
)
TYPES = {
    name: {
        kind.__name__: kind
        for module in (*_SHARED, *machine)
        for kind in vars(module).values()
        if isinstance(kind, type) and dataclasses.is_dataclass(kind)
    }
    for name, machine in (
        ("silo", (silo_party, silo_events, silo_effects, silo_states)),
        ("coordinator", (coordinator_events, coordinator_effects, coordinator_states)),
    )
}


def to_json(value: Any) -> Any:
    if isinstance(value, Secret):
        return {"secret": value.buffer.hex()}
    if isinstance(value, coordinator_effects.Journal | silo_effects.Journal):
        return {"type": "Journal"}
    if dataclasses.is_dataclass(value):
        fields = {field.name: to_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"type": type(value).__name__, **fields}
    if isinstance(value, bytes | bytearray):
        return {"hex": value.hex()}
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, tuple | list):
        return [to_json(item) for item in value]
    if isinstance(value, np.ndarray):
        return [int(item) for item in value]
    return value


def from_json(value: Any, side: str) -> Any:
    """The event that a file describes; `side` is "silo" or "coordinator"."""
    if isinstance(value, list):
        return tuple(from_json(item, side) for item in value)
    if not isinstance(value, dict):
        return value
    if set(value) == {"hex"}:
        return bytes.fromhex(value["hex"])
    if set(value) == {"secret"}:
        return Secret(bytes.fromhex(value["secret"]))
    fields = {name: from_json(item, side) for name, item in value.items() if name != "type"}
    return TYPES[side][value["type"]](**fields) if "type" in value else fields


# --- primitives -------------------------------------------------------------------------------------------------------


def primitives() -> dict[str, Any]:
    return {
        "transcript": _transcript(),
        "keys": _keys(),
        "sharing": _sharing(),
        "box": _box(),
        "stream": _stream(),
        "encoding": _encoding(),
    }


def _transcript() -> list[dict[str, Any]]:
    cases: list[list[Any]] = [[], [""], ["a", "b"], ["ab"], [[b"ab", 1], -1, 0.5], [["a"], "b"], [["a", "b"]]]
    return [{"parts": to_json(parts), "digest": to_json(transcript.digest("vector", *parts))} for parts in cases]


def _keys() -> dict[str, Any]:
    of, (one, other, *_) = attempt(), silo_names(3)
    roots = {name: Secret(entropy("vector root", name)) for name in (one, other)}
    secrets = {
        "mask": {name: key_agreement.mask_secret(root, of) for name, root in roots.items()},
        "box": {name: key_agreement.box_secret(root, of) for name, root in roots.items()},
    }
    keys = {kind: {name: key_agreement.KeyPair(each) for name, each in held.items()} for kind, held in secrets.items()}
    public = {kind: {name: pair.public for name, pair in held.items()} for kind, held in keys.items()}
    bound_to = {"roster": entropy("roster"), "dealings": entropy("dealings")}
    links = {
        kind: key_agreement.Link(roster=entropy("roster"), silos=(one, other), keys=(held[one], held[other]))
        for kind, held in public.items()
    }
    copy_kem, box_kem = (encapsulated_with(public[kind][other], entropy("coins", kind)) for kind in ("mask", "box"))
    pair = pair_secret.pair_secret(secrets["mask"][one], links["mask"])
    copy = pair_secret.copied(pair, links["mask"], copy_kem)
    pairwise = key_agreement.pairwise_mask_key(
        keys["mask"][one], links["mask"], own=one, pair_secret=pair, copy=copy.digest, dealings=entropy("dealings")
    )
    seed = key_agreement.self_mask_seed(roots[one], of, entropy("roster"))
    return {
        "attempt": to_json(of),
        "attempt_digest": to_json(of.digest),
        "roots": {name: to_json(root) for name, root in roots.items()},
        "secrets": {kind: {name: to_json(each) for name, each in held.items()} for kind, held in secrets.items()},
        "public_keys": {kind: {name: to_json(key) for name, key in held.items()} for kind, held in public.items()},
        "roster": to_json(entropy("roster")),
        "dealings": to_json(entropy("dealings")),
        "box_coins": to_json(entropy("coins", "box")),
        "box_encapsulation": to_json(box_kem),
        "box_key": to_json(key_agreement.box_key(keys["box"][one], links["box"], own=one, kem=box_kem)),
        "pair_secret": to_json(pair),
        "pair_copy_coins": to_json(entropy("coins", "mask")),
        "pair_copy": to_json(copy),
        "pair_copy_digest": to_json(copy.digest),
        "pairwise_mask_key": to_json(pairwise),
        "self_mask_seed": to_json(seed),
        "self_mask_key": to_json(key_agreement.self_mask_key(seed, own=one, **bound_to)),
        "rounding_key": to_json(key_agreement.rounding_key(roots[one], of, MODEL)),
        "small_order": [to_json(bytes(32)), to_json(b"\x01" + bytes(31))],
    }


def encapsulated_with(public: bytes, coins: bytes) -> key_agreement.Encapsulation:
    """What `key_agreement.encapsulated` would make, had OpenSSL drawn these coins."""
    kem, _ = key_agreement.halves(public)
    secret, ciphertext = ml_kem.encapsulate(kem, coins)
    return key_agreement.Encapsulation(Secret(secret), ciphertext)


def _sharing() -> dict[str, Any]:
    secret, threshold, holders = Secret(entropy("shared secret")), 3, 5
    coefficients = Secret(b"".join(entropy("coefficients", index) for index in range(5))[: 2 * 66])
    shares = secret_sharing.split(secret, threshold=threshold, holders=holders, entropy=coefficients)
    one, other = silo_names(2)
    return {
        "secret": to_json(secret),
        "coefficients": to_json(coefficients),
        "threshold": threshold,
        "shares": to_json(shares),
        "commitment": to_json(
            secret_sharing.share_commitment(
                roster=entropy("roster"),
                kind=secret_sharing.SELF_MASK,
                dealer=one,
                holder=other,
                salt=entropy("salt"),
                share=bytes(shares[1].buffer),
            )
        ),
        "seed_commitment": to_json(secret_sharing.seed_commitment(roster=entropy("roster"), dealer=one, seed=secret)),
        "not_a_share": [to_json(secret_sharing.PRIME.to_bytes(66, "big")), to_json(b"\xff" * 66), to_json(bytes(65))],
    }


def _box() -> dict[str, Any]:
    one, other = silo_names(2)
    shares = share_box.KeyShares(
        self_mask=Secret(bytes(34) + entropy("share")),
        self_mask_salt=Secret(entropy("salt")),
        mask_key=Secret(bytes(34) + entropy("other share")),
        mask_key_salt=Secret(entropy("other salt")),
        pair_secret=Secret(entropy("pair secret")),
    )
    bound_to = {"roster": entropy("roster"), "dealer": one, "holder": other}
    key = Secret(entropy("box key"))
    box = share_box.sealed(shares, key, **bound_to)
    tampered = {
        "a bit of the content": {"box": bytes([box[0] ^ 1]) + box[1:]},
        "a bit of the tag": {"box": box[:-1] + bytes([box[-1] ^ 128])},
        "cut short": {"box": box[:-1]},
        "another roster": {"roster": entropy("another roster")},
        "sent back": {"dealer": other, "holder": one},
        "for another holder": {"holder": "silo-09"},
        "another key": {"key": Secret(entropy("another key"))},
    }
    return {
        "shares": to_json(shares),
        "key": to_json(key),
        "roster": to_json(entropy("roster")),
        "dealer": one,
        "holder": other,
        "box": to_json(box),
        "tampered": [
            {"name": name, "changes": {field: to_json(value) for field, value in changes.items()}}
            for name, changes in tampered.items()
        ],
        "outcome": "IntegrityError",
    }


def _stream() -> list[dict[str, Any]]:
    stream = mask_stream.KeyStream(Secret(entropy("stream key")))
    cases = []
    for start in (0, 1, 4, 65_535, 1 << 32, (1 << 38) + 1):
        out = np.zeros(8, dtype="<u4")
        stream.words_into(out, start, mask_stream.Workspace())
        cases.append({"start": start, "words": to_json(out)})
    return [{"key": to_json(stream.key), "cases": cases}]


def _encoding() -> list[dict[str, Any]]:
    cases = []
    for cohort, weight in ((3, 1.5), (8, 64.0), (32, 1e9)):
        ranges = fixed_point.Ranges.of(sizes=(3, 2), largest_delta=(0.5, 1e-3), largest_weight=64)
        encoding = fixed_point.FixedPoint.of(cohort=cohort, ranges=ranges)
        key = Secret(entropy("rounding", cohort))
        delta = np.array([0.25, -0.125, 0.75, 1e-4, -1e-3], dtype=np.float32)
        told = scores_of(str(cohort))
        words = encoded(encoding, mask_stream.KeyStream(key), delta, weight, told)
        decoded = np.zeros(5)
        fixed_point.decode(encoding, words[: -fixed_point.EXTRA_WORDS], 0, decoded)
        tail = fixed_point.decode_tail(encoding, words[-fixed_point.EXTRA_WORDS :])
        cases.append(
            {
                "fixed_point": to_json(encoding),
                "rounding": to_json(key),
                "delta": [float(value) for value in delta],
                "weight": weight,
                "scores": to_json(told),
                "words": to_json(words),
                "decoded": [float(value) for value in decoded],
                "tail": to_json(tail),
            }
        )
    return cases


# --- one attempt ------------------------------------------------------------------------------------------------------

COUNT = 4
DROPPED = silo_names(COUNT)[2]
LINK = alone(silo_names(COUNT))


class Coins(Silo):
    """Encapsulates with coins that only the names and the key decide."""

    def shared_keys(self) -> messages.SharedKeys:
        def encapsulate(public: bytes) -> key_agreement.Encapsulation:
            return encapsulated_with(public, entropy("coins", self.name, public.hex()))

        assert isinstance(self.state, silo_states.WithRoster)
        return silo_own_dealing.shared_keys(self.state, self.party, encapsulate)


class ManifestWithCoins(Coins, ManifestSilo):
    """The same, of a silo that signs the manifest of its vector."""


def with_coins(count: int, *, link: release_groups.Link, terms_: parameters.Terms | None) -> Federation:
    names = silo_names(count)
    silos: dict[SiloName, Silo] = {name: Coins(party(name, names, link=link)) for name in names}
    return Federation(count, link=link, terms_=terms_, silos=silos)


class Recorded(Federation):
    """A federation that writes down each event and its effects."""

    def __init__(self) -> None:
        names = silo_names(COUNT)
        super().__init__(COUNT, link=LINK, silos={name: Coins(party(name, names, link=LINK)) for name in names})
        self.steps: list[dict[str, Any]] = []

    def tell_coordinator(self, event: coordinator_events.Event) -> None:
        _, effects = coordinator_machine.step(self.coordinator, event, self.identities)
        self.steps.append({"actor": "coordinator", "event": to_json(event), "effects": to_json(effects)})
        super().tell_coordinator(event)

    def tell_silo(self, name: Any, event: silo_events.Event) -> None:
        each = self.silos[name]
        state, effects = silo_machine.step(each.state, event, each.party)
        self.steps.append({"actor": name, "event": to_json(event), "effects": to_json(effects)})
        super().tell_silo(name, event)
        if any(isinstance(effect, silo_effects.ShareKeys) for effect in effects):
            shared = each.state.shared  # type: ignore[union-attr]
            _, effects = silo_machine.step(state, shared, each.party)
            self.steps.append({"actor": name, "event": to_json(shared), "effects": to_json(effects)})
        if any(isinstance(effect, silo_effects.MaskVector) for effect in effects):
            masked = silo_events.VectorMasked(each.state.vector)  # type: ignore[union-attr]
            _, effects = silo_machine.step(state, masked, each.party)
            self.steps.append({"actor": name, "event": to_json(masked), "effects": to_json(effects)})


def exchange() -> dict[str, Any]:
    federation = Recorded()
    federation.run(drops={DROPPED: "masked input"})
    for name in federation.names:
        federation.tell_silo(name, silo_events.AttemptEnded(federation.attempt))
    # `effects` were written before the roots in them were erased
    return {
        "identity_keys": {name: {"secret": identity_key(name).private_bytes_raw().hex()} for name in federation.names},
        "silos": {
            name: {
                "delta": [float(value) for value in delta_of(name)],
                "weight": weight_of(name),
                "scores": to_json(scores_of(name)),
                "encoded": to_json(federation.silos[name].encoded),
                "masked": to_json(federation.silos[name].masked),
            }
            for name in federation.names
        },
        "steps": federation.steps,
        "sum": to_json(federation.sum()),
        "tampered": tampered(federation.steps),
    }


def _at(steps: list[dict[str, Any]], actor: str, kind: str) -> tuple[int, Any]:
    """Where the actor first gets an event of this kind, and a copy of it."""
    at = next(at for at, step in enumerate(steps) if step["actor"] == actor and step["event"]["type"] == kind)
    return at, json.loads(json.dumps(steps[at]["event"]))


def _flipped(field: dict[str, str]) -> dict[str, str]:
    return {"hex": f"{int(field['hex'][:2], 16) ^ 1:02x}{field['hex'][2:]}"}


INTEGRITY, MALFORMED, POLICY, TIME = "IntegrityError", "MalformedMessage", "PolicyRefusal", "WrongTime"
BLAMED = "bad signature"


def tampered(steps: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Events that stand in the place of the step `at`, each with the outcome that is expected, written by hand."""
    victim = silo_names(COUNT)[0]
    cases: list[dict[str, Any]] = []

    def case(name: str, expected: str, kind: str, *path: Any, actor: str = victim, **value: Any) -> None:
        at, event = _at(steps, actor, kind)
        holder = event
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value.get("value") or _flipped(holder[path[-1]])
        outcome = {"error": expected} if actor != "coordinator" else {"blamed": [[victim, expected]]}
        cases.append({"name": name, "actor": actor, "at": at, "event": event, "outcome": outcome})

    parameters_ = ("Roster", "parameters")
    case("a member's mask key is swapped", INTEGRITY, "Roster", "members", 1, "mask_key")
    case("a member's box key is swapped", INTEGRITY, "Roster", "members", 1, "box_key")
    case("a member's signature is altered", INTEGRITY, "Roster", "members", 3, "signature")
    case("a member is somebody unknown", POLICY, "Roster", "members", 3, "silo", value="silo-99")
    case("members out of order", MALFORMED, "Roster", "members", 0, "silo", value="silo-50")
    case("the roster is for another model", POLICY, "Roster", "model")
    case("the roster is for another attempt", MALFORMED, "Roster", "attempt", "number", value=2)
    case("the threshold is lowered", MALFORMED, *parameters_, "threshold", value=2)
    case("min_survivors is lowered", MALFORMED, *parameters_, "min_survivors", value=2)
    case("the levels could overflow", MALFORMED, *parameters_, "fixed_point", "levels", value=2**29)
    case("a commitment is altered", INTEGRITY, "Delivery", "dealings", 1, "lines", 0, "self_mask")
    case("the own dealing is altered", INTEGRITY, "Delivery", "dealings", 0, "seed_commitment")
    case("a box is altered", INTEGRITY, "Delivery", "boxes", 0, "box")
    case("a box's ciphertext is altered", INTEGRITY, "Delivery", "boxes", 0, "ciphertext")
    for field in ("ciphertext", "covered", "commitment"):
        name = f"the {field} of a pair copy is altered"
        case(name, INTEGRITY, "Delivery", "boxes", 0, "copy", field, actor=silo_names(COUNT)[3])
    case("a box of another dealer", MALFORMED, "Delivery", "boxes", 0, "dealer", value="silo-00")
    for name, outcome_, *silos in (
        ("the survivors leave out the silo and are too few", POLICY, "silo-01", "silo-03"),
        ("the survivors are too few", POLICY, "silo-00", "silo-01"),
        ("a stranger survives", MALFORMED, "silo-00", "silo-01", "silo-77"),
    ):
        case(name, outcome_, "SurvivorSet", "silos", value=silos)
        cases[-1]["event"]["inputs"] = [{"hex": "00" * 32}] * len(silos)
    case("another vector of this silo survives", INTEGRITY, "SurvivorSet", "inputs", 0)
    case("a survivor without a vector", MALFORMED, "SurvivorSet", "inputs", value=[{"hex": "00" * 32}])
    case("the roster is for other release groups", POLICY, "Roster", "link")
    case("more colluders than the release groups hold against", POLICY, *parameters_, "colluders", value=1)
    case("a sum of fewer silos than the groups allow", POLICY, "Roster", "parameters", "least_sum", value=4)
    case("the survivors are of other dealings", TIME, "SurvivorSet", "dealings")
    case("a forged agreement", INTEGRITY, "UnmaskRequest", "agreements", 1, "signature")
    case("an agreement on another set", INTEGRITY, "UnmaskRequest", "agreements", 1, "survivors")
    agreements = _at(steps, victim, "UnmaskRequest")[1]["agreements"]
    case("too few agreements", POLICY, "UnmaskRequest", "agreements", value=agreements[:2])
    case("the unmask request is for another roster", TIME, "UnmaskRequest", "roster")
    there = {"actor": "coordinator"}
    case("keys that are not signed", BLAMED, "Advertisement", "mask_key", **there)
    case("a dealing that is not signed", BLAMED, "SharedKeys", "dealing", "seed_commitment", **there)
    case("a masked input that is not signed", BLAMED, "MaskedInput", "vector", **there)
    case("a masked input of another length", BLAMED, "MaskedInput", "words", value=7, **there)
    case("an agreement that is not signed", BLAMED, "Agreement", "survivors", **there)
    case("a reveal that is not signed", BLAMED, "Reveal", "shares", 1, "share", **there)
    return cases


def replayed(steps: list[dict[str, Any]], actor: str, before: int) -> tuple[Any, Any, Any]:
    """(machine's step, state, context) of one actor, after its own steps up to `before`."""
    names = silo_names(COUNT)
    if actor == "coordinator":
        step: Any = coordinator_machine.step
        state: Any = coordinator_states.Idle()
        context: Any = {name: identity_key(name).public_key() for name in names}
    else:
        step, state = silo_machine.step, silo_states.Resting(silo_memory.SiloMemory())
        context = party(actor, names, link=LINK)  # type: ignore[arg-type]
    for each in steps[:before]:
        if each["actor"] == actor:
            state, _ = step(state, from_json(each["event"], side(actor)), context)
    return step, state, context


def side(actor: str) -> str:
    return "coordinator" if actor == "coordinator" else "silo"


def outcome(steps: list[dict[str, Any]], actor: str, at: int, event: Any) -> Any:
    """What a tampered event does lead to: the error's class, or who is blamed."""
    step, state, context = replayed(steps, actor, at)
    try:
        _, effects = step(state, from_json(event, side(actor)), context)
    except LoricaError as error:
        return {"error": type(error).__name__}
    return {"blamed": [[it.silo, it.offence.value] for it in effects if isinstance(it, coordinator_effects.Blame)]}


def files() -> dict[str, str]:
    contents = {
        "primitives.json": primitives(),
        "exchange.json": exchange(),
        "sums.json": sums(with_coins, to_json),
        "rounds.json": rounds(ManifestWithCoins, to_json),
    }
    return {name: json.dumps(content, indent=1) + "\n" for name, content in contents.items()}


def main() -> None:
    FOLDER.mkdir(parents=True, exist_ok=True)
    for name, text in files().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
