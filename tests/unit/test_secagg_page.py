"""A second implementation of what ops/docs/secure-aggregation.md specifies meets the test vectors. It imports nothing
of Lorica.

Each function is one line of a table of that page: where a formula there is wrong, the vectors do not come out. Whoever
wrote it knew the code, so that it shows that the page is right, and not that it leaves nothing out.
"""

import json
import math
import struct
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from blake3 import blake3
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

VECTORS = Path(__file__).resolve().parents[1] / "vectors" / "secure_aggregation"
P = "lorica/v1/secure-aggregation/"
PRIME = 2**521 - 1
TAIL = 7


def read(value: Any) -> Any:
    """Bytes and secrets as bytes; a message as its fields."""
    if isinstance(value, dict):
        if set(value) in ({"hex"}, {"secret"}):
            return bytes.fromhex(value.get("hex", value.get("secret")))
        return {name: read(item) for name, item in value.items()}
    return [read(item) for item in value] if isinstance(value, list) else value


SUMS = read(json.loads((VECTORS / "sums.json").read_text(encoding="utf-8")))
ROUNDS = read(json.loads((VECTORS / "rounds.json").read_text(encoding="utf-8")))
COURSES = pytest.mark.parametrize("course", SUMS, ids=lambda course: course["name"])


# --- numbers, digests, keys -------------------------------------------------------------------------------------------


def framed(*parts: Any) -> bytes:
    out = b""
    for part in parts:
        match part:
            case bytes():
                out += b"b" + struct.pack(">Q", len(part)) + part
            case str():
                out += b"s" + struct.pack(">Q", len(part.encode())) + part.encode()
            case float():
                out += b"f" + struct.pack(">d", part)
            case int():
                out += b"i" + struct.pack(">q", part)
            case _:
                out += b"l" + struct.pack(">Q", len(part)) + framed(*part)
    return out


def d(purpose: str, *parts: Any) -> bytes:
    return blake3(framed(P + purpose, *parts)).digest()


def k(secret: bytes, purpose: str, *parts: Any, length: int = 32) -> bytes:
    return HKDF(SHA256(), length, salt=None, info=framed(P + purpose, *parts)).derive(secret)


def check_signature(message: dict[str, Any], domain: str, payload: bytes, key: bytes) -> None:
    public = Ed25519PrivateKey.from_private_bytes(key).public_key()
    public.verify(message["signature"], b"lorica/v1/" + domain.encode() + b"\0" + payload)


class Keys:
    """Both private keys of a mask or a box secret."""

    def __init__(self, secret: bytes) -> None:
        self.x25519 = X25519PrivateKey.from_private_bytes(k(secret, "x25519"))
        self.kem = MLKEM768PrivateKey.from_seed_bytes(k(secret, "ml-kem-768", length=64))

    @property
    def public(self) -> bytes:
        return self.kem.public_key().public_bytes_raw() + self.x25519.public_key().public_bytes_raw()

    def agreed(self, public: bytes) -> bytes:
        return self.x25519.exchange(X25519PublicKey.from_public_bytes(public[1184:]))


def stream(key: bytes, words: int) -> np.ndarray:
    cipher = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(cipher.update(bytes(4 * words)), dtype="<u4")


# --- an attempt -------------------------------------------------------------------------------------------------------


class Attempt:
    """A course of sums.json, with the roster that follows from its events."""

    def __init__(self, course: dict[str, Any]) -> None:
        self.course, self.keys, self.roots = course, course["identity_keys"], course["roots"]
        events = course["events"]
        self.opening = events[0]
        at = self.opening["attempt"]
        self.parts = (at["federation"], at["plan"], at["round"], at["number"], at["id"])
        self.digest = d("attempt", *self.parts)
        of = {kind: [it for it in events if it["type"] == kind] for kind in {it["type"] for it in events}}
        self.of = of
        self.members = sorted(of["Advertisement"], key=lambda it: it["silo"])
        self.names = [it["silo"] for it in self.members]
        self.shared = {
            it["dealing"]["silo"]: it for it in sorted(of["SharedKeys"], key=lambda it: it["dealing"]["silo"])
        }
        self.terms = self.opening["terms"]
        self.tensors = [(it["elements"], it["bound"]) for it in self.terms["ranges"]["tensors"]]
        self.cap = self.terms["ranges"]["weight_cap"]
        self.words = sum(elements for elements, _ in self.tensors) + TAIL
        self.groups = self.terms["link"]["partition"]["groups"]
        self.roster = d(
            "roster",
            self.digest,
            self.terms["model"],
            link_digest(self.terms["link"]),
            self.parameters(),
            [[it["silo"], it["mask_key"], it["box_key"], it["seen"], it["signature"]] for it in self.members],
        )
        self.dealings = d("dealings", [dealing_payload(it["dealing"]) for it in self.shared.values()])

    def parameters(self) -> list[Any]:
        n, terms = len(self.names), self.terms
        colluders, most_survivors = terms["colluders"], terms["min_survivors"]
        asked = terms["threshold"] if terms["threshold"] is not None else max(3, 2 * n // 3 + 1)
        self.threshold = max(asked, max(3, n // 2 + 1), (n + colluders) // 2 + 1)
        least_sum = least_sum_of(self.groups, self.names, self.threshold, most_survivors)
        self.levels = (2**31 - 1) // n - 1
        if terms["noise_multiplier"]:
            _, self.levels = noise(n, least_sum - max(colluders, 1), terms["noise_multiplier"], self.words - TAIL)
        fixed_point = [n, self.levels, (2**32 - 1) // n, self.cap, self.tensors]
        return [n, self.threshold, colluders, most_survivors, least_sum, fixed_point]

    def key(self, silo: str, kind: str) -> bytes:
        return self.members[self.names.index(silo)][f"{kind}_key"]

    def link(self, one: str, other: str, kind: str) -> list[Any]:
        return [self.roster, one, other, self.key(one, kind), self.key(other, kind)]

    def copy(self, first: str, second: str) -> dict[str, Any]:
        (box,) = (it for it in self.shared[first]["boxes"] if it["holder"] == second)
        return box["copy"]

    def pair_key(self, own: str, secret: bytes, peer: str) -> bytes:
        """By the mask secret of `own`; of the second of the two by the copy."""
        first, second = sorted((own, peer))
        keys, link, copy = Keys(secret), self.link(first, second, "mask"), self.copy(first, second)
        if own == first:
            pair = k(secret, "pair-secret", *link)
        else:
            cover = k(keys.kem.decapsulate(copy["ciphertext"]), "pair-cover", *link, copy["ciphertext"])
            pair = bytes(one ^ other for one, other in zip(copy["covered"], cover, strict=True))
        assert d("pair-commitment", *link, pair) == copy["commitment"]
        told = copy_digest(copy)
        return k(pair + keys.agreed(self.key(peer, "mask")), "pairwise-mask", *link, told, self.dealings)


def copy_digest(copy: dict[str, Any]) -> bytes:
    return d("pair-copy", copy["ciphertext"], copy["covered"], copy["commitment"])


def dealing_payload(it: dict[str, Any]) -> bytes:
    lines = [[line["self_mask"], line["mask_key"], line["box"]] for line in it["lines"]]
    return framed(it["roster"], it["silo"], it["seed_commitment"], lines)


def link_digest(link: dict[str, Any]) -> bytes:
    groups, atoms = link["partition"]["groups"], link["atoms"]
    return d("release-groups", link["federation"], link["number"], link["previous"], groups, atoms)


def least_sum_of(groups: list[list[str]], cohort: list[str], threshold: int, least: int) -> int | None:
    """By trying every choice of whole groups."""
    whole = [group for group in groups if set(group) <= set(cohort)]
    sizes = [
        sum(map(len, chosen))
        for count in range(1, len(whole) + 1)
        for chosen in combinations(whole, count)
        if len(cohort) - (len(whole) - count) >= threshold
    ]
    return min((size for size in sizes if size >= least), default=None)


def noise(cohort: int, honest: int, multiplier: float, elements: int) -> tuple[int, int]:
    for bits in range(30, 9, -1):
        t = (
            math.sqrt(elements)
            * 10
            * math.fsum(math.exp(-2 * math.pi**2 * 4.0**bits * each / (each + 1)) for each in range(1, honest))
        )
        levels = math.floor(math.sqrt(honest) * 2.0**bits * (1 / multiplier - t) - math.sqrt(elements)) - 1
        if cohort * (levels + 1) + 12 * 2.0**bits * math.sqrt(cohort) <= 2**31 - 1:
            return bits, levels
    raise AssertionError("no noise fits")


def shares_of(root: bytes, kind: str, secret: bytes, at: Attempt) -> list[bytes]:
    size, entropy = 66 * (at.threshold - 1), b""
    while len(entropy) < size:
        length = min(8160, size - len(entropy))
        entropy += k(root, f"polynomial/{kind}", at.roster, len(entropy), length=length)
    numbers = [int.from_bytes(secret, "big")]
    for offset in range(0, size, 66):
        numbers.append((int.from_bytes(entropy[offset : offset + 66], "big") % 2**521) % PRIME)
    places = range(1, len(at.names) + 1)
    return [(sum(n * place**i for i, n in enumerate(numbers)) % PRIME).to_bytes(66, "big") for place in places]


def combined(shares: dict[int, bytes]) -> bytes:
    total = 0
    for place, share in shares.items():
        factor = 1
        for other in shares:
            if other != place:
                factor = factor * other * pow(other - place, -1, PRIME) % PRIME
        total += int.from_bytes(share, "big") * factor
    return (total % PRIME).to_bytes(66, "big")[-32:]


def commitment(at: Attempt, kind: str, dealer: str, holder: str, salt: bytes, share: bytes) -> bytes:
    return d("share-commitment", at.roster, kind, dealer, holder, salt, share)


@COURSES
def test_every_signature_is_over_what_the_page_says(course: dict[str, Any]) -> None:
    at = Attempt(course)
    assert link_digest(course["release_groups"]) == course["release_groups_digest"]
    payloads = {
        "Advertisement": lambda it: framed(*at.parts, it["silo"], it["mask_key"], it["box_key"], it["seen"]),
        "MaskedInput": lambda it: framed(it["roster"], it["dealings"], it["silo"], it["words"], it["vector"]),
        "Agreement": lambda it: framed(it["roster"], it["silo"], it["survivors"]),
        "Complaint": lambda it: framed(it["roster"], it["silo"], it["dealer"], it["key"]),
        "Reveal": lambda it: framed(
            it["roster"], it["silo"], [[one["type"], one["dealer"], one["share"], one["salt"]] for one in it["shares"]]
        ),
    }
    domains = {"MaskedInput": "masked-input"}
    for event in course["events"]:
        if event["type"] in payloads:
            domain = "secure-aggregation/" + domains.get(event["type"], event["type"].lower())
            check_signature(event, domain, payloads[event["type"]](event), at.keys[event["silo"]])
        if "roster" in event:
            assert event["roster"] == at.roster
    for name, shared in at.shared.items():
        assert shared["dealing"]["roster"] == at.roster
        check_signature(
            shared["dealing"], "secure-aggregation/dealing", dealing_payload(shared["dealing"]), at.keys[name]
        )
        for box in shared["boxes"]:
            copy = b"" if box["copy"] is None else copy_digest(box["copy"])
            line = shared["dealing"]["lines"][at.names.index(box["holder"])]
            assert line["box"] == d("box", box["ciphertext"], box["box"], copy)
        assert shared["dealing"]["lines"][at.names.index(name)]["box"] == d("box", b"", b"", b"")
    for event in at.of.get("MaskedInput", []):
        assert (event["dealings"], event["words"]) == (at.dealings, at.words)
        masked = np.array(course["masked"][event["silo"]], dtype="<u4")
        assert event["vector"] == blake3(masked.tobytes()).digest()


@COURSES
def test_what_a_silo_sends_follows_from_its_root(course: dict[str, Any]) -> None:
    at = Attempt(course)
    for name in at.shared:
        root = at.roots[name]
        secrets = {kind: k(root, f"{kind}-secret", at.digest) for kind in ("mask", "box")}
        assert all(Keys(secret).public == at.key(name, kind) for kind, secret in secrets.items())
        seed = k(root, "self-mask-seed", at.digest, at.roster)
        dealing = at.shared[name]["dealing"]
        assert dealing["seed_commitment"] == d("seed-commitment", at.roster, name, seed)
        dealt = {
            "self-mask": shares_of(root, "self-mask", seed, at),
            "mask-key": shares_of(root, "mask-key", secrets["mask"], at),
        }
        salts = {kind: [k(root, f"salt/{kind}", at.roster, holder) for holder in at.names] for kind in dealt}
        for place, holder in enumerate(at.names):
            line = dealing["lines"][place]
            for kind, field in (("self-mask", "self_mask"), ("mask-key", "mask_key")):
                made = commitment(at, kind, name, holder, salts[kind][place], dealt[kind][place])
                lies = line[field] == bytes(32)
                assert lies or line[field] == made
        for box in at.shared[name]["boxes"]:
            place, link = at.names.index(box["holder"]), at.link(name, box["holder"], "box")
            held = Keys(k(at.roots[box["holder"]], "box-secret", at.digest))
            kem = held.kem.decapsulate(box["ciphertext"])
            key = k(kem + held.agreed(at.key(name, "box")), "box", *link, box["ciphertext"])
            content = b"".join(part[place] for kind in dealt for part in (dealt[kind], salts[kind]))
            if name < box["holder"]:
                content += k(secrets["mask"], "pair-secret", *at.link(name, box["holder"], "mask"))
            bound = framed(P + "box-data", at.roster, name, box["holder"])
            try:
                assert ChaCha20Poly1305(key).decrypt(bytes(12), box["box"], bound) == content
            except InvalidTag:
                assert ["silo-01", "disputed"] in course["blamed"]
        if name in course["masked"]:
            total = np.array(course["encoded"][name], dtype="<u4") + stream(
                k(seed, "self-mask", at.roster, at.dealings, name), at.words
            )
            for peer in at.shared:
                if peer != name:
                    pair = stream(at.pair_key(name, secrets["mask"], peer), at.words)
                    total = total + pair if name < peer else total - pair
            assert total.tolist() == course["masked"][name]


@COURSES
def test_shares_take_the_masks_off_the_sum_of_the_survivors(course: dict[str, Any]) -> None:
    at = Attempt(course)
    if "survivors" not in course:
        return
    survivors, reveals = course["survivors"], at.of["Reveal"][: at.threshold]
    vectors = {it["silo"]: it["vector"] for it in at.of["MaskedInput"]}
    digest = d("survivors", at.roster, at.dealings, survivors, [vectors[name] for name in survivors])
    assert digest == course["survivors_digest"]
    assert all(it["survivors"] == digest for it in at.of["Agreement"])
    total = np.sum([course["masked"][name] for name in survivors], axis=0).astype("<u4")
    for dealer in at.shared:
        shares = {}
        for reveal in reveals:
            (share,) = (it for it in reveal["shares"] if it["dealer"] == dealer)
            kind = "self-mask" if share["type"] == "SelfMaskShare" else "mask-key"
            assert (kind == "self-mask") == (dealer in survivors)
            line = at.shared[dealer]["dealing"]["lines"][at.names.index(reveal["silo"])]
            made = commitment(at, kind, dealer, reveal["silo"], share["salt"], share["share"])
            assert line[kind.replace("-", "_")] == made
            shares[at.names.index(reveal["silo"]) + 1] = share["share"]
        secret = combined(shares)
        if dealer in survivors:
            total -= stream(k(secret, "self-mask", at.roster, at.dealings, dealer), at.words)
            continue
        assert Keys(secret).public == at.key(dealer, "mask")
        for survivor in survivors:
            pair = stream(at.pair_key(dealer, secret, survivor), at.words)
            total = total - pair if survivor < dealer else total + pair
    assert total.tolist() == course["sum"]
    assert course["dropped"] == [name for name in at.shared if name not in survivors]


@pytest.mark.parametrize("course", SUMS[4:], ids=lambda course: course["name"])
def test_a_complaint_shows_who_lied_or_that_nothing_shows_it(course: dict[str, Any]) -> None:
    at = Attempt(course)
    (complaint,) = at.of["Complaint"]
    dealer, holder = complaint["dealer"], complaint["silo"]
    (box,) = (it for it in at.shared[dealer]["boxes"] if it["holder"] == holder)
    bound = framed(P + "box-data", at.roster, dealer, holder)
    try:
        content = ChaCha20Poly1305(complaint["key"]).decrypt(bytes(12), box["box"], bound)
    except InvalidTag:
        blamed = [[dealer, "disputed"], [holder, "disputed"]]
    else:
        line = at.shared[dealer]["dealing"]["lines"][at.names.index(holder)]
        made = commitment(at, "self-mask", dealer, holder, content[66:98], content[:66])
        assert line["self_mask"] != made
        blamed = [[dealer, "bad share"]]
    assert course["blamed"] == blamed
    assert course["abandoned"]


# --- encoding ---------------------------------------------------------------------------------------------------------

PRIMITIVES = read(json.loads((VECTORS / "primitives.json").read_text(encoding="utf-8")))


@pytest.mark.parametrize("case", PRIMITIVES["encoding"], ids=lambda case: f"{case['fixed_point']['cohort']} silos")
def test_numbers_become_words(case: dict[str, Any]) -> None:
    point, ranges = case["fixed_point"], case["fixed_point"]["ranges"]
    n, cap, levels = point["cohort"], ranges["weight_cap"], point["levels"]
    assert (levels, point["saturation_limit"]) == ((2**31 - 1) // n - 1, (2**32 - 1) // n)
    bounds = np.repeat([it["bound"] for it in ranges["tensors"]], [it["elements"] for it in ranges["tensors"]])
    weight = min(case["weight"], cap)
    f = weight / cap * levels
    y = np.array(case["delta"], dtype=np.float32).astype(np.float64) * (f / bounds * 2.0**32)
    cut = np.abs(y) > levels * 2.0**32
    y = np.clip(y, -levels * 2.0**32, levels * 2.0**32)
    drawn = stream(case["rounding"], len(y) + 1).view("<i4").astype(np.float64)
    words = np.rint((np.append(y, f * 2.0**32) + drawn) / 2.0**32).astype(np.int64) % 2**32
    told = case["scores"]
    scores = [told[key] for key in ("questions", "exact_matches", "executed", "execution_matches", "loss")]
    saturated = int(cut.sum()) + (case["weight"] > cap)
    tail = [words[-1], *(min(each, point["saturation_limit"]) for each in (saturated, *scores))]
    assert [*words[:-1], *tail] == case["words"]
    signed = np.array(case["words"], dtype="<u4").view("<i4").astype(np.float64)
    assert (signed[: len(y)] * (bounds / levels * cap)).tolist() == case["decoded"]


# --- rounds -----------------------------------------------------------------------------------------------------------


def manifest(layout: str, data: bytes, chunk_bytes: int) -> str:
    chunks = [blake3(data[at : at + chunk_bytes]).hexdigest() for at in range(0, len(data), chunk_bytes)]
    told = {"chunk_bytes": chunk_bytes, "chunks": chunks, "layout": layout, "total_bytes": len(data)}
    return blake3(json.dumps(told, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def layout(dtype: str, tensors: list[list[Any]]) -> str:
    told = {"dtype": dtype, "tensors": [[name, sizes] for name, *sizes in tensors]}
    return blake3(json.dumps(told, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def power(base: float, exponent: int) -> float:
    out = 1.0
    while exponent:
        out, base, exponent = (out * base if exponent & 1 else out), base * base, exponent >> 1
    return out


def stepped(how: dict[str, Any], x: np.ndarray, g: np.ndarray, slots: dict[str, np.ndarray], t: int) -> np.ndarray:
    """x after the step; `slots` change."""
    f, lr = np.float32, how["learning_rate"]
    if how["name"] == "sgd":
        b = g
        if how["momentum"]:
            b = slots["momentum"] = slots["momentum"] * f(how["momentum"]) + g
        return x - (b if lr == 1.0 else b * f(lr))
    tau = f(how["tau"])
    if how["name"] == "adagrad":
        v = slots["sum_of_squares"] = slots["sum_of_squares"] + g * g
        return x - (g / (np.sqrt(v) + tau)) * f(lr)
    one, two = how["beta1"], how["beta2"]
    m = slots["first_moment"] = slots["first_moment"] * f(one) + g * f(1 - one)
    if how["name"] == "adam":
        v = slots["second_moment"] = slots["second_moment"] * f(two) + (g * g) * f(1 - two)
        r = np.sqrt(v) * f(1 / math.sqrt(1 - power(two, t))) + tau
        return x - (m / r) * f(lr / (1 - power(one, t)))
    q = g * g
    sign = np.sign(slots["second_moment"] - q)
    v = slots["second_moment"] = slots["second_moment"] - (q * f(1 - two)) * sign
    return x - (m / (np.sqrt(v) + tau)) * f(lr)


FILLS = {"momentum": 0.0, "first_moment": 0.0, "second_moment": 0.0}


@pytest.mark.parametrize("name", sorted(ROUNDS["rounds"]))
@pytest.mark.parametrize("number", [0, 1])
def test_a_round_is_made_again_and_its_evidence_says_so(name: str, number: int) -> None:
    it = ROUNDS["rounds"][name][number]
    how, point, tail = it["optimizer"], it["fixed_point"], it["sum"][-TAIL:]
    assert tail == it["tail"]
    signed = np.array(it["sum"], dtype="<u4").view("<i4")
    cap = point["ranges"]["weight_cap"]
    weights = max(int(signed[-TAIL]), 0) * cap / point["levels"]
    mean, start = np.empty(len(signed) - TAIL, dtype=np.float32), 0
    for tensor in point["ranges"]["tensors"]:
        stop = start + tensor["elements"]
        mean[start:stop] = signed[start:stop] * (tensor["bound"] / point["levels"] * (cap / weights))
        start = stop
    x = np.frombuffer(it["before"]["master"], dtype="<f4")
    slots = {slot: np.frombuffer(raw, dtype="<f4") for slot, raw in it["before"]["slots"].items()}
    if number == 0:
        fills = {**FILLS, "sum_of_squares": how.get("tau", 0.0) ** 2}
        if how["name"] == "yogi":
            fills["second_moment"] = how["tau"] * how["tau"]
        slots = {slot: np.full(len(x), fills[slot], dtype=np.float32) for slot in it["after"]["slots"]}
    x = stepped(how, x, -mean, slots, number + 1)
    assert x.tobytes() == it["after"]["master"]
    assert {slot: values.tobytes() for slot, values in slots.items()} == it["after"]["slots"]
    states = []
    for steps, at in ((number, it["before"]), (number + 1, it["after"])):
        float32, handed = (layout(dtype, it["tensors"]) for dtype in ("float32", at["model_dtype"]))
        bits = np.frombuffer(at["master"], dtype="<u4").astype(np.uint64)
        if at["model_dtype"] == "bfloat16":
            assert ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype("<u2").tobytes() == at["model"]
        model = manifest(handed, at["model"], it["chunk_bytes"])
        master = manifest(float32, at["master"], it["chunk_bytes"])
        of_slots = {slot: manifest(float32, raw, it["chunk_bytes"]) for slot, raw in sorted(at["slots"].items())}
        assert (model, master, of_slots) == (at["model_manifest"], at["master_manifest"], at["slot_manifests"])
        listed = [[slot, bytes.fromhex(digest)] for slot, digest in of_slots.items()]
        states.append(d("model-state", steps, bytes.fromhex(model), bytes.fromhex(master), listed))
        assert states[-1] == at["state_digest"]
    evidence = d("evidence", it["attempt_digest"], it["survivors_digest"], *states, *tail)
    assert evidence == it["evidence_digest"]
    check_signature(it, "round-evidence", evidence, it["coordinator_key"])


def test_verdicts_and_whose_chunks_are_whose() -> None:
    it = ROUNDS["verdicts"]
    verdict, bits = it["verdict"], bytearray(max(it["numbers"]) // 8 + 1)
    for number in it["numbers"]:
        bits[number // 8] |= 1 << number % 8
    assert bytes(bits) == verdict["chunks"]
    payload = framed(verdict["silo"].encode(), verdict["evidence"], verdict["chunks"])
    check_signature(verdict, "round-verdict", payload, it["identity_key"])
    names = it["survivors"]
    for colluders, parts in it["parts"].items():
        each = max(2, int(colluders.split()[0]) + 1)
        assert parts == {
            name: [chunk for chunk in range(it["chunks"]) if (place - chunk) % len(names) < each]
            for place, name in enumerate(names)
        }


def test_release_groups_follow_one_another() -> None:
    before: dict[str, Any] | None = None
    for one in ROUNDS["release_groups"]["links"]:
        link, groups = one["link"], one["link"]["partition"]["groups"]
        assert link_digest(link) == one["digest"]
        check_signature(
            one, "secure-aggregation/release-groups", framed(one["digest"]), ROUNDS["release_groups"]["identity_key"]
        )
        members = {silo for group in groups for silo in group}
        if before is None:
            assert (link["number"], link["previous"], link["atoms"]) == (1, bytes(32), groups)
            needed = [len(members)] * 3
        else:
            known = {silo for atom in before["atoms"] for silo in atom}
            pieces = [set(atom) & set(group) for atom in before["atoms"] for group in groups]
            pieces += [set(atom) - members for atom in before["atoms"]] + [set(group) - known for group in groups]
            assert link["atoms"] == sorted(sorted(piece) for piece in pieces if piece)
            assert (link["number"], link["previous"]) == (before["number"] + 1, link_digest(before))
            count = sum(map(len, before["partition"]["groups"]))
            needed = [(count + colluders) // 2 + 1 for colluders in range(3)]
        assert list(one["signatures_needed"].values()) == needed
        before = link
    for case in ROUNDS["release_groups"]["least_sums"]:
        arguments = case["groups"], case["cohort"], case["threshold"], case["min_survivors"]
        assert least_sum_of(*arguments) == case["least_sum"]


@pytest.mark.parametrize("case", ROUNDS["noise"], ids=str)
def test_noise_leaves_so_many_levels(case: dict[str, Any]) -> None:
    made = noise(case["cohort"], case["honest"], case["noise_multiplier"], case["elements"])
    assert made == (case["sigma_bits"], case["levels"])


def test_nothing_of_lorica_is_imported_here() -> None:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    names = {line.split()[1].split(".")[0] for line in lines if line.startswith(("import ", "from "))}
    assert not names & {"security", "silo_wire", "coordinator", "silo_agent", "ops", "tests"}
