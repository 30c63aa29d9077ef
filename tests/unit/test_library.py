"""`import lorica`: its examples run, its names are there, and it loads nothing before it is needed."""

import ast
import doctest
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import lorica
from lorica import secure_aggregation as secagg
from lorica.demo.processes import environment
from lorica_security.errors import ConfigurationError, MalformedMessage, StateError
from lorica_security.identifiers import SiloName

SILOS = [SiloName(name) for name in ("bank-a", "bank-b", "hospital-a", "hospital-b")]


@pytest.mark.parametrize("module", [lorica, secagg], ids=["lorica", "secure_aggregation"])
def test_the_examples_run(module: object) -> None:
    done = doctest.testmod(module)  # type: ignore[arg-type]
    assert done.attempted >= 4
    assert not done.failed


def test_every_name_is_there_and_typed() -> None:
    assert all(getattr(lorica, name) is not None for name in lorica.__all__)
    assert set(dir(lorica)) >= set(lorica.__all__)
    tree = ast.parse(Path(lorica.__file__).read_text(encoding="utf-8"))
    (checked,) = (node for node in tree.body if isinstance(node, ast.If))
    typed = {
        alias.asname or alias.name
        for node in ast.walk(checked)
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert typed == set(lorica.__all__)
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        lorica.nothing  # noqa: B018


@pytest.mark.parametrize(
    ("code", "left_out"),
    [
        ("import lorica", {"torch", "grpc", "numpy", "pydantic", "cryptography"}),
        ("import lorica; lorica.secure_aggregation", {"torch", "grpc", "transformers", "sqlalchemy"}),
        ("import lorica; lorica.accounting, lorica.WEIGHTINGS, lorica.Plan", {"torch", "grpc", "transformers"}),
    ],
    ids=["lorica", "secure_aggregation", "values"],
)
def test_what_is_not_needed_is_not_imported(code: str, left_out: set[str]) -> None:
    command = [sys.executable, "-c", f"{code}; import sys; print(*sys.modules)"]
    loaded = set(subprocess.check_output(command, env=environment(), text=True).split())
    assert not loaded & left_out


def attempt(**changes: int) -> secagg.AttemptInMemory:
    return secagg.AttemptInMemory(
        SILOS, secagg.terms_of(SILOS, elements=50, largest=1.0, largest_weight=2.0, **changes)
    )


def test_a_silo_that_is_lost_leaves_the_mean_of_the_others() -> None:
    of = attempt()
    vectors = {silo: np.full(50, (number + 1) / 8) for number, silo in enumerate(SILOS)}
    sent = {silo: secagg.masked(of.works[silo], vectors[silo], weight=1.0) for silo in SILOS[:3]}
    mean = of.mean(sent)
    assert np.allclose(mean.vector, 2 / 8, atol=1e-6)
    assert round(mean.weight_sum, 4) == 3


def test_a_masked_vector_tells_nothing_by_itself_and_the_same_one_is_never_sent_twice() -> None:
    zeros = np.zeros(50)
    words = [secagg.masked(attempt().works[SILOS[0]], zeros, weight=1.0) for _ in range(2)]
    assert not np.array_equal(*words)
    assert len(set(words[0].tolist())) > 50


def test_numbers_beyond_their_range_are_cut_and_counted() -> None:
    of = attempt()
    sent = {silo: secagg.masked(of.works[silo], np.full(50, 4.0), weight=1.0) for silo in SILOS}
    mean = of.mean(sent)
    assert mean.saturated == 200
    assert np.allclose(mean.vector, 2.0), "a weight of half the largest leaves room for twice the range"


def test_what_cannot_be_summed_is_refused_with_the_reason() -> None:
    of = attempt()
    with pytest.raises(ValueError, match="50 numbers"):
        secagg.masked(of.works[SILOS[0]], np.zeros(49), weight=1.0)
    with pytest.raises(StateError, match="finite"):
        secagg.masked(of.works[SILOS[0]], np.full(50, np.nan), weight=1.0)
    with pytest.raises(StateError, match="at least 3 must"):
        of.mean({SILOS[1]: secagg.masked(of.works[SILOS[1]], np.zeros(50), weight=1.0)})
    nothing = attempt()
    with pytest.raises(StateError, match="weigh nothing together"):
        nothing.mean({silo: secagg.masked(nothing.works[silo], np.zeros(50), weight=0.0) for silo in SILOS})
    with pytest.raises((ConfigurationError, MalformedMessage, StateError), match="at least 3"):
        secagg.AttemptInMemory(SILOS[:2], secagg.terms_of(SILOS[:2], elements=1, largest=1.0, largest_weight=1.0))
