"""A text file as lines of characters: UTF-8 or UTF-16 by its first bytes, else the encoding that was given.

A byte that the encoding does not have is a problem with its line, and reading goes on. An encoding of 8 bits has all
bytes, so a file that is UTF-8 from its first byte to its last is a problem where another encoding was given.
"""

import codecs
import gzip
import io
import re
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, cast

from lorica_security.errors import ConfigurationError, DataError
from silo_agent.edges.data_import.findings import Findings

if TYPE_CHECKING:
    from _typeshed import WriteableBuffer

MAX_LINE_CHARACTERS = 1 << 20
MAX_CHARACTERS = 1 << 30
"""Of one file, unpacked."""
MAX_JSON_CHARACTERS = 1 << 28
"""Of one file that is parsed as a whole."""
_HEAD_BYTES = 4096
_MARKS = (  # UTF-32 begins as UTF-16 does
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
_SHOWN_ENCODINGS = {"utf-8-sig": "UTF-8", "utf-16-le": "UTF-16", "utf-16-be": "UTF-16"}
_LINE_ENDS = {"\r\n": "CRLF", "\r": "CR"}
_NOT_DECODED = re.compile("[\ud800-\udfff]")
_ASCII = "".join(map(chr, range(32, 127)))


def checked_encoding(name: str) -> str:
    """`name`, if it is an encoding of text that has ASCII as it is, or UTF-16; raises ConfigurationError."""
    try:
        if codecs.lookup(name).name.startswith("utf-16") or _ASCII.encode().decode(name) == _ASCII:
            return name
    except (LookupError, UnicodeError):
        pass
    raise ConfigurationError(
        f"--encoding {name} is no encoding of text files: take utf-8, utf-16, cp1252, latin-1 or the like"
    )


class TextSource:
    """One open file. `shown` is how findings name it, `beginning` its first characters."""

    def __init__(self, stream: io.TextIOWrapper, beginning: str, shown: str, encoding: str, findings: Findings) -> None:
        self._stream = stream
        self._findings = findings
        self.shown = shown
        self.encoding = encoding
        self.beginning = beginning

    def lines(self) -> Iterator[str]:
        """Each with its line end. What follows a line that is too long is not read."""
        characters = 0
        for number, line in enumerate(iter(lambda: self._stream.readline(MAX_LINE_CHARACTERS + 1), ""), 1):
            if len(line) > MAX_LINE_CHARACTERS:
                self._findings.problem(
                    self.shown, number, f"longer than {MAX_LINE_CHARACTERS:,} characters; the rest is not read"
                )
                return
            characters += len(line)
            if characters > MAX_CHARACTERS:
                raise DataError(f"{self.shown} has more than {MAX_CHARACTERS:,} characters: divide it")
            yield self._decoded(line, number)

    def whole(self) -> str:
        """All of it; raises DataError where that is too much."""
        text = self._stream.read(MAX_JSON_CHARACTERS + 1)
        if len(text) > MAX_JSON_CHARACTERS:
            raise DataError(
                f"{self.shown} has more than {MAX_JSON_CHARACTERS:,} characters: save it as JSON lines, or divide it"
            )
        return "".join(self._decoded(line, number) for number, line in enumerate(io.StringIO(text, newline=""), 1))

    def _decoded(self, line: str, number: int) -> str:
        if (wrong := _NOT_DECODED.search(line)) is None:
            return line
        byte = ord(wrong[0]) - 0xDC00
        what = f"byte 0x{byte:02X}" if 0x80 <= byte <= 0xFF else "half a character"
        remedy = "" if self.encoding.startswith("utf-16") else ": if Excel wrote the file, give --encoding cp1252"
        self._findings.problem(
            self.shown, number, f"not {_shown(self.encoding)}{remedy}", f"{what} at column {wrong.start() + 1}"
        )
        return _NOT_DECODED.sub("\N{REPLACEMENT CHARACTER}", line)


class _Watched(io.RawIOBase):
    """The bytes of a file, and whether they are UTF-8 that is not ASCII alone; known once they are read to the end."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = cast("io.RawIOBase", file)
        self._decoder = codecs.getincrementaldecoder("utf-8")()
        self._ascii = self._valid = True
        self._ended = False

    @property
    def utf8(self) -> bool:
        return self._ended and self._valid and not self._ascii

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: "WriteableBuffer", /) -> int:
        count = self._file.readinto(buffer) or 0
        part = bytes(memoryview(buffer)[:count])
        self._ended = not part
        self._ascii = self._ascii and part.isascii()
        if self._valid:
            try:
                self._decoder.decode(part, final=not part)
            except UnicodeDecodeError:
                self._valid = False
        return count


@contextmanager
def opened_text(path: Path, shown: str, given: str, findings: Findings) -> Iterator[TextSource]:
    """`given` is the encoding of a file that does not say it itself. Raises DataError naming the file where it cannot
    be read."""
    try:
        with _unpacked(path) as file:
            watched = _Watched(file)
            buffered = io.BufferedReader(watched, _HEAD_BYTES)
            head = buffered.peek(_HEAD_BYTES)[:_HEAD_BYTES]
            encoding = _encoding(head, shown, given)
            # What cannot be decoded comes as half a surrogate pair, which no text holds.
            errors = "surrogatepass" if encoding.startswith("utf-16") else "surrogateescape"
            stream = io.TextIOWrapper(buffered, encoding, errors, newline="")
            beginning = head.decode(encoding, "ignore")
            _remark(head, beginning, encoding, given, shown, findings)
            yield TextSource(stream, beginning, shown, encoding, findings)
            if watched.utf8 and not codecs.lookup(encoding).name.startswith("utf"):
                findings.problem(
                    shown,
                    0,
                    f"looks like UTF-8, not {_shown(encoding)}: leave --encoding out; if it is {_shown(encoding)}, "
                    "save it as UTF-8",
                )
    except UnicodeDecodeError:
        findings.problem(shown, 0, "ends within a character: copy it again")
    except (OSError, EOFError, zlib.error) as error:  # gzip.BadGzipFile is an OSError
        raise DataError(f"{shown} cannot be read ({error}): correct or replace it") from error


def _unpacked(path: Path) -> IO[bytes]:
    return cast("IO[bytes]", gzip.open(path, "rb")) if path.suffix == ".gz" else path.open("rb", buffering=0)


def _encoding(head: bytes, shown: str, given: str) -> str:
    for mark, encoding in _MARKS:
        if head.startswith(mark):
            if encoding == "utf-32":
                raise DataError(f"{shown} is UTF-32: save it as UTF-8")
            return encoding
    pairs = len(head) // 2
    for first, encoding in ((1, "utf-16-le"), (0, "utf-16-be")):
        if pairs and 2 * head[first : 2 * pairs : 2].count(0) > pairs:  # the upper bytes of letters and digits
            return encoding
    return given


def _remark(head: bytes, beginning: str, encoding: str, given: str, shown: str, findings: Findings) -> None:
    found = []
    if any(head.startswith(mark) for mark, _ in _MARKS):
        found.append(f"is {_shown(encoding)} with a byte order mark")
    elif encoding != given:
        found.append(f"is {_shown(encoding)} without a byte order mark")
    line_end = re.search("\r\n|\r|\n", beginning)
    if line_end and line_end[0] in _LINE_ENDS:
        found.append(f"has lines that end in {_LINE_ENDS[line_end[0]]}")
    if found:
        findings.remark(f"{shown} {' and '.join(found)}: it is written as UTF-8 with LF")


def _shown(encoding: str) -> str:
    return _SHOWN_ENCODINGS.get(encoding, encoding.upper())
