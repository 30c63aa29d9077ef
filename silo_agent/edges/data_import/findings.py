"""What an import finds, whatever the files hold: problems, for which nothing is written, and remarks.

All problems of all files are found in one run. Of one kind in one file few are kept and the others counted.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from operator import itemgetter

from lorica_security.visible_text import visible

KEPT = 10
"""Problems of one kind in one file that are kept with their lines."""


def shortened(text: str, most: int = 60) -> str:
    """In quotes, cut to `most` characters."""
    return f"'{visible(text if len(text) <= most else text[: most - 3] + '...')}'"


@dataclass(slots=True)
class Findings:
    remarks: list[str] = field(default_factory=list)
    _counts: Counter[tuple[str, str]] = field(default_factory=Counter)
    _kept: list[tuple[str, int, str, str]] = field(default_factory=list)

    def problem(self, file: str, line: int, what: str, detail: str = "") -> None:
        """`line` 0 means the whole file. `what` is the kind of problem, `detail` what differs from one to the next."""
        self._counts[file, what] += 1
        if self._counts[file, what] <= KEPT:
            self._kept.append((file, line, what, detail))

    def remark(self, text: str) -> None:
        self.remarks.append(text)

    @property
    def problems(self) -> int:
        return self._counts.total()

    def of_file(self, file: str) -> int:
        return sum(count for (of, _), count in self._counts.items() if of == file)

    def shown(self) -> Iterator[str]:
        """One line for each problem that was kept, file by file and line by line, and one for each kind of which there
        are more."""
        for file in dict.fromkeys(file for file, *_ in self._kept):
            of_file = [entry for entry in self._kept if entry[0] == file]
            for _, line, what, detail in sorted(of_file, key=itemgetter(1)):
                yield visible(f"{file}{f':{line}' if line else ''}: {what}{f' ({detail})' if detail else ''}")
            for (of, what), count in self._counts.items():
                if of == file and count > KEPT:
                    yield visible(f"{file}: {what}: {count - KEPT:,} more lines")
