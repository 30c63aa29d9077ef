"""Ranks that train privately together come to what one process comes to: its samples, its sums, its noise, its weight.

Ranks are threads here, which meet by the same gloo; tests/integration/test_private_rank_processes.py has them as
processes, and kills them.
"""

import copy
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from torch import nn

from lorica_security.errors import StateError
from lorica_security.noise.discrete_gaussian import SIGMA
from lorica_security.noise.noise_streams import BLOCK_ELEMENTS
from lorica_security.noise.random_words import KEY_BYTES, RandomWords
from silo_agent.rounds.update import TrainingStopped
from silo_agent.training.data.batches import EncodedExamples
from silo_agent.training.private import clipping as clipping_module
from silo_agent.training.private import loss_sums, private_optimizer, private_trainer
from silo_agent.training.private.clipping import Backend
from silo_agent.training.private.exact_noise import StepNoise
from silo_agent.training.private.loss_sums import loss_sum
from silo_agent.training.private.once_among_ranks import (
    agreed_secret,
    agreed_words,
    part_of_noise,
    require_each_once,
    require_noise_once,
    require_one_sample,
    share_of,
    side_by_side,
)
from silo_agent.training.private.per_example.chunks import Chunks, shape_of
from silo_agent.training.private.private_optimizer import PrivateOptimizer
from silo_agent.training.private.private_trainer import PrivateSchedule, train_privately
from silo_agent.training.ranks.ranks import ALONE, Alone, Ranks, Together
from tests.support.rank_silo import in_ranks
from tests.unit.test_training_private_gradients import parameters_of, t5
from tests.unit.test_training_private_trainer import SCHEDULE, SECTION, examples_of, flat

pytestmark = pytest.mark.slow

MODEL = t5()
"""Ranks are threads, whose models would be drawn from one generator."""
ENTROPY = bytes(range(64, 96))
SHORT = replace(SCHEDULE, steps=2)


def key_of(rank: int) -> bytes:
    return bytes([rank + 1]) * KEY_BYTES


def secret_of(world: int) -> bytes:
    """What `world` ranks agree on, whose words are those of `key_of`."""
    return agreed_secret([RandomWords(key_of(rank)).words32(8).tobytes() for rank in range(world)], ENTROPY)


@dataclass
class Trained:
    """What came of a private training at one rank, and what it did."""

    parameters: torch.Tensor = field(default_factory=lambda: torch.zeros(0))
    weight: float | None = None
    progress: list[float] = field(default_factory=list)


def private(
    ranks: Ranks,
    examples: EncodedExamples,
    schedule: PrivateSchedule = SHORT,
    *,
    words: RandomWords | None = None,
    backend: Backend = "ghost",
    entropy: bytes = ENTROPY,
    model: Any = None,
    batch_size: int = 3,
    should_stop: Callable[[], bool] = lambda: False,
) -> Trained:
    model, told = model or copy.deepcopy(MODEL), Trained()
    told.weight = train_privately(
        model,
        parameters_of(model),
        examples,
        SECTION.model_copy(update={"batch_size": batch_size}),
        schedule,
        backend=backend,
        words=words or RandomWords(key_of(ranks.rank)),
        on_progress=told.progress.append,
        should_stop=should_stop,
        ranks=ranks,
        own_entropy=entropy,
    )
    told.parameters = flat(model)
    return told


def differing(some: torch.Tensor, others: torch.Tensor) -> int:
    """How many of their numbers have other bits."""
    return int((some.view(torch.int32) != others.view(torch.int32)).sum())


def alone(world: int, examples: EncodedExamples, schedule: PrivateSchedule = SHORT, **how: Any) -> Trained:
    """One process that draws from what `world` ranks agree on."""
    return private(ALONE, examples, schedule, words=RandomWords(secret_of(world)), **how)


def together(world: int, examples: EncodedExamples, schedule: PrivateSchedule = SHORT, **how: Any) -> list[Any]:
    return in_ranks(world, lambda ranks: private(ranks, examples, schedule, **how))


# ---- what one process comes to -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("world", "backend"), [(2, "ghost"), (3, "loop"), (4, "ghost")])
def test_ranks_come_to_the_bits_of_one_process(world: int, backend: Backend) -> None:
    """Sums have another order of their float64 numbers, which noise's grid, 2^30 to a deviation, does not show."""
    examples = examples_of(24)
    one = alone(world, examples, backend=backend)
    several = together(world, examples, backend=backend)
    for rank in several:
        assert rank.weight == one.weight
        assert rank.progress == one.progress
        assert differing(rank.parameters, one.parameters) == 0


@pytest.mark.parametrize("backend", ["ghost", "loop"])
def test_ranks_that_train_adapters_come_to_the_bits_of_one_process(backend: Backend) -> None:
    adapted: Any = get_peft_model(copy.deepcopy(MODEL), LoraConfig(r=4, target_modules=["q", "v", "wi", "wo"]))
    inner = adapted.base_model.model
    examples, schedule = examples_of(12), replace(SHORT, loss_noise_multiplier=None)
    one = alone(2, examples, schedule, backend=backend, model=copy.deepcopy(inner))
    assert 0 < differing(one.parameters, flat(inner)) < len(one.parameters) / 2
    models = [copy.deepcopy(inner) for _ in range(2)]
    for rank in in_ranks(
        2, lambda ranks: private(ranks, examples, schedule, backend=backend, model=models[ranks.rank])
    ):
        assert differing(rank.parameters, one.parameters) == 0


@given(
    world=st.integers(1, 4),
    count=st.integers(0, 9),
    rate=st.sampled_from([1e-9, 0.3, 1.0]),
    batch_size=st.integers(1, 5),
    bound=st.sampled_from([1e-3, 0.5, 1e3]),
    units=st.booleans(),
)
@settings(max_examples=8, deadline=None)
def test_whatever_the_plan_says_ranks_come_to_the_numbers_of_one_process(
    world: int, count: int, rate: float, batch_size: int, bound: float, units: bool
) -> None:
    """Also where there are fewer examples than ranks, or none. What rounding leaves is the order of a float64 sum."""
    examples = examples_of(count)
    if units and count > 1:
        examples = replace(examples, units=(tuple(range(count // 2)), tuple(range(count // 2, count))))
    schedule = replace(SHORT, steps=1, sampling_rate=rate, max_grad_norm=bound)
    one = alone(world, examples, schedule, batch_size=batch_size) if world > 1 else private(ALONE, examples, schedule)
    for rank in together(world, examples, schedule, batch_size=batch_size):
        assert rank.weight == one.weight
        assert float((rank.parameters - one.parameters).abs().max()) <= 1e-6


@given(
    world=st.integers(1, 4),
    sizes=st.lists(
        st.sampled_from([1, 7, BLOCK_ELEMENTS - 1, BLOCK_ELEMENTS, BLOCK_ELEMENTS + 1]), min_size=1, max_size=4
    ),
    key=st.binary(min_size=KEY_BYTES, max_size=KEY_BYTES),
    empty=st.booleans(),
)
@settings(max_examples=12, deadline=None)
def test_the_noise_of_a_step_is_that_of_one_process_and_each_number_has_it_once(
    world: int, sizes: list[int], key: bytes, empty: bool
) -> None:
    """Sums are whole numbers of the grid's steps here: what ranks add is exact, and noise is what is left of it."""
    generator = np.random.default_rng(5)
    parts = [
        [generator.integers(-(1 << 20), 1 << 20, size).astype(np.float64) / SIGMA for size in sizes]
        for _ in range(world)
    ]

    def step(ranks: Ranks, sums: Sequence[np.ndarray[Any, Any] | None]) -> list[torch.Tensor]:
        parameters = [nn.Parameter(torch.zeros(size)) for size in sizes]
        optimizer = PrivateOptimizer(
            torch.optim.SGD(parameters, lr=1.0),
            noise_multiplier=2.0,
            max_grad_norm=0.5,
            expected_batch_size=1,
            words=RandomWords(key),
            ranks=ranks,
        )
        try:
            optimizer.begin_step()
            for parameter, total in zip(parameters, sums, strict=True):
                parameter.summed_grad = None if total is None else torch.from_numpy(total.copy())  # type: ignore[attr-defined]
            optimizer.add_noise()
            assert all(parameter.summed_grad is None for parameter in parameters)  # type: ignore[attr-defined]
        finally:
            optimizer.close()
        return [parameter.grad for parameter in parameters if parameter.grad is not None]

    def own(rank: int) -> list[np.ndarray[Any, Any] | None]:
        return [None if empty or rank == 1 else part for part in parts[rank]]

    totals = [
        sum((part for rank in range(world) if (part := own(rank)[at]) is not None), np.zeros(size))
        for at, size in enumerate(sizes)
    ]
    expected = step(ALONE, totals)
    with ThreadPoolExecutor(1) as threads:
        stream = StepNoise(RandomWords(key).words32(8).tobytes(), sizes, threads, ahead=0)
        noise = [stream.add(np.zeros(size), deviation=1.0) for size in sizes]
    for total, made, drawn in zip(totals, expected, noise, strict=True):
        assert np.allclose(made.numpy() - total, drawn, atol=1e-6)
    for gradients in in_ranks(world, lambda ranks: step(ranks, own(ranks.rank))):
        assert not isinstance(gradients, BaseException), gradients
        assert [differing(made, one) for made, one in zip(gradients, expected, strict=True)] == [0] * len(sizes)


def test_the_sample_is_one_and_each_of_it_is_clipped_by_one_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same as one process draws, whatever the number of ranks: who is in it has the probability that is charged."""
    drawn: list[list[int]] = []
    original = private_trainer.drawn_examples

    def noted(*arguments: Any) -> list[int]:
        drawn.append(original(*arguments))
        return drawn[-1]

    monkeypatch.setattr(private_trainer, "drawn_examples", noted)
    examples, schedule = examples_of(30), replace(SHORT, loss_noise_multiplier=None)
    alone(3, examples, schedule)
    ones, clipped = drawn[:], 0
    drawn.clear()
    accumulate = clipping_module.Ghost.accumulate

    def counted(way: clipping_module.Ghost, batch: Any) -> torch.Tensor:
        nonlocal clipped
        clipped += batch.examples
        return accumulate(way, batch)

    monkeypatch.setattr(clipping_module.Ghost, "accumulate", counted)
    together(3, examples, schedule)
    assert sorted(map(tuple, drawn)) == sorted(map(tuple, ones * 3))
    assert clipped == sum(map(len, ones))
    assert max(map(len, ones)) > 3


def test_the_summed_loss_is_exactly_that_of_one_process() -> None:
    """Of units as well, whose means are rounded down once."""
    for examples in (examples_of(11), replace(examples_of(7), units=((0, 1, 2), (3,), (4, 5, 6))), examples_of(1)):
        one = loss_sum(MODEL, examples, Chunks(MODEL, most=4), bound=8.0)

        def work(ranks: Together, examples: EncodedExamples = examples) -> int:
            model = copy.deepcopy(MODEL)
            return loss_sum(model, examples, Chunks(model, most=4), bound=8.0, ranks=ranks)

        assert in_ranks(3, work) == [one] * 3


class Rank(Alone):
    def __init__(self, rank: int, world: int) -> None:
        object.__setattr__(self, "rank", rank)
        object.__setattr__(self, "world", world)


@given(st.integers(0, 40), st.integers(1, 6), st.integers(0, 9))
def test_shares_are_the_whole_and_each_has_the_long_ones_of_its_number(count: int, world: int, seed: int) -> None:
    examples = examples_of(count, seed)
    shares = [list(share_of(examples, range(count), Rank(rank, world))) for rank in range(world)]
    assert sorted(index for share in shares for index in share) == list(range(count))
    lengths = [[shape_of(examples, index) for index in share] for share in shares]
    for shape in {shape for of_rank in lengths for shape in of_rank}:
        have = [of_rank.count(shape) for of_rank in lengths]
        assert max(have) - min(have) <= 1


@given(st.integers(0, 10_000), st.integers(1, 1024))
def test_each_block_of_noise_is_one_ranks(blocks: int, world: int) -> None:
    parts = [part_of_noise(blocks, Rank(rank, world)) for rank in range(world)]
    assert [number for part in parts for number in part] == list(range(blocks))


# ---- what ranks find out about each other ---------------------------------------------------------------------------


def all_refuse(outcomes: Sequence[Any], words: str) -> None:
    assert [type(outcome) for outcome in outcomes] == [StateError] * len(outcomes), outcomes
    for outcome in outcomes:
        assert words in str(outcome)
        assert "set [training] processes to 0" in str(outcome) or "install one version" in str(outcome)


def test_a_rank_of_another_secret_is_named_before_anything_is_drawn() -> None:
    outcomes = in_ranks(
        3, lambda ranks: private(ranks, examples_of(9), entropy=bytes(32) if ranks.rank == 2 else ENTROPY)
    )
    all_refuse(outcomes, "the secret that samples and noise come from of ranks 2 is not that of rank 0")


def test_what_ranks_draw_from_needs_the_silos_secret_and_what_each_drew() -> None:
    heard = [bytes([rank]) * 32 for rank in range(3)]
    secrets = {
        agreed_secret(heard, ENTROPY),
        agreed_secret(heard, bytes(32)),
        agreed_secret(heard[::-1], ENTROPY),
        *(agreed_secret([*heard[:at], bytes([9]) * 32, *heard[at + 1 :]], ENTROPY) for at in range(3)),
    }
    assert len(secrets) == 6
    words = RandomWords(key_of(0))
    assert agreed_words(words, b"", ALONE) is words, "one process draws from what the system gave it"


@pytest.mark.parametrize(
    "other",
    [
        lambda drawn, key: (drawn[1:], key),
        lambda drawn, key: ([*drawn, 0], key),
        lambda drawn, key: ([*drawn[:-1], drawn[-1] + 1], key),
        lambda drawn, key: (drawn, bytes(KEY_BYTES)),
    ],
)
def test_a_rank_that_drew_otherwise_is_named(other: Any) -> None:
    def work(ranks: Together) -> None:
        drawn, key = [3, 5, 8], key_of(0)
        require_one_sample(*(other(drawn, key) if ranks.rank == 1 else (drawn, key)), ranks)

    all_refuse(in_ranks(2, work), "the sample of a step, or the key of its noise, of ranks 1 is not that of rank 0")


@pytest.mark.parametrize(
    ("weighs", "named"),
    [
        (None, "the sample of a step, or the key of its noise, of ranks 1 is"),
        (2.0, "the number of examples, or of blocks of noise, of ranks 1 is"),
    ],
)
def test_a_rank_that_has_a_record_less_is_named_in_training(weighs: float | None, named: str) -> None:
    """With the sample, or with the losses that are summed before it."""
    schedule = replace(SHORT, sampling_rate=1.0, loss_noise_multiplier=weighs)
    outcomes = in_ranks(2, lambda ranks: private(ranks, examples_of(9 - ranks.rank), schedule))
    all_refuse(outcomes, named)


def test_a_rank_whose_stream_is_further_on_is_named_in_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would draw other samples, and other noise."""

    def further_on(words: RandomWords, entropy: bytes, ranks: Ranks) -> RandomWords:
        made = agreed_words(words, entropy, ranks)
        made.words32(ranks.rank)
        return made

    monkeypatch.setattr(private_trainer, "agreed_words", further_on)
    schedule = replace(SHORT, loss_noise_multiplier=None)
    outcomes = in_ranks(2, lambda ranks: private(ranks, examples_of(9), schedule))
    all_refuse(outcomes, "the sample of a step, or the key of its noise, of ranks 1")


def test_an_example_that_two_ranks_add_or_none_keeps_all_from_the_step() -> None:
    for own, by in (([1, 4], ""), ([1, 4, 4], "1"), ([1], "none"), ([1, 4, 9], "1"), ([1, 2, 4], "0, 1")):

        def work(ranks: Together, own: list[int] = own) -> None:
            require_each_once("clipped gradients", [1, 2, 4, 7], own if ranks.rank == 1 else [2, 7], ranks)

        outcomes = in_ranks(2, work)
        if by:
            all_refuse(outcomes, f"clipped gradients of one example were added by ranks {by}, and one rank alone")
        else:
            assert outcomes == [None, None]


FEW = st.lists(st.integers(0, 4), max_size=4)


@given(
    wanted=st.lists(st.integers(0, 4), max_size=5, unique=True),
    done=st.lists(FEW, min_size=2, max_size=4),
    dealt=st.booleans(),
    samples=st.lists(st.sampled_from([[], [0], [1], [0, 1]]), min_size=4, max_size=4),
    keys=st.lists(st.sampled_from([bytes(KEY_BYTES), key_of(0)]), min_size=4, max_size=4),
    one=st.booleans(),
    added=st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=4, max_size=4),
)
@settings(max_examples=25, deadline=None)
def test_whatever_ranks_do_they_go_on_if_and_only_if_it_was_done_once(
    wanted: list[int],
    done: list[list[int]],
    dealt: bool,
    samples: list[list[int]],
    keys: list[bytes],
    one: bool,
    added: list[list[int]],
) -> None:
    world = len(done)
    if dealt:  # else chance would hardly ever have all of it right
        done = [wanted[rank::world] for rank in range(world)]
        added = [[int(block % world == rank) for block in range(3)] for rank in range(world)]
    if one:
        samples, keys = samples[:1] * world, keys[:1] * world
    tables = [np.array(row, dtype=np.uint8) for row in added[:world]]

    def work(ranks: Together) -> list[bool]:
        def passes(check: Callable[..., None], *given: Any) -> bool:
            try:
                check(*given, ranks)
            except StateError:
                return False
            return True

        return [
            passes(require_one_sample, samples[ranks.rank], keys[ranks.rank]),
            passes(require_each_once, "losses", wanted, done[ranks.rank]),
            passes(require_noise_once, tables[ranks.rank]),
        ]

    alike = all(each == (samples[0], keys[0]) for each in zip(samples[:world], keys[:world], strict=True))
    expected = [alike, sorted(chain(*done)) == sorted(wanted), bool((sum(tables) == 1).all())]
    assert in_ranks(world, work) == [expected] * world


def test_an_empty_sample_to_which_a_rank_adds_is_refused() -> None:
    all_refuse(
        in_ranks(2, lambda ranks: require_each_once("clipped gradients", [], [3] * ranks.rank, ranks)), "clipped"
    )


def test_noise_that_two_ranks_add_or_none_is_named() -> None:
    for first, second, named in (
        ([1, 1, 0], [0, 1, 1], "noise of block 1 of 3 was added by ranks 0, 1, and"),
        ([1, 0, 0], [0, 0, 1], "noise of block 1 of 3 was added by ranks none, and"),
        ([1, 2, 0], [0, 0, 1], "noise of block 1 of 3 was added by ranks 0, and"),
    ):
        tables = [np.array(row, dtype=np.uint8) for row in (first, second)]
        all_refuse(in_ranks(2, lambda ranks, tables=tables: require_noise_once(tables[ranks.rank], ranks)), named)
    whole = [np.array(row, dtype=np.uint8) for row in ([1, 1, 0], [0, 0, 1])]
    assert in_ranks(2, lambda ranks: require_noise_once(whole[ranks.rank], ranks)) == [None, None]


@pytest.mark.parametrize(
    ("owner", "function", "named"),
    [
        (private_trainer, "share_of", "clipped gradients of one example were added by ranks "),
        (private_optimizer, "part_of_noise", "noise of block 0 of"),
        (loss_sums, "share_of", "losses of one example were added by ranks 0, 1, and"),
    ],
)
def test_a_rank_that_does_what_is_another_ranks_keeps_all_from_the_step(
    owner: Any, function: str, named: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = getattr(owner, function)

    def as_rank_0(*arguments: Any, **named: Any) -> Any:
        (ranks,) = (given for given in (*arguments, *named.values()) if isinstance(given, Together))
        others = [given for given in arguments if given is not ranks]
        return original(*others, Rank(0, ranks.world))

    monkeypatch.setattr(owner, function, as_rank_0)
    models = [copy.deepcopy(MODEL) for _ in range(2)]
    schedule = replace(SHORT, sampling_rate=1.0)
    outcomes = in_ranks(2, lambda ranks: private(ranks, examples_of(6), schedule, model=models[ranks.rank]))
    all_refuse(outcomes, named)
    for model in models:
        assert differing(flat(model), flat(MODEL)) == 0, "no step was made"
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(getattr(parameter, "summed_grad", None) is None for parameter in model.parameters())


def test_ranks_take_what_they_have_side_by_side_and_stop_together() -> None:
    """One has nine, the other one; and one of them is told to stop before the fifth."""
    met = [0, 0, 0]

    def work(ranks: Together, stop_at: int) -> list[int]:
        taken: list[int] = []
        ranks._met = lambda: met.__setitem__(ranks.rank, met[ranks.rank] + 1)
        items = range(9 if ranks.rank else 1)
        for item in side_by_side(items, ranks, lambda: ranks.rank == 0 and len(taken) == stop_at):
            taken.append(item)
        return taken

    assert in_ranks(2, lambda ranks: work(ranks, 2)) == [[0], list(range(9))]
    assert met[:2] == [4, 4], "before every fourth, and once to hear that there are no more"
    assert [type(outcome) for outcome in in_ranks(2, lambda ranks: work(ranks, 1))] == [TrainingStopped] * 2
    met[:] = [0, 0, 0]
    assert in_ranks(1, lambda ranks: work(ranks, 9)) == [[0]]
    assert met[0] == 2, "or an agent would take one rank to hang"
    assert list(side_by_side(range(3), ALONE)) == [0, 1, 2]
    with pytest.raises(TrainingStopped):
        list(side_by_side(range(3), ALONE, lambda: True))


def test_ranks_stop_together_where_one_is_told_to() -> None:
    outcomes = in_ranks(2, lambda ranks: private(ranks, examples_of(6), should_stop=lambda: ranks.rank == 0))
    assert [type(outcome) for outcome in outcomes] == [TrainingStopped] * 2
