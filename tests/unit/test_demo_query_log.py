"""Query logs for the private demo: sizes, what is held out, and what the public textbook may not say."""

from functools import cache

import pytest

from lorica.demo.silos.query_log import DEV, TEST, QueryLog, query_log
from lorica.demo.silos.silos import SILOS
from lorica.demo.silos.specification import SiloSpecification

RECORDS = 700

every_silo = pytest.mark.parametrize("silo", SILOS, ids=lambda silo: silo.name)


@cache
def made(name: str, seed: int = 0) -> QueryLog:
    return query_log(next(silo for silo in SILOS if silo.name == name), records=RECORDS, seed=seed)


@every_silo
def test_splits_have_their_sizes_and_ids_of_their_own(silo: SiloSpecification) -> None:
    log, textbook = made(silo.name).log, made(silo.name).textbook
    assert [len(log.train), len(log.dev), len(log.test)] == [RECORDS, DEV, TEST]
    ids = [record.id for _, records in log for record in records] + [record.id for record in textbook]
    assert len(set(ids)) == len(ids)


@every_silo
def test_no_sql_of_a_held_out_question_is_in_log_or_textbook(silo: SiloSpecification) -> None:
    log, textbook = made(silo.name).log, made(silo.name).textbook
    held_out = {record.query for record in (*log.dev, *log.test)}
    assert held_out.isdisjoint(record.query for record in (*log.train, *textbook))


@every_silo
def test_the_textbook_words_nothing_as_people_do(silo: SiloSpecification) -> None:
    log, textbook = made(silo.name).log, made(silo.name).textbook
    asked = {record.question for _, records in log for record in records}
    assert asked.isdisjoint(record.question for record in textbook)
    assert {record.query for record in log.train} <= {record.query for record in textbook}


@every_silo
def test_same_seed_same_log_and_another_seed_another(silo: SiloSpecification) -> None:
    assert query_log(silo, records=RECORDS, seed=0) == made(silo.name)
    assert made(silo.name, 1) != made(silo.name)
