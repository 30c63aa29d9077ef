"""Which PostgreSQL database `[storage] database` of federation.toml means.

What is refused, since whoever sits between the coordinator and the server could otherwise read or change the state: a
server elsewhere without TLS that checks its name and its certificate's root; parameters that are not known here, of
which several lead somewhere else. A password is refused in a file that others can read, and is in no name, error or
log.
"""

import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from sqlalchemy.engine import URL, make_url
from sqlalchemy.exc import ArgumentError

from lorica_security.daemon.listen_address import is_loopback
from lorica_security.errors import ConfigurationError, StorageError

DRIVER: Final = "postgresql+psycopg"
_KEY: Final = "[storage] database"
_OPTION: Final = "--database"
_LIKE: Final = (
    f"{DRIVER}://USER@HOST/DATABASE?sslmode=verify-full&sslrootcert=/PATH/ROOT.pem, or "
    f"{DRIVER}://USER@/DATABASE?host=/run/postgresql for a unix socket"
)
_FILES: Final = ("sslrootcert", "sslcert", "sslkey", "passfile")
_PARAMETERS: Final = ("host", "sslmode", *_FILES)
_HOST: Final = re.compile(r"[A-Za-z0-9._:-]{1,253}")
_VERIFIED: Final = "verify-full"
_PORT: Final = 5432
_OTHERS: Final = 0o077


@dataclass(frozen=True, slots=True)
class DatabasePlace:
    """`url` may hold a password: what people see is `name`."""

    url: URL = field(repr=False)
    host: str
    """A host, or the folder of a unix socket."""

    @property
    def name(self) -> str:
        port = f":{self.url.port}" if self.url.port else ""
        at = "" if self.host.startswith("/") else f"{self.host}{port}"
        return f"postgresql://{at}/{self.url.database}"

    @property
    def parameters(self) -> dict[str, str]:
        """Of the connection, user, password and database apart: no PGHOST, PGPORT or PGSSLMODE of the environment takes
        their place."""
        query = {key: str(value) for key, value in self.url.query.items()}
        port = str(self.url.port or _PORT)
        fixed = {"host": self.host, "port": port, "hostaddr": "", "gssencmode": "disable"}
        return {"sslmode": "prefer", **query, **fixed}

    @classmethod
    def parse(cls, text: str, settings: Path | None) -> "DatabasePlace":
        """What `text` in the file `settings` means; None: in the command line. Raises ConfigurationError, with the
        remedy and without the password."""
        where = f"{settings}: {_KEY}" if settings else _OPTION
        try:
            url = make_url(text)
        except (ArgumentError, ValueError) as error:
            raise ConfigurationError(f"{where} is no address of a database: use {_LIKE}") from error
        if url.drivername != DRIVER:
            raise ConfigurationError(
                f"{where} is of the kind {url.drivername[:40]!r}: use {_LIKE}; leave it empty for SQLite in the folder"
            )
        query = _query(url, where)
        if url.password is not None:
            _require_private(settings, where)
        if not (url.username and url.database):
            raise ConfigurationError(f"{where} names no user or no database: use {_LIKE}")
        host = _host(url, query, where)
        place = cls(url=url, host=host)
        if not host.startswith("/") and not is_loopback(host):
            _require_verified(query, where, place.name)
        return place


def _query(url: URL, where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in url.query.items():
        if key not in _PARAMETERS or not isinstance(value, str):
            raise ConfigurationError(
                f"{where} has the parameter {key[:40]!r}, or has it twice: known are {', '.join(_PARAMETERS)}"
            )
        if key in _FILES and not value.startswith("/"):
            raise ConfigurationError(f"{where}: {key} = {value[:60]!r} is no path from / on: give the whole path")
        found[key] = value
    return found


def _host(url: URL, query: dict[str, str], where: str) -> str:
    if (url.host is None) == ("host" not in query):
        raise ConfigurationError(f"{where} names no host, or two: use {_LIKE}")
    host = url.host or query["host"]
    if host.startswith("/"):
        return host
    if _HOST.fullmatch(host) is None:
        raise ConfigurationError(f"{where}: {host[:60]!r} is not one host name, address or path: use {_LIKE}")
    return host


def _require_verified(query: dict[str, str], where: str, name: str) -> None:
    mode = query.get("sslmode", "")
    if mode != _VERIFIED or "sslrootcert" not in query:
        said = f"sslmode={mode}" if mode and mode != _VERIFIED else "no root certificate" if mode else "no sslmode"
        raise ConfigurationError(
            f"{where}: {name} is on another machine, with {said}: whoever is on the way could read and change the "
            "state; add sslmode=verify-full and sslrootcert=/PATH/ROOT.pem"
        )


def _require_private(settings: Path | None, where: str) -> None:
    if settings is None:
        raise ConfigurationError(
            f"{where} has a password, and a command line is seen by every account of this machine: keep the password "
            "in a file of mode 0600 that passfile=/PATH names, and change it"
        )
    try:
        mode = settings.stat().st_mode & 0o7777
    except OSError as error:
        raise StorageError(f"{settings} cannot be read: {error.strerror or error}") from error
    if mode & _OTHERS:
        raise ConfigurationError(
            f"{settings} has mode {mode:04o}, and a password in {_KEY}, which others can read: chmod 600 it and "
            "change the password, or keep the password in a file of mode 0600 that passfile=/PATH names"
        )
