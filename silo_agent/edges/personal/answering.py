"""Which model answers a question: the best of the global one and this silo's own, or the one that people name."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from lorica_security.errors import StateError
from silo_agent.edges.personal.own_models import Collected, OwnModels
from silo_agent.edges.personal.own_scores import MODELS, Which
from silo_agent.service.ports import RoundModel
from silo_wire.canonical import Digest


@dataclass(frozen=True, slots=True, kw_only=True)
class Answering:
    """`told` is what people are to know of that, beside the answer."""

    which: Which
    model: RoundModel
    told: Sequence[str] = ()


def answering(own: OwnModels, collected: Collected, asked: Which | Literal["best"], *, trains: bool) -> Answering:
    """`trains`: whether this silo has models of its own now. Raises StateError where the model that was asked for is
    not here."""
    plan, scores = collected.bundle.plan, own.record.read()
    why = ""
    if asked != "best":
        which = asked
    else:
        if not trains or scores.plan != plan.digest:
            return Answering(which="global", model=collected.newest)
        beside = scores.scores.get("global")
        if beside is None or beside.model != collected.newest.manifest.digest:
            return Answering(which="global", model=collected.newest, told=(_OUTDATED,))
        which = scores.best
        others = ", ".join(it for it in MODELS if it in scores.scores)
        why = f": the best of {others} on {beside.examples} held-out questions"
    if which == "global":
        return Answering(which=which, model=collected.newest, told=(f"the global model answered{why}",))
    scored = scores.scores.get(which) if scores.plan == plan.digest else None
    model = own.model(Digest(scored.model), collected.bundle.layout) if scored else None
    if model is None:
        raise StateError(
            f"no {which} model of plan {plan.name} is here: run `silo-agent personal train`, or ask with --model global"
        )
    told = [f"the {which} model answered{why}"]
    if plan.privacy.level != "none":
        told.append(
            f"the plan's differential privacy does not cover the {which} model: whoever gets it, or its answers, gets "
            "what it learned of records, so publish neither"
        )
    return Answering(which=which, model=model, told=tuple(told))


_OUTDATED = (
    "the global model answered: it is newer than the scores of this silo's own models; `silo-agent personal train` "
    "scores anew"
)
