"""Rows of make privacy-utility: what is kept, what is not done again, and the picture."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
from rich.console import Console

from lorica.demo.silos.query_log import query_log
from lorica.demo.silos.specification import SiloSpecification
from lorica.privacy_utility import answers
from lorica.privacy_utility import run as study
from lorica.privacy_utility.comparison import VARIANTS, comparison_table, comparisons, student
from lorica.privacy_utility.pages import aim_table, cost_picture, cost_table, ideas_table
from lorica.privacy_utility.picture import picture
from lorica.privacy_utility.rows import QUERY_LOGS, RESULTS, Row, by_epsilon, read_rows
from lorica.privacy_utility.run import NO_PRIVACY, run_utility
from lorica.privacy_utility.silos import HELD_OUT, NAMES, study_silos
from lorica_security.errors import ConfigurationError
from silo_wire.canonical import Digest
from silo_wire.messages import Evaluation
from silo_wire.plans.plan import Plan
from tests.unit.test_wire_plan import plan_value


def row(
    epsilon: float, seed: int, exact_match: float = 0.5, variant: str = "today", loss: float = 0.2, right: str = ""
) -> Row:
    return Row(
        data=QUERY_LOGS,
        records=20_000,
        epsilon=epsilon,
        seed=seed,
        exact_match_before=0.1,
        exact_match=exact_match,
        loss_per_token_before=0.9,
        loss_per_token=loss,
        variant=variant,
        spent=0.0 if math.isinf(epsilon) else epsilon,
        right={"bank": right} if right else {},
    )


ROWS = [row(epsilon, seed, 0.4 + seed / 10) for epsilon in (NO_PRIVACY, 8.0, 1.0) for seed in (1, 2)]


def written(path: Path) -> Path:
    from dataclasses import asdict

    path.write_text(json.dumps([{**asdict(one), "epsilon": str(one.epsilon)} for one in ROWS]))
    return path


def test_trainings_that_the_file_has_are_not_done_again(tmp_path: Path) -> None:
    rows = run_utility(
        tmp_path / "work",
        epsilons=[NO_PRIVACY, 8.0, 1.0],
        seeds=[1, 2],
        records=20_000,
        real=None,
        out=written(tmp_path / "rows.json"),
        console=Console(quiet=True),
    )
    assert rows == ROWS
    assert not (tmp_path / "work").exists()


def test_a_file_of_something_else_is_not_written_over(tmp_path: Path) -> None:
    other = tmp_path / "rows.json"
    other.write_text('{"something": "else"}')
    with pytest.raises(ConfigurationError, match="not what this command writes"):
        run_utility(tmp_path, epsilons=[], seeds=[], records=1000, real=None, out=other, console=Console(quiet=True))
    assert other.read_text() == '{"something": "else"}'


def test_a_real_silo_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"holds no train\.jsonl"):
        run_utility(
            tmp_path,
            epsilons=[],
            seeds=[],
            records=1000,
            real=tmp_path / "absent",
            out=tmp_path / "rows.json",
            console=Console(quiet=True),
        )


def test_rows_that_differ_in_their_seed_alone_go_together() -> None:
    assert [(epsilon, [one.seed for one in rows]) for _, _, epsilon, rows in by_epsilon(ROWS)] == [
        (NO_PRIVACY, [1, 2]),
        (8.0, [1, 2]),
        (1.0, [1, 2]),
    ]


def test_the_picture_is_svg_with_a_dot_for_each_training_in_each_chart() -> None:
    root = ElementTree.fromstring(picture(ROWS))
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}circle")) == 2 * len(ROWS)
    texts = [element.text for element in root.iter(f"{space}text")]
    assert texts.count("no privacy") == 2
    assert "warm start 10%" in texts


# --- ideas that cost no epsilon, beside today's

PAIRED = [
    *(row(1.0, seed, 0.4, loss=0.5) for seed in (1, 2, 3)),
    *(row(1.0, seed, 0.4 + seed / 100, "average", loss=0.5 - seed / 10) for seed in (1, 2, 3, 4)),
    row(8.0, 1, 0.5),
    row(8.0, 1, 0.7, "both"),
    row(4.0, 1, 0.7, "both"),
]


def test_differences_are_paired_by_seed_with_students_interval() -> None:
    """1, 2 and 3 points: mean 2, deviation 1, and 4.3027 x 1 / sqrt(3) to either side; seed 4 has no pair."""
    average, both = comparisons(PAIRED)
    assert (average.variant, average.epsilon, average.seeds) == ("average", 1.0, (1, 2, 3))
    assert average.exact_match.mean == pytest.approx(0.02)
    assert average.exact_match.half == pytest.approx(0.01 * 4.3027 / 3**0.5, rel=1e-4)
    assert average.loss_per_token.mean == pytest.approx(-0.2)
    assert average.loss_per_token.half == pytest.approx(0.1 * 4.3027 / 3**0.5, rel=1e-4)
    assert (both.variant, both.epsilon, both.exact_match.half) == ("both", 8.0, math.inf)
    assert both.exact_match.mean == pytest.approx(0.2)
    assert comparison_table([average, both]).row_count == 2


def test_variants_stand_beside_todays_of_another_epsilon_too() -> None:
    """Today's own is one of them: what the smaller epsilon costs. Seeds without both, and that epsilon itself, are
    left out."""
    rows = [*PAIRED, row(4.0, 2, 0.6, loss=0.4), row(4.0, 3, 0.7, loss=0.3), row(4.0, 9, 0.7)]
    today, average = comparisons(rows, beside=4.0)
    assert (today.variant, today.epsilon, today.seeds) == ("today", 1.0, (2, 3))
    assert today.loss_per_token.mean == pytest.approx(0.15)
    assert (average.variant, average.epsilon, average.seeds) == ("average", 1.0, (2, 3))
    assert average.exact_match.mean == pytest.approx(-0.225)
    lines = aim_table(rows).splitlines()[2:]
    assert [line.split(" | ")[:3] for line in lines] == [
        ["| `today`", "2", "+0.150 ± 0.635"],
        ["| `average`", "2", "-0.100 ± 0.000"],
    ]


def test_students_quantiles_are_those_of_the_books() -> None:
    books = {1: 12.706, 5: 2.571, 9: 2.262, 10: 2.228, 20: 2.086, 100: 1.984}
    assert {freedom: student(freedom) for freedom in books} == pytest.approx(books, rel=1e-3)


def test_exact_match_has_an_interval_over_the_questions_too() -> None:
    """Of ten questions two are won and one is lost: mean 0.1, variance 0.29 / 0.9, and 1.96 roots of a tenth of
    that."""
    pair = (row(1.0, 1, 0.5, "average", right="1111100000"), row(1.0, 1, 0.4, right="1110010000"))
    (found,) = comparisons(pair)
    assert found.exact_match_over_questions.mean == pytest.approx(0.1)
    assert found.exact_match_over_questions.half == pytest.approx(1.96 * (0.29 / 0.9 / 10) ** 0.5, rel=1e-4)
    twice = [*pair, *(replace(one, seed=2) for one in pair)]
    (both,) = comparisons(twice)
    assert both.exact_match_over_questions.half == pytest.approx(found.exact_match_over_questions.half / 2**0.5)
    assert all(math.isinf(one.exact_match_over_questions.half) for one in comparisons(PAIRED))


def test_each_seed_has_the_least_epsilon_first_and_variants_there_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[tuple[int, float, str]] = []

    def trained(data: str, records: int, epsilon: float, seed: int, *rest: object) -> Row:
        done.append((seed, epsilon, str(rest[3])))
        return row(epsilon, seed, variant=str(rest[3]))

    monkeypatch.setattr(study, "write_private_silos", lambda *args, **options: None)
    monkeypatch.setattr(study, "_trained", trained)
    out, quiet = tmp_path / "rows.json", Console(quiet=True)

    def run(seeds: list[int]) -> None:
        run_utility(
            tmp_path,
            epsilons=[NO_PRIVACY, 4.0, 1.0],
            seeds=seeds,
            records=20_000,
            real=None,
            out=out,
            console=quiet,
            variants=["average", "large-batch"],
        )

    run([1])
    of_a_seed = [(1.0, "today"), (1.0, "average"), (1.0, "large-batch"), (4.0, "today"), (NO_PRIVACY, "today")]
    assert done == [(1, *one) for one in of_a_seed]
    run([1, 2])
    assert done == [(seed, *one) for seed in (1, 2) for one in of_a_seed]


@pytest.mark.parametrize("silo", study_silos(), ids=NAMES)
def test_the_studys_silos_hold_questions_whose_sql_is_learnt_by_no_training(silo: SiloSpecification) -> None:
    made = query_log(silo, records=2000, seed=1, test=HELD_OUT)
    held_out = {record.query for record in made.log.test}
    assert len(held_out) == HELD_OUT == 500
    known = {record.query for record in (*made.log.train, *made.textbook)}
    assert held_out.isdisjoint(known)
    assert len(known) >= HELD_OUT


def test_more_questions_than_a_silo_has_are_refused() -> None:
    with pytest.raises(ConfigurationError, match="add values to its pools, or ask for fewer"):
        query_log(study_silos()[0], records=10, seed=1, test=5000)


def test_rows_of_variants_are_in_no_picture_and_are_not_trained_again(tmp_path: Path) -> None:
    """Without privacy there is nothing to compare: a variant is trained with the least epsilon alone."""
    from dataclasses import asdict

    out = tmp_path / "rows.json"
    rows = [*ROWS, *(row(epsilon, seed, 0.9, "average") for epsilon in (8.0, 1.0) for seed in (1, 2))]
    out.write_text(json.dumps([{**asdict(one), "epsilon": str(one.epsilon)} for one in rows]))
    told = Console(record=True, width=200, quiet=False, file=(tmp_path / "told").open("w"))
    again = run_utility(
        tmp_path / "work",
        epsilons=[NO_PRIVACY, 8.0, 1.0],
        seeds=[1, 2],
        records=20_000,
        real=None,
        out=out,
        console=told,
        variants=["average"],
    )
    assert again == rows
    assert cost_picture(rows) == picture(ROWS)
    assert "+35.0 ± 63.5 points" in told.export_text()


def test_a_file_from_before_there_were_variants_is_todays(tmp_path: Path) -> None:
    from dataclasses import asdict

    out = tmp_path / "rows.json"
    kept = [{key: value for key, value in asdict(one).items() if key != "variant"} for one in ROWS]
    out.write_text(json.dumps([{**one, "epsilon": str(one["epsilon"])} for one in kept]))
    quiet = Console(quiet=True)
    assert run_utility(tmp_path, epsilons=[8.0], seeds=[1], records=20_000, real=None, out=out, console=quiet) == ROWS


def test_an_unknown_variant_is_refused_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match="variant 'faster' is unknown: use some of today, average"):
        run_utility(
            tmp_path,
            epsilons=[8.0],
            seeds=[1],
            records=1000,
            real=None,
            out=tmp_path / "rows.json",
            console=Console(quiet=True),
            variants=["faster"],
        )


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_variant_is_a_plan_that_is_taken(variant: str) -> None:
    value = plan_value(
        training={"dropout": 0.0},
        evaluation={"every": 0, "initial": False, "last": False},
        privacy={"level": "record", "noise_multiplier": 1.0, "nominal_records": 20_000},
    )
    for key, setting in VARIANTS[variant].items():
        section, name = key.split(".")
        value[section][name] = setting
    plan = Plan.model_validate(value)
    assert (plan.privacy.average_decay > 0) == (variant in ("average", "both"))
    assert (plan.training.optimizer == "adam_corrected") == (variant in ("corrected", "corrected-slower", "both"))
    assert (plan.privacy.expected_batch_size == 2000) == (variant == "large-batch")
    assert (plan.privacy.augmentations == 4) == (variant == "augmented")


# --- on the page


def test_the_page_has_each_epsilon_with_the_interval_of_its_mean() -> None:
    lines = cost_table(ROWS).splitlines()
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| no privacy", "| 8", "| 1"]
    assert "| 1 | 2 | 0.900 | 0.200 ± 0.000 | 10.0 % | 55.0 ± 63.5 % | 1.00 |" in lines


def test_the_page_says_what_was_not_measured_yet_and_of_one_seed_no_interval() -> None:
    lines = {line.split("`")[1]: line for line in ideas_table(PAIRED).splitlines()[2:]}
    assert set(lines) == set(VARIANTS) - {"today"}
    assert lines["average"].endswith("| 1 | 3 | -0.200 ± 0.248 | +2.0 ± 2.5 points |  |")
    assert lines["both"].endswith("| 8 | 1 | +0.000 | +20.0 points |  |")
    assert "not measured yet" in lines["large-batch"]
    assert "not measured yet" in cost_table([])


def test_rows_that_are_kept_with_the_code_are_of_the_study() -> None:
    rows = read_rows(RESULTS)
    assert rows, "make privacy-utility writes them"
    assert {row.data for row in rows} == {QUERY_LOGS}
    assert all(set(row.right) == set(NAMES) for row in rows)
    assert all(len(right) == HELD_OUT for row in rows for right in row.right.values())
    for row in rows:
        assert row.exact_match == pytest.approx(sum(r.count("1") for r in row.right.values()) / 2 / HELD_OUT)


# --- question by question


class OfOneModel:
    """Stands for a finished plan's models: of each silo it knows which questions are answered right, whatever the order
    they are asked in."""

    def __init__(self, coordinator: Path, plan: Digest, folder: Path) -> None:
        del coordinator, plan, folder

    def initial(self) -> SimpleNamespace:
        return SimpleNamespace(file=Path(), manifest="initial")

    def model(self, digest: Digest) -> SimpleNamespace:
        return SimpleNamespace(file=Path(), manifest=str(digest))

    def trainer(self, silo: str, data: Path) -> SimpleNamespace:
        queries = [json.loads(line)["query"] for line in (data / "test.jsonl").read_text().splitlines()]

        def evaluate(*, model: str, same_result: Callable[[str, str], bool | None], **rest: object) -> Evaluation:
            right = {"initial": 0, "final": 2 if silo == "bank" else 1}[model]
            for number, query in reversed(list(enumerate(queries))):
                assert same_result(query, f"{query.lower()} ;" if number < right else "SELECT 0") is None
            return Evaluation(
                split="test",
                examples=len(queries),
                exact_matches=right,
                executed=0,
                execution_matches=0,
                loss_per_token=0.5 - right / 10,
                seconds=1.0,
            )

        return SimpleNamespace(evaluate=evaluate)


def test_answers_are_kept_in_the_order_of_the_questions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "PlanModels", OfOneModel)
    for name in NAMES:
        (tmp_path / name).mkdir()
        lines = [json.dumps({"query": f"SELECT {name} FROM t{number}"}) for number in range(3)]
        (tmp_path / name / "test.jsonl").write_text("\n".join(lines) + "\n")
    found = answers.Answers()
    before, after = found(tmp_path, Digest("0" * 64), Digest("final"), {name: tmp_path / name for name in NAMES})
    assert found.right == {"hospital": "100", "bank": "110"}
    assert [score.exact_match for score in before.values()] == [0.0, 0.0]
    assert after["bank"].exact_match == pytest.approx(2 / 3)
    assert after["bank"].loss_per_token == pytest.approx(0.3)
