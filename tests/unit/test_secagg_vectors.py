"""The test vectors in tests/vectors/secure_aggregation: what they say is what this version does, tampered or not."""

import json
from typing import Any

import numpy as np
import pytest

from lorica_security.errors import IntegrityError, MalformedMessage
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation import transcript
from lorica_security.secure_aggregation.keys import key_agreement, pair_secret, secret_sharing, share_box
from lorica_security.secure_aggregation.keys.key_agreement import KEM_KEY_BYTES, KeyPair, Link
from lorica_security.secure_aggregation.keys.secret import Secret
from lorica_security.secure_aggregation.masked_vectors import fixed_point, mask_stream
from tests.support import secagg_vectors as vectors
from tests.support.secagg_federation import MODEL, encoded, entropy

PRIMITIVES = json.loads((vectors.FOLDER / "primitives.json").read_text(encoding="utf-8"))
EXCHANGE = json.loads((vectors.FOLDER / "exchange.json").read_text(encoding="utf-8"))


def test_the_generator_makes_these_files_byte_for_byte() -> None:
    for name, text in vectors.files().items():
        assert (vectors.FOLDER / name).read_text(encoding="utf-8") == text, f"make {name} anew and read the difference"


def of(value: Any) -> Any:
    return vectors.from_json(value, "silo")


# --- primitives -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", PRIMITIVES["transcript"], ids=lambda case: str(case["parts"]))
def test_transcript(case: dict[str, Any]) -> None:
    assert transcript.digest("vector", *of(case["parts"])) == of(case["digest"])


def test_different_parts_have_different_digests() -> None:
    digests = [case["digest"]["hex"] for case in PRIMITIVES["transcript"]]
    assert len(set(digests)) == len(digests)


def test_both_sides_of_a_pair_derive_the_same_keys() -> None:
    it = of(PRIMITIVES["keys"])
    attempt, roots = it["attempt"], it["roots"]
    assert attempt.digest == it["attempt_digest"]
    made = {"mask": key_agreement.mask_secret, "box": key_agreement.box_secret}
    secrets = {kind: {name: make(root, attempt) for name, root in roots.items()} for kind, make in made.items()}
    assert secrets == it["secrets"]
    keys = {kind: {name: KeyPair(each) for name, each in held.items()} for kind, held in secrets.items()}
    assert {kind: {name: pair.public for name, pair in held.items()} for kind, held in keys.items()} == it[
        "public_keys"
    ]
    one, other = map(SiloName, roots)
    links = {
        kind: Link(roster=it["roster"], silos=(one, other), keys=(held[one], held[other]))
        for kind, held in it["public_keys"].items()
    }
    masks, boxes = keys["mask"], keys["box"]

    sent = it["box_encapsulation"]
    assert boxes[other].decapsulated(sent.ciphertext) == sent.secret
    assert vectors.encapsulated_with(boxes[other].public, it["box_coins"]) == sent
    for own in (one, other):
        assert key_agreement.box_key(boxes[own], links["box"], own=own, kem=sent) == it["box_key"]
    turned = Link(roster=it["roster"], silos=(other, one), keys=links["box"].keys[::-1])
    assert key_agreement.box_key(boxes[one], turned, own=one, kem=sent) != it["box_key"]

    pair, copy = pair_secret.pair_secret(secrets["mask"][one], links["mask"]), it["pair_copy"]
    assert pair == it["pair_secret"]
    assert copy.digest == it["pair_copy_digest"]
    kem = vectors.encapsulated_with(masks[other].public, it["pair_copy_coins"])
    assert pair_secret.copied(pair, links["mask"], kem) == copy
    assert pair_secret.uncovered(copy, links["mask"], masks[other]) == pair, "the second's mask secret leads there too"
    assert pair_secret.is_committed(pair, copy, links["mask"])
    bound_to = {"pair_secret": pair, "copy": copy.digest, "dealings": it["dealings"]}
    for own in (one, other):
        assert (
            key_agreement.pairwise_mask_key(masks[own], links["mask"], own=own, **bound_to) == it["pairwise_mask_key"]
        )
    for field, value in {
        "pair_secret": Secret(entropy("elsewhere")),
        "copy": entropy("elsewhere"),
        "dealings": entropy("elsewhere"),
    }.items():
        elsewhere = {**bound_to, field: value}
        key = key_agreement.pairwise_mask_key(masks[one], links["mask"], own=one, **elsewhere)
        assert key != it["pairwise_mask_key"], field

    seed = key_agreement.self_mask_seed(roots[one], attempt, it["roster"])
    assert seed == it["self_mask_seed"]
    made_key = key_agreement.self_mask_key(seed, own=one, roster=it["roster"], dealings=it["dealings"])
    assert made_key == it["self_mask_key"]
    assert key_agreement.rounding_key(roots[one], attempt, MODEL) == it["rounding_key"]
    for weak in it["small_order"]:
        with pytest.raises(MalformedMessage, match="agrees on no secret"):
            masks[one].agreed(masks[other].public[:KEM_KEY_BYTES] + weak, other)


def test_any_threshold_of_shares_gives_the_secret_back_and_altered_or_fewer_ones_do_not() -> None:
    it = {name: of(value) for name, value in PRIMITIVES["sharing"].items()}
    shares = {place: bytes(share.buffer) for place, share in enumerate(it["shares"], start=1)}
    made = secret_sharing.split(it["secret"], threshold=3, holders=5, entropy=it["coefficients"])
    assert made == it["shares"]
    for places in ((1, 2, 3), (5, 1, 4), (2, 4, 5)):
        assert secret_sharing.combined({place: shares[place] for place in places}, threshold=3) == it["secret"]
    with pytest.raises(ValueError, match="exactly 3"):
        secret_sharing.combined({place: shares[place] for place in (1, 2)}, threshold=3)
    with pytest.raises(MalformedMessage, match="no 32-byte secret"):
        secret_sharing.combined({1: shares[1], 2: shares[2]}, threshold=2)
    altered = shares[3][:-1] + bytes([shares[3][-1] ^ 1])
    assert secret_sharing.combined({1: shares[1], 2: shares[2], 3: altered}, threshold=3) != it["secret"]
    for wrong in it["not_a_share"]:
        with pytest.raises(MalformedMessage, match="2\\^521"):
            secret_sharing.check_share(wrong)
    committed = {
        "roster": entropy("roster"),
        "kind": "self-mask",
        "dealer": SiloName("silo-00"),
        "holder": SiloName("silo-01"),
        "salt": entropy("salt"),
        "share": shares[2],
    }
    assert secret_sharing.share_commitment(**committed) == it["commitment"]
    for field, value in {
        "roster": bytes(32),
        "kind": "mask-key",
        "dealer": SiloName("silo-01"),
        "holder": SiloName("silo-00"),
        "salt": bytes(32),
        "share": shares[1],
    }.items():
        assert secret_sharing.share_commitment(**{**committed, field: value}) != it["commitment"]
    seed = secret_sharing.seed_commitment(roster=entropy("roster"), dealer=SiloName("silo-00"), seed=it["secret"])
    assert seed == it["seed_commitment"]


def test_fewer_shares_than_the_threshold_fit_any_secret() -> None:
    """For every other secret there is a polynomial through the same two shares: they say nothing."""
    it = PRIMITIVES["sharing"]
    shares = {place: int(share["secret"], 16) for place, share in enumerate(it["shares"], start=1)}
    prime = secret_sharing.PRIME
    for guess in (0, 1, 2**256 - 1):
        points = {0: guess, 1: shares[1], 2: shares[2]}

        def through(x: int, points: dict[int, int] = points) -> int:
            total = 0
            for place, value in points.items():
                weight = 1
                for other in points:
                    if other != place:
                        weight = weight * (x - other) * pow(place - other, -1, prime) % prime
                total = (total + value * weight) % prime
            return total

        third = through(3).to_bytes(66, "big")
        pair = {place: shares[place].to_bytes(66, "big") for place in (1, 2)}
        secret = secret_sharing.combined({**pair, 3: third}, threshold=3)
        assert int.from_bytes(secret.buffer, "big") == guess


def test_boxes() -> None:
    it = PRIMITIVES["box"]
    shares = share_box.KeyShares(**{name: of(value) for name, value in it["shares"].items() if name != "type"})
    arguments = {"box": of(it["box"]), "key": of(it["key"]), "roster": of(it["roster"])}
    arguments |= {"dealer": it["dealer"], "holder": it["holder"]}
    sealing = {name: value for name, value in arguments.items() if name not in ("box", "key")}
    assert share_box.sealed(shares, arguments["key"], **sealing) == arguments["box"]
    assert share_box.opened(**arguments) == shares
    assert len(it["tampered"]) == 7
    for case in it["tampered"]:
        changed = {**arguments, **{name: of(value) for name, value in case["changes"].items()}}
        with pytest.raises(IntegrityError, match="does not open"):
            share_box.opened(**changed)


@pytest.mark.parametrize("stream", PRIMITIVES["stream"], ids=["key"])
def test_streams(stream: dict[str, Any]) -> None:
    for case in stream["cases"]:
        out = np.zeros(8, dtype="<u4")
        mask_stream.KeyStream(of(stream["key"])).words_into(out, case["start"], mask_stream.Workspace())
        assert out.tolist() == case["words"]


@pytest.mark.parametrize("case", PRIMITIVES["encoding"], ids=lambda case: f"{case['fixed_point']['cohort']} silos")
def test_encoding(case: dict[str, Any]) -> None:
    encoding = of(case["fixed_point"])
    delta = np.array(case["delta"], dtype=np.float32)
    words = encoded(encoding, mask_stream.KeyStream(of(case["rounding"])), delta, case["weight"], of(case["scores"]))
    assert words.tolist() == case["words"]
    decoded = np.zeros(5)
    fixed_point.decode(encoding, words[: -fixed_point.EXTRA_WORDS], 0, decoded)
    assert decoded.tolist() == case["decoded"]
    tail = fixed_point.decode_tail(encoding, words[-fixed_point.EXTRA_WORDS :])
    assert tail == of(case["tail"])


# --- one attempt ------------------------------------------------------------------------------------------------------


def test_every_step_of_the_attempt_has_the_effects_that_are_written_there() -> None:
    states: dict[str, Any] = {}
    for step in EXCHANGE["steps"]:
        actor = step["actor"]
        function, first, context = vectors.replayed([], actor, 0)
        states[actor], effects = function(
            states.get(actor, first), vectors.from_json(step["event"], vectors.side(actor)), context
        )
        assert vectors.to_json(effects) == step["effects"], f"{actor}: {step['event']['type']}"
    assert {type(state).__name__ for state in states.values()} == {"Resting", "Unmasked"}


def test_the_vectors_of_the_attempt_add_up_to_its_sum() -> None:
    unmask = next(effect for step in EXCHANGE["steps"] for effect in step["effects"] if effect["type"] == "Unmask")
    silos = EXCHANGE["silos"]
    total = np.sum([silos[name]["masked"] for name in unmask["survivors"]], axis=0).astype("<u4")
    masks = of(unmask["masks"])
    masks.apply(total, 0, mask_stream.Workspace())
    assert total.tolist() == EXCHANGE["sum"]
    plain = np.sum([silos[name]["encoded"] for name in unmask["survivors"]], axis=0) % 2**32
    assert total.tolist() == plain.tolist()
    assert unmask["dropped"] == [str(vectors.DROPPED)]


@pytest.mark.parametrize("case", EXCHANGE["tampered"], ids=lambda case: case["name"])
def test_a_tampered_event_has_the_outcome_that_is_expected(case: dict[str, Any]) -> None:
    genuine = EXCHANGE["steps"][case["at"]]
    assert genuine["event"] != case["event"]
    assert vectors.outcome(EXCHANGE["steps"], case["actor"], case["at"], genuine["event"]) == {"blamed": []}
    assert vectors.outcome(EXCHANGE["steps"], case["actor"], case["at"], case["event"]) == case["outcome"]


def test_a_secret_is_not_shown_copied_or_hashed() -> None:
    secret = Secret(b"\x07" * 32)
    assert "07" not in repr(secret)
    with pytest.raises(TypeError, match="not copied"):
        __import__("copy").deepcopy(secret)
    with pytest.raises(TypeError, match="unhashable"):
        hash(secret)
    buffer = bytearray(b"\x09" * 4)
    owner = Secret.taking(buffer)
    owner.erase()
    assert buffer == bytes(4)
