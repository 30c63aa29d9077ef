"""A silo's audit log as one page for whoever answers for its data: what left, under which promise, and what was
refused."""

from collections import Counter
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field

from lorica_security.audit.entry import MOST_TEXT_CHARACTERS, Entry, Event
from lorica_security.on_disk.reading import instant, one_line


@dataclass(slots=True, kw_only=True)
class Part:
    """This silo's part of one attempt at a round. `updates` is 1, or more where a transfer began anew; `bytes` of one
    of them.

    `survivors` are the silos of the sum that it helped to unmask, of deltas of `model`, under the link `groups` of the
    release groups.
    """

    plan: str
    round: int
    attempt: int
    at: int
    updates: int = 0
    bytes: int = 0
    covered_by: str = ""
    examples: int = 0
    ledger_entry: int = 0
    receipt: bool = False
    model: str = ""
    survivors: str = ""
    groups: str = ""
    keys: int = 0
    scores: int = 0
    outcome: str = ""


@dataclass(slots=True, kw_only=True)
class Report:
    """`bytes` counts each update once; `refused` and `declined` count by rule and by reason; `pins` are changes of
    trust.

    `decisions` are what people allowed by command: plans, and how their models were compared, release groups, lost
    memory. `false_models` are those that the coordinator was shown to have handed out, with the file that proves it;
    `went_back` tells of older models that the silo was led back to.
    """

    since: int
    until: int
    entries: int
    plans: dict[str, dict[str, str | int]] = field(default_factory=dict)
    parts: list[Part] = field(default_factory=list)
    refused: dict[str, int] = field(default_factory=dict)
    latest_refusals: list[str] = field(default_factory=list)
    declined: dict[str, int] = field(default_factory=dict)
    decisions: list[str] = field(default_factory=list)
    pins: list[str] = field(default_factory=list)
    false_models: list[str] = field(default_factory=list)
    went_back: list[str] = field(default_factory=list)
    counted: list[str] = field(default_factory=list)

    @property
    def bytes(self) -> int:
        return sum(part.bytes for part in self.parts)

    @property
    def rounds_with_an_update(self) -> int:
        return sum(1 for part in self.parts if part.updates)

    def json(self) -> dict[str, object]:
        return {**asdict(self), "bytes": self.bytes, "rounds_with_an_update": self.rounds_with_an_update}


LATEST = 10
"""Refusals that are shown in full."""


def report_of(entries: Iterable[Entry], *, since: int = 0) -> Report:
    """Of the entries from `since` on, in seconds since 1970. What plans promise is told whenever they came."""
    report = Report(since=since, until=0, entries=0)
    parts: dict[tuple[str, int, int], Part] = {}
    refused: Counter[str] = Counter()
    declined: Counter[str] = Counter()

    def part(entry: Entry) -> Part:
        key = entry.text("plan"), entry.number("round"), entry.number("attempt")
        if key not in parts:
            parts[key] = Part(plan=key[0], round=key[1], attempt=key[2], at=entry.at)
        return parts[key]

    for entry in entries:
        match entry.event:
            case Event.PLAN_RECEIVED:
                about = report.plans.setdefault(entry.text("plan"), {"promise": "not allowed"})
                about |= {
                    "name": entry.text("name"),
                    "tensors": entry.number("tensors"),
                    "rounds": entry.number("rounds"),
                }
            case Event.PLAN_ALLOWED:
                report.plans.setdefault(entry.text("plan"), {})["promise"] = entry.text("promise")
            case _:
                pass
        if entry.at < since:
            continue
        report.entries += 1
        report.until = max(report.until, entry.at)
        match entry.event:
            case Event.UPDATE_LEAVES | Event.MASKED_UPDATE_LEAVES:
                one = part(entry)
                one.updates += 1
                one.bytes = entry.number("bytes")
                one.covered_by = entry.text("covered_by")
                one.examples = entry.number("examples")
                one.ledger_entry = entry.number("ledger_entry")
            case Event.RECEIPT:
                part(entry).receipt = True
            case Event.KEYS_LEAVE:
                part(entry).keys += 1
            case Event.SUM_UNMASKED:
                part(entry).model = entry.text("model")
                part(entry).survivors = entry.text("survivors")
                part(entry).groups = entry.text("groups")
            case Event.SCORES_LEAVE:
                part(entry).scores += 1
            case Event.ROUND_ENDED if entry.text("work") == "training":
                part(entry).outcome = entry.text("outcome")
            case Event.REFUSED:
                refused[entry.text("rule")] += 1
                report.latest_refusals.append(
                    f"{instant(entry.at)} {entry.text('rule')}: {one_line(entry.text('detail'))}"
                )
            case Event.DECLINED:
                declined[entry.text("reason")] += 1
            case Event.PLAN_APPROVED | Event.MEMORY_RESET | Event.GROUPS_APPROVED | Event.GROUPS_WITHDRAWN:
                report.decisions.append(f"{instant(entry.at)} {entry.event.value}: {_decided(entry)}")
            case Event.PIN_ADDED | Event.PIN_REMOVED:
                how = entry.text("how")
                report.pins.append(
                    f"{instant(entry.at)} {entry.event.value}: {entry.text('silo')}{how and f' ({how})'}, by "
                    f"{entry.who}"
                )
            case Event.FALSE_MODEL:
                report.false_models.append(
                    f"{instant(entry.at)} round {entry.number('round')} of plan {entry.text('plan')[:16]}: model "
                    f"{entry.text('model')[:16]} in chunk {entry.number('chunk')}; proofs/{entry.text('proof')}, "
                    f"SHA-256 {entry.text('proof_sha256')}"
                )
            case Event.MODEL_WENT_BACK:
                report.went_back.append(
                    f"{instant(entry.at)} plan {entry.text('plan')[:16]}: back to model {entry.text('model')[:16]} "
                    f"of round {entry.number('round')}, after one of round {entry.number('accepted_round')} was "
                    f"accepted"
                )
            case Event.REPEATED:
                report.counted.append(f"{instant(entry.at)} {entry.text('what')}: {entry.number('times')} more")
            case _:
                pass
    report.parts = sorted(parts.values(), key=lambda one: (one.at, one.round, one.attempt))
    report.refused, report.declined = dict(sorted(refused.items())), dict(sorted(declined.items()))
    report.latest_refusals = report.latest_refusals[-LATEST:]
    return report


def _decided(entry: Entry) -> str:
    """What people allowed, in words."""
    match entry.event:
        case Event.PLAN_APPROVED:
            others = ", ".join(other[:16] for other in entry.text("although").split())
            beside = f", although this silo masked under {others}" if others else ""
            return (
                f"{entry.text('name')} ({entry.text('plan')[:16]}), initial model "
                f"{entry.text('model') or 'not compared'}{beside}"
            )
        case Event.MEMORY_RESET:
            return entry.text("detail")
        case _:
            learnt = f"; {entry.text('learnt')}" if entry.text("learnt") else ""
            return f"{entry.text('groups')} ({entry.text('digest')[:16]}){learnt}"


def page(report: Report, silo: str) -> str:
    """As people read it."""
    until = instant(report.until) if report.until else "now"
    out = [
        f"What left silo {silo}, {f'from {instant(report.since)}' if report.since else 'from the beginning'} to "
        f"{until}",
        "",
        f"{report.rounds_with_an_update} updates, {report.bytes:,} bytes; records, questions, SQL, query results "
        "and keys: none",
        "",
    ]
    for digest, about in report.plans.items():
        out.append(
            f"plan {about.get('name', '')} ({digest[:16]}): {about.get('promise', '')}; {about.get('tensors', 0)} "
            "tensors"
        )
    out += [
        "",
        f"{'when':<20}  {'plan':<16}  {'round':>7}  {'bytes':>15}  {'examples':>8}  {'receipt':<7}  outcome, and "
        "what covers it",
    ]
    for one in report.parts:
        if not (one.updates or one.keys or one.scores or one.outcome):
            continue
        rounds = int(report.plans.get(one.plan, {}).get("rounds", 0))
        said = ", ".join(
            text
            for text in (
                "closing round, without training" if 0 < rounds < one.round else "",
                one.outcome or ("only scores" if one.scores and not one.updates else ""),
                one.covered_by,
                f"sum over {one.survivors.replace(' ', ', ')} of model {one.model[:16]}, release groups "
                f"{one.groups[:16]}"
                if one.survivors
                else "",
                f"ledger entry {one.ledger_entry}" if one.ledger_entry else "",
                f"{one.keys} messages with keys" if one.keys else "",
                "scores" if one.scores and one.updates else "",
            )
            if text
        )
        out.append(
            f"{instant(one.at):<20}  {one.plan[:16]:<16}  {one.round:>5}.{one.attempt}  {one.bytes:>15,}  "
            f"{one.examples or '':>8}  {'yes' if one.receipt else 'no' if one.updates else '':<7}  {said}"
        )
    out += [
        "",
        "refused: " + (", ".join(f"{rule} {count} times" for rule, count in report.refused.items()) or "nothing"),
    ]
    out += [f"  {line}" for line in report.latest_refusals]
    out.append(
        "declined: " + (", ".join(f"{reason} {count} times" for reason, count in report.declined.items()) or "nothing")
    )
    out += [
        "decided by people: " + ("" if report.decisions else "nothing"),
        *(f"  {line}" for line in report.decisions),
    ]
    out += ["trust: " + ("" if report.pins else "no change"), *(f"  {line}" for line in report.pins)]
    if report.false_models:
        out += ["FALSE MODELS from the coordinator:", *(f"  {line}" for line in report.false_models)]
    if report.went_back:
        out += ["led back to an older model by the coordinator:", *(f"  {line}" for line in report.went_back)]
    out += [f"counted alone, of a flood: {line}" for line in report.counted]
    return "\n".join(one_line(line, MOST_TEXT_CHARACTERS).rstrip() for line in out)  # whatever a plan or a peer wrote
