"""Whole attempts: any cohort, threshold, drop-outs and order give the survivors' sum exactly, or nothing at all."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorica_security.errors import Conflict, IntegrityError, StateError
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.coordinator import effects as coordinator_effects
from lorica_security.secure_aggregation.coordinator import events as coordinator_events
from lorica_security.secure_aggregation.coordinator import machine as coordinator_machine
from lorica_security.secure_aggregation.coordinator import states as coordinator_states
from lorica_security.secure_aggregation.masked_vectors import mask_stream
from lorica_security.secure_aggregation.masked_vectors.fixed_point import EXTRA_WORDS, decode, decode_tail
from lorica_security.secure_aggregation.messages import MaskedInput
from lorica_security.secure_aggregation.parameters import least_threshold
from lorica_security.secure_aggregation.silo import effects as silo_effects
from lorica_security.secure_aggregation.silo import events as silo_events
from lorica_security.secure_aggregation.silo import machine as silo_machine
from lorica_security.secure_aggregation.silo import resumption as silo_resumption
from lorica_security.secure_aggregation.silo import states as silo_states
from tests.support.secagg_federation import (
    PHASES,
    SIZES,
    Federation,
    attempt,
    delta_of,
    opening,
    scores_of,
    silo_names,
    terms,
    weight_of,
)


@st.composite
def attempts(draw: st.DrawFn) -> tuple[int, int, dict[SiloName, str]]:
    cohort = draw(st.integers(3, 7))
    threshold = draw(st.integers(least_threshold(cohort), cohort))
    drops = draw(st.dictionaries(st.sampled_from(silo_names(cohort)), st.sampled_from(PHASES), max_size=cohort))
    return cohort, threshold, drops


def expected_to_end_well(cohort: int, threshold: int, drops: dict[SiloName, str]) -> bool:
    """By counting alone: a roster of those left after phase 1 must be possible, and `threshold` must reach the end."""
    roster = cohort - sum(phase == PHASES[0] for phase in drops.values())
    return roster >= threshold >= least_threshold(roster) and cohort - len(drops) >= threshold


@settings(max_examples=60)
@given(attempts(), st.data())
def test_the_survivors_sum_comes_out_exactly_or_nothing_can_be_put_together(
    drawn: tuple[int, int, dict[SiloName, str]], data: st.DataObject
) -> None:
    cohort, threshold, drops = drawn
    federation = Federation(cohort, terms_=terms(threshold=threshold))
    federation.run(drops=drops, order=lambda waiting: data.draw(st.integers(0, waiting - 1)))

    shares = federation.shares_seen()
    for name in federation.names:
        whole = [kind for kind in ("self mask", "mask key") if len(shares.get((name, kind), ())) >= threshold]
        assert len(whole) <= 1, f"{name} could be unmasked: {whole}"
    if expected_to_end_well(cohort, threshold, drops):
        assert isinstance(federation.coordinator, coordinator_states.Unmasked)
        assert federation.unmask is not None
        before_upload = [name for name, phase in drops.items() if phase in PHASES[:3]]
        assert set(federation.unmask.survivors) == set(federation.names) - set(before_upload)
        assert np.array_equal(federation.sum(), federation.true_sum())
        assert {blame.silo for blame in federation.blames} <= set(drops)
    else:
        assert isinstance(federation.coordinator, coordinator_states.Abandoned)
        assert all(len(holders) < threshold for holders in shares.values())
    federation.end()
    assert all(type(each.state) is silo_states.Resting for each in federation.silos.values())
    assert all(secret.erased for each in federation.silos.values() for secret in each.erased)


@pytest.mark.parametrize("phase", PHASES)
def test_two_of_seven_drop_out_in_any_phase(phase: str) -> None:
    federation = Federation(7)
    drops = {federation.names[1]: phase, federation.names[5]: phase}
    federation.run(drops=drops)
    assert np.array_equal(federation.sum(), federation.true_sum())
    assert {(blame.silo, blame.offence) for blame in federation.blames} <= {
        (name, coordinator_effects.Offence.SILENCE) for name in drops
    }


def test_the_sum_is_the_weighted_sum_of_the_deltas_and_the_sum_of_the_weights() -> None:
    federation = Federation(5).run()
    assert federation.unmask is not None
    words, fixed_point = federation.sum(), federation.unmask.fixed_point
    plain = sum(weight_of(name) * delta_of(name).astype(np.float64) for name in federation.names)
    secure = np.zeros(sum(SIZES))
    decode(fixed_point, words[:-EXTRA_WORDS], 0, secure)
    assert np.abs(secure - plain).max() < 64 * 5 / fixed_point.levels
    tail = decode_tail(fixed_point, words[-EXTRA_WORDS:])
    assert abs(tail.weight_sum - sum(map(weight_of, federation.names))) < 1e-5
    assert tail.saturated == 0
    told = [scores_of(name).words for name in federation.names]
    assert tail.scores is not None
    assert tail.scores.words == tuple(map(sum, zip(*told, strict=True)))


def test_without_unmasking_the_sum_is_noise() -> None:
    federation = Federation(5).run()
    assert federation.unmask is not None
    masked = sum(each.masked.astype(np.int64) for each in federation.silos.values() if each.masked is not None)
    assert (np.asarray(masked % 2**32) != federation.true_sum()).all()


def test_one_survivor_set_member_missing_leaves_noise() -> None:
    federation = Federation(5).run()
    assert federation.unmask is not None
    total = np.zeros(federation.unmask.fixed_point.words, dtype="<u4")
    for name in federation.unmask.survivors[:-1]:
        total += federation.silos[name].masked
    federation.unmask.masks.apply(total, 0, mask_stream.Workspace())
    rest = sum(federation.silos[name].encoded.astype(np.int64) for name in federation.unmask.survivors[:-1])
    assert (total != np.asarray(rest % 2**32)).all()


# --- restarts ---------------------------------------------------------------------------------------------------------


@settings(max_examples=25)
@given(st.integers(0, 4), st.integers(0, 12), st.data())
def test_a_silo_that_is_killed_anywhere_sends_the_same_bytes(which: int, after: int, data: st.DataObject) -> None:
    undisturbed = Federation(5).run()
    federation = Federation(5)
    name = federation.names[which]
    federation.begin()
    killed = False
    steps = 0
    while not federation.over:
        federation.deliver(data.draw(st.integers(0, len(federation.queue) - 1)) if not killed else 0)
        steps += 1
        if steps == 2 * after:
            killed = True
            again = federation.silos[name].restart()
            assert all(message in federation.silos[name].sent for message in again)
    assert federation.unmask is not None
    assert undisturbed.unmask is not None
    assert np.array_equal(federation.sum(), undisturbed.sum())
    assert np.array_equal(federation.silos[name].masked, undisturbed.silos[name].masked)


def test_a_silo_that_is_killed_while_it_masks_makes_the_same_vector() -> None:
    federation = Federation(4).run(until="masked input")
    to, delivery = federation.queue.pop(0)
    killed = federation.silos[SiloName(to)]
    killed.state, effects = silo_machine.step(killed.state, delivery, killed.party)
    killed.journal += [effect.event for effect in effects if isinstance(effect, silo_effects.Journal)]
    (first,) = killed.restart()
    assert isinstance(first, MaskedInput)
    assert federation.silos[SiloName(to)].take(silo_events.VectorMasked(first.vector)) == [first]
    federation.queue.append(("", first))
    federation.run()
    assert np.array_equal(federation.sum(), federation.true_sum())


def test_a_restarted_coordinator_stands_where_it_stood() -> None:
    for phase in PHASES:
        federation = Federation(4).run(until=phase)
        state, effects = coordinator_machine.restored(tuple(federation.journal), federation.identities)
        assert state == federation.coordinator
        sent = [(effect.to, effect.message) for effect in effects if isinstance(effect, coordinator_effects.Send)]
        assert all(item in federation.queue for item in sent)
    federation = Federation(4).run()
    state, effects = coordinator_machine.restored(tuple(federation.journal), federation.identities)
    assert state == federation.coordinator
    (unmask,) = effects
    assert unmask == federation.unmask


def test_a_vector_that_cannot_be_made_again_forfeits_the_attempt() -> None:
    federation = Federation(4).run(until="consistency check")
    each = federation.silos[federation.names[0]]
    with pytest.raises(Conflict, match="forfeit"):
        each.take(silo_events.VectorMasked(bytes(32)))
    with pytest.raises(IntegrityError, match="begins with Roster"):
        silo_resumption.restored(each.memory, tuple(each.journal[1:]), each.party)


def test_a_journal_without_its_root_is_worth_nothing() -> None:
    federation = Federation(4).run()
    each = federation.silos[federation.names[0]]
    journal = tuple(each.journal)
    federation.end()
    with pytest.raises(StateError, match="erased"):
        silo_resumption.restored(each.memory, journal, each.party)


def test_the_next_attempt_shares_no_mask_with_the_last() -> None:
    first = Federation(4).run()
    second = Federation(4, of=attempt(round=2)).run()
    for name in first.names:
        one, other = first.silos[name], second.silos[name]
        assert (one.masked - one.encoded != other.masked - other.encoded).all()


def test_the_federation_goes_on_to_the_next_round_after_a_drop_out() -> None:
    first = Federation(5).run(drops={silo_names(5)[2]: "masked input"})
    first.end()
    second = Federation(5, of=attempt(round=2), silos=first.silos).run()
    assert second.unmask is not None
    assert len(second.unmask.survivors) == 5
    assert np.array_equal(second.sum(), second.true_sum())


def test_silos_with_different_models_or_openings_get_no_sum() -> None:
    federation = Federation(4)
    federation.tell_coordinator(
        coordinator_events.OpenAttempt(attempt=federation.attempt, terms=federation.terms, invited=federation.names)
    )
    other = opening(federation.names[3], federation.attempt, model=bytes(32))
    assert other.model != federation.terms.model
    for name in federation.names[:3]:
        federation.tell_silo(name, opening(name, federation.attempt))
    federation.tell_silo(federation.names[3], other)
    with pytest.raises(Exception, match="the roster is for model"):
        federation.run()
