"""The global model's score on a held-out split: right answers, loss per token, execution accuracy where a database is
given.

How many answers are right by the plan's score is in what leaves a silo, as a whole number: `exact_matches`, whatever
the score. What a task knows beside goes to `on_parts` and no further than this machine.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Literal

import torch

from silo_agent.rounds.update import TrainingDiverged, TrainingStopped
from silo_agent.sql_sandbox import DatabaseTarget, ExecutionOutcome, Limits, Sandbox, execution_match
from silo_agent.training.data.batches import EncodedExamples, collate, sorted_batches
from silo_agent.training.data.schema import Schema
from silo_agent.training.data.text_to_sql_data import Example
from silo_agent.training.data.tokenizer import TextTokenizer
from silo_agent.training.generation import generated
from silo_agent.training.model.model import T5
from silo_agent.training.task_loss import encoded_inputs, summed_loss
from silo_agent.training.tasks.task import Task
from silo_wire.messages import Evaluation

SameResult = Callable[[str, str], bool | None]
"""(gold SQL, predicted SQL) -> whether both give the same result; None where the gold query itself cannot run."""

Parts = Callable[[Mapping[str, float]], None]
"""Hears of how many answers each metric of the task was right, under its name; a part of an answer where it is right in
part."""

Truths = Callable[[Sequence[tuple[float, ...]]], None]
"""Hears of each answer how much of it is right, by each of the task's metrics; in the same order each time."""


def in_sandbox(box: Sandbox) -> SameResult:
    """Execution in an open sandbox; a predicted query that fails or is refused is a mismatch."""

    def same_result(gold: str, predicted: str) -> bool | None:
        match = execution_match(box, gold_sql=gold, predicted_sql=predicted)
        return None if match.outcome is ExecutionOutcome.GOLD_ERROR else match.outcome is ExecutionOutcome.MATCH

    return same_result


@contextmanager
def judged_on(target: DatabaseTarget | None, limits: Limits) -> Iterator[SameResult | None]:
    """Execution in a sandbox that is open while this is; None where there is no database. Raises what Sandbox does."""
    if target is None:
        yield None
    else:
        with Sandbox(target, limits) as box:
            yield in_sandbox(box)


@torch.inference_mode()
def evaluate(
    model: T5,
    tokenizer: TextTokenizer,
    examples: Sequence[Example],
    encoded: EncodedExamples,
    chosen: Sequence[int],
    *,
    task: Task,
    schemas: Mapping[str, Schema],
    split: Literal["dev", "test"],
    batch_size: int,
    beams: int,
    max_output_tokens: int,
    same_result: SameResult | None,
    on_parts: Parts,
    on_truths: Truths = lambda truths: None,
    on_progress: Callable[[float], None],
    should_stop: Callable[[], bool],
    clock: Callable[[], float],
) -> Evaluation:
    """Score the examples at indices `chosen`, in float32 whatever the plan's training precision.

    `encoded` runs beside `examples`; `schemas` are those that they ask of, by id. Raises TrainingStopped soon after
    `should_stop()` turns true, TrainingDiverged where the model's loss is not finite, DataError where the database is
    out of reach.
    """
    began = clock()
    model.eval()
    device = next(model.parameters()).device
    predictions: dict[int, str] = {}
    loss_sum, tokens = 0.0, 0
    for indices in sorted_batches(encoded, chosen=chosen, batch_size=batch_size):
        batch = collate(encoded, indices, pad=model.config.pad_token_id, device=device)
        hidden = encoded_inputs(model, batch)
        loss_sum += float(summed_loss(model, batch, hidden))
        tokens += batch.target_tokens
        answers = generated(
            model, hidden, batch.attention_mask, beams=beams, max_new_tokens=max_output_tokens, should_stop=should_stop
        )
        predictions.update(zip(indices, tokenizer.decode(answers), strict=True))
        on_progress(len(predictions) / len(chosen))
    if not loss_sum < float("inf"):
        raise TrainingDiverged(f"evaluation loss on {split} is {loss_sum}: the round model is not usable")
    results: list[bool | None] = []
    if same_result is not None:
        for index, predicted in predictions.items():
            if should_stop():
                raise TrainingStopped
            results.append(same_result(examples[index].query, predicted))
    right: list[tuple[float, ...]] = []
    for index, text in predictions.items():
        if should_stop():
            raise TrainingStopped
        right.append(task.right(text, examples[index].query, schemas[examples[index].db_id]))
    on_truths(right)
    counts = {name: sum(found) for name, found in zip(task.metrics, zip(*right, strict=True), strict=True)}
    on_parts(counts)
    return Evaluation(
        split=split,
        examples=len(predictions),
        exact_matches=whole(counts[task.metrics[0]]),
        executed=sum(result is not None for result in results),
        execution_matches=sum(result is True for result in results),
        loss_per_token=loss_sum / max(1, tokens),
        seconds=clock() - began,
    )


def whole(right: float) -> int:
    """A sum of scores from 0 to 1 as what leaves a silo: rounded, so that it tells no more than a count does."""
    return int(right + 0.5)
