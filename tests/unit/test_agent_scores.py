"""What of a silo's scores leaves, and what stays: small held-out sets, scores that cannot be had, restarts; real
files."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from lorica_security.errors import DataError, LoricaError, PolicyRefusal
from lorica_security.secure_aggregation.masked_vectors.scores import MOST_LOSS, NO_SCORES, Scores
from silo_agent.edges.workshop.silo_sources import SiloSources
from silo_agent.edges.workshop.workshop import Workshop
from silo_agent.policy.rules import PolicyRules
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.rounds.effects import JournalRoundModel, JournalUpdate
from silo_agent.rounds.update import TrainingDiverged
from silo_agent.service.ports import RoundModel
from silo_agent.service.told import FAILED, reason, told
from silo_agent.settings import Settings
from silo_wire.canonical import Digest
from silo_wire.manifest import SCORES_ALONE
from silo_wire.messages import DeclineReason, Evaluation
from tests.support.federation_peer import SILO, TestNet, small_bundle
from tests.support.hostile_masks import BANK, HostileCoordinator, attacked, evaluation_of
from tests.support.tiny_t5 import SCHEMA
from tests.unit.test_agent_round_journal import BUNDLE, DATA, KEY, MODEL, PLAN, UPDATE, opened

NET = TestNet.create()
TOLD = Scores(questions=50, exact_matches=40, executed=30, execution_matches=20, loss=10)


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HTTPS_PROXY", "https_proxy", "NO_PROXY", "no_proxy", "ALL_PROXY", "all_proxy"):
        monkeypatch.delenv(name, raising=False)


def workshop(folder: Path, *, held_out: int, **rules: Any) -> Workshop:
    folder.mkdir(parents=True)
    schema = {"db_id": "clinic", "tables": [{"name": "patients", "columns": [{"name": "id", "type": "integer"}]}]}
    (folder / "schema.json").write_text(json.dumps(schema))
    line = {"question": "how many patients", "db_id": "clinic", "query": "select count(*) from patients"}
    for name, count in (("train", 4), ("dev", held_out)):
        lines = [json.dumps({"id": f"{name}{number}", **line}) for number in range(count)]
        (folder / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    settings = Settings.model_validate({"data": {"folder": str(folder)}, "policy": rules})
    sources = SiloSources(settings, scratch=folder / "scratch")
    return Workshop(settings=settings, policy=SiloPolicy(rules=settings.policy, silo=SILO), sources=sources)


@pytest.mark.parametrize("measure", ["logged", "as_published"])
def test_a_plan_under_which_this_silo_would_log_too_few_losses_is_refused_before_it_is_ready(
    tmp_path: Path, measure: str
) -> None:
    """Four examples in batches of two are two steps an epoch."""
    silo = workshop(tmp_path / "data", held_out=1)
    (tmp_path / "data" / "schema.json").write_bytes(replace(SCHEMA, db_id="clinic").to_json())
    training = {"epochs": 1, "batch_size": 2, "loss_reduction": measure}
    with pytest.raises(DataError, match=r"would log 2 of at least 3 losses a round on its 4 training examples"):
        silo.prepare(small_bundle(training=training), None)


class Questions:
    """In the place of a model that would be asked."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.asked = 0

    def questions(self, split: str) -> int:
        assert split == "dev"
        return self.count

    def evaluate(self, **_: Any) -> Evaluation:
        self.asked += 1
        return Evaluation(
            split="dev",
            examples=self.count,
            exact_matches=0,
            executed=0,
            execution_matches=0,
            loss_per_token=1.0,
            seconds=0.0,
        )


@pytest.mark.parametrize(("held_out", "least"), [(1, 2), (9, 10)])
def test_a_held_out_set_that_is_too_small_tells_nothing(tmp_path: Path, held_out: int, least: int) -> None:
    at = workshop(tmp_path / "data", held_out=held_out, smallest_evaluation=least, allow_execution=False)
    trainer = Questions(held_out)
    at._bundle, at._trainer = BUNDLE, trainer  # type: ignore[assignment]
    model = RoundModel(file=tmp_path / "model", manifest=UPDATE.manifest)
    asking: Callable[[], Evaluation] = lambda: at.evaluate(  # noqa: E731
        bundle=BUNDLE, model=model, progress=lambda fraction: None, cancelled=lambda: False
    )
    with pytest.raises(PolicyRefusal) as refusal:
        asking()
    assert refusal.value.rule == "smallest_evaluation"
    assert trainer.asked == 0
    trainer.count = least
    assert asking().examples == least


class PanicException(BaseException):
    """As the tokenizers library names its own."""


@pytest.mark.parametrize("work", ["prepare", "train", "evaluate"])
@pytest.mark.parametrize("defect", [IndexError("index out of range in self"), PanicException("slice")], ids=repr)
def test_attack_whatever_a_plan_makes_of_a_record_ends_the_work_and_not_the_agent(
    tmp_path: Path, work: str, defect: BaseException
) -> None:
    """An agent that is gone tells of that record by its name, and helps in no further round."""
    at = workshop(tmp_path / "data", held_out=3, allow_execution=False)

    def fails(*_: Any, **__: Any) -> Any:
        raise defect

    model = RoundModel(file=tmp_path / "model", manifest=UPDATE.manifest)
    trainer = Questions(3)
    trainer.evaluate = trainer.train = fails  # type: ignore[method-assign, attr-defined]
    at._sources.data_for = fails  # type: ignore[method-assign]
    at._bundle, at._trainer = BUNDLE, trainer  # type: ignore[assignment]
    does: dict[str, Callable[[], Any]] = {
        "prepare": lambda: at.prepare(BUNDLE, None),
        "train": lambda: at.train(
            bundle=BUNDLE,
            key=KEY,
            model=model,
            update_file=tmp_path / "update",
            included_update=None,
            told_before=None,
            checkpoint_file=tmp_path / "checkpoint",
            progress=lambda fraction: None,
            notice=lambda event, detail: None,
            cancelled=lambda: False,
        ),
        "evaluate": lambda: at.evaluate(
            bundle=BUNDLE, model=model, progress=lambda fraction: None, cancelled=lambda: False
        ),
    }
    with pytest.raises(DataError, match=type(defect).__name__) as failed:
        does[work]()
    assert told(failed.value, private=False, masked=True) == FAILED
    assert reason(failed.value, private=False, masked=True) is DeclineReason.TRAINING_FAILED
    defect = KeyboardInterrupt()
    at._bundle, at._trainer = BUNDLE, trainer  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        does[work]()


def test_attack_a_loss_that_no_journal_can_keep(tmp_path: Path) -> None:
    for loss in (1e9, 1e17, 1e308):
        scores = Scores.told(questions=10, exact_matches=0, executed=0, execution_matches=0, loss_per_token=loss)
        assert scores.loss == MOST_LOSS == 2**32 - 1
    journal = opened(tmp_path)
    journal.update_file(KEY).write_bytes(DATA)
    journal.record(JournalUpdate(replace(UPDATE, masked=True, scores=scores)))
    saved = opened(tmp_path).saved_update()
    assert saved is not None
    assert saved.scores == scores


def test_the_delta_of_a_closing_round_is_the_same_for_every_silo(tmp_path: Path) -> None:
    one, other = (
        workshop(tmp_path / name, held_out=3).no_training(update_file=tmp_path / f"{name}.delta")
        for name in ("one", "other")
    )
    assert (tmp_path / "one.delta").read_bytes() == (tmp_path / "other.delta").read_bytes() == bytes(4)
    assert (one.manifest, one.summary) == (other.manifest, other.summary)
    one.manifest.check_layout(SCORES_ALONE)
    assert one.summary.loss_reduction == 0


@pytest.mark.parametrize(
    "trouble",
    [
        DataError("silo bank-b has no dev examples"),
        PolicyRefusal("smallest_evaluation", "few"),
        TrainingDiverged("evaluation loss on dev is inf"),
    ],
    ids=lambda error: type(error).__name__,
)
async def test_scores_that_cannot_be_had_are_zeros_and_the_round_goes_on(tmp_path: Path, trouble: LoricaError) -> None:
    def fails(**_: Any) -> Evaluation:
        raise trouble

    async with attacked(tmp_path, NET) as at:
        at.silos[BANK].trainer.evaluate = fails  # type: ignore[assignment]
        await whole_round(at)
        sums = at.tail().scores
        assert sums is not None
        assert sums.questions > 0
        at.require_sum_of(*at.silos)
        ((fields),) = at.silos[BANK].notes.of("no-scores")
        assert fields["detail"] == str(trouble)


async def whole_round(at: HostileCoordinator) -> None:
    await at.train()
    at.open()
    await at.play("unmasked")


async def test_scores_outlive_the_process_that_made_them(tmp_path: Path) -> None:
    """Killed after training, the agent masks the scores that it journalled, and does not ask the model again."""
    async with attacked(tmp_path, NET) as at:
        await at.train()
        await at.silos[BANK].restart()
        at.open()
        await at.play("unmasked")
        alone = at.tail().scores
        assert at.silos[BANK].trainer.scored == [at.model.digest]
    async with attacked(tmp_path / "undisturbed", NET) as at:
        await whole_round(at)
        assert at.tail().scores == alone


async def test_scores_that_people_withhold_after_training_do_not_leave(tmp_path: Path) -> None:
    async with attacked(tmp_path, NET) as at:
        await at.train()
        at.silos[BANK].rules = PolicyRules(tell_scores=False)
        await at.silos[BANK].restart()
        at.open()
        await at.play("unmasked")
        at.require_sum_of(*at.silos)
        own, sums = evaluation_of(BANK, at.model.digest), at.tail().scores
        assert sums is not None
        everybody = sum(evaluation_of(silo, at.model.digest).examples for silo in at.silos)
        assert sums.questions == everybody - own.examples


def test_the_journal_keeps_scores_with_their_update_and_models_for_good(tmp_path: Path) -> None:
    journal = opened(tmp_path)
    journal.update_file(KEY).write_bytes(DATA)
    journal.record(JournalUpdate(replace(UPDATE, scores=TOLD)))
    journal.record(JournalRoundModel(plan=PLAN, round=2, model=MODEL))
    journal.record(JournalRoundModel(plan=PLAN, round=2, model=Digest("cd" * 32)))
    journal.close()
    again = opened(tmp_path)
    assert again.saved_update() == replace(UPDATE, scores=TOLD)
    assert again.round_models() == {(PLAN, 2): MODEL}, "the first one stands"
    newer = replace(UPDATE, key=replace(KEY, attempt=3))
    again.update_file(newer.key).write_bytes(DATA)
    again.record(JournalUpdate(newer))
    assert again.saved_update() == newer
    assert newer.scores == NO_SCORES
    again.close()
