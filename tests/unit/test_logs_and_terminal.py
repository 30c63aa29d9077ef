"""What both programs put on stderr: JSON that says where it belongs, or a picture for a person; colours unless told not
to."""

import io
import json
import logging
from collections.abc import Iterator
from contextlib import redirect_stderr
from typing import Any

import pytest
import structlog
from rich.console import Console

from lorica_coordinator.edges.telemetry.caller import CALLER
from lorica_coordinator.edges.telemetry.logs import log_to_stderr
from lorica_security.errors import ConfigurationError
from lorica_security.identifiers import FederationName, Identity, Role, SiloName
from silo_agent.edges.console.display import LogDisplay, TerminalDisplay
from silo_agent.edges.console.logs import configure_logs
from silo_agent.rounds.effects import Activity, JournalActivity
from silo_wire.canonical import Digest
from silo_wire.messages import RoundKey
from tests.support.waiting import until

FEDERATION = FederationName("test-net")
KEY = RoundKey(federation=FEDERATION, plan=Digest("0" * 64), round=3, attempt=2)
WHERE = {"silo", "phase", "round", "attempt"}


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def untouched() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


def lines(text: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in text.splitlines()]


def test_every_line_of_the_coordinator_says_round_phase_and_silo() -> None:
    with redirect_stderr(io.StringIO()) as err:
        where = log_to_stderr("info", libraries=True)
        log = structlog.get_logger("a module")
        log.info("before there is a service")
        where.of = lambda: ("collecting", 3, 2)
        log.debug("of no interest")
        log.info("something of nobody")
        log.warning("of a silo", silo="bank-b", round=2)
        token = CALLER.set(Identity(FEDERATION, Role.SILO, "hospital-a"))
        log.info("in a call")
        CALLER.reset(token)
        logging.getLogger("a.library").warning("its own words: %d", 7)
        try:
            raise ValueError("broken")
        except ValueError as error:
            log.error("defect", exc_info=error)
    before, nobody, silo, called, library, defect = lines(err.getvalue())
    assert {key: before[key] for key in WHERE} == dict.fromkeys(WHERE)
    assert {key: nobody[key] for key in WHERE} == {"silo": None, "phase": "collecting", "round": 3, "attempt": 2}
    assert (silo["silo"], silo["round"], silo["phase"]) == ("bank-b", 2, "collecting")
    assert called["silo"] == "hospital-a"
    assert (library["event"], library["level"], library["round"]) == ("its own words: 7", "warning", 3)
    assert "ValueError: broken" in defect["exception"]


def on_a_terminal() -> tuple[str, str]:
    """A defect's line, and what nobody may read in it."""
    secret = "-".join(("a", "token", "of", "somebody"))

    def fails(token: str) -> None:
        raise ValueError("broken")

    with redirect_stderr(Terminal()) as err:
        log_to_stderr("info", libraries=True)
        logging.getLogger("a.library").warning("said \x1b[2J\nby a peer")
        try:
            fails(secret)
        except ValueError as error:
            structlog.get_logger("a module").error("defect", exc_info=error)
    return err.getvalue(), secret


def test_a_traceback_on_a_terminal_shows_no_value_of_a_variable() -> None:
    shown, secret = on_a_terminal()
    assert "ValueError: broken" in shown
    assert "in fails" in shown
    assert secret not in shown


def test_what_a_library_says_paints_nothing_on_the_terminal() -> None:
    shown, _ = on_a_terminal()
    assert "by a peer" in shown
    assert "\x1b[2J" not in shown
    assert "said" in next(line for line in shown.splitlines() if "by a peer" in line)


def test_every_line_of_the_agent_says_silo_round_and_phase() -> None:
    with redirect_stderr(io.StringIO()) as err:
        where = configure_logs("info")
        where.silo = SiloName("bank-b")
        display = LogDisplay(where)
        display.note("started", coordinator="localhost:7443")
        display.activity(JournalActivity(Activity.TRAINING, KEY))
        display.note("refused", rule="min_cohort", detail="too few")
        display.note("event", kind="of no interest")
        logging.getLogger("a.library").error("its own words")
        display.activity(JournalActivity(Activity.WAITING))
    started, training, refused, library, waiting = lines(err.getvalue())
    assert {key: started[key] for key in WHERE} == {"silo": "bank-b", "phase": None, "round": None, "attempt": None}
    for line in (training, refused, library):
        assert {key: line[key] for key in WHERE} == {"silo": "bank-b", "phase": "training", "round": 3, "attempt": 2}
    assert refused["level"] == "warning"
    assert (waiting["phase"], waiting["round"]) == ("waiting", None)


def test_the_level_is_the_least_that_is_written() -> None:
    for level, count in (("debug", 4), ("info", 3), ("warning", 2), ("error", 1)):
        with redirect_stderr(io.StringIO()) as err:
            log_to_stderr(level)
            for name in ("debug", "info", "warning", "error"):
                getattr(structlog.get_logger("a module"), name)("told")
        assert len(lines(err.getvalue())) == count
    with pytest.raises(ConfigurationError, match="--log-level 'loud'"):
        log_to_stderr("loud")


@pytest.mark.parametrize(("no_color", "coloured"), [(None, True), ("", True), ("1", False)])
def test_a_terminal_has_words_and_colours_unless_told_not_to(
    monkeypatch: pytest.MonkeyPatch, no_color: str | None, coloured: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    if no_color is not None:
        monkeypatch.setenv("NO_COLOR", no_color)
    with redirect_stderr(Terminal()) as err:
        log_to_stderr("info")
        structlog.get_logger("a module").info("told", round=3)
    assert "told" in err.getvalue()
    assert "{" not in err.getvalue()
    assert "null" not in err.getvalue()
    assert ("\x1b[" in err.getvalue()) is coloured


def drawn(no_color: bool = False) -> str:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, no_color=no_color, _environ={})
    now = iter(range(100))
    with TerminalDisplay(console, clock=lambda: float(next(now))) as display:
        display.note("started", silo="bank-b")
        display.activity(JournalActivity(Activity.WAITING))
        display.activity(JournalActivity(Activity.TRAINING, KEY))
        display.progress(0.37)
        until(lambda: "37 %" in out.getvalue(), lambda: None, 60.0)
        display.note("unreachable", detail="\x1b[31mnobody\x1b[2J\r there")
        display.note("unreachable", detail="\x1b[31mnobody\x1b[2J\r there")
        display.activity(JournalActivity(Activity.WAITING, detail="for the next round"))
    return out.getvalue()


def test_a_person_sees_what_is_done_how_far_it_is_and_what_happened() -> None:
    seen = drawn()
    assert "started: silo bank-b" in seen
    assert "37 %" in seen
    assert "training, round 3: 1.0 s" in seen  # when it was over
    assert "waiting: for the next round" in seen


def test_what_others_say_paints_nothing_on_the_terminal() -> None:
    seen = drawn()
    assert seen.count("nobody") == 1  # the same again is not said again
    assert "\x1b[31mnobody" not in seen
    assert "\x1b[2J" not in seen


def test_no_color_leaves_no_colour_in_the_picture() -> None:
    assert "\x1b[3" in drawn()
    assert "\x1b[3" not in drawn(no_color=True)
