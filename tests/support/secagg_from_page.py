"""Secure aggregation, written from ops/docs/secure-aggregation.md alone by somebody who had not read the code.

Messages are plain dicts with a "type". Where the page left a guess and now has a sentence, the guess was brought in
line: when a phase ends with too few, and answers for another roster.
"""

import json
import math
import struct

import numpy as np
from blake3 import blake3
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

PREFIX = "lorica/v1/secure-aggregation/"
PRIME = 2**521 - 1
TAIL = 7
MLKEM, X25519 = 1184, 32
PUBLIC = MLKEM + X25519
CIPHERTEXT = 1088
SHARE = 66


class MalformedMessage(Exception):
    pass


class IntegrityError(Exception):
    pass


class PolicyRefusal(Exception):
    pass


class WrongTime(Exception):
    pass


class FalseBox(Exception):
    pass  # what was signed and what the box holds differ: a complaint


# ---------------------------------------------------------------- framing, D, K, signatures
def frame(part):
    if isinstance(part, bool):
        raise TypeError("bool")
    if isinstance(part, (bytes, bytearray)):
        return b"b" + struct.pack(">Q", len(part)) + bytes(part)
    if isinstance(part, str):
        b = part.encode()
        return b"s" + struct.pack(">Q", len(b)) + b
    if isinstance(part, int):
        return b"i" + struct.pack(">q", part)
    if isinstance(part, float):
        return b"f" + struct.pack(">d", part)
    if isinstance(part, (list, tuple)):
        return b"l" + struct.pack(">Q", len(part)) + framed(*part)
    raise TypeError(type(part))


def framed(*parts):
    return b"".join(frame(p) for p in parts)


def H(data):
    return blake3(data).digest()


def D(purpose, *parts):
    return H(framed(PREFIX + purpose, *parts))


def K(secret, purpose, *parts, length=32):
    return HKDF(hashes.SHA256(), length, None, framed(PREFIX + purpose, *parts)).derive(secret)


def to_sign(domain, payload):
    return b"lorica/v1/" + domain.encode() + b"\0" + payload


def sign(key, domain, payload):
    return Ed25519PrivateKey.from_private_bytes(key).sign(to_sign(domain, payload))


def public_of(key):
    return raw(Ed25519PrivateKey.from_private_bytes(key).public_key())


P25519 = 2**255 - 19
SMALL_Y = set()


def _small_order():
    """y of the points of small order: 0, 1, -1 and the two of order 8 (any sign bit, any encoding)."""
    d = -121665 * pow(121666, -1, P25519) % P25519
    ys = {0, 1, P25519 - 1}
    # order 8: y^2 = x^-2 ... doubled gives y=0: 1 + d y^4 - ... use x^2 = -y^2 => -x^2+y^2 = 1+d x^2 y^2 with x^2=-y^2:
    # 2y^2 = 1 - d y^4
    disc = (4 + 4 * d) % P25519  # d Y^2 + 2Y - 1 = 0, Y = y^2

    def root(a):
        r = pow(a, (P25519 + 3) // 8, P25519)
        if r * r % P25519 == a:
            return r
        r = r * pow(2, (P25519 - 1) // 4, P25519) % P25519
        return r if r * r % P25519 == a else None

    s = root(disc)
    for sg in (s, -s):
        y2 = (-2 + sg) * pow(2 * d, -1, P25519) % P25519
        y = root(y2)
        if y is not None:
            ys |= {y, P25519 - y}
    return ys


SMALL_Y = _small_order()


def identity_key_ok(pk):
    y = int.from_bytes(pk, "little") & (2**255 - 1)
    return len(pk) == 32 and y % P25519 not in SMALL_Y


def verify(pk, domain, payload, signature):
    if not identity_key_ok(pk):
        return False
    try:
        Ed25519PublicKey.from_public_bytes(pk).verify(signature, to_sign(domain, payload))
        return True
    except (InvalidSignature, ValueError):
        return False


def raw(key):
    return key.public_bytes(serialization.Encoding.Raw, serialization.PublicFormat.Raw)


# ---------------------------------------------------------------- keys of two kinds
class Key:
    """The private keys of a secret."""

    def __init__(self, secret):
        self.secret = secret
        self.x = X25519PrivateKey.from_private_bytes(K(secret, "x25519"))
        self.m = MLKEM768PrivateKey.from_seed_bytes(K(secret, "ml-kem-768", length=64))
        self.public = self.m.public_key().public_bytes_raw() + raw(self.x.public_key())

    def agree(self, public):
        return self.x.exchange(X25519PublicKey.from_public_bytes(public[MLKEM:]))  # raises on zero

    def open(self, c):
        return self.m.decapsulate(c)


def encapsulate(public):
    k, c = MLKEM768PublicKey.from_public_bytes(public[:MLKEM]).encapsulate()
    return k, c


def key_passes(public):
    """FIPS 203, 7.2: coefficients below q; X25519 agrees on no zero."""
    if len(public) != PUBLIC:
        return False
    b = np.frombuffer(public[:1152], np.uint8).astype(np.int32).reshape(-1, 3)
    if ((b[:, 0] | (b[:, 1] & 15) << 8) >= 3329).any() or ((b[:, 1] >> 4 | b[:, 2] << 4) >= 3329).any():
        return False
    try:
        MLKEM768PublicKey.from_public_bytes(public[:MLKEM])
        X25519PrivateKey.from_private_bytes(b"\x01" * 32).exchange(X25519PublicKey.from_public_bytes(public[MLKEM:]))
    except ValueError:
        return False
    return True


def stream(key, words, offset=0):
    """`words` words of AES-256-CTR from a counter of zero over zeros."""
    enc = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
    return np.frombuffer(enc.update(bytes(4 * (offset + words))), "<u4")[offset:]


# ---------------------------------------------------------------- digests and payloads
def attempt_parts(a):
    return (a["federation"], a["plan"], a["round"], a["number"])


def attempt_digest(a):
    return D("attempt", *attempt_parts(a), a["id"])


def seen_list(seen):
    return [list(s) for s in seen]


def advertisement_parts(m):
    return (
        *attempt_parts(m["attempt"]),
        m["attempt"]["id"],
        m["silo"],
        m["mask_key"],
        m["box_key"],
        seen_list(m["seen"]),
    )


def advertisement_digest(m):
    return D("advertisement", framed(*advertisement_parts(m)))  # gap: the payload as one part


def dealing_payload(d):
    return framed(
        d["roster"], d["silo"], d["seed_commitment"], [[l["self_mask"], l["mask_key"], l["box"]] for l in d["lines"]]
    )


def payload(m):
    t = m["type"]
    if t == "Advertisement":
        return framed(*advertisement_parts(m))
    if t == "Dealing":
        return dealing_payload(m)
    if t == "Complaint":
        return framed(m["roster"], m["silo"], m["dealer"], m["key"])
    if t == "MaskedInput":
        return framed(m["roster"], m["dealings"], m["silo"], m["words"], m["vector"])
    if t == "Agreement":
        return framed(m["roster"], m["silo"], m["survivors"])
    if t == "Reveal":
        return framed(m["roster"], m["silo"], [[s["type"], s["dealer"], s["share"], s["salt"]] for s in m["shares"]])
    if t == "Verdict":
        return framed(m["silo"].encode(), m["evidence"], m["chunks"])
    raise TypeError(t)


DOMAIN = {
    "Advertisement": "secure-aggregation/advertisement",
    "Dealing": "secure-aggregation/dealing",
    "Complaint": "secure-aggregation/complaint",
    "MaskedInput": "secure-aggregation/masked-input",
    "Agreement": "secure-aggregation/agreement",
    "Reveal": "secure-aggregation/reveal",
    "Verdict": "round-verdict",
}
GROUPS_DOMAIN = "secure-aggregation/release-groups"


def signed(m, key):
    return {**m, "signature": sign(key, DOMAIN[m["type"]], payload(m))}


def signature_good(m, pk):
    try:
        return verify(pk, DOMAIN[m["type"]], payload(m), m["signature"])
    except (TypeError, struct.error):
        return False


def parameters_list(p):
    f = p["fixed_point"]
    r = f["ranges"]
    return [
        p["cohort"],
        p["threshold"],
        p["colluders"],
        p["min_survivors"],
        p["least_sum"],
        [
            f["cohort"],
            f["levels"],
            f["saturation_limit"],
            float(r["weight_cap"]),
            [[t["elements"], float(t["bound"])] for t in r["tensors"]],
        ],
    ]


def roster_digest(r):
    return D(
        "roster",
        attempt_digest(r["attempt"]),
        r["model"],
        r["link"],
        parameters_list(r["parameters"]),
        [[m["silo"], m["mask_key"], m["box_key"], seen_list(m["seen"]), m["signature"]] for m in r["members"]],
    )


def dealings_digest(dealings):
    return D("dealings", [dealing_payload(d) for d in sorted(dealings, key=lambda d: d["silo"])])


def survivors_digest(s):
    return D("survivors", s["roster"], s["dealings"], list(s["silos"]), list(s["inputs"]))


def link_digest(l):
    def s(x):
        return sorted(sorted(g) for g in x)

    p = l["promise"]
    groups, atoms = s(l["partition"]["groups"]), s(l["atoms"])
    return D(
        "release-groups",
        l["federation"],
        l["number"],
        l["previous"],
        groups,
        atoms,
        p["colluders"],
        p["smallest_group"],
    )


# ---------------------------------------------------------------- parameters
def threshold_of(n, c=0, plan=None):
    return max(plan if plan is not None else max(3, 2 * n // 3 + 1), n // 2 + 1, (n + c) // 2 + 1)


def least_sum(groups, cohort, threshold, min_survivors):
    """None where there is no such sum."""
    cohort = set(cohort)
    n = len(cohort)
    whole = [len(g) for g in groups if set(g) <= cohort]
    reach = {(0, 0)}  # (silos in the sum, groups in it)
    for size in whole:
        reach |= {(a + size, k + 1) for a, k in reach}
    fits = [a for a, k in reach if k and a >= min_survivors and n - (len(whole) - k) >= threshold]
    return min(fits, default=None)


SIGMA_BITS = 30


def noise_parameters(cohort, h, z, d, reach=1.0, grain=0.0):
    for b in range(SIGMA_BITS, 9, -1):
        T = math.sqrt(d) * 10 * sum(math.exp(-2 * math.pi**2 * 4.0**b * k / (k + 1)) for k in range(1, h))
        left = math.sqrt(h) * 2**b * (1 / z - T) - math.sqrt(d)
        levels = math.floor(left / (1 / reach + grain * math.sqrt(d))) - 1
        if cohort * (levels + 1) + 12 * 2**b * math.sqrt(cohort) <= 2**31 - 1 and levels > 0:
            return b, levels
    raise PolicyRefusal("no noise fits")


def fixed_point(cohort, ranges, levels=None):
    return {
        "type": "FixedPoint",
        "cohort": cohort,
        "levels": (2**31 - 1) // cohort - 1 if levels is None else levels,
        "saturation_limit": (2**32 - 1) // cohort,
        "ranges": ranges,
    }


def coordinates(ranges):
    return sum(t["elements"] for t in ranges["tensors"])


def make_parameters(terms, cohort):
    """None if these silos cannot have a sum."""
    n, c = len(cohort), terms["colluders"]
    t = threshold_of(n, c, terms["threshold"])
    ms = max(3, c + 2, terms["min_survivors"])
    if n < max(3, terms["min_cohort"]) or t > n:
        return None
    ls = least_sum(terms["link"]["partition"]["groups"], cohort, t, ms)
    if ls is None:
        return None
    levels = None
    if (noise := terms["noise"]) is not None:
        h = ls - max(c, 1)
        if noise["makers"] is not None:
            if noise["makers"] > h:
                return None
            h = noise["makers"]
        z, d = noise["noise_multiplier"], coordinates(terms["ranges"])
        _, levels = noise_parameters(n, h, z, d, noise["reach"], noise["grain"])
    return {
        "type": "Parameters",
        "cohort": n,
        "threshold": t,
        "colluders": c,
        "min_survivors": ms,
        "least_sum": ls,
        "fixed_point": fixed_point(n, terms["ranges"], levels),
    }


# ---------------------------------------------------------------- shares
def polynomial(root, kind, roster, threshold):
    total = SHARE * (threshold - 1)
    out = b""
    while len(out) < total:
        out += K(root, "polynomial/" + kind, roster, len(out), length=min(8160, total - len(out)))
    return [(int.from_bytes(out[i : i + SHARE], "big") & (2**521 - 1)) % PRIME for i in range(0, total, SHARE)]


def make_shares(root, kind, roster, threshold, secret, n):
    coefficients = [int.from_bytes(secret, "big"), *polynomial(root, kind, roster, threshold)]
    shares = []
    for p in range(1, n + 1):
        v = 0
        for a in reversed(coefficients):
            v = (v * p + a) % PRIME
        shares.append(v.to_bytes(SHARE, "big"))
    return shares


def share_salt(root, kind, roster, holder):
    return K(root, "salt/" + kind, roster, holder)


def share_commitment(roster, kind, dealer, holder, salt, share):
    return D("share-commitment", roster, kind, dealer, holder, salt, share)


def share_ok(share):
    return len(share) == SHARE and int.from_bytes(share, "big") < PRIME


def combine(points):
    """{place: share} -> 32 bytes, or None."""
    total = 0
    for p, s in points.items():
        if not share_ok(s):
            return None
        num = den = 1
        for q in points:
            if q != p:
                num = num * q % PRIME
                den = den * (q - p) % PRIME
        total = (total + int.from_bytes(s, "big") * num * pow(den, -1, PRIME)) % PRIME
    return total.to_bytes(32, "big") if total < 2**256 else None


# ---------------------------------------------------------------- boxes, pairs, masks
class Session:
    """What a roster says, and what of it anybody can derive."""

    def __init__(self, roster):
        self.message = roster
        self.digest = roster_digest(roster)
        self.attempt = attempt_digest(roster["attempt"])
        self.members = {m["silo"]: m for m in roster["members"]}
        self.names = list(self.members)
        self.place = {s: i + 1 for i, s in enumerate(self.names)}
        self.parameters = roster["parameters"]
        self.t = roster["parameters"]["threshold"]
        self.fp = self.parameters["fixed_point"]
        self.words = coordinates(self.fp["ranges"]) + TAIL

    def link(self, kind, a, b):
        return (self.digest, a, b, self.members[a][kind], self.members[b][kind])

    def box_data(self, dealer, holder):
        return framed(PREFIX + "box-data", self.digest, dealer, holder)

    def seed_commitment(self, dealer, seed):
        return D("seed-commitment", self.digest, dealer, seed)

    def self_mask(self, seed, dealings, name):
        return K(seed, "self-mask", self.digest, dealings, name)

    def pair_secret(self, mask_secret, a, b):
        return K(mask_secret, "pair-secret", *self.link("mask_key", a, b))

    def pair_commitment(self, a, b, p):
        return D("pair-commitment", *self.link("mask_key", a, b), p)

    def pair_mask(self, a, b, p, x, copy, dealings):
        return K(p + x, "pairwise-mask", *self.link("mask_key", a, b), copy_digest(copy), dealings)

    def cover(self, a, b, p, k, c):
        return xor(p, K(k, "pair-cover", *self.link("mask_key", a, b), c))

    def box_key(self, dealer, holder, k, x, c):
        return K(k + x, "box", *self.link("box_key", dealer, holder), c)

    def pair_of(self, key, me, other, copy):
        """The pair secret as the silo `me` has it from its mask secret."""
        if me < other:
            return self.pair_secret(key.secret, me, other)
        return self.cover(other, me, copy["covered"], key.open(copy["ciphertext"]), copy["ciphertext"])

    def holds_what_was_signed(self, dealer, holder, plain, line, copy):
        if len(plain) != (228 if copy else 196):
            return False
        s1, a1, s2, a2, p = plain[:66], plain[66:98], plain[98:164], plain[164:196], plain[196:]
        return (
            share_ok(s1)
            and share_ok(s2)
            and share_commitment(self.digest, "self-mask", dealer, holder, a1, s1) == line["self_mask"]
            and share_commitment(self.digest, "mask-key", dealer, holder, a2, s2) == line["mask_key"]
            and (not copy or self.pair_commitment(dealer, holder, p) == copy["commitment"])
        )


def xor(a, b):
    return bytes(x ^ y for x, y in zip(a, b, strict=False))


def copy_digest(c):
    return D("pair-copy", c["ciphertext"], c["covered"], c["commitment"]) if c else b""


def box_digest(b):
    return D("box", b["ciphertext"], b["box"], copy_digest(b["copy"]))


OWN_BOX = D("box", b"", b"", b"")
NONCE = bytes(12)


def check_dealing_shape(s, d, boxes=None):
    """Does what is said fit the roster?"""
    if d["silo"] not in s.members or d["roster"] != s.digest or len(d["lines"]) != len(s.names):
        return False
    if d["lines"][s.place[d["silo"]] - 1]["box"] != OWN_BOX:
        return False
    if boxes is None:
        return True
    if [b["holder"] for b in boxes] != [n for n in s.names if n != d["silo"]]:
        return False
    return all(
        b["dealer"] == d["silo"] and box_fits(s, b) and box_digest(b) == d["lines"][s.place[b["holder"]] - 1]["box"]
        for b in boxes
    )


def box_fits(s, b):
    first = b["dealer"] < b["holder"]
    c = b["copy"]
    return (
        len(b["ciphertext"]) == CIPHERTEXT
        and (c is not None) == first
        and len(b["box"]) == 16 + (228 if first else 196)
        and (c is None or (len(c["ciphertext"]), len(c["covered"]), len(c["commitment"])) == (CIPHERTEXT, 32, 32))
    )


def unmask(total, masks):
    added, subtracted = masks
    total = total.astype(np.uint32).copy()
    for k in added:
        total += stream(k, len(total))
    for k in subtracted:
        total -= stream(k, len(total))
    return total


# ---------------------------------------------------------------- encoding
def share(fp, weight, max_weight_ratio=None):
    cap = float(fp["ranges"]["weight_cap"])
    return max(min(weight, cap), cap / max_weight_ratio if max_weight_ratio else 0.0) / cap


def within_ranges(fp, deltas, weight, max_weight_ratio=None):
    """The deltas that are encoded, no tensor of which is beyond its range, and how many coordinates were."""
    out, beyond, at = np.array(deltas, np.float64), 0, 0
    for t in fp["ranges"]["tensors"]:
        x = out[at : at + t["elements"]]
        sizes = np.abs(x) * share(fp, weight, max_weight_ratio)
        beyond += int((sizes > t["bound"]).sum())
        if sizes.max() > t["bound"]:
            x *= t["bound"] / sizes.max() * (1 - 2.0**-22)
        at += t["elements"]
    return out.astype(np.float32), beyond


def encode(fp, deltas, weight, scores=None, rounding_key=None, max_weight_ratio=None, beyond=0):
    """deltas: flat float32 in the order of the tensors; beyond: how many were, before their tensors were scaled."""
    cap, levels = float(fp["ranges"]["weight_cap"]), fp["levels"]
    f = share(fp, weight, max_weight_ratio) * levels
    n = coordinates(fp["ranges"])
    r = stream(rounding_key, n + 1).view("<i4").astype(np.float64)
    y = np.empty(n)
    at = 0
    deltas = np.asarray(deltas, np.float64)
    for t in fp["ranges"]["tensors"]:
        y[at : at + t["elements"]] = deltas[at : at + t["elements"]] * (f / t["bound"] * 2.0**32)
        at += t["elements"]
    top = levels * 2.0**32
    cut = np.abs(y) > top
    y = np.clip(y, -top, top)
    words = np.rint((y + r[:n]) / 2.0**32).astype(np.int64)
    w0 = int(np.rint((f * 2.0**32 + r[n]) / 2.0**32))
    limit = fp["saturation_limit"]
    tail = [w0, min(beyond + int(cut.sum()) + (weight > cap), limit)]
    s = scores or {}
    tail += [
        min(int(s.get(k, 0)), limit) for k in ("questions", "exact_matches", "executed", "execution_matches", "loss")
    ]
    return (np.concatenate([words, np.array(tail, np.int64)]) & 0xFFFFFFFF).astype(np.uint32)


def rounding_key(root, attempt, model):
    return K(root, "rounding", attempt, model)


def sum_weights(fp, word):
    return max(0, int(np.uint32(word).view(np.int32))) * fp["ranges"]["weight_cap"] / fp["levels"]


def mean(fp, total):
    """float32 mean delta from the words of a sum."""
    cap, out, at = float(fp["ranges"]["weight_cap"]), [], 0
    n = coordinates(fp["ranges"])
    w = sum_weights(fp, total[n])
    signed_ = np.asarray(total[:n], np.uint32).view(np.int32).astype(np.float64)
    for t in fp["ranges"]["tensors"]:
        out.append(signed_[at : at + t["elements"]] * (t["bound"] / fp["levels"] * (cap / w)))
        at += t["elements"]
    return np.concatenate(out).astype(np.float32)


# ---------------------------------------------------------------- the silo
class Silo:
    def __init__(self, name, key, pins, link, terms, announced=(), seen=None):
        """pins: name -> identity key; link: the one held; terms: what the plan promised and the policy asks (as
        Terms)."""
        self.name, self.key, self.pins, self.link, self.terms = name, key, pins, link, terms
        self.announced, self.seen = list(announced), dict(seen or {})
        self.taken, self.revealed, self.models = {}, set(), {}
        self.state = "Resting"

    def group(self):
        return next(g for g in self.link["partition"]["groups"] if self.name in g)

    def _at(self, *states):
        if self.state not in states:
            raise WrongTime(self.state)

    def open(self, attempt, model, tensors, root, newest=()):
        where = (attempt["plan"], attempt["round"])
        if where in self.revealed:
            raise PolicyRefusal("shares were revealed for this round")
        last = self.taken.get(attempt["plan"], (0, 0))
        if (attempt["round"], attempt["number"]) <= last:
            raise PolicyRefusal("attempts in ascending order, each once")
        if self.models.setdefault(where, model) != model:
            raise PolicyRefusal("another model in this round")
        if any(d not in self.announced for d in newest):
            raise PolicyRefusal("masking_memory")
        self.taken[attempt["plan"]] = (attempt["round"], attempt["number"])
        self.attempt, self.model, self.tensors, self.root = attempt, model, tensors, root
        a = attempt_digest(attempt)
        self.mask, self.box = Key(K(root, "mask-secret", a)), Key(K(root, "box-secret", a))
        seen = [[s, self.seen[s]] for s in sorted(self.group()) if s != self.name and s in self.seen]
        self.own = signed(
            {
                "type": "Advertisement",
                "attempt": attempt,
                "silo": self.name,
                "mask_key": self.mask.public,
                "box_key": self.box.public,
                "seen": seen,
            },
            self.key,
        )
        self.announced = ([*self.announced, advertisement_digest(self.own)])[-1000:]
        self.state = "Advertised"
        return self.own

    def roster(self, r):
        self._at("Advertised")
        p, f, members = r["parameters"], r["parameters"]["fixed_point"], r["members"]
        names = [m["silo"] for m in members]
        n, c = len(names), p["colluders"]
        # well formed
        if names != sorted(set(names)):
            raise MalformedMessage("members do not ascend")
        if any(m["attempt"] != r["attempt"] for m in members):
            raise MalformedMessage("of another attempt")
        if p["cohort"] != n or f["cohort"] != n or n < 3:
            raise MalformedMessage("cohort")
        if not (2 * p["threshold"] > n + c and n >= p["threshold"] >= 3):
            raise MalformedMessage("threshold")
        if not max(3, c + 2) <= p["min_survivors"] <= n or not p["min_survivors"] <= p["least_sum"] <= n:
            raise MalformedMessage("survivors")
        if not (f["levels"] > 0 and n * (f["levels"] + 1) <= 2**31 - 1 and n * f["saturation_limit"] <= 2**32 - 1):
            raise MalformedMessage("overflow")
        if any(len(m["mask_key"]) != PUBLIC or len(m["box_key"]) != PUBLIC for m in members):
            raise MalformedMessage("key sizes")
        # of this attempt, the model, the plan, the policy
        if r["attempt"] != self.attempt:
            raise WrongTime("another attempt")
        if r["model"] != self.model:
            raise PolicyRefusal("another model")
        if [t["elements"] for t in f["ranges"]["tensors"]] != list(self.tensors):
            raise PolicyRefusal("tensors")
        if r["link"] != link_digest(self.link):
            raise PolicyRefusal("release groups")
        if c > self.link["promise"]["colluders"]:
            raise PolicyRefusal("more colluders than the release groups hold against")
        for s in names:
            if s not in self.pins:
                raise PolicyRefusal("nobody pinned " + s)
        for m in members:
            if not signature_good(m, self.pins[m["silo"]]):
                raise IntegrityError("signature of " + m["silo"])
        if self.own not in members:
            raise IntegrityError("own advertisement")
        halves = [
            k[i]
            for m in members
            for k in ((m["mask_key"][:MLKEM], m["mask_key"][MLKEM:]), (m["box_key"][:MLKEM], m["box_key"][MLKEM:]))
            for i in (0, 1)
        ]
        if len(set(halves)) != len(halves):
            raise IntegrityError("a key is there twice")
        if not all(key_passes(m[k]) for m in members for k in ("mask_key", "box_key")):
            raise IntegrityError("a key is no key")
        for m in members:
            if m["silo"] in self.group() and any(s == self.name and d not in self.announced for s, d in m["seen"]):
                raise PolicyRefusal("masking_memory: " + m["silo"])
        t = self.terms
        want = make_parameters(t, names)
        if want is None or n < t["min_cohort"]:
            raise PolicyRefusal("no sum")
        if c < t["colluders"] or p["threshold"] < want["threshold"] or p["min_survivors"] < t["min_survivors"]:
            raise PolicyRefusal("policy")
        if p["least_sum"] != least_sum(self.link["partition"]["groups"], names, p["threshold"], p["min_survivors"]):
            raise PolicyRefusal("least sum")
        if f["ranges"] != t["ranges"]:
            raise PolicyRefusal("ranges")
        if f["levels"] != want["fixed_point"]["levels"]:
            raise PolicyRefusal("levels")
        self.s = Session(r)
        self.state = "Sharing"

    def seed(self):
        return K(self.root, "self-mask-seed", self.s.attempt, self.s.digest)

    def my_shares(self):
        s = self.s
        return [
            make_shares(self.root, kind, s.digest, s.t, secret, len(s.names))
            for kind, secret in (("self-mask", self.seed()), ("mask-key", self.mask.secret))
        ]

    def deal(self, capsule=None):
        """capsule(kind, public, holder) -> (k, c)"""
        self._at("Sharing")
        s = self.s
        capsule = capsule or (lambda kind, public, holder: encapsulate(public))
        shares = self.my_shares()
        lines, boxes = [], []
        for i, holder in enumerate(s.names):
            a, b = shares[0][i], shares[1][i]
            sa, sb = (share_salt(self.root, k, s.digest, holder) for k in ("self-mask", "mask-key"))
            line = {
                "type": "DealtLine",
                "self_mask": share_commitment(s.digest, "self-mask", self.name, holder, sa, a),
                "mask_key": share_commitment(s.digest, "mask-key", self.name, holder, sb, b),
                "box": OWN_BOX,
            }
            if holder != self.name:
                them = s.members[holder]
                copy, plain = None, a + sa + b + sb
                k, c = capsule("box", them["box_key"], holder)
                if self.name < holder:
                    p = s.pair_secret(self.mask.secret, self.name, holder)
                    kp, cp = capsule("copy", them["mask_key"], holder)
                    copy = {
                        "type": "PairCopy",
                        "ciphertext": cp,
                        "covered": s.cover(self.name, holder, p, kp, cp),
                        "commitment": s.pair_commitment(self.name, holder, p),
                    }
                    plain += p
                key = s.box_key(self.name, holder, k, self.box.agree(them["box_key"]), c)
                box = {
                    "type": "SealedShare",
                    "dealer": self.name,
                    "holder": holder,
                    "ciphertext": c,
                    "box": ChaCha20Poly1305(key).encrypt(NONCE, plain, s.box_data(self.name, holder)),
                    "copy": copy,
                }
                line["box"] = box_digest(box)
                boxes.append(box)
            lines.append(line)
        self.copies = {b["holder"]: b["copy"] for b in boxes}
        self.dealing = signed(
            {
                "type": "Dealing",
                "roster": s.digest,
                "silo": self.name,
                "seed_commitment": s.seed_commitment(self.name, self.seed()),
                "lines": lines,
            },
            self.key,
        )
        self.state = "Dealt"
        return {"type": "SharedKeys", "dealing": self.dealing, "boxes": boxes}

    def delivery(self, d):
        """The masks (added, subtracted), or a Complaint."""
        self._at("Dealt")
        s = self.s
        if d["roster"] != s.digest:
            raise WrongTime("another roster")
        if d["holder"] != self.name:
            raise MalformedMessage("for another silo")
        dealers = [x["silo"] for x in d["dealings"]]
        if dealers != sorted(set(dealers)) or not set(dealers) <= set(s.names):
            raise MalformedMessage("dealers")
        if [b["dealer"] for b in d["boxes"]] != [x for x in dealers if x != self.name] or any(
            b["holder"] != self.name for b in d["boxes"]
        ):
            raise MalformedMessage("boxes")
        if any(x["roster"] != s.digest or len(x["lines"]) != len(s.names) for x in d["dealings"]):
            raise MalformedMessage("dealing")
        if not all(box_fits(s, b) for b in d["boxes"]):
            raise MalformedMessage("box")
        for x in d["dealings"]:
            if not signature_good(x, self.pins[x["silo"]]):
                raise IntegrityError("signature of " + x["silo"])
        if self.dealing not in d["dealings"]:
            raise IntegrityError("own dealing")
        if len(dealers) < s.t:
            raise PolicyRefusal("too few dealt")
        lines = {x["silo"]: x["lines"][s.place[self.name] - 1] for x in d["dealings"]}
        for b in d["boxes"]:
            if box_digest(b) != lines[b["dealer"]]["box"]:
                raise IntegrityError("box of " + b["dealer"])
        self.dealers, self.dealings = dealers, dealings_digest(d["dealings"])
        self.held, added, subtracted = {}, [s.self_mask(self.seed(), self.dealings, self.name)], []
        mine = self.my_shares()
        i = s.place[self.name] - 1
        self.held[self.name] = (
            mine[0][i],
            share_salt(self.root, "self-mask", s.digest, self.name),
            mine[1][i],
            share_salt(self.root, "mask-key", s.digest, self.name),
        )
        {b["dealer"]: b["copy"] for b in d["boxes"]}
        for b in d["boxes"]:
            them, dealer = s.members[b["dealer"]], b["dealer"]
            key = s.box_key(
                dealer, self.name, self.box.open(b["ciphertext"]), self.box.agree(them["box_key"]), b["ciphertext"]
            )
            try:
                plain = ChaCha20Poly1305(key).decrypt(NONCE, b["box"], s.box_data(dealer, self.name))
            except InvalidTag:
                plain = None
            if plain is None or not s.holds_what_was_signed(dealer, self.name, plain, lines[dealer], b["copy"]):
                self.state = "Resting"
                return signed(
                    {"type": "Complaint", "roster": s.digest, "silo": self.name, "dealer": dealer, "key": key}, self.key
                )
            self.held[dealer] = (plain[:66], plain[66:98], plain[98:164], plain[164:196])
            x = self.mask.agree(them["mask_key"])
            if dealer < self.name:
                subtracted.append(s.pair_mask(dealer, self.name, plain[196:], x, b["copy"], self.dealings))
        # of pairs in which this silo is first, the copy is its own
        self.pending = (added, subtracted)
        for dealer in dealers:
            if dealer > self.name:
                p = s.pair_secret(self.mask.secret, self.name, dealer)
                added.append(
                    s.pair_mask(
                        self.name,
                        dealer,
                        p,
                        self.mask.agree(s.members[dealer]["mask_key"]),
                        self.copies[dealer],
                        self.dealings,
                    )
                )
        for x in dealers:
            if x != self.name and x in self.group():
                self.seen[x] = advertisement_digest(s.members[x])
        self.state = "Masking"
        return self.pending

    def remember_dealing(self, shared):
        self.dealing = shared["dealing"]
        self.copies = {b["holder"]: b["copy"] for b in shared["boxes"]}
        self.state = "Dealt"

    def masked(self, encoded):
        added, subtracted = self.pending
        return unmask(encoded, (added, subtracted))

    def vector(self, digest, words):
        self._at("Masking")
        self.state = "Masked"
        self.digest = digest
        return signed(
            {
                "type": "MaskedInput",
                "roster": self.s.digest,
                "dealings": self.dealings,
                "silo": self.name,
                "words": words,
                "vector": digest,
            },
            self.key,
        )

    def survivor_set(self, v):
        self._at("Masked")
        s = self.s
        if v["roster"] != s.digest or v["dealings"] != self.dealings:
            raise WrongTime("of something else")
        names = list(v["silos"])
        if len(names) != len(v["inputs"]) or names != sorted(set(names)) or not set(names) <= set(s.names):
            raise MalformedMessage("survivors")
        if not set(names) <= set(self.dealers):
            raise PolicyRefusal("a survivor did not deal")
        if len(names) < s.parameters["min_survivors"]:
            raise PolicyRefusal("too few")
        if any(0 < len(set(g) & set(names)) < len(g) for g in self.link["partition"]["groups"]):
            raise PolicyRefusal("no whole groups")
        if self.name in names and v["inputs"][names.index(self.name)] != self.digest:
            raise IntegrityError("another vector")
        self.set, self.survivors = survivors_digest(v), names
        self.state = "Agreed"
        return signed({"type": "Agreement", "roster": s.digest, "silo": self.name, "survivors": self.set}, self.key)

    def unmask_request(self, u):
        self._at("Agreed")
        s = self.s
        if u["roster"] != s.digest:
            raise WrongTime("another roster")
        names = [a["silo"] for a in u["agreements"]]
        if names != sorted(set(names)) or not set(names) <= set(self.dealers):
            raise MalformedMessage("agreements")
        for a in u["agreements"]:
            if not signature_good(a, self.pins[a["silo"]]) or a["roster"] != s.digest or a["survivors"] != self.set:
                raise IntegrityError("agreement")
        if len(names) < s.t:
            raise PolicyRefusal("too few agreements")
        shares = []
        for d in self.dealers:
            h = self.held[d]
            if d in self.survivors:
                shares.append({"type": "SelfMaskShare", "dealer": d, "share": h[0], "salt": h[1]})
            else:
                shares.append({"type": "MaskKeyShare", "dealer": d, "share": h[2], "salt": h[3]})
        self.revealed.add((self.attempt["plan"], self.attempt["round"]))
        self.state = "Revealed"
        return signed({"type": "Reveal", "roster": s.digest, "silo": self.name, "shares": shares}, self.key)

    def ended(self, attempt):
        if attempt != self.attempt:
            raise WrongTime("another attempt")
        self.root = self.mask = self.box = self.held = None
        self.state = "Resting"


# ---------------------------------------------------------------- the coordinator
class Coordinator:
    PHASES = ["advertise keys", "share keys", "masked input", "consistency check", "unmasking"]

    def __init__(self, pins):
        self.pins = pins
        self.blamed = []
        self.sent = []
        self.state = "Idle"
        self.result = None

    def step(self, e):
        t = e["type"]
        if t == "OpenAttempt":
            assert self.state == "Idle"
            self.attempt, self.terms = e["attempt"], e["terms"]
            self.phase = 0
            self.state = "Advertising"
            self.waiting, self.answers = set(e["invited"]), {}
            return
        if self.state in ("Unmasked", "Abandoned", "Idle"):
            return
        if t == "PhaseClosed":
            if e["phase"] != self.PHASES[self.phase]:
                return
            for s in sorted(self.waiting):
                self.blamed.append((s, "silence"))
            self.waiting.clear()
            self.advance()
            return
        if t == "SiloDropped":
            self.waiting.discard(e["silo"])
            self.advance()
            return
        m = e["dealing"] if t == "SharedKeys" else e
        kinds = [("Advertisement",), ("SharedKeys",), ("MaskedInput", "Complaint"), ("Agreement",), ("Reveal",)][
            self.phase
        ]
        silo = m["silo"]
        if t not in kinds or silo not in self.waiting:
            return  # of a step that is over
        if (m.get("attempt", self.attempt) != self.attempt) or (self.phase and m["roster"] != self.s.digest):
            return  # another attempt's, or another roster's
        if not signature_good(m, self.pins[silo]):
            self.drop(silo, "bad signature")
            return
        offence = getattr(self, "on_" + t)(e)
        if self.state == "Abandoned":
            return
        if offence:
            self.drop(silo, *offence)
            return
        self.waiting.discard(silo)
        self.answers[silo] = e
        self.advance()

    def drop(self, silo, offence):
        self.blamed.append((silo, offence))
        self.waiting.discard(silo)
        self.advance()

    def abandon(self):
        self.state = "Abandoned"

    def on_Advertisement(self, m):
        if not (key_passes(m["mask_key"]) and key_passes(m["box_key"])):
            return ("bad message",)

        def halves(x):
            return [x["mask_key"][:MLKEM], x["mask_key"][MLKEM:], x["box_key"][:MLKEM], x["box_key"][MLKEM:]]

        mine = halves(m)
        if len(set(mine)) < 4 or any(set(mine) & set(halves(o)) for o in self.answers.values()):
            return ("bad message",)

    def on_SharedKeys(self, e):
        if not check_dealing_shape(self.s, e["dealing"], e["boxes"]):
            return ("bad message",)

    def on_MaskedInput(self, m):
        if m["dealings"] != self.dealings:
            return ("bad message",)
        if m["words"] != self.s.words:
            return ("wrong length",)

    def on_Complaint(self, m):
        holder, dealer, s = m["silo"], m["dealer"], self.s
        box = self.boxes.get((dealer, holder))
        if box is None:
            return ("bad message",)
        try:
            plain = ChaCha20Poly1305(m["key"]).decrypt(NONCE, box["box"], s.box_data(dealer, holder))
        except (InvalidTag, ValueError):
            plain = None
        if plain is None:
            self.blamed += [(x, "disputed") for x in sorted((dealer, holder))]
        elif s.holds_what_was_signed(
            dealer, holder, plain, self.dealt[dealer]["lines"][s.place[holder] - 1], box["copy"]
        ):
            self.blamed.append((holder, "false complaint"))
        else:
            self.blamed.append((dealer, "bad share"))
        self.abandon()

    def on_Agreement(self, m):
        if m["survivors"] != self.set:
            return ("bad message",)

    def on_Reveal(self, m):
        s = self.s
        want = [("SelfMaskShare" if d in self.survivors else "MaskKeyShare", d) for d in self.dealt]
        if [(x["type"], x["dealer"]) for x in m["shares"]] != want:
            return ("bad message",)
        for x in m["shares"]:
            kind, field = ("self-mask", "self_mask") if x["type"] == "SelfMaskShare" else ("mask-key", "mask_key")
            line = self.dealt[x["dealer"]]["lines"][s.place[m["silo"]] - 1]
            if (
                not share_ok(x["share"])
                or share_commitment(s.digest, kind, x["dealer"], m["silo"], x["salt"], x["share"]) != line[field]
            ):
                return ("bad share",)

    def whole(self, silos):
        return sorted(x for g in self.terms["link"]["partition"]["groups"] if set(g) <= set(silos) for x in g)

    def enough(self, silos):
        """Seen at the end of a phase, of those who answered."""
        if self.phase == 0:
            return make_parameters(self.terms, sorted(silos)) is not None
        p = self.s.parameters
        if len(silos) < p["threshold"]:
            return False
        return self.phase >= 3 or len(self.whole(silos)) >= p["least_sum"]

    def advance(self):
        if self.state == "Abandoned":
            return
        if self.phase == 4 and len(self.answers) >= self.s.t:
            self.finish()
            return
        if self.waiting:
            return
        if not self.enough(set(self.answers)):
            self.abandon()
            return
        names = sorted(self.answers)
        answers = {n: self.answers[n] for n in names}

        def send(to, m):
            return self.sent.append((to, m))

        if self.phase == 0:
            r = {
                "type": "Roster",
                "attempt": self.attempt,
                "model": self.terms["model"],
                "link": link_digest(self.terms["link"]),
                "parameters": make_parameters(self.terms, names),
                "members": [answers[n] for n in names],
            }
            self.s = Session(r)
            for n in names:
                send(n, r)
        elif self.phase == 1:
            self.dealt = {n: answers[n]["dealing"] for n in names}
            self.boxes = {(b["dealer"], b["holder"]): b for a in answers.values() for b in a["boxes"]}
            self.dealings = dealings_digest(self.dealt.values())
            for n in names:
                send(
                    n,
                    {
                        "type": "Delivery",
                        "roster": self.s.digest,
                        "holder": n,
                        "dealings": list(self.dealt.values()),
                        "boxes": [self.boxes[d, n] for d in names if d != n],
                    },
                )
        elif self.phase == 2:
            self.survivors = self.whole(names)
            v = {
                "type": "SurvivorSet",
                "roster": self.s.digest,
                "dealings": self.dealings,
                "silos": self.survivors,
                "inputs": [answers[n]["vector"] for n in self.survivors],
            }
            self.set = survivors_digest(v)
            for n in names:
                send(n, v)
        elif self.phase == 3:
            u = {"type": "UnmaskRequest", "roster": self.s.digest, "agreements": list(answers.values())}
            for n in names:
                send(n, u)
        self.phase += 1
        self.waiting, self.answers = set(names), {}
        self.state = ["Advertising", "Sharing", "Masking", "Agreeing", "Unmasking"][self.phase]

    def finish(self):
        s = self.s
        added, subtracted = [], []  # what is still to be added to, and taken off, the sum
        reveals = list(self.answers.values())
        dropped = [d for d in self.dealt if d not in self.survivors]
        points = {d: {} for d in self.dealt}
        for r in reveals:
            for x in r["shares"]:
                points[x["dealer"]][s.place[r["silo"]]] = x["share"]
        bad = []
        for d in self.survivors:
            seed = combine(points[d])
            if seed is None or s.seed_commitment(d, seed) != self.dealt[d]["seed_commitment"]:
                bad.append(d)
                continue
            subtracted.append(s.self_mask(seed, self.dealings, d))
        for d in dropped:
            secret = combine(points[d])
            key = Key(secret) if secret is not None else None
            if key is None or key.public != s.members[d]["mask_key"]:
                bad.append(d)
                continue
            for v in self.survivors:
                a, b = sorted((d, v))
                copy = self.boxes[a, b]["copy"]
                p = s.pair_of(key, d, v, copy)
                if s.pair_commitment(a, b, p) != copy["commitment"]:
                    bad.append(a)
                    continue
                k = s.pair_mask(a, b, p, key.agree(s.members[v]["mask_key"]), copy, self.dealings)
                (subtracted if v == a else added).append(k)
        if bad:
            self.blamed += [(d, "bad share") for d in sorted(set(bad))]
            self.abandon()
            return
        self.dropped, self.masks, self.state = dropped, (added, subtracted), "Unmasked"

    def sum(self, vectors):
        total = sum((np.asarray(vectors[s], np.uint32).astype(np.uint64) for s in self.survivors), np.uint64(0))
        return unmask((total & np.uint64(0xFFFFFFFF)).astype(np.uint32), self.masks)


# ---------------------------------------------------------------- manifests, states, evidence
def canonical(x):
    return json.dumps(x, sort_keys=True, separators=(",", ":")).encode()


def layout(dtype, tensors):
    return H(canonical({"dtype": dtype, "tensors": [[n, list(s)] for n, s in tensors]}))


def manifest(data, dtype, tensors, chunk_bytes=1 << 20):
    return {
        "chunk_bytes": chunk_bytes,
        "chunks": [H(data[i : i + chunk_bytes]).hex() for i in range(0, len(data), chunk_bytes)],
        "layout": layout(dtype, tensors).hex(),
        "total_bytes": len(data),
    }


def manifest_digest(m):
    return H(canonical(m))


def masked_manifest(words, chunk_bytes=1 << 20):
    return manifest(np.asarray(words, "<u4").tobytes(), "uint32", [["masked", [len(words)]]], chunk_bytes)


def state_digest(s):
    return D("model-state", s["steps"], s["model"], s["master"], [list(x) for x in s["slots"]])


def evidence_digest(attempt, survivors, before, after, tail):
    return D("evidence", attempt, survivors, before, after, *map(int, tail))


def sign_evidence(key, digest):
    return sign(key, "round-evidence", digest)


def evidence_signed(pk, digest, signature):
    return verify(pk, "round-evidence", digest, signature)


def bfloat16(x):
    """float32 to bfloat16 words, to the nearest, ties to even."""
    u = np.ascontiguousarray(x, np.float32).view(np.uint32).astype(np.uint64)
    return ((u + 0x7FFF + ((u >> 16) & 1)) >> 16).astype("<u2")


# ---------------------------------------------------------------- the server's step
def power(b, t):
    r = 1.0
    while t:
        if t & 1:
            r *= b
        b *= b
        t >>= 1
    return r


F = np.float32


def slots_of(o):
    return {
        "sgd": {"momentum": 0.0} if o.get("momentum") else {},
        "adam": {"first_moment": 0.0, "second_moment": 0.0},
        "yogi": {"first_moment": 0.0, "second_moment": o.get("tau", 0) * o.get("tau", 0)},
        "adagrad": {"sum_of_squares": o.get("tau", 0) * o.get("tau", 0)},
    }[o["name"]]


def in_its_turn(o, takes_turns, round_number, survivors):
    """The optimizer of a round where silos with labels and silos without take turns."""
    k = len(survivors)
    rate = k / (k + 1) if takes_turns and round_number % 2 == 0 else 1.0
    return {**o, "learning_rate": o["learning_rate"] * rate}


def fallen(o, rate_at_end, rounds, round_number):
    """The optimizer of a round of a plan whose rate falls."""
    part = (round_number - 1) / (rounds - 1) if rounds > 1 else 0.0
    return {**o, "learning_rate": o["learning_rate"] * (1.0 - (1.0 - rate_at_end) * part)}


def server_step(o, x, slots, mean_delta, t):
    """float32 master, slots (empty before the first step), mean -> master, slots."""
    x, g = np.asarray(x, F), -np.asarray(mean_delta, F)
    s = {n: slots[n] if n in slots else np.full(len(x), F(v), F) for n, v in slots_of(o).items()}
    lr, name = o["learning_rate"], o["name"]
    if name == "sgd":
        b = g
        if "momentum" in s:
            b = s["momentum"] = s["momentum"] * F(o["momentum"]) + g
        return (x - b if lr == 1 else x - b * F(lr)), s
    tau = F(o["tau"])
    if name == "adagrad":
        v = s["sum_of_squares"] = s["sum_of_squares"] + g * g
        return x - (g / (np.sqrt(v) + tau)) * F(lr), s
    b1, b2 = o["beta1"], o["beta2"]
    m = s["first_moment"] = s["first_moment"] * F(b1) + g * F(1 - b1)
    q = g * g
    if name == "adam":
        v = s["second_moment"] = s["second_moment"] * F(b2) + q * F(1 - b2)
        r = np.sqrt(v) * F(1 / math.sqrt(1 - power(b2, t))) + tau
        return x - (m / r) * F(lr / (1 - power(b1, t))), s
    v = s["second_moment"]
    v = s["second_moment"] = v - (q * F(1 - b2)) * np.sign(v - q)
    return x - (m / (np.sqrt(v) + tau)) * F(lr), s


def make_chunk(fp, o, i, chunk_bytes, masked, masks, tail_word0, master, slots, steps, nominal=None):
    """Chunk i of master and slots, from chunk i of the survivors' masked vectors, of the master and the slots before.
    masks: (added, subtracted) that come off the sum; tail_word0: word 0 of the tail of the sum, as signed evidence has
    it."""
    per = chunk_bytes // 4
    at = per * i
    n = coordinates(fp["ranges"])
    count = max(0, min(per, n - at))
    total = np.zeros(count, np.uint32)
    for v in masked:
        total += np.asarray(v, np.uint32)[:count]
    for k in masks[0]:
        total += stream(k, count, at)
    for k in masks[1]:
        total -= stream(k, count, at)
    bounds = np.repeat([t["bound"] for t in fp["ranges"]["tensors"]], [t["elements"] for t in fp["ranges"]["tensors"]])[
        at : at + count
    ]
    cap = float(fp["ranges"]["weight_cap"])
    w = cap * nominal if nominal else sum_weights(fp, tail_word0)
    d = (total.view(np.int32) * (bounds / fp["levels"] * (cap / w))).astype(F)
    return server_step(o, master, slots, d, steps + 1)


class Lineage:
    def __init__(self, first):
        self.states, self.rounds = {first: 0}, set()

    def join(self, before, after, round_):
        if before not in self.states or round_ <= self.states[before] or round_ in self.rounds:
            return False
        self.states.setdefault(after, round_)
        self.rounds.add(round_)
        return True


# ---------------------------------------------------------------- verdicts
def verdict_bits(numbers):
    out = bytearray(max(numbers) // 8 + 1) if numbers else bytearray()
    for n in numbers:
        out[n // 8] |= 1 << n % 8
    return bytes(out)


def verdict(key, silo, evidence, numbers):
    return signed({"type": "Verdict", "silo": silo, "evidence": evidence, "chunks": verdict_bits(numbers)}, key)


def part(survivors, silo, chunks, colluders):
    n, k = len(survivors), sorted(survivors).index(silo)
    return [i for i in range(chunks) if (k - i) % n < max(2, colluders + 1)]


# ---------------------------------------------------------------- release groups
def next_atoms(atoms, groups):
    out = []
    for a in map(set, atoms):
        out += [a & set(g) for g in groups]
        out.append(a.difference(*map(set, groups)))
    for g in map(set, groups):
        out.append(g.difference(*map(set, atoms)))
    return sorted(sorted(x) for x in out if x)


def make_promise(colluders=0, smallest_group=3):
    if not 0 <= colluders <= 10_000 or not max(3, colluders + 2) <= smallest_group <= 10_002:
        raise MalformedMessage("promise")
    return {"type": "Promise", "colluders": colluders, "smallest_group": smallest_group}


def below(promise, other):
    return promise["colluders"] < other["colluders"] or promise["smallest_group"] < other["smallest_group"]


def make_link(federation, groups, predecessor=None, promise=None):
    groups = sorted(sorted(g) for g in groups)
    return {
        "type": "Link",
        "federation": federation,
        "number": predecessor["number"] + 1 if predecessor else 1,
        "previous": link_digest(predecessor) if predecessor else bytes(32),
        "partition": {"type": "Partition", "groups": groups},
        "atoms": next_atoms(predecessor["atoms"], groups) if predecessor else groups,
        "promise": promise or (predecessor["promise"] if predecessor else make_promise()),
    }


def members(link):
    return sorted(s for g in link["partition"]["groups"] for s in g)


def signatures_needed(link, predecessor=None):
    if not predecessor:
        return len(members(link))
    return (len(members(predecessor)) + predecessor["promise"]["colluders"]) // 2 + 1


def out_of_reach(link):
    n = len(members(link))
    return n < 3 or link["promise"]["colluders"] > n - 3


def stands(link, signatures, pins, predecessor=None):
    """signatures: silo -> signature."""
    if make_link(link["federation"], link["partition"]["groups"], predecessor, link["promise"]) != link:
        return False
    who = members(predecessor or link)
    d = framed(link_digest(link))
    good = sum(s in pins and s in signatures and verify(pins[s], GROUPS_DOMAIN, d, signatures[s]) for s in who)
    return good >= signatures_needed(link, predecessor)


def passes_without_word(link, me, pinned, policy, predecessor=None):
    """policy: as a promise."""
    if out_of_reach(link) or below(link["promise"], policy):
        return False
    before = predecessor["promise"] if predecessor else make_promise()
    enough = {key: max(policy[key], before[key]) for key in ("colluders", "smallest_group")}
    if below(enough, link["promise"]):
        return False
    least = max(policy["smallest_group"], link["promise"]["smallest_group"])
    groups = link["partition"]["groups"]
    if predecessor is None:
        return groups == [sorted({*pinned, me})] and len(groups[0]) >= least
    if link["previous"] != link_digest(predecessor) or below(link["promise"], predecessor["promise"]):
        return False
    own = next((a for a in predecessor["atoms"] if me in a), None)
    group = next((g for g in groups if me in g), [])
    return (
        own in link["atoms"]
        and {*group} <= {*pinned, me}
        and all(len(a) >= least for a in link["atoms"] if a not in predecessor["atoms"])
        and all(len(g) >= least for g in groups if g not in predecessor["partition"]["groups"])
    )


# ---------------------------------------------------------------- evidence as a reader has it
def replay(journal, pins, survivors_digest_, attempt_digest_, model_before):
    """The coordinator's machine after its journal, or None where it does not end with this sum over this model."""
    m = Coordinator(pins)
    for e in journal:
        m.step(e)
    if m.state != "Unmasked" or m.set != survivors_digest_ or attempt_digest(m.attempt) != attempt_digest_:
        return None
    return m if m.terms["model"] == model_before else None


def decode_scores(fp, total):
    n = coordinates(fp["ranges"])
    q, exact, executed, matches, loss = (int(x) for x in total[n + 2 : n + 7])
    if exact > q or executed > q or matches > executed:
        return None
    return {"questions": q, "exact_matches": exact, "executed": executed, "execution_matches": matches, "loss": loss}
