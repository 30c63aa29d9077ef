"""Which of a teacher's answers count, by what the silo's own database says of them, in the sandbox.

The SQL is hostile: whoever chooses the model chooses it, and sees in the update which answers counted. So that is what
a filter gives away, one bit a statement; a silo's policy says whether it may (`database_in_training`).

- `executes`: the database runs the answer. Where it only prepares it (`prepares`), the schema alone decides.
- `nonempty`: its result has a row.
- `agrees`: it has a row, and more than half of the samples, the answer itself among them, give the same result.

What cannot be tried in time does not count: a question has so many seconds, and all of a round have so many. They are
looked at between statements, so that a round is held by one statement more at most.
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Final

from lorica_security.errors import ConfigurationError, UnsafeSql
from silo_agent.rounds.update import TrainingStopped
from silo_agent.sql_sandbox import QueryFailed, Rows, Sandbox, same_result
from silo_wire.plans.plan import Plan

MOST_KNOWN: Final = 10_000
"""Verdicts that are remembered: epochs ask the same again, where a teacher answers the same."""
KEPT, DROPPED, LATE = "kept", "dropped", "late"


class AnswerFilter:
    """For one round's training at one silo. `counts` says of how many questions the answer was kept, dropped, and not
    tried in time."""

    def __init__(
        self,
        box: Sandbox,
        *,
        filter: str,
        prepares: bool,
        question_seconds: float,
        round_seconds: float,
        clock: Callable[[], float],
    ) -> None:
        """`box` is open; its own limit is of one statement. `clock` in seconds.

        Raises ConfigurationError for a filter that looks at rows where nothing may run.
        """
        if prepares and filter != "executes":
            raise ConfigurationError(
                f'filter "{filter}" looks at rows of the database, which no promise of privacy covers: use "executes"'
            )
        self._box, self._filter, self._prepares = box, filter, prepares
        self._question_seconds, self._left, self._clock = question_seconds, round_seconds, clock
        self._known: dict[tuple[str, ...], bool] = {}
        self._counts: Counter[str] = Counter()

    @classmethod
    def of(
        cls, plan: Plan, box: Sandbox, *, question_seconds: float, round_seconds: float, clock: Callable[[], float]
    ) -> "AnswerFilter":
        """As `plan` has it: under a promise of privacy nothing runs."""
        return cls(
            box,
            filter=plan.semi_supervised.filter,
            prepares=plan.privacy.level != "none",
            question_seconds=question_seconds,
            round_seconds=round_seconds,
            clock=clock,
        )

    @property
    def counts(self) -> Mapping[str, int]:
        return dict(self._counts)

    def counts_answer(self, samples: Sequence[str], should_stop: Callable[[], bool]) -> bool:
        """Whether the first of one question's `samples` counts. Raises TrainingStopped, DataError where the database is
        out of reach."""
        asked = tuple(samples)
        if (known := self._known.get(asked)) is None:
            verdict = self._tried(asked, should_stop)
            if verdict is None:
                self._counts[LATE] += 1
                return False
            known = verdict
            if len(self._known) < MOST_KNOWN:
                self._known[asked] = known
        self._counts[KEPT if known else DROPPED] += 1
        return known

    def _tried(self, samples: Sequence[str], should_stop: Callable[[], bool]) -> bool | None:
        """None: there was not the time for it."""
        question = _Budget(self._question_seconds)
        first = self._result(samples[0], question, should_stop)
        if first is None:
            return None if question.overdrawn else False
        if self._filter == "executes":
            return True
        if not first.rows or self._filter == "nonempty":
            return bool(first.rows)
        agreeing, needed = 1, len(samples) // 2 + 1
        for left, sql in zip(range(len(samples) - 1, 0, -1), samples[1:], strict=True):
            if agreeing >= needed or agreeing + left < needed:
                break
            other = first if sql == samples[0] else self._result(sql, question, should_stop)
            if question.overdrawn:
                return None
            ordered = first.ordered
            agreeing += other is not None and same_result(first, other, ordered=ordered)
        return agreeing >= needed

    def _result(self, sql: str, question: "_Budget", should_stop: Callable[[], bool]) -> Rows | None:
        """None where the database did not run it, or it was not asked, for want of time."""
        if should_stop():
            raise TrainingStopped
        if self._left <= 0 or question.left <= 0:
            question.overdrawn = True
            return None
        began = self._clock()
        try:
            if self._prepares:
                self._box.prepare(sql)
                return Rows((), ())
            return self._box.run(sql)
        except (UnsafeSql, QueryFailed):
            return None
        finally:
            took = self._clock() - began
            self._left -= took
            question.left -= took


class _Budget:
    """Seconds that are left for one question; `overdrawn`: a statement was not run for want of them."""

    def __init__(self, seconds: float) -> None:
        self.left = seconds
        self.overdrawn = False
