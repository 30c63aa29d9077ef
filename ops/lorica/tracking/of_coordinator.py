"""A coordinator's rounds, by the calls of `coordinator rounds`: what that shows nobody, no tool gets either."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from lorica.tracking.point import Point, Run, finite, instant, name_of, words_of
from lorica_coordinator.commands.command_line import OnTheHost, reach
from lorica_security.errors import Unreachable
from silo_wire.v1 import operator_pb2, operator_pb2_grpc

RUNNING = "running"
ENDED = "finished"


class OfCoordinator:
    """Of the plan that the coordinator in `folder`, or the one that it gives access to, has under way or had last."""

    def __init__(self, folder: Path, *, offline: bool = False) -> None:
        """`offline`: a coordinator that does not run is read from its folder; else it is waited for, so that no look
        at its folder keeps it from starting."""
        self._folder, self._offline = folder, offline

    def points(self) -> Sequence[Point]:
        """Raises Unreachable where the coordinator does not answer."""
        reached = reach(self._folder)
        if isinstance(reached, OnTheHost) and not self._offline and not reached.serving:
            raise Unreachable(f"no coordinator serves {self._folder}")
        status, rounds = reached.ask(_both)
        return tuple(points_of(status, rounds))


async def _both(
    stub: "operator_pb2_grpc.OperatorAsyncStub",
) -> tuple[operator_pb2.StatusReply, operator_pb2.ListRoundsReply]:
    """Rounds first: a plan that is finished after that may have changed none of them."""
    rounds = await stub.ListRounds(operator_pb2.ListRoundsRequest())
    return await stub.GetStatus(operator_pb2.GetStatusRequest()), rounds


def points_of(status: operator_pb2.StatusReply, rounds: operator_pb2.ListRoundsReply) -> Iterator[Point]:
    """Of all that changes no more: scores come after a round is closed, so that the last one waits for the next, or for
    the plan's end."""
    if not status.plan_digest:
        return
    run = Run(
        plan=status.plan_digest.hex(),
        name=words_of(status.plan_name),
        of="coordinator",
        federation=words_of(status.federation),
    )
    score = rounds.score or "exact match"
    changing = len(rounds.rounds) - (status.phase != ENDED)
    for record in rounds.rounds[:changing]:
        if record.outcome != RUNNING:
            yield Point(
                run=run,
                round=record.round,
                attempt=record.attempt,
                what="round",
                outcome=words_of(record.outcome),
                unix_s=instant(record.closed_unix_s or record.opened_unix_s),
                values=finite(dict(_values(record, score))),
            )


def _values(record: operator_pb2.RoundRecord, score: str) -> Iterator[tuple[str, float]]:
    if record.closed_unix_s:
        yield "seconds", record.closed_unix_s - record.opened_unix_s
    yield "silos", sum(silo.outcome == "committed" for silo in record.silos)
    if record.macro_exact_match >= 0:
        yield f"macro_{name_of(score)}", record.macro_exact_match
    if record.micro_exact_match >= 0:
        yield f"micro_{name_of(score)}", record.micro_exact_match
    if record.HasField("masked"):
        yield "weight_sum", record.masked.weight_sum
        yield "saturated_share", record.masked.saturated / max(1, record.masked.coordinates)
    for silo in record.silos:
        yield from ((f"silo/{silo.silo}/{name}", value) for name, value in _of_one_silo(silo, score))


def _of_one_silo(silo: operator_pb2.SiloRound, score: str) -> Iterator[tuple[str, float]]:
    """Nothing where the coordinator shows no single silos."""
    if silo.examples:
        yield "examples", silo.examples
        yield "loss_reduction", silo.loss_reduction
        yield "share", silo.share
        yield "delta_norm", silo.delta_norm
    if silo.dev_examples:
        yield name_of(score), silo.dev_exact_matches / silo.dev_examples
    if silo.dev_executed:
        yield "execution_accuracy", silo.dev_execution_matches / silo.dev_executed
