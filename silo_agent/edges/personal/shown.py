"""What people and monitoring are told of this silo's own models, beside the global one."""

from lorica_security.console.terminal import EMPTY, Page
from silo_agent.edges.personal.own_scores import MODELS, OwnScores, Scored


def own_models_facts(scores: OwnScores) -> dict[str, object] | None:
    """For JSON; None where nothing was scored."""
    if not scores.scores:
        return None
    models = {
        which: {"model": scored.model, "method": scored.method or None, "questions": scored.examples, **scored.numbers}
        for which, scored in _in_order(scores)
    }
    return {"plan": scores.plan, "best": scores.best, "models": models, "no_local": scores.no_local or None}


def own_models_page(scores: OwnScores) -> Page:
    """A line a model, the best one marked."""
    return Page(
        columns=("model", "by", "loss per token", scores.score_label, "same result", "of", "best"),
        rows=[
            (
                which,
                scored.method or EMPTY,
                f"{scored.loss_per_token:.4f}",
                str(scored.exact_matches),
                f"{scored.execution_matches} of {scored.executed}" if scored.executed else EMPTY,
                str(scored.examples),
                "best" if which == scores.best else EMPTY,
            )
            for which, scored in _in_order(scores)
        ],
        numbers=("loss per token", scores.score_label, "same result", "of"),
    )


def own_models_lines(scores: OwnScores) -> list[str]:
    """For a log, and beside other lines: one a model."""
    lines = []
    for which, scored in _in_order(scores):
        by = f" by {scored.method}" if scored.method and scored.method != which else ""
        results = f", {scored.execution_matches} of {scored.executed} with the right result" if scored.executed else ""
        parts = ", ".join(f"{name} {round(count, 1):g}" for name, count in scored.right.items())
        results += f" ({parts})" if parts else ""
        best = "; the best" if which == scores.best else ""
        lines.append(
            f"{which} model{by}: loss per token {scored.loss_per_token:.4f}, "
            f"{scores.score_label} {scored.exact_matches} of {scored.examples}{results}{best}"
        )
    if scores.no_local:
        lines.append(f"no local model: {scores.no_local}")
    return lines


def _in_order(scores: OwnScores) -> list[tuple[str, Scored]]:
    return [(which, scores.scores[which]) for which in MODELS if which in scores.scores]
