"""kill -9 of the coordinator and of agents at named points of masked rounds, one test each: the same attempt goes on.

Masks are drawn once for an attempt, and rounding with them; what a test draws is repeatable (repeatable_draws.py), so
that the models of the run under kills are those of the undisturbed one bit by bit. Whoever drew anew where it should
have gone on would round differently, or mask what nobody can unmask.

What was revealed is journalled before it is told, and when a round is over, no file holds a secret of it any more.
"""

from collections.abc import Callable, Mapping

import pytest

from lorica.soak.comparison import differences
from lorica.soak.federation import COORDINATOR
from lorica_coordinator.rounds.states import Aggregating, Collecting, Gathering, Masking, State
from lorica_security.secure_aggregation.keys.secret_sharing import SHARE_BYTES
from tests.support.audit_logs import check_audit_logs
from tests.support.kill_run import AgentRecords, Death, Kill, check_the_round, check_work_was_done_once
from tests.support.masked_kill_plan import CLOSING, KILLS, ROUNDS, SHAPE
from tests.support.masked_kill_run import MaskedEnd

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


# --- where they died


def _state(death: Death) -> State:
    assert death.coordinator is not None
    return death.coordinator.state


def _protocol(phase: str, answers: str, *counts: int) -> Callable[[Death], None]:
    def check(death: Death) -> None:
        state = _state(death)
        assert isinstance(state, Masking), state
        assert state.secure is not None
        assert state.secure.state.phase == phase
        assert len(getattr(state.secure.state, answers)) in counts

    return check


def _not_opened(death: Death) -> None:
    state = _state(death)
    assert isinstance(state, Masking)
    assert state.secure is None


def _unmasked(death: Death) -> None:
    state = _state(death)
    assert isinstance(state, Aggregating)
    assert state.masked is not None
    assert state.masked.silos == SHAPE.silos


def _silo(death: Death) -> AgentRecords:
    assert death.agent is not None
    assert death.agent.update is not None
    assert death.agent.update.key.round == death.at()
    return death.agent


EVENTS = ("OpenAttempt", "Roster", "SharedKeys", "Delivery", "VectorMasked", "SurvivorSet", "UnmaskRequest")


def _journalled(last: str, *, answered: bool = False, vector: bool | None = None) -> Callable[[Death], None]:
    """`vector`: whether it is in its file, where that is certain."""

    def check(death: Death) -> None:
        records = _silo(death)
        assert tuple(records.masking) == EVENTS[: EVENTS.index(last) + 1]
        assert [plan.answered for plan in records.memory.plans] == [answered]
        assert records.memory.plans[0].round == death.at()
        if vector is not None:
            assert ("masking/vector" in death.files) == vector

    return check


def _erasing(death: Death) -> None:
    assert _silo(death).masking == []
    assert death.files["masking/attempt"] > 0


def _erased(death: Death) -> None:
    assert _silo(death).masking == []
    assert not {"masking/attempt", "masking/vector", "masking/vector.manifest"} & set(death.files)
    assert [plan.answered for plan in _silo(death).memory.plans] == [True]


def _closed(death: Death) -> None:
    assert isinstance(_state(death), Collecting | Gathering)
    assert any(name.endswith("state.sqlite-wal") and size for name, size in death.files.items())


def _spooled(death: Death) -> None:
    _protocol("masked input", "inputs", 0)(death)
    assert any(name.startswith("spools/") and name.endswith(".delta") for name in death.files)


def _published(death: Death) -> None:
    _unmasked(death)
    models = [name for name in death.files if name.startswith("models/") and name.endswith(".safetensors")]
    assert len([name for name in models if "/.new-" not in name]) >= 2


def _evidence(*, more: int) -> Callable[[Death], None]:
    """Of the rounds before this one, and of `more`."""

    def check(death: Death) -> None:
        _unmasked(death)
        kept = [name for name in death.files if name.endswith(".evidence")]
        assert len(kept) == death.at() - 1 + more

    return check


def _gathering(death: Death) -> None:
    """For the round whose silos check the model of the round before."""
    state = _state(death)
    assert isinstance(state, Gathering | Collecting), state


def _checking(*, accepted: bool) -> Callable[[Death], None]:
    """The model that came of the round that the silo trained last: nothing is trained of it yet."""

    def check(death: Death) -> None:
        assert death.agent is not None
        assert death.agent.update is not None
        assert death.agent.masking == [], "its part in the round before is over"
        assert max(death.agent.accepted, default=0) == death.agent.update.key.round - (0 if accepted else 1)

    return check


WHERE_THE_COORDINATOR_DIED: Mapping[str, Callable[[Death], None]] = {
    "mid-upload": _spooled,
    "spool-durable": _spooled,
    "model-published": _published,
    "masking-entered": _not_opened,
    "attempt-opened": _protocol("advertise keys", "advertisements", 0),
    "keys-advertised": _protocol("advertise keys", "advertisements", 1),
    "roster-made": _protocol("share keys", "shared", 0),
    "keys-shared": _protocol("share keys", "shared", 1),
    "boxes-delivered": _protocol("masked input", "inputs", 0),
    "vector-accepted": _protocol("masked input", "inputs", 1),
    "survivors-fixed": _protocol("consistency check", "agreements", 0),
    "survivors-signed": _protocol("consistency check", "agreements", 1),
    "shares-asked": _protocol("unmasking", "reveals", 0),
    "shares-revealed": _protocol("unmasking", "reveals", 1),
    "unmasked": _unmasked,
    "mid-unmasking": _unmasked,
    "log-not-cleared": _closed,
    "keys-not-announced": _protocol("advertise keys", "advertisements", 1, 2),  # another silo's may be saved meanwhile
    "evidence-not-kept": _evidence(more=0),
    "evidence-kept": _evidence(more=1),
    "verdict-not-taken": _gathering,
}
WHERE_A_SILO_DIED: Mapping[str, Callable[[Death], None]] = {
    "root-journalled": _journalled("OpenAttempt"),
    "roster-journalled": _journalled("Roster", vector=False),
    "boxes-journalled": _journalled("SharedKeys", vector=False),
    "delivery-journalled": _journalled("Delivery", vector=False),
    "vector-written": _journalled("Delivery", vector=True),
    "vector-journalled": _journalled("VectorMasked", vector=True),
    "mid-upload": _journalled("VectorMasked", vector=True),
    "survivors-journalled": _journalled("SurvivorSet", vector=True),
    "answer-not-marked": _journalled("SurvivorSet", answered=True),
    "answer-remembered": _journalled("SurvivorSet", answered=True),
    "shares-journalled": _journalled("UnmaskRequest", answered=True),
    "shares-delivered": _journalled("UnmaskRequest", answered=True),
    "pieces-fetched": _checking(accepted=False),
    "verdict-shared": _checking(accepted=False),
    "model-not-accepted": _checking(accepted=False),
    "model-accepted": _checking(accepted=True),
    "erasing": _erasing,
    "erased": _erased,
}


@pytest.mark.parametrize("kill", KILLS, ids=lambda kill: f"{kill.process}-{kill.point}")
def test_a_process_is_killed_in_a_masked_round(
    kill: Kill, masked_run: MaskedEnd, masked_undisturbed: MaskedEnd
) -> None:
    where_it_died = WHERE_THE_COORDINATOR_DIED if kill.process == COORDINATOR else WHERE_A_SILO_DIED
    death = masked_run.run.death(kill)
    where_it_died[kill.point](death)
    trained_last = death.agent.update.key.round if death.agent is not None and death.agent.update is not None else None
    number = trained_last if kill.round is None else kill.round
    assert number is not None
    check_the_round(number, masked_run.run, masked_undisturbed.run)


def test_all_rounds_are_those_of_the_undisturbed_run(masked_run: MaskedEnd, masked_undisturbed: MaskedEnd) -> None:
    assert differences(masked_undisturbed.run.result, masked_run.run.result) == []
    assert len(masked_run.run.deaths) == len(KILLS)
    assert {row.round for row in masked_run.run.result.rounds} == set(range(1, CLOSING + 1))
    assert all(row.masked is not None for row in masked_run.run.result.rounds)
    scored = [row.round for row in masked_run.run.result.rounds if row.micro_exact_match is not None]
    assert scored == [3, 6, ROUNDS]
    assert masked_run.run.result.rounds[-1].outcome == "scored"


def test_no_delta_is_trained_again(masked_run: MaskedEnd) -> None:
    check_work_was_done_once(masked_run.run)


def test_the_undisturbed_run_drew_once_for_each_attempt(masked_undisturbed: MaskedEnd) -> None:
    drawers = (COORDINATOR, *SHAPE.silos)
    assert masked_undisturbed.draws == {f"{who}-{number}-1": 1 for who in drawers for number in range(1, CLOSING + 1)}


def test_the_killed_ones_did_so_again_and_went_on_with_what_they_drew_first(masked_run: MaskedEnd) -> None:
    """Else the models could not be the same: a second root gives other masks and another rounding."""
    assert masked_run.draws["clinic-a-1-1"] > 1, "its root was journalled, and was asked for again"
    assert {who for who in masked_run.draws if who.startswith(COORDINATOR)} == {
        f"{COORDINATOR}-{number}-1" for number in range(1, CLOSING + 1)
    }
    assert all(count == 1 for who, count in masked_run.draws.items() if who.startswith(COORDINATOR))


# --- nothing is left


def test_the_search_finds_what_is_there(masked_run: MaskedEnd) -> None:
    """In the middle of a round: a silo's root in its journal, the first silo's shares in the coordinator's state."""
    (silo,) = [trace for kill, trace in masked_run.traces.items() if kill.point == "shares-journalled"]
    assert any(found for name, found in silo.of_this_round.items() if name == "masking/attempt")
    (coordinator,) = [trace for kill, trace in masked_run.traces.items() if kill.point == "shares-revealed"]
    shares = {secret for found in coordinator.of_this_round.values() for secret in found}
    assert any(len(share) == SHARE_BYTES for share in shares)
    assert all("state.sqlite" in name for name in coordinator.of_this_round)


def test_what_a_kill_left_in_the_log_is_what_the_next_start_clears(masked_run: MaskedEnd) -> None:
    (trace,) = [trace for kill, trace in masked_run.traces.items() if kill.point == "log-not-cleared"]
    assert trace.of_this_round, "else the kill came too late"


@pytest.mark.parametrize("point", ["erasing", "erased"])
def test_a_silo_that_was_killed_while_it_erased_has_no_secret_of_the_round(point: str, masked_run: MaskedEnd) -> None:
    (trace,) = [trace for kill, trace in masked_run.traces.items() if kill.point == point]
    assert trace.of_this_round == {}


def test_no_file_of_anybody_dead_has_a_secret_of_an_earlier_round(masked_run: MaskedEnd) -> None:
    assert len(masked_run.traces) == 5
    assert [kill.point for kill, trace in masked_run.traces.items() if trace.of_earlier_rounds] == []


@pytest.mark.parametrize("name", ["masked_undisturbed", "masked_run"])
def test_no_file_has_any_secret_at_the_end(name: str, request: pytest.FixtureRequest) -> None:
    """Roots, seeds, mask keys, keys of boxes, shares: of the coordinator's database, its log and free pages, too."""
    end: MaskedEnd = request.getfixturevalue(name)
    assert len(end.secrets) > 75 * ROUNDS
    assert end.left == {}


def test_the_audit_logs_are_whole_and_agree(masked_run: MaskedEnd) -> None:
    """Whatever was killed when: nothing left, and nothing counts, that they do not tell of."""
    federation = masked_run.run.federation
    check_audit_logs(federation.folder, [federation.agent(silo) for silo in federation.shape.silos])
