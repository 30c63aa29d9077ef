"""What order of data and dropout begin from: a number, as ever, or all 256 bits of a silo's own key."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from silo_agent.training.draws import begin_all, begun

KEY = bytes(range(32))


def order_of(seed: int | bytes) -> list[int]:
    found: list[int] = torch.randperm(64, generator=begun(torch.Generator(), seed)).tolist()
    return found


def dropped(seed: int | bytes) -> list[bool]:
    with torch.random.fork_rng():
        begin_all(seed)
        found: list[bool] = (torch.nn.functional.dropout(torch.ones(256), 0.5, training=True) == 0).tolist()
    return found


@pytest.mark.parametrize("drawn", [order_of, dropped])
def test_a_number_begins_as_torch_does(drawn: object) -> None:
    generator = torch.Generator().manual_seed(7)
    assert order_of(7) == torch.randperm(64, generator=generator).tolist()
    assert order_of(7) == order_of(7 + (1 << 32)), (
        "torch takes 32 bits on a CPU, which is why a key does not go this way"
    )


@given(st.integers(0, 255))
def test_each_bit_of_a_key_tells(bit: int) -> None:
    """Also those that change nothing in what `manual_seed` would have been given."""
    other = bytearray(KEY)
    other[bit // 8] ^= 1 << bit % 8
    assert order_of(bytes(other)) != order_of(KEY)
    assert dropped(bytes(other)) != dropped(KEY)


def test_all_of_the_generators_state_comes_of_the_key() -> None:
    """Not 32 bits of it, spread: two keys whose numbers are the same have states that differ in nearly all words."""
    mine, other = (
        begun(torch.Generator(), key).get_state()[24 : 24 + 8 * 624].view(torch.int64) for key in (KEY, KEY[::-1])
    )
    assert int((mine != other).sum()) > 600
    generator = torch.Generator()
    numbers = {begun(generator, KEY).initial_seed(), begun(generator, KEY[::-1]).initial_seed()}
    assert len(numbers) == 2
    assert not torch.equal(
        begun(torch.Generator(), KEY).get_state(), torch.Generator().manual_seed(min(numbers)).get_state()
    )


def test_draws_are_spread_evenly() -> None:
    generator = begun(torch.Generator(), KEY)
    values = torch.rand(100_000, generator=generator)
    assert abs(float(values.mean()) - 0.5) < 0.01
    assert abs(float(values.var()) - 1 / 12) < 0.005


def test_each_byte_of_a_key_tells_where_generators_take_a_number(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a GPU: 63 bits of the key's digest."""
    numbers: list[int] = []
    monkeypatch.setattr(torch, "manual_seed", numbers.append)
    keys = [bytes(32), *(bytes(at) + b"\1" + bytes(31 - at) for at in range(32))]
    with torch.random.fork_rng():
        for key in keys:
            begin_all(key)
    assert len(set(numbers)) == len(keys)
    assert 1 << 60 < max(numbers) < 1 << 63
