"""Which database, as a checked value: a SQLite file or a PostgreSQL URL whose password is never shown.

A password with `/ ? # @` left unencoded moves its tail into the host, path or query, where libpq's own messages repeat
it. Such URLs are refused here, without echoing any part of them.
"""

import contextlib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple
from urllib.parse import parse_qsl, quote, unquote, urlsplit

from lorica_security.errors import ConfigurationError

_POSTGRESQL_SCHEMES = ("postgresql", "postgres", "postgresql+psycopg")
_ENCODE = "percent-encode every special character of user and password"


class FileIdentity(NamedTuple):
    """Which file it is, whatever its name."""

    device: int
    inode: int


@dataclass(frozen=True, slots=True)
class SqliteTarget:
    """An SQLite file, by absolute path."""

    path: Path

    @property
    def shown(self) -> str:
        return f"sqlite:///{self.path}"

    def beside(self, ending: str) -> Path:
        """A file that SQLite keeps beside the database, which it looks for where a link leads."""
        path = self.path.resolve()
        return path.with_name(path.name + ending)

    def files(self) -> dict[Path, FileIdentity]:
        """The database and what SQLite keeps beside it, as far as it is there."""
        found = {}
        for ending in ("", "-wal", "-shm", "-journal"):
            with contextlib.suppress(OSError):
                facts = (path := self.beside(ending)).stat()
                found[path] = FileIdentity(facts.st_dev, facts.st_ino)
        return found

    def uri(self, **parameters: str) -> str:
        """The file: URI that SQLite opens, with `?`, `#` and `%` of the path encoded and `parameters` behind it."""
        query = "&".join(f"{key}={value}" for key, value in parameters.items())
        return f"file:{quote(os.fsencode(self.path))}?{query}"


@dataclass(frozen=True, slots=True)
class PostgresqlTarget:
    """A PostgreSQL database, by libpq URL; `shown` is the same without user, password and parameters."""

    url: str = field(repr=False)
    shown: str

    @property
    def database(self) -> str:
        return unquote(urlsplit(self.url).path.removeprefix("/"))

    def redact(self, message: str) -> str:
        """`message` on one line, without the password, plain or percent-encoded."""
        line = " ".join(message.split())
        raw = urlsplit(self.url).password or ""
        for secret in (raw, unquote(raw)):
            if secret:
                line = line.replace(secret, "***")
        return line


DatabaseTarget = SqliteTarget | PostgresqlTarget


def parse_database(text: str) -> DatabaseTarget:
    """A database from `sqlite:///relative`, `sqlite:////absolute`, a plain path, or
    `postgresql://USER:PASSWORD@HOST/DATABASE`.

    Raises ConfigurationError; its message never holds any part of a PostgreSQL URL but the scheme.
    """
    scheme, separator, rest = text.partition("://")
    if not separator:
        if not text or "\0" in text:
            raise ConfigurationError(
                "database is empty or holds a NUL: give a path, sqlite:///PATH or postgresql://..."
            )
        return SqliteTarget(Path(text).absolute())
    if scheme in ("sqlite", "sqlite+pysqlite"):
        if not rest.startswith("/") or rest == "/" or "\0" in rest:
            raise ConfigurationError(
                f"database {text!r} names no file: write sqlite:///relative.db or sqlite:////absolute.db"
            )
        return SqliteTarget(Path(rest[1:]).absolute())
    if scheme not in _POSTGRESQL_SCHEMES:
        raise ConfigurationError(f"database scheme {scheme!r} is not supported: use sqlite:///PATH or postgresql://...")
    return _postgresql(rest)


def _postgresql(rest: str) -> PostgresqlTarget:
    url = f"postgresql://{rest}"
    try:
        parts = urlsplit(url)
        port = parts.port
        parameters = dict(parse_qsl(parts.query, strict_parsing=True)) if parts.query else {}
    except ValueError:
        # `from None`: the ValueError repeats what may be the tail of a password.
        raise ConfigurationError(f"PostgreSQL URL cannot be parsed: {_ENCODE}") from None
    database = unquote(parts.path.removeprefix("/"))
    if "@" in parts.path or "/" in database or parts.fragment or "#" in url or parts.netloc.count("@") > 1:
        raise ConfigurationError(f"PostgreSQL URL is ambiguous: {_ENCODE}")
    if not database:
        raise ConfigurationError("PostgreSQL URL names no database: end it with /DATABASE")
    if {"password", "user"} & parameters.keys():
        raise ConfigurationError(
            "PostgreSQL URL has user or password as a parameter: write postgresql://USER:PASSWORD@HOST/DATABASE"
        )
    host = parts.hostname or ""
    shown_host = f"[{host}]" if ":" in host else host
    shown = f"postgresql://{shown_host}{f':{port}' if port else ''}/{quote(database)}"
    return PostgresqlTarget(url=url, shown=shown)
