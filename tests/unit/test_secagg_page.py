"""The page is the specification: what was written from it alone, by somebody who had not read the code, meets all
vectors.

tests/support/secagg_from_page.py imports nothing of Lorica. Here it plays both sides of every vector, tampered events
among them, and then runs against itself where no vector goes.
"""

import ast
import functools
import json
import os
from pathlib import Path

import numpy as np
import pytest
from blake3 import blake3

from tests.support import secagg_from_page as I

VECTORS = Path(__file__).parents[1] / "vectors" / "secure_aggregation"


def load(x):
    if isinstance(x, dict):
        if len(x) == 1 and next(iter(x)) in ("hex", "secret"):
            return bytes.fromhex(next(iter(x.values())))
        return {k: load(v) for k, v in x.items()}
    if isinstance(x, list):
        return [load(v) for v in x]
    return x


@functools.cache
def vectors(name):
    return load(json.loads((VECTORS / f"{name}.json").read_text()))


SUMS = vectors("sums")


def pins_of(c):
    return {s: I.public_of(k) for s, k in c["identity_keys"].items()}


case = pytest.mark.parametrize("c", SUMS, ids=[c["name"].replace(" ", "-") for c in SUMS])


def words(v):
    return np.array(v, np.uint32)


@case
def test_coordinator_of_sums(c):
    assert I.link_digest(c["release_groups"]) == c["release_groups_digest"]
    m = I.Coordinator(pins_of(c))
    for e in c["events"]:
        m.step(e)
    assert sorted(m.blamed) == sorted(map(tuple, c["blamed"]))
    if c.get("abandoned"):
        assert m.state == "Abandoned"
        return
    assert m.state == "Unmasked"
    assert m.survivors == c["survivors"]
    assert m.dropped == c["dropped"]
    assert m.set == c["survivors_digest"]
    for e in c["events"]:
        if e["type"] == "MaskedInput":
            assert blake3(words(c["masked"][e["silo"]]).tobytes()).digest() == e["vector"]
    assert (m.sum(c["masked"]) == words(c["sum"])).all()
    plain = sum(words(c["encoded"][s]).astype(np.uint64) for s in c["survivors"]) & 0xFFFFFFFF
    assert (plain == words(c["sum"])).all()


def capsules(events, roots, attempt, dealer):
    """The ciphertexts that this dealer used, and what its holders find in them."""
    boxes = {
        b["holder"]: b
        for e in events
        if e["type"] == "SharedKeys" and e["dealing"]["silo"] == dealer
        for b in e["boxes"]
    }

    def capsule(kind, public, holder):
        c = boxes[holder]["ciphertext"] if kind == "box" else boxes[holder]["copy"]["ciphertext"]
        secret = I.K(roots[holder], "box-secret" if kind == "box" else "mask-secret", I.attempt_digest(attempt))
        key = I.Key(secret)
        assert key.public == public
        return key.open(c), c

    return capsule


@case
def test_silos_of_sums(c):
    o = c["events"][0]
    terms = o["terms"]
    complaint = c.get("abandoned")
    silos, m = {}, I.Coordinator(pins_of(c))
    answers = {}
    for e in c["events"]:
        if "type" in e:
            answers[e["type"], e.get("silo") or e.get("dealing", {}).get("silo")] = e
    for e in c["events"]:
        at = len(m.sent)
        m.step(e)
        if e["type"] == "OpenAttempt":
            for s, root in c["roots"].items():
                silos[s] = I.Silo(s, c["identity_keys"][s], pins_of(c), terms["link"], terms)
                ad = silos[s].open(
                    o["attempt"], terms["model"], [t["elements"] for t in terms["ranges"]["tensors"]], root
                )
                if ("Advertisement", s) in answers:
                    assert ad == answers["Advertisement", s]
        for to, msg in m.sent[at:]:
            x = silos[to]
            if msg["type"] == "Roster":
                x.roster(msg)
                if ("SharedKeys", to) not in answers:
                    continue
                shared = x.deal(capsules(c["events"], c["roots"], o["attempt"], to))
                told = answers["SharedKeys", to]
                if complaint and to == "silo-01":
                    shared = told
                assert shared == told
                x.remember_dealing(shared)
            elif msg["type"] == "Delivery":
                got = x.delivery(msg)
                if isinstance(got, dict):
                    assert got == answers["Complaint", to]
                    continue
                assert ("Complaint", to) not in answers
                if to not in c["encoded"]:
                    continue
                masked = x.masked(words(c["encoded"][to]))
                assert (masked == words(c["masked"][to])).all()
                sent = x.vector(blake3(masked.tobytes()).digest(), len(masked))
                if ("MaskedInput", to) in answers:
                    assert sent == answers["MaskedInput", to]
            elif msg["type"] == "SurvivorSet":
                a = x.survivor_set(msg)
                if ("Agreement", to) in answers:
                    assert a == answers["Agreement", to]
            elif msg["type"] == "UnmaskRequest":
                a = x.unmask_request(msg)
                if ("Reveal", to) in answers:
                    assert a == answers["Reveal", to]


ROUNDS = vectors("rounds")
EACH = [(k, i) for k, v in ROUNDS["rounds"].items() for i in range(len(v))]


@pytest.mark.parametrize(("name", "i"), EACH)
def test_rounds(name, i):
    r = ROUNDS["rounds"][name][i]
    b, a, fp, o = r["before"], r["after"], r["fixed_point"], r["optimizer"]
    o = I.in_its_turn(o, r["takes_turns"], r["round"], r["survivors"])
    o = I.fallen(o, r["rate_at_end"], r["rounds_of_plan"], r["round"])
    tensors = [[n, [s]] for n, s in r["tensors"]]

    def f32(x):
        return np.frombuffer(x, "<f4")

    for s in (b, a):
        st = s["state"]
        cb = r["chunk_bytes"]

        def md(data, dtype, cb=cb):
            return I.manifest_digest(I.manifest(data, dtype, tensors, cb))

        assert md(s["master"], "float32") == st["master"] == bytes.fromhex(s["master_manifest"])
        assert md(s["model"], s["model_dtype"]) == st["model"] == bytes.fromhex(s["model_manifest"]), "model"
        assert [[n, md(v, "float32")] for n, v in sorted(s["slots"].items())] == st["slots"]
        assert I.state_digest(st) == s["state_digest"]
    total = words(r["sum"])
    n = I.coordinates(fp["ranges"])
    x, slots = I.server_step(
        o, f32(b["master"]), {k: f32(v) for k, v in b["slots"].items()}, I.mean(fp, total), b["state"]["steps"] + 1
    )
    assert x.dtype == np.float32
    assert x.tobytes() == a["master"]
    assert {k: v.tobytes() for k, v in slots.items()} == a["slots"]
    assert all(v.dtype == np.float32 for v in slots.values())
    assert a["model"] == (a["master"] if a["model_dtype"] == "float32" else I.bfloat16(x).tobytes())
    assert r["tail"] == [int(w) for w in total[n:]]
    d = I.evidence_digest(r["attempt_digest"], r["survivors_digest"], b["state_digest"], a["state_digest"], r["tail"])
    assert d == r["evidence_digest"]
    assert I.sign_evidence(r["coordinator_key"], d) == r["signature"]
    assert I.evidence_signed(I.public_of(r["coordinator_key"]), d, r["signature"])
    per = r["chunk_bytes"] // 4
    for c in range(-(-n // per)):
        cut = slice(c * per, (c + 1) * per)
        x, s = I.make_chunk(
            fp,
            o,
            c,
            r["chunk_bytes"],
            [total[cut]],
            ([], []),
            total[n],
            f32(b["master"])[cut],
            {k: f32(v)[cut] for k, v in b["slots"].items()},
            b["state"]["steps"],
        )
        assert x.tobytes() == f32(a["master"])[cut].tobytes()
        assert {k: v.tobytes() for k, v in s.items()} == {k: f32(v)[cut].tobytes() for k, v in a["slots"].items()}


def test_verdicts():
    v = ROUNDS["verdicts"]
    assert I.verdict(v["identity_key"], v["verdict"]["silo"], v["verdict"]["evidence"], v["numbers"]) == v["verdict"]
    for c, parts in v["parts"].items():
        assert {s: I.part(v["survivors"], s, v["chunks"], int(c.split()[0])) for s in v["survivors"]} == parts


def test_links():
    g = ROUNDS["release_groups"]
    before = None
    for l in g["links"]:
        link = l["link"]
        promise = I.make_promise(link["promise"]["colluders"], link["promise"]["smallest_group"])
        assert I.make_link(link["federation"], link["partition"]["groups"], before, promise) == link
        assert I.link_digest(link) == l["digest"]
        assert I.sign(g["identity_key"], I.GROUPS_DOMAIN, I.framed(l["digest"])) == l["signature"]
        assert I.signatures_needed(link, before) == l["signatures_needed"]
        before = link
    for x in g["least_sums"]:
        assert I.least_sum(x["groups"], x["cohort"], x["threshold"], x["min_survivors"]) == x["least_sum"], x


def test_noise():
    for x in ROUNDS["noise"]:
        of = (x["cohort"], x["honest"], x["noise_multiplier"], x["elements"], x["reach"], x["grain"])
        assert I.noise_parameters(*of) == (x["sigma_bits"], x["levels"])


EX = vectors("exchange")
PINS = pins_of(EX)
TERMS = EX["steps"][0]["event"]["terms"]
NAMES = list(EX["silos"])


class Play:
    """Everything before step `at`, at every side; effects compared."""

    def __init__(self, at):
        self.c = I.Coordinator(PINS)
        self.silos = {s: I.Silo(s, EX["identity_keys"][s], PINS, TERMS["link"], TERMS) for s in NAMES}
        self.roots = {s["actor"]: s["event"]["root"] for s in EX["steps"] if "root" in s["event"]}
        for s in EX["steps"][:at]:
            self.compare(s)

    def do(self, actor, e):
        if actor == "coordinator":
            at, b = len(self.c.sent), len(self.c.blamed)
            self.c.step(e)
            return self.c.sent[at:], self.c.blamed[b:]
        x = self.silos[actor]
        t = e["type"]
        if t == "OpenAttempt":
            return x.open(e["attempt"], e["model"], e["tensors"], e["root"], e["seen"])
        if t == "Roster":
            return x.roster(e)
        if t == "SharedKeys":
            made = x.deal(capsules([s["event"] for s in EX["steps"]], self.roots, TERMS_ATTEMPT, actor))
            assert made == e
            return made
        if t == "Delivery":
            return x.delivery(e)
        if t == "VectorMasked":
            return x.vector(e["vector"], x.s.words)
        if t == "SurvivorSet":
            return x.survivor_set(e)
        if t == "UnmaskRequest":
            return x.unmask_request(e)
        if t == "AttemptEnded":
            return x.ended(e["attempt"])

    def compare(self, s):
        got = self.do(s["actor"], s["event"])
        effects = s["effects"]
        sends = [f for f in effects if f["type"] == "Send"]
        if s["actor"] == "coordinator":
            assert got[0] == [(f["to"], f["message"]) for f in sends]
            assert got[1] == [(f["silo"], f["offence"]) for f in effects if f["type"] == "Blame"]
            for f in effects:
                if f["type"] == "Unmask":
                    assert self.c.survivors == f["survivors"]
                    assert self.c.dropped == f["dropped"]
                    assert self.c.s.fp == f["fixed_point"]
                    assert [sorted(m) for m in self.c.masks] == [
                        sorted(k["key"] for k in f["masks"][x]) for x in ("added", "subtracted")
                    ]
        else:
            if sends:
                assert [got] == [f["message"] for f in sends]
            x = self.silos[s["actor"]]
            for f in effects:
                if f["type"] == "Remember":
                    assert x.announced == f["memory"]["announced"]
                if f["type"] == "MaskVector":
                    assert I.rounding_key(x.root, x.s.attempt, x.model) == f["rounding"]["key"]
                    assert x.s.parameters == f["parameters"]
                    assert [list(m) for m in got] == [
                        [k["key"] for k in f["masks"][y]] for y in ("added", "subtracted")
                    ]


TERMS_ATTEMPT = EX["steps"][0]["event"]["attempt"]


def test_exchange():
    p = Play(len(EX["steps"]))
    assert p.c.state == "Unmasked"
    assert (p.c.sum({s: v["masked"] for s, v in EX["silos"].items()}) == words(EX["sum"])).all()


@pytest.mark.parametrize("s", NAMES)
def test_encoding(s):
    v = EX["silos"][s]
    root = next(x["event"]["root"] for x in EX["steps"] if x["actor"] == s and "root" in x["event"])
    fp = I.make_parameters(TERMS, NAMES)["fixed_point"]
    e = I.encode(
        fp, v["delta"], v["weight"], v["scores"], I.rounding_key(root, I.attempt_digest(TERMS_ATTEMPT), TERMS["model"])
    )
    assert list(e) == v["encoded"]
    p = Play(29)
    assert list(p.silos[s].masked(e)) == v["masked"]


@pytest.mark.parametrize("i", range(len(EX["tampered"])), ids=[t["name"].replace(" ", "-") for t in EX["tampered"]])
def test_tampered(i):
    t = EX["tampered"][i]
    p = Play(t["at"])
    if "error" in t["outcome"]:
        with pytest.raises(getattr(I, t["outcome"]["error"])):
            p.do(t["actor"], t["event"])
    else:
        assert [list(b) for b in p.do(t["actor"], t["event"])[1]] == t["outcome"]["blamed"]


# ---------------------------------------------------------------- courses that no vector has: this implementation
# against itself
def federation(groups, n=7, seen=None):
    names = [f"silo-{i:02}" for i in range(n)]
    keys = {s: bytes([i + 1]) * 32 for i, s in enumerate(names)}
    pins = {s: I.public_of(k) for s, k in keys.items()}
    link = I.make_link("test", groups(names))
    terms = {**TERMS, "link": link}
    return names, keys, pins, terms, {s: I.Silo(s, keys[s], pins, link, terms) for s in names}, I.Coordinator(pins)


def play(names, keys, pins, terms, silos, c, absent=None, change=lambda m: m, number=1):
    if absent is None:
        absent = {}
    a = {**TERMS_ATTEMPT, "number": number}
    out = {}
    c.step({"type": "OpenAttempt", "attempt": a, "terms": terms, "invited": names})
    queue = [silos[s].open(a, terms["model"], [3, 7, 1, 10], os.urandom(32)) for s in names]
    done = 0
    while True:
        for m in queue:
            m = change(m) if not isinstance(m, list) else m
            for x in m if isinstance(m, list) else [m]:
                who = x.get("silo") or x["dealing"]["silo"]
                if absent.get(who) != x["type"]:
                    c.step(x)
        if c.state in ("Unmasked", "Abandoned"):
            return out
        if len(c.sent) == done:
            c.step({"type": "PhaseClosed", "phase": c.PHASES[c.phase]})
            if c.state in ("Unmasked", "Abandoned"):
                return out
        queue = []
        for to, m in c.sent[done:]:
            x = silos[to]
            if m["type"] == "Roster":
                x.roster(m)
                queue.append(x.deal())
            elif m["type"] == "Delivery":
                got = x.delivery(m)
                if isinstance(got, dict):
                    queue.append(got)
                    continue
                e = np.arange(x.s.words, dtype=np.uint32) * (1 + names.index(to))
                out[to] = (e, x.masked(e))
                queue.append(x.vector(blake3(out[to][1].tobytes()).digest(), x.s.words))
            elif m["type"] == "SurvivorSet":
                queue.append(x.survivor_set(m))
            elif m["type"] == "UnmaskRequest":
                queue.append(x.unmask_request(m))
        done = len(c.sent)


def two(n):
    return [n[:3], n[3:]]


def test_own_sum_with_drop_outs_and_memory():
    f = federation(two)
    names, c, silos = f[0], f[-1], f[-2]
    v = play(*f, absent={"silo-05": "MaskedInput", "silo-04": "Reveal"})
    assert c.state == "Unmasked"
    assert c.survivors == names[:3]
    assert ("silo-05", "silence") in c.blamed
    total = c.sum({s: v[s][1] for s in c.survivors})
    assert (total == sum(v[s][0] for s in c.survivors)).all()
    with pytest.raises(I.PolicyRefusal):
        silos["silo-00"].open({**TERMS_ATTEMPT, "number": 2}, TERMS["model"], [3, 7, 1, 10], bytes(32))
    assert set(silos["silo-00"].seen) == {"silo-01", "silo-02"}
    nxt = {**TERMS_ATTEMPT, "round": 2}
    ads = [silos[s].open(nxt, TERMS["model"], [3, 7, 1, 10], os.urandom(32)) for s in names]
    assert [s for s, _ in ads[0]["seen"]] == ["silo-01", "silo-02"]
    c2 = I.Coordinator(f[2])
    c2.step({"type": "OpenAttempt", "attempt": nxt, "terms": f[3], "invited": names})
    for a in ads:
        c2.step(a)
    silos["silo-01"].announced.clear()
    silos["silo-01"].announced.append(I.advertisement_digest(ads[1]))
    silos["silo-00"].roster(c2.sent[0][1])
    with pytest.raises(I.PolicyRefusal):
        silos["silo-01"].roster(c2.sent[1][1])


@pytest.mark.parametrize("kind", ["bad share", "wrong length", "bad message", "false complaint", "false pair copy"])
def test_own_blame(kind):
    f = federation(two)
    keys, c = f[1], f[-1]

    def change(m):
        s = m.get("silo")
        if kind == "bad share" and s == "silo-01" and m["type"] == "Reveal":
            m = {**m, "shares": [{**m["shares"][0], "share": bytes(66)}, *m["shares"][1:]]}
            return I.signed(m, keys[s])
        if kind == "wrong length" and s == "silo-01" and m["type"] == "MaskedInput":
            return I.signed({**m, "words": 5}, keys[s])
        if kind == "bad message" and s == "silo-01" and m["type"] == "Agreement":
            return I.signed({**m, "survivors": bytes(32)}, keys[s])
        if kind == "false complaint" and s == "silo-01" and m["type"] == "MaskedInput":
            x, b = f[-2][s], c.boxes["silo-00", s]
            k = x.s.box_key(
                "silo-00",
                s,
                x.box.open(b["ciphertext"]),
                x.box.agree(x.s.members["silo-00"]["box_key"]),
                b["ciphertext"],
            )
            return I.signed(
                {"type": "Complaint", "roster": x.s.digest, "silo": s, "dealer": "silo-00", "key": k}, keys[s]
            )
        if kind == "false pair copy" and m["type"] == "SharedKeys" and m["dealing"]["silo"] == "silo-00":
            b = [dict(x) for x in m["boxes"]]
            last = b[-1]
            last["copy"] = {**last["copy"], "covered": bytes(32)}
            lines = [dict(x) for x in m["dealing"]["lines"]]
            lines[-1]["box"] = I.box_digest(last)
            d = I.signed({**m["dealing"], "lines": lines}, keys["silo-00"])
            f[-2]["silo-00"].dealing = d
            f[-2]["silo-00"].copies["silo-06"] = last["copy"]
            return {**m, "dealing": d, "boxes": b}
        return m

    play(*f, change=change, absent={"silo-06": "MaskedInput"} if kind == "false pair copy" else {})
    who, what = {"false pair copy": ("silo-00", "bad share")}.get(kind, ("silo-01", kind))
    assert (who, what) in c.blamed
    assert [b for b in c.blamed if b != (who, what)] in ([], [("silo-06", "silence")])
    assert c.state == ("Abandoned" if kind in ("false complaint", "false pair copy") else "Unmasked")


def test_links_pass():
    n = [f"silo-{i:02}" for i in range(10)]
    a = I.make_link("test", [n[:4]])
    least = I.make_promise()
    assert I.passes_without_word(a, n[0], n[1:4], least)
    assert not I.passes_without_word(a, n[0], n[1:5], least)
    assert not I.passes_without_word(a, n[0], n[1:4], I.make_promise(1))
    b = I.make_link("test", [n[:4], n[4:7]], a)
    assert I.passes_without_word(b, n[0], n[1:4], least, a)
    d = I.make_link("test", [n[:4], n[4:6]], a)
    assert not I.passes_without_word(d, n[0], n[1:4], least, a)
    e = I.make_link("test", [n[:3]], a)
    assert not I.passes_without_word(e, n[0], n[1:4], least, a)
    more = I.make_link("test", [n[:4]], a, I.make_promise(1, 4))
    assert not I.passes_without_word(more, n[0], n[1:4], least, a)
    assert I.passes_without_word(more, n[0], n[1:4], more["promise"], a)
    most = I.make_link("test", [n[:4]], a, I.make_promise(2, 4))
    assert not I.passes_without_word(most, n[0], n[1:4], most["promise"], a)
    less = I.make_link("test", [n[:4]], more, least)
    assert not I.passes_without_word(less, n[0], n[1:4], least, more)
    with_one = I.make_link("test", [n[:4], n[4:5]], I.make_link("test", [n[:5]], a))
    assert not I.passes_without_word(with_one, n[0], n[1:5], least, I.make_link("test", [n[:5]], a))


def test_replay_of_sums():
    c = SUMS[0]
    o = c["events"][0]
    m = I.replay(c["events"], pins_of(c), c["survivors_digest"], I.attempt_digest(o["attempt"]), o["terms"]["model"])
    assert (m.sum(c["masked"]) == words(c["sum"])).all()
    assert (
        I.replay(
            c["events"][:-1], pins_of(c), c["survivors_digest"], I.attempt_digest(o["attempt"]), o["terms"]["model"]
        )
        is None
    )


def test_it_imports_nothing_of_lorica():
    tree = ast.parse(Path(I.__file__).read_text())
    named = {one.name for node in ast.walk(tree) if isinstance(node, ast.Import) for one in node.names}
    named |= {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    assert {name.split(".")[0] for name in named} <= {"blake3", "cryptography", "json", "math", "numpy", "struct"}
