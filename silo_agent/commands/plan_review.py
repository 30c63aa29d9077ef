"""What a person needs to see of a plan before approving it: every setting that touches training, and what is unusual
about them.

Nothing here refuses. The limits of a plan are wide, so that whatever is sensible fits; these bands are narrow, so that
whatever is not sensible is seen.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

from lorica_security.console.strict_toml import Section
from silo_wire.model_folders.tokenizer_parts import odd_parts
from silo_wire.plans.plan import Plan, PlanBundle
from silo_wire.plans.work import COMMON, MOST_SETTINGS, Work, widest_gap

USUAL_RATES, USUAL_SGD_RATES = (1e-6, 3e-2), (1e-3, 3.0)
USUAL_SERVER_RATES = {"sgd": (0.1, 2.0), "adam": (1e-3, 1.0), "yogi": (1e-3, 1.0), "adagrad": (1e-3, 1.0)}
FEW_EXAMPLES = 20
"""Scores of fewer tell of single ones."""
USUAL_EPSILON = (1e-9, 1e-3)
"""`layer_norm_epsilon` of config.json. A large one makes every text the same."""
MASKS = ("secure_aggregation", "threshold", "colluders", "min_survivors")
"""Keys of [aggregation] that say how masks go; all others say what the server does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Override:
    """`least` and `most` are what the silo's rate x steps are of the common ones, over equal data of any size."""

    silo: str
    changes: Mapping[str, float]
    least: Fraction
    most: Fraction


def settings(plan: Plan) -> dict[str, dict[str, Any]]:
    """Every key of the plan that touches training or what leaves, by what it is about. What is off is one key alone."""

    def about(section: Section, *without: str) -> dict[str, Any]:
        return section.model_dump(mode="json", exclude=set(without))

    return {
        "schedule": {**about(plan.schedule), "seed": plan.seed},
        "task": about(plan.task),
        "training": about(plan.training, "overrides"),
        "semi_supervised": about(plan.semi_supervised) if plan.semi_supervised.unlabelled else {"unlabelled": []},
        "adapters": {**about(plan.adapters), "train": plan.adapters.train} if plan.adapters.rank else {"rank": 0},
        "wire": about(plan.wire),
        "privacy": about(plan.privacy) if plan.privacy.level != "none" else {"level": "none"},
        "aggregation": about(plan.aggregation, *MASKS),
        "evaluation": about(plan.evaluation),
    }


def part(bundle: PlanBundle, silo: str) -> str:
    """What this silo does in a plan in which some have no labels, in words; "" in any other plan."""
    section = bundle.plan.semi_supervised
    if not section.unlabelled:
        return ""
    alone = section.who_trains.labelled_alone
    if not section.without_labels(silo):
        rounds = {"never": "each round", "in_turn": "rounds of odd numbers", "always": "each round"}[alone]
        return f"trains with labels, in {rounds}"
    if section.teacher == "none":
        return "trains in no round, since it has no labels; it is handed the models of others at the end"
    rounds = "rounds of even numbers" if alone == "in_turn" else "each round"
    how = "it fills in spans of its questions"
    if section.teacher != "mlm":
        which = "a moving average of what it trains" if section.teacher == "ema" else "the round model"
        how = (
            f"a teacher, {which}, answers its questions and never leaves; that takes "
            f"{bundle.teacher_bytes(silo):,} bytes of memory more"
        )
    return f"trains without labels, in {rounds}: {how}; answers in its lines are not read"


def scores_leave(plan: Plan, *, tells_scores: bool, silo: str = "") -> str:
    """How scores of this silo's held-out questions leave it, in words."""
    scores = plan.evaluation
    if plan.semi_supervised.without_labels(silo):
        return "no scores: it has no labels in this plan"
    if not (scores.every or scores.initial or scores.last):
        return "no scores: the plan has none"
    masked = plan.aggregation.secure_aggregation
    if not tells_scores:
        return f"no scores, by [policy] tell_scores{': zeros stand for them in the sum' if masked else ''}"
    if masked:
        return "scores masked as the update is: the coordinator sees their sum over the cohort"
    return "scores of this silo alone, which the coordinator sees"


def overrides(plan: Plan) -> Iterator[Override]:
    """Of every silo that has one, this one's or another's."""
    common = Work.of(plan.training)
    for silo, override in plan.training.overrides.items():
        least, most = Work.of(plan.training.for_silo(silo)).times(common)
        yield Override(silo=silo, changes=override.model_dump(exclude_none=True), least=least, most=most)


def unusual(bundle: PlanBundle) -> Iterator[str]:
    """A line for each thing that somebody who approves the plan should ask about."""
    plan = bundle.plan
    yield from _work(plan)
    yield from _training(plan)
    yield from _server(plan)
    yield from _scores(plan)
    yield from (f"tokenizer.json: {part}, which no tokenizer of T5's family has" for part in odd_parts(bundle.files))
    yield from _configuration(bundle.files)


def _work(plan: Plan) -> Iterator[str]:
    training, masked = plan.training, plan.aggregation.secure_aggregation
    if not training.overrides:
        return
    gap = widest_gap(training.works)
    if gap is None:
        yield (
            f"[training.overrides] have more than {MOST_SETTINGS} different settings, too many to compare each with "
            "each"
        )
    elif gap.ratio > 1:
        yield (
            f"{gap.first} and {gap.second} differ {float(gap.ratio):.3g}-fold in learning rate x optimizer steps"
            + (": under masks a silo that trains far more than the others is alone in the sum" if masked else "")
        )
    elif masked:
        yield "there are overrides under masks, of which none changes learning rate x optimizer steps"
    rates = {COMMON: training.learning_rate} | {
        f"[training.overrides.{silo}]": override.learning_rate
        for silo, override in training.overrides.items()
        if override.learning_rate is not None
    }
    yield from (line for name, rate in rates.items() if name != COMMON for line in _rate(plan, name, rate))


def _rate(plan: Plan, name: str, rate: float) -> Iterator[str]:
    usual = USUAL_SGD_RATES if plan.training.optimizer == "sgd" else USUAL_RATES
    yield from _outside(f"{name} learning_rate", rate, usual)


def _outside(name: str, value: float, usual: tuple[float, float]) -> Iterator[str]:
    least, most = usual
    if not least <= value <= most:
        yield f"{name} = {value:g} is outside the usual {least:g} to {most:g}"


def _training(plan: Plan) -> Iterator[str]:
    training = plan.training
    yield from _rate(plan, COMMON, training.learning_rate)
    yield from _outside(f"{COMMON} epochs", training.epochs, (1, 100))
    if not training.max_grad_norm:
        yield f"{COMMON} max_grad_norm = 0: gradients are not clipped, so one example can move the model far"
    else:
        yield from _outside(f"{COMMON} max_grad_norm", training.max_grad_norm, (0.01, 100.0))
    if (shrinks := training.weight_decay * training.learning_rate) > 0.01:
        yield (
            f"{COMMON} weight_decay = {training.weight_decay:g} takes {min(shrinks, 1):.2g} of every parameter in "
            "each step, whatever the data"
        )
    if plan.corrects_drift:
        yield (
            f'{COMMON} drift_correction = "{training.drift_correction}": this silo keeps the sum of its deltas on disk '
            "until another plan begins, and nothing bounds what one silo's delta does to the model"
        )
    yield from _outside(f"{COMMON} fedprox_mu", training.fedprox_mu, (0.0, 10.0))
    if training.dropout is not None:
        yield from _outside(f"{COMMON} dropout", training.dropout, (0.0, 0.5))
    yield from _outside(f"{COMMON} max_input_tokens", training.max_input_tokens, (16, 4096))
    yield from _outside(f"{COMMON} max_output_tokens", training.max_output_tokens, (8, 4096))
    if training.loss_log_steps > 100 and plan.logs_losses:
        yield (
            f"{COMMON} loss_log_steps = {training.loss_log_steps}: a silo of as few optimizer steps logs fewer than "
            "three losses, by which it would weigh, and does not take part"
        )
    if training.loss_reduction == "as_published" and plan.weighted:
        yield (
            f'{COMMON} loss_reduction = "as_published": weights follow from how many batches an epoch leaves over; it '
            "is for who repeats the study of Zhang et al. 2023"
        )


def _server(plan: Plan) -> Iterator[str]:
    server = plan.aggregation
    optimizer = server.server_optimizer
    yield from _outside(
        f"[aggregation] server_learning_rate of {optimizer}", server.server_learning_rate, USUAL_SERVER_RATES[optimizer]
    )
    if optimizer == "sgd":
        yield from _outside("[aggregation] momentum", server.momentum, (0.0, 0.95))
    else:
        yield from _outside("[aggregation] tau", server.tau, (1e-10, 0.1))
    yield from _outside("[aggregation] fairness", server.fairness, (0.0, 5.0))
    if server.max_delta_norm:
        yield from _outside("[aggregation] max_delta_norm", server.max_delta_norm, (0.01, 1e6))
    if server.secure_aggregation:
        if server.max_weight < server.weighs.least_usual_cap:
            yield (
                f"[aggregation] max_weight = {server.max_weight:g} is less than almost any weight: a silo that "
                f"reduces its loss at all weighs {server.max_weight_ratio:g} times what one weighs that does not"
            )
        yield from _outside("[aggregation] max_weight_ratio", server.max_weight_ratio, (1.0, 100.0))
        yield from _outside("[aggregation] delta_bound", server.delta_bound, (1e-3, 100.0))


def _scores(plan: Plan) -> Iterator[str]:
    scores = plan.evaluation
    if not (scores.every or scores.initial or scores.last):
        return
    if 0 < scores.max_examples < FEW_EXAMPLES:
        yield f"[evaluation] max_examples = {scores.max_examples}: scores of so few tell of single examples"


def _configuration(files: Mapping[str, bytes]) -> Iterator[str]:
    value = json.loads(files["config.json"])
    epsilon = value.get("layer_norm_epsilon", USUAL_EPSILON[0]) if isinstance(value, dict) else None
    if not isinstance(epsilon, int | float):
        yield "config.json: it is not that of a T5"
    else:
        yield from _outside("config.json: layer_norm_epsilon", epsilon, USUAL_EPSILON)
