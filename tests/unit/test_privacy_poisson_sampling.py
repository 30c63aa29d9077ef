"""Poisson samples: every record on its own, with the rate that was asked for."""

import math

import numpy as np
import pytest
from scipy import stats

from lorica_security.noise.poisson_sampling import sample
from lorica_security.noise.random_words import RandomWords

KEY = bytes(range(1, 33))


def test_a_rate_of_one_takes_all() -> None:
    assert sample(RandomWords(KEY), 5, 1.0).tolist() == [0, 1, 2, 3, 4]


def test_no_records_give_an_empty_sample() -> None:
    assert sample(RandomWords(KEY), 0, 0.5).tolist() == []


@pytest.mark.parametrize("rate", [1 / 3, 0.02, 1e-4])
def test_sizes_are_binomial(rate: float) -> None:
    words, records, times = RandomWords(KEY), 20_000, 300
    sizes = np.array([len(sample(words, records, rate)) for _ in range(times)])
    assert stats.binomtest(int(sizes.sum()), records * times, rate).pvalue > 1e-6
    # Shuffled batches of one size would have no variance, and draws that hang together more of it.
    assert 0.7 < sizes.var() / (records * rate * (1 - rate)) < 1.4


def test_no_record_comes_with_another() -> None:
    words, times = RandomWords(KEY), 40_000
    drawn = np.zeros((times, 4), dtype=bool)
    for row in drawn:
        row[sample(words, 4, 0.3)] = True
    together = np.corrcoef(drawn.T)
    assert np.abs(together - np.eye(4)).max() < 5 / math.sqrt(times)
    assert np.abs(drawn.mean(axis=0) - 0.3).max() < 5 * math.sqrt(0.21 / times)


def test_an_empty_draw_happens() -> None:
    words = RandomWords(KEY)
    assert any(len(sample(words, 10, 0.01)) == 0 for _ in range(20))


@pytest.mark.parametrize("rate", [0.0, -0.1, 1.0000001, math.nan])
def test_rates_that_are_none_are_refused(rate: float) -> None:
    with pytest.raises(ValueError, match="sampling rate"):
        sample(RandomWords(KEY), 10, rate)
