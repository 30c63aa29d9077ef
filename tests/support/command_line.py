"""The commands as a user meets them: arguments in, exit code, stdout and stderr out; in this process, for speed."""

import contextlib
import io
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

import structlog

from lorica_security.errors import EXIT_CODES, LoricaError


@dataclass(frozen=True, slots=True)
class Done:
    code: int
    out: str
    err: str

    def is_refusal(self, kind: type[LoricaError], *words: str) -> None:
        """One line on stderr with each of `words`, nothing on stdout, and the exit code of `kind`."""
        assert self.code == EXIT_CODES[kind], self.err
        lines = self.err.strip().splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith(("error: ", "silo-agent: ")), self.err
        for word in words:
            assert word in lines[0], self.err
        assert self.out == ""


def run_command(main: Callable[[], None], *arguments: str | Path) -> Done:
    """`main` with these arguments, as its console script would run it."""
    out, err = io.StringIO(), io.StringIO()
    code = 0
    with (
        patch.object(sys, "argv", ["command", *map(str, arguments)]),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
    ):
        try:
            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 1 if end.code else 0
        finally:
            structlog.reset_defaults()
    return Done(code, out.getvalue(), err.getvalue())
