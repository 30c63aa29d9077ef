"""A study's file, its runs, its data and its report; the runs themselves are simulations
(tests/integration/test_simulation.py)."""

import gzip
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.insurer import INSURER
from lorica.demo.silos.silos import write_silo
from lorica.experiments.data import merged, own_copy, require_same
from lorica.experiments.definition import PAPER_SETUPS, Run, Study
from lorica.experiments.practice.labelled_start import write_labelled_start
from lorica.experiments.reports.report import changes, loss_curves, share_curves, write_report
from lorica.experiments.reports.tables import spread
from lorica.experiments.results_file import RESULTS, append_result, results
from lorica.experiments.run import run_study
from lorica.simulation.run import silos_in
from lorica_coordinator.plans.model_source import FolderModel, SizedModel
from lorica_coordinator.plans.plan_folder import create_plan
from lorica_security.console.strict_toml import parse_toml
from lorica_security.errors import ConfigurationError, Conflict, DataError, StorageError
from lorica_security.host.process_lock import ProcessLock
from lorica_security.identifiers import SiloName
from silo_agent.settings import Settings
from silo_agent.training.data.text_to_sql_data import DataLimits, load_silo_data

SMALL = """
name = "small"
silos = "silos"
seeds = [1, 2]
setups = ["fedopt", "fedopt-lorar"]
[start]
size = "micro"
[plan]
"schedule.rounds" = 3
"aggregation.momentum" = 0.5
[grid]
"training.learning_rate" = [1e-3, 3e-3]
[only.fedopt-lorar]
"aggregation.max_weight_share" = 0.5
"""
FIXED = SMALL.replace("[grid]\n", "").replace("[1e-3, 3e-3]", "1e-3")


def study(text: str = SMALL) -> Study:
    return parse_toml(Study, text, "study.toml")


def test_ten_set_ups_of_the_paper_are_there_and_a_study_has_all_of_them_unless_it_says_which() -> None:
    assert len(PAPER_SETUPS) == 10
    every = study('name = "all"\nsilos = "x"\n[start]\nsize = "micro"')
    assert [run.setup for run in every.runs()] == list(PAPER_SETUPS)


def test_runs_are_seeds_times_points_times_set_ups_and_each_has_a_key_of_its_own() -> None:
    runs = list(study().runs())
    assert [(run.seed, run.point["training.learning_rate"], run.setup) for run in runs[:3]] == [
        (1, 1e-3, "fedopt"),
        (1, 1e-3, "fedopt-lorar"),
        (1, 3e-3, "fedopt"),
    ]
    assert len({run.key for run in runs}) == len(runs) == 8
    assert {run.key for run in study(SMALL.replace('rounds" = 3', 'rounds" = 4')).runs()}.isdisjoint(
        run.key for run in runs
    )


def test_what_makes_a_set_up_wins_over_the_study_and_its_own_values_over_all() -> None:
    plain, weighted, *_ = study().runs()
    assert plain.values["aggregation.momentum"] == 0.9, "that is what FedOPT is"
    assert (plain.values["aggregation.weighting"], weighted.values["aggregation.weighting"]) == ("size", "lorar")
    assert plain.values["schedule.rounds"] == 3
    assert "aggregation.max_weight_share" not in plain.values
    assert weighted.values["aggregation.max_weight_share"] == 0.5


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (SMALL.replace('"fedopt",', '"fedsgd",'), "set-up 'fedsgd' is unknown: use finetuning"),
        (SMALL.replace('size = "micro"', ""), "either folder or size"),
        (SMALL.replace("seeds = [1, 2]", "seeds = []"), "seeds"),
        (SMALL + "\n[grud]\n", "unknown key grud"),
        (SMALL.replace("[only.fedopt-lorar]", "[only.fedopt-lora]"), "set-up 'fedopt-lora' is unknown"),
        (
            SMALL.replace('"fedopt-lorar"]', '"fedopt"]'),
            "fedopt, seed 1, training.learning_rate = 0.001 would be run twice",
        ),
        (SMALL.replace("[1, 2]", "[2, 2]"), "fedopt, seed 2, .* would be run twice"),
        (SMALL.replace("[1e-3, 3e-3]", "[1e-3, 1e-3]"), "= 0.001 would be run twice"),
        (SMALL + '"training.learning_rate" = 2e-3', r"in \[only.fedopt-lorar\] nothing that the grid goes over"),
        (FIXED.replace("[plan]", '[plan]\n"training.fedprox_mu" = 0.1'), r"write it into \[only.fedprox\]"),
        (SMALL.replace('size = "micro"', 'folder = "t5"\nvocabulary = 9'), "vocabulary goes with size"),
        (SMALL + "[start.practice]\npairs = 9\ntraining = {batch_size = 8}", "has no epochs"),
    ],
)
def test_a_study_that_says_something_else_is_refused_with_the_key(text: str, said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        study(text)


def test_a_variant_is_of_the_set_up_that_it_names_and_else_of_each() -> None:
    runs = list(study(f'{FIXED}\n[variants.own]\nsetup = "finetuning"\n[variants.any]\n').runs())
    assert [(run.setup, run.point["variant"]) for run in runs[:3]] == [
        ("finetuning", "own"),
        ("fedopt", "any"),
        ("fedopt-lorar", "any"),
    ]
    assert "setup" not in runs[0].values
    assert runs[1].key == next(iter(study(FIXED).runs())).key, "a variant's name is no value"
    with pytest.raises(ConfigurationError, match="set-up 'fedsgd' is unknown"):
        study(f'{FIXED}\n[variants.own]\nsetup = "fedsgd"\n')


def test_a_study_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigurationError, match=r"none\.toml cannot be read"):
        Study.read(tmp_path / "none.toml")
    (tmp_path / "study.toml").write_bytes(b'name = "\xff"')
    with pytest.raises(ConfigurationError, match=r"study\.toml is not UTF-8 text"):
        Study.read(tmp_path / "study.toml")


def test_a_run_has_the_same_key_wherever_its_study_lies(tmp_path: Path) -> None:
    keys = []
    for name in ("here", "there"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "study.toml").write_text(SMALL)
        keys.append([run.key for run in Study.read(tmp_path / name / "study.toml").runs()])
    assert keys[0] == keys[1], "what one machine has done is not done again on another"


def test_the_papers_study_reads_and_is_all_ten_set_ups_on_t5_base() -> None:
    path = Path(__file__).resolve().parents[2] / "ops" / "lorica" / "experiments" / "studies" / "paper.toml"
    assert len(list(Study.read(path).runs())) == 30


@pytest.fixture(scope="module")
def silos(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("silos")
    for specification in (CLINIC, INSURER):
        write_silo(folder / specification.name, specification, seed=1)
    return folder


def test_merged_data_has_every_line_and_every_schema(silos: Path, tmp_path: Path) -> None:
    parts = [load_silo_data(path) for path in silos_in(silos).values()]
    whole = load_silo_data(merged(silos_in(silos), tmp_path / "all"))
    for split in ("train", "dev", "test"):
        assert whole.split(split) == [example for part in parts for example in part.split(split)]
    assert whole.schemas == tuple(part.schema for part in parts)
    assert whole.bad_lines == ()


def test_training_is_cut_to_the_same_examples_each_time_and_nothing_else_is(silos: Path, tmp_path: Path) -> None:
    cut = own_copy(silos_in(silos), tmp_path / "a", {"insurer": 20})
    again = own_copy(silos_in(silos), tmp_path / "b", {"insurer": 20})
    data, other = (load_silo_data(folders["insurer"]) for folders in (cut, again))  # type: ignore[index]
    assert len(data.train) == 20
    assert data.train == other.train
    assert data.dev == load_silo_data(silos / "insurer").dev
    assert cut["clinic"] == silos / "clinic"  # type: ignore[index]
    with pytest.raises(ConfigurationError, match="at_most names silo 'bank'"):
        own_copy(silos_in(silos), tmp_path / "c", {"bank": 1})


def test_silos_are_not_cut_in_their_own_folder(silos: Path) -> None:
    before = (silos / "insurer" / "train.jsonl").read_bytes()
    with pytest.raises(ConfigurationError, match="holds the silos themselves"):
        own_copy(silos_in(silos), silos, {"insurer": 1})
    assert (silos / "insurer" / "train.jsonl").read_bytes() == before


def test_a_cut_silo_has_one_of_each_file_however_it_was_packed(silos: Path, tmp_path: Path) -> None:
    source = tmp_path / "insurer"
    shutil.copytree(silos / "insurer", source)
    (source / "notes").mkdir()
    own_copy(silos_in(tmp_path), tmp_path / "data", {"insurer": 20})
    (source / "dev.jsonl.gz").write_bytes(gzip.compress((source / "dev.jsonl").read_bytes()))
    (source / "dev.jsonl").unlink()
    cut = own_copy(silos_in(tmp_path), tmp_path / "data", {"insurer": 20})
    assert load_silo_data(cut[SiloName("insurer")]).dev == load_silo_data(source).dev


def twins(folder: Path, silos: Path) -> Path:
    """Two silos with the same database name and ids, the second with a question that holds U+2028, and a bad line."""
    for name in ("one", "two"):
        shutil.copytree(silos / "clinic", folder / name)
    for split in ("train", "dev", "test"):
        file = folder / "two" / f"{split}.jsonl"
        rows = [json.loads(text) for text in file.read_text().split("\n") if text]
        rows[0]["question"] += "\u2028and so on"
        text = "".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows)
        file.write_text(text + "\n" + ("{no\n" if split == "train" else ""))
    (folder / "two" / "silo.toml").write_text("[data]\nmax_bad_lines_share = 0.5\n")
    return folder


def test_merged_data_loses_nothing_where_silos_share_ids_and_names_of_databases(silos: Path, tmp_path: Path) -> None:
    found = silos_in(twins(tmp_path / "silos", silos))
    limits = DataLimits(max_bad_fraction=0.5)
    parts = [load_silo_data(path, limits) for path in found.values()]
    folder = merged(found, tmp_path / "all")
    assert Settings.read(folder / "silo.toml").data.max_bad_lines_share == 0.5
    whole = load_silo_data(folder, limits)
    for split in ("train", "dev", "test"):
        together = [example for part in parts for example in part.split(split)]  # type: ignore[arg-type]
        assert [(one.question, one.query) for one in whole.split(split)] == [  # type: ignore[arg-type]
            (one.question, one.query) for one in together
        ]
    assert [schema.db_id for schema in whole.schemas] == ["clinic", "two/clinic"]
    assert {example.db_id for example in whole.train[len(parts[0].train) :]} == {"two/clinic"}
    assert len(whole.bad_lines) == 1


def test_results_of_other_data_are_not_gone_on_with(silos: Path, tmp_path: Path) -> None:
    shutil.copytree(silos, tmp_path / "silos")
    found = silos_in(tmp_path / "silos")
    require_same(found, tmp_path)
    train = tmp_path / "silos" / "clinic" / "train.jsonl"
    train.with_suffix(".jsonl.gz").write_bytes(gzip.compress(train.read_bytes()))
    train.unlink()
    require_same(found, tmp_path)  # packed, and still the same
    dev = tmp_path / "silos" / "insurer" / "dev.jsonl"
    dev.write_text("\n".join(dev.read_text().splitlines()[1:]))
    with pytest.raises(
        ConfigurationError, match=r"results of other data: those of insurer were others when.*choose another --out"
    ):
        require_same(found, tmp_path)


def line(run: Run, score: float) -> dict[str, Any]:
    test = {
        "clinic": {"examples": 10, "exact_match": score, "loss_per_token": 1.0},
        "insurer": {"examples": 30, "exact_match": 0.5, "loss_per_token": 2.0},
    }
    silos = {
        "clinic": {"loss_max": 2.0, "loss_min": 1.0, "share": score},
        "insurer": {"loss_max": 3.0, "loss_min": 2.0, "share": 1 - score},
    }
    scored = {"clinic": {"loss_per_token": 3.0}, "insurer": {"loss_per_token": 2.0 + score}}
    first = {"round": 0, "outcome": "evaluated", "micro_exact_match": 0.0, "silos": scored}
    row = {"round": 1, "outcome": "applied", "micro_exact_match": score, "silos": silos}
    return {
        "run": run.key,
        "setup": run.setup,
        "seed": run.seed,
        "point": {},
        "commit": "abc",
        "seconds": 1.0,
        "test": test,
        "macro_exact_match": (score + 0.5) / 2,
        "micro_exact_match": (10 * score + 15) / 40,
        "rounds": [[first, row]],
        "losses": [{"clinic": [[2, 2.0], [4, 1.0]]}],
    }


def test_the_report_has_means_spreads_averages_and_what_lorar_changes(tmp_path: Path) -> None:
    one = study(FIXED)
    scores = {("fedopt", 1): 0.1, ("fedopt", 2): 0.3, ("fedopt-lorar", 1): 0.2, ("fedopt-lorar", 2): 0.6}
    lines = [json.dumps(line(run, scores[run.setup, run.seed])) for run in one.runs()]
    (tmp_path / RESULTS).write_text("\n".join(lines) + '\n{"run": "torn')
    assert len(list(results(tmp_path))) == 4
    page = write_report(one, tmp_path).read_text()
    assert "| FedOPT | 20.0 ± 14.1 | 50.0 ± 0.0 | 35.0 ± 7.1 | 42.5 ± 3.5 |" in page
    assert "| FedOPT + Lorar | 20.0 ± 14.1 | 0.0 ± 0.0 | 10.0 ± 7.1 | 5.0 ± 3.5 |" in page, "points more, seed by seed"
    assert "| FedOPT + Lorar | 0.000 ± 0.000 | 0.000 ± 0.000 |" in page, "nats more"
    assert "| FedOPT + Lorar | 40.0 ± 28.3 | 60.0 ± 28.3 |" in page, "shares of the sum of weights"
    assert "| FedOPT + Lorar | 3.000 ± 0.000 | 2.400 ± 0.283 | 2.700 ± 0.141 |" in page, "dev, of the last scored round"
    assert "No silo has one." in page  # a database
    names = ("lorar", "lorar-loss", "shares-fedopt-lorar", "3", "4", "5", "5-loss", "6", "6-loss")
    for figure in (f"figure-{name}.svg" for name in names):
        assert (tmp_path / figure).read_text().startswith("<?xml")
        assert figure in page
    with pytest.raises(ConfigurationError, match="has no run of study small"):
        write_report(study(SMALL.replace("[1, 2]", "[3]")), tmp_path)


def written(study: Study, out: Path, score: Callable[[Run], float], **more: Any) -> str:
    for run in study.runs():
        append_result(out, {**line(run, score(run)), **more})
    return write_report(study, out).read_text()


def test_what_lorar_changes_stands_in_order_of_training_examples_and_of_test_examples_where_masks_hide_those() -> None:
    lines = [line(run, 0.25) for run in study(FIXED.replace("[1, 2]", "[1]")).runs()]
    by_setup = {(each["setup"], ""): [each] for each in lines}
    assert [list(change.by_silo) for change in changes(by_setup, "exact_match")] == [
        ["clinic", "insurer", "MacroAvg", "MicroAvg"]
    ]
    for each in lines:
        for silo, examples in (("clinic", 70), ("insurer", 60)):
            each["rounds"][0][1]["silos"][silo]["examples"] = examples
    (change,) = changes(by_setup, "exact_match")
    assert list(change.by_silo) == ["insurer", "clinic", "MacroAvg", "MicroAvg"]
    assert change.lorar == ("fedopt-lorar", "")
    assert change.seeds == 1


ROWS = """
[variants.size]
"aggregation.weighting" = "size"
[variants.lorar]
"aggregation.weighting" = "lorar"
"aggregation.reduction_memory" = 0.5
[variants.finetuning]
setup = "finetuning"
"""


def test_rows_whose_questions_are_told_stand_beside_each_other_with_intervals_by_either_choice(tmp_path: Path) -> None:
    one = study(FIXED.replace(', "fedopt-lorar"]', "]") + ROWS)
    answers = {"size": "1000", "lorar": "1110", "finetuning": "1100"}
    for run in one.runs():
        facts = line(run, 0.5)
        if run.point["variant"] == "lorar":
            later = {silo: {**told, "share": 0.5} for silo, told in facts["rounds"][0][1]["silos"].items()}
            later["clinic"]["share"] = 0.2
            facts["rounds"][0].append({**facts["rounds"][0][1], "round": 2, "silos": later})
        facts["rounds"][0][1]["macro_exact_match"] = facts["rounds"][0][0]["macro_exact_match"] = 0.5
        facts["rounds"][0][-1]["macro_exact_match"] = 0.5
        for silo, right in (("clinic", answers[str(run.point["variant"])]), ("insurer", "0001")):
            facts["test"][silo] |= {"right": right, "exact_match": right.count("1") / 4}
        if run.point["variant"] == "size":
            better = {silo: {**score, "right": "1111", "exact_match": 1.0} for silo, score in facts["test"].items()}
            facts["test_by_macro"] = better
        append_result(tmp_path, facts)
    page = write_report(one, tmp_path).read_text()
    by_micro, by_macro = page.split("### By the model with the best MacroAvg on dev")
    assert "| FedOPT (size) | 25.0 ± 0.0 | 25.0 ± 0.0 | 25.0 ± 0.0 |" in by_micro
    assert "| FedOPT (size) | 100.0 ± 0.0 | 100.0 ± 0.0 | 100.0 ± 0.0 |" in by_macro
    assert "| FedOPT (lorar) | 25.0 ± 0.0 | 75.0 ± 0.0 |" in page, "without clinic, without insurer"
    assert "| MacroAvg, points more than | Finetuning | FedOPT (size) | FedOPT (lorar) |" in page
    assert "| FedOPT (lorar) | +12.5 [+0.0, +37.5] | +25.0 [+0.0, +50.0] |  |" in page, "by MicroAvg"
    assert "| FedOPT (lorar) | +12.5 [+0.0, +37.5] | -50.0 [-75.0, -25.0] |  |" in page, "size is another model then"
    assert "Of lorar: `aggregation.weighting = lorar`" in page
    for figure in ("5", "5-macro", "5-loss", "3-lorar", "4-lorar", "shares-lorar"):
        assert (tmp_path / f"figure-{figure}.svg").exists()
        assert f"(figure-{figure}.svg)" in page
    assert not (tmp_path / "figure-4-size.svg").exists(), "its shares stay"


def test_each_point_of_a_grid_has_its_own_rows_and_pictures(tmp_path: Path) -> None:
    def score(run: Run) -> float:
        return 0.2 + (run.setup == "fedopt-lorar") * (0.1 if run.point["training.learning_rate"] == 1e-3 else 0.3)

    page = written(study(), tmp_path, score)
    assert "| FedOPT (training.learning_rate = 0.003) | 20.0 ± 0.0 |" in page
    assert "| FedOPT + Lorar (training.learning_rate = 0.001) | 10.0 ± 0.0 | 0.0 ± 0.0 |" in page, "what Lorar changes"
    assert "| FedOPT + Lorar (training.learning_rate = 0.003) | 30.0 ± 0.0 | 0.0 ± 0.0 |" in page
    for number in (1, 2):
        assert (tmp_path / f"figure-5-{number}.svg").exists()
    assert "![With Lorar and without (as the paper's figure 5), training.learning_rate = 0.003](figure-5-2.svg)" in page


def test_a_value_that_moved_to_the_grid_is_a_point_of_it(tmp_path: Path) -> None:
    for run in study(FIXED).runs():
        append_result(tmp_path, line(run, 0.1))
    page = written(study(), tmp_path, lambda run: 0.2)
    assert "| FedOPT (training.learning_rate = 0.001) | 10.0 ± 0.0 |" in page, "that run was done, and counts"
    assert "| FedOPT |" not in page


def test_a_row_of_fewer_seeds_than_the_study_has_says_so(tmp_path: Path) -> None:
    one = study(FIXED)
    for run in list(one.runs())[:3]:
        append_result(tmp_path, line(run, 0.5))
    page = write_report(one, tmp_path).read_text()
    assert "| FedOPT | 50.0 ± 0.0 |" in page
    assert "| FedOPT + Lorar (1 of 2 seeds) | 50.0 |" in page
    assert "3 of 4 runs, seeds 1, 2, " in page


def test_averages_are_over_all_silos_or_not_at_all_and_executions_count_what_ran(tmp_path: Path) -> None:
    one = study(FIXED.replace("[1, 2]", "[1]"))
    first, second = one.runs()
    both = line(first, 0.5)
    both["test"]["clinic"] |= {"execution_accuracy": 0.5, "executed": 10}
    both["test"]["insurer"] |= {"execution_accuracy": 1.0, "executed": 10}
    alone = line(second, 0.5)
    alone["test"]["clinic"] |= {"execution_accuracy": 0.5, "executed": 10}
    for each in (both, alone):
        append_result(tmp_path, each)
    page = write_report(one, tmp_path).read_text()
    assert "| FedOPT | 50.0 | 100.0 | 75.0 | 75.0 |" in page
    assert "| FedOPT + Lorar | 50.0 |  |  |  |" in page


def test_masked_runs_and_abandoned_attempts_have_no_shares(tmp_path: Path) -> None:
    one = study(FIXED.replace("[1, 2]", "[1]"))
    plain, masked = one.runs()
    with_two = line(plain, 0.25)
    (rows,) = with_two["rounds"]
    rows.insert(
        1, {**rows[1], "outcome": "abandoned", "silos": {"clinic": {"share": 0.0, "loss_max": 9.0, "loss_min": 8.0}}}
    )
    without = line(masked, 0.25)
    for silo in without["rounds"][0][1]["silos"].values():
        silo.clear()
    for each in (with_two, without):
        append_result(tmp_path, each)
    page = write_report(one, tmp_path).read_text()
    assert "| FedOPT | 25.0 | 75.0 |\n" in page
    assert loss_curves([with_two, without])["clinic"] == {2: [2.0, 2.0], 4: [1.0, 1.0]}


def test_shares_are_means_of_each_tenth_of_the_rounds_that_made_a_model() -> None:
    (run, *_) = study(FIXED).runs()
    one = line(run, 0.0)
    rows = one["rounds"][0]
    template = rows.pop()
    for number in range(1, 21):
        silos = {"clinic": {"share": number / 100}, "insurer": {"share": 1 - number / 100}}
        rows.append(
            {**template, "round": number, "attempt": 1, "outcome": "abandoned", "silos": {"clinic": {"share": 1.0}}}
        )
        rows.append({**template, "round": number, "silos": silos})
    curves = share_curves([one])
    assert curves["clinic"] == {2 * tenth: [pytest.approx(2 * tenth - 0.5)] for tenth in range(1, 11)}
    assert curves["insurer"][20] == [pytest.approx(80.5)]


def test_the_page_needs_no_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigurationError, match="pictures need matplotlib"):
        written(study(), tmp_path, lambda run: 0.5)
    assert "| FedOPT" in (tmp_path / "report.md").read_text()


def test_one_seed_has_no_spread() -> None:
    assert (spread([0.5]), spread([]), spread([1.25], share=False)) == ("50.0", "", "1.250")


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ('"training.learning_rat" = 1', "plan fedopt-lorar: unknown key training.learning_rat"),
        (
            '"training.overrides.clinc.epochs" = 3',
            "training.overrides.clinc names no silo: the silos are clinic, insurer",
        ),
    ],
)
def test_what_the_last_set_up_would_be_refused_for_is_said_before_the_first_begins(
    silos: Path, tmp_path: Path, more: str, said: str
) -> None:
    bad = study(f"{FIXED}{more}".replace('"silos"', f'"{silos}"'))
    with pytest.raises(ConfigurationError, match=said):
        run_study(bad, tmp_path, data=silos, console=Console(quiet=True))
    assert not (tmp_path / "runs").exists()


def test_a_silo_without_a_test_split_is_told_before_the_first_run(silos: Path, tmp_path: Path) -> None:
    shutil.copytree(silos, tmp_path / "silos")
    (tmp_path / "silos" / "clinic" / "test.jsonl").unlink()
    with pytest.raises(DataError, match=r"silo clinic has no test examples.*test\.jsonl"):
        run_study(study(), tmp_path / "out", data=tmp_path, console=Console(quiet=True))


def test_a_torn_last_line_is_no_result_and_spoils_none_that_comes_after(tmp_path: Path) -> None:
    append_result(tmp_path, {"run": "a", "seed": 1})
    with (tmp_path / RESULTS).open("a") as file:
        file.write('{"run": "b", "se')  # a kill
    append_result(tmp_path, {"run": "b", "seed": 2})
    append_result(tmp_path, {"run": "c", "seed": 3})
    assert [(line["run"], line["seed"]) for line in results(tmp_path)] == [("a", 1), ("b", 2), ("c", 3)]


def test_numbers_of_a_line_have_five_digits_and_counts_all_of_theirs(tmp_path: Path) -> None:
    append_result(tmp_path, {"run": "a", "test": [{"loss": 1 / 3, "right": "0011", "examples": 1234567, "on": True}]})
    (line,) = results(tmp_path)
    assert line["test"] == [{"loss": 0.33333, "right": "0011", "examples": 1234567, "on": True}]


def test_a_run_that_stands_twice_among_the_results_counts_once(tmp_path: Path) -> None:
    for seed in (1, 2):
        append_result(tmp_path, {"run": "a", "seed": seed})
    assert [line["seed"] for line in results(tmp_path)] == [1]


def test_a_full_disk_is_an_error_of_the_results_file(tmp_path: Path) -> None:
    (tmp_path / RESULTS).symlink_to("/dev/full")
    with pytest.raises(StorageError, match=r"results\.jsonl cannot be written: No space left on device"):
        append_result(tmp_path, {"run": "a"})


def test_two_commands_do_not_work_in_one_folder(silos: Path, tmp_path: Path) -> None:
    with ProcessLock(tmp_path / "lock", "study"), pytest.raises(Conflict, match="another study"):
        run_study(study(), tmp_path, data=silos.parent, console=Console(quiet=True))


def test_a_folder_that_cannot_be_made_is_named(silos: Path, tmp_path: Path) -> None:
    (tmp_path / "out").touch()
    with pytest.raises(StorageError, match="out cannot be made: File exists; choose another --out"):
        run_study(study(), tmp_path / "out", data=silos.parent, console=Console(quiet=True))


def test_what_a_kill_left_of_a_run_that_is_done_is_deleted(silos: Path, tmp_path: Path) -> None:
    every = study(SMALL.replace('"silos"', f'"{silos}"'))
    for run in every.runs():
        append_result(tmp_path, line(run, 0.5))
        (tmp_path / "runs" / run.key / "plans").mkdir(parents=True)
    run_study(every, tmp_path, data=silos.parent, console=Console(quiet=True))
    assert list((tmp_path / "runs").iterdir()) == []


def test_a_start_may_be_what_silos_with_labels_made_before(silos: Path, tmp_path: Path) -> None:
    values = {"schedule.rounds": 1, "training.epochs": 1, "training.max_input_tokens": 16, "evaluation.initial": False}
    before, after = SizedModel("micro"), FolderModel(tmp_path / "start")
    few = own_copy(silos_in(silos), tmp_path / "few", {"clinic": 8, "insurer": 8})
    write_labelled_start(tmp_path / "start", before, few, values, seed=1)
    made = [
        create_plan(tmp_path, name=name, federation="f", source=source, preset="default", seed=1, overrides={})
        for name, source in (("before", before), ("after", after))
    ]
    assert made[0].layout == made[1].layout
    assert made[0].plan.model.initial != made[1].plan.model.initial
    assert sorted(path.name for path in tmp_path.iterdir()) == ["after", "before", "few", "start"], (
        "nothing else is left"
    )
