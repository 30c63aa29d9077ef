"""When two results count as the same, and what becomes of a (gold, predicted) pair."""

import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lorica_security.errors import DataError
from silo_agent.sql_sandbox import (
    ExecutionMatch,
    ExecutionOutcome,
    Limits,
    ResultKind,
    Rows,
    Sandbox,
    SqliteTarget,
    Value,
    execution_match,
    same_result,
)

NOISE = 1e-12


def rows(*values: tuple[Value, ...], columns: tuple[str, ...] = ()) -> Rows:
    return Rows(columns, values)


@pytest.mark.parametrize(
    ("gold", "predicted", "unordered", "ordered"),
    [
        (rows((1,), (2,)), rows((1,), (2,)), True, True),
        (rows((1,), (2,)), rows((2,), (1,)), True, False),
        (rows((1,), (1,), (2,)), rows((1,), (2,), (2,)), False, False),
        (rows((1,), (1,)), rows((1,)), False, False),
        (rows((1, "a")), rows(("a", 1)), False, False),
        (rows((1, 2)), rows((1,)), False, False),
        (rows(), rows(), True, True),
        (rows(), rows((None,)), False, False),
        (rows((None,)), rows((0,)), False, False),
        (rows((None,)), rows(("",)), False, False),
        (rows((3,)), rows((3.0,)), True, True),
        (rows((3,)), rows(("3",)), False, False),
        (rows((0.1 + 0.2,)), rows((0.3,)), True, True),
        (rows((10**9,)), rows((10**9 + 1,)), False, False),
        (rows((1.5,)), rows((1.500001,)), False, False),
        (rows(("NaN",)), rows(("NaN",)), True, True),
        (rows(("Infinity",)), rows((1e308,)), False, False),
        (rows((1 - NOISE,)), rows((1,)), True, True),
        # Two averages that agree but for noise, told apart by another column
        (rows((0.1 + 0.2, "a"), (0.3, "b")), rows((0.3, "a"), (0.1 + 0.2, "b")), True, True),
        (rows((0.1 + 0.2, "a"), (0.3, "b")), rows((0.3, "b"), (0.3, "a")), True, False),
        # Noise in the first column upsets the order by the second: only a matching finds the pairs
        (rows((0.3, 7.5), (0.1 + 0.2, 5.5)), rows((0.3, 5.5), (0.1 + 0.2, 7.5)), True, False),
        (rows((0.3, 7.5), (0.1 + 0.2, 5.5)), rows((0.3, 5.5), (0.1 + 0.2, 8.5)), False, False),
    ],
)
def test_by_hand(gold: Rows, predicted: Rows, unordered: bool, ordered: bool) -> None:
    assert same_result(gold, predicted, ordered=False) is unordered
    assert same_result(predicted, gold, ordered=False) is unordered
    assert same_result(gold, predicted, ordered=True) is ordered


def test_column_names_do_not_count() -> None:
    assert same_result(rows((1,), columns=("total",)), rows((1,), columns=("count(*)",)), ordered=True)


values = st.one_of(
    st.none(),
    st.integers(-3, 3),
    st.sampled_from(["a", "b", ""]),
    st.floats(-10, 10, allow_nan=False).map(lambda x: round(x, 3)),
)
tables = st.integers(1, 3).flatmap(lambda width: st.lists(st.tuples(*[values] * width), max_size=12))


@given(tables, st.randoms(use_true_random=False))
def test_any_order_and_noise_in_the_last_digits_is_the_same(table: list[tuple[Value, ...]], random: object) -> None:
    shuffled = [tuple(v * (1 + NOISE) if isinstance(v, float) else v for v in row) for row in table]
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    assert same_result(rows(*table), rows(*shuffled), ordered=False)


@given(tables.filter(bool), st.data())
def test_one_changed_value_is_not_the_same(table: list[tuple[Value, ...]], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(table) - 1))
    column = data.draw(st.integers(0, len(table[0]) - 1))
    changed = [list(row) for row in table]
    changed[index][column] = "something else"
    assert not same_result(rows(*table), rows(*map(tuple, changed)), ordered=False)


@given(tables.filter(bool), st.data())
def test_one_row_more_or_twice_is_not_the_same(table: list[tuple[Value, ...]], data: st.DataObject) -> None:
    index = data.draw(st.integers(0, len(table) - 1))
    assert not same_result(rows(*table), rows(*table, table[index]), ordered=False)


def test_thousands_of_noisy_rows_are_compared_without_matching_each_with_each() -> None:
    gold = [(i / 7, (i * 31 % 5000) / 3) for i in range(5000)]
    noisy = [(a * (1 + NOISE), b) for a, b in reversed(gold)]
    assert same_result(rows(*gold), rows(*noisy), ordered=False)
    assert not same_result(rows(*gold), rows(*noisy[:-1], (0.5, 0.5)), ordered=False)


@pytest.fixture(scope="module")
def box(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Sandbox]:
    path = tmp_path_factory.mktemp("bank") / "bank.db"
    connection = sqlite3.connect(path)
    connection.executescript(
        "CREATE TABLE account (id INTEGER, owner TEXT); INSERT INTO account VALUES (1, 'Ada'), (2, 'Bo'), (3, 'Ada');"
    )
    connection.close()
    with Sandbox(SqliteTarget(path), Limits(seconds=1, rows=100)) as box:
        yield box


@pytest.mark.parametrize(
    ("gold", "predicted", "outcome", "kind"),
    [
        (
            "SELECT owner FROM account ;",
            "SELECT owner FROM account ORDER BY id DESC",
            ExecutionOutcome.MATCH,
            ResultKind.ROWS,
        ),
        (
            "SELECT id FROM account ORDER BY id",
            "SELECT id FROM account ORDER BY id DESC",
            ExecutionOutcome.MISMATCH,
            ResultKind.ROWS,
        ),
        ("SELECT owner FROM account", "SELECT DISTINCT owner FROM account", ExecutionOutcome.MISMATCH, ResultKind.ROWS),
        ("SELECT owner FROM account", "SELECT nope FROM account", ExecutionOutcome.PREDICTED_ERROR, ResultKind.ROWS),
        ("SELECT owner FROM account", "owner owner owner", ExecutionOutcome.PREDICTED_REFUSED, ResultKind.ROWS),
        ("SELECT owner FROM account", "DROP TABLE account", ExecutionOutcome.PREDICTED_REFUSED, ResultKind.ROWS),
        ("SELECT nope FROM account", "SELECT owner FROM account", ExecutionOutcome.GOLD_ERROR, None),
        (
            "SELECT owner FROM account WHERE id > 9",
            "SELECT id FROM account WHERE id > 8",
            ExecutionOutcome.MATCH,
            ResultKind.EMPTY,
        ),
        (
            "SELECT owner FROM account WHERE id > 9",
            "SELECT owner FROM account",
            ExecutionOutcome.MISMATCH,
            ResultKind.EMPTY,
        ),
        ("SELECT count(*) FROM account WHERE id > 9", "SELECT 0", ExecutionOutcome.MATCH, ResultKind.NULL_OR_ZERO),
    ],
)
def test_outcomes(box: Sandbox, gold: str, predicted: str, outcome: ExecutionOutcome, kind: ResultKind | None) -> None:
    result = execution_match(box, gold_sql=gold, predicted_sql=predicted)
    assert (result.outcome, result.gold) == (outcome, kind)
    ran = outcome in (ExecutionOutcome.MATCH, ExecutionOutcome.MISMATCH)
    assert bool(result.reason) is not ran


def test_a_database_out_of_reach_is_no_outcome(tmp_path: Path) -> None:
    path = tmp_path / "gone.db"
    sqlite3.connect(path).execute("CREATE TABLE t (a)").connection.close()
    with Sandbox(SqliteTarget(path)) as box:
        assert execution_match(box, gold_sql="SELECT * FROM t", predicted_sql="SELECT a FROM t") == ExecutionMatch(
            ExecutionOutcome.MATCH, ResultKind.EMPTY
        )
        path.unlink()
        with pytest.raises(DataError, match="not a file"):
            execution_match(box, gold_sql="SELECT * FROM t", predicted_sql="SELECT a FROM t")
