import pytest
from hypothesis import given
from hypothesis import strategies as st

from silo_agent.training.data.serialisation import exact_match, model_input, normalised


def test_the_question_comes_before_the_schema() -> None:
    assert (
        model_input("how many ?", "| people : name , city")
        == "how many ? ; structured knowledge: | people : name , city"
    )
    assert model_input("how many ?", None) == "how many ?"


@pytest.mark.parametrize(
    ("sql", "expected"),
    [
        ("SELECT A FROM B ;", "select a from b ;"),
        ("SELECT A FROM B;", "select a from b ;"),
        ("SELECT A FROM B", "select a from b ;"),
        ("  select\ta \n from   b ", "select a from b ;"),
        ('SELECT A WHERE C = "X y"', "select a where c = 'x y' ;"),
        ("SELECT A WHERE C = 'X'", "select a where c = 'x' ;"),
        ("SELECT A ; ;;", "select a ;"),
        ("", ";"),
        (" ; ", ";"),
    ],
)
def test_normalisation_table(sql: str, expected: str) -> None:
    assert normalised(sql) == expected


@pytest.mark.parametrize(
    ("predicted", "gold"),
    [("SELECT A , B", "SELECT A, B ;"), ("SELECT A FROM B ; DROP", "SELECT A FROM B ;"), ("", "SELECT 1 ;")],
)
def test_what_differs_by_more_is_no_match(predicted: str, gold: str) -> None:
    assert not exact_match(predicted, gold)


@given(st.text())
def test_normalising_twice_changes_nothing(sql: str) -> None:
    assert normalised(normalised(sql)) == normalised(sql)
