"""Processes that are forked from one which has imported torch and transformers (lorica.bench.many.forked), and what
tests ask of them beyond that."""

from lorica.bench.many.forked import ForkedProcesses


class WarmProcesses(ForkedProcesses):
    def result(self, name: str, timeout_s: float) -> tuple[int, str]:
        """The exit code of a child that is waited for, and what it printed; raises TimeoutExpired."""
        code = self._entry(name)[1].wait(timeout_s)
        return code, (self._logs / f"{name}.log").read_text()
