"""Which bucket `[storage] blobs` of federation.toml means.

What is refused, since whoever sits between the coordinator and the server could otherwise read models, or have the
credentials: a server elsewhere without TLS; parameters that are not known here. Credentials are in no address: they
come from a file of mode 0600, or from the environment, and are in no name, error or log.
"""

import configparser
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import SplitResult, parse_qsl, urlsplit

from cryptography import x509

from lorica_security.daemon.listen_address import is_loopback
from lorica_security.errors import ConfigurationError, StorageError

_KEY: Final = "[storage] blobs"
_OPTION: Final = "--blobs"
_LIKE: Final = "s3://BUCKET/PREFIX?endpoint=https://HOST&credentials=/PATH, or s3://BUCKET/PREFIX?region=REGION for AWS"
_PARAMETERS: Final = ("endpoint", "region", "credentials", "root")
_BUCKET: Final = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_PART: Final = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,63}")
_REGION: Final = re.compile(r"[a-z0-9-]{1,32}")
_HOST: Final = re.compile(r"[A-Za-z0-9._:-]{1,253}")
_ANY_REGION: Final = "us-east-1"
_MOST_PREFIX: Final = 200
_OTHERS: Final = 0o077
_ACCESS, _SECRET, _TOKEN = "aws_access_key_id", "aws_secret_access_key", "aws_session_token"
_MOST_BYTES: Final = 65_536


@dataclass(frozen=True, slots=True)
class Credentials:
    """Shown nowhere."""

    access_key_id: str
    secret_access_key: str
    token: str | None

    def __repr__(self) -> str:
        return "Credentials(...)"


@dataclass(frozen=True, slots=True, kw_only=True)
class BucketPlace:
    """`prefix` ends with a slash, or is empty; `root` is a file of certificates (PEM), "" where the system's do."""

    bucket: str
    prefix: str
    endpoint: str
    region: str
    credentials_file: str
    root: str

    @property
    def name(self) -> str:
        return f"s3://{self.bucket}/{self.prefix}"

    @property
    def in_clear(self) -> bool:
        """Whether it is spoken to without TLS, on this machine."""
        return self.endpoint.startswith("http://")

    @classmethod
    def parse(cls, text: str, settings: Path | None) -> "BucketPlace":
        """What `text` in the file `settings`, or on a command line, means. Raises ConfigurationError with the
        remedy."""
        where = f"{settings}: {_KEY}" if settings else _OPTION
        try:
            url = urlsplit(text)
        except ValueError as error:
            raise ConfigurationError(f"{where} is no address of a bucket: use {_LIKE}") from error
        if url.scheme != "s3":
            raise ConfigurationError(
                f"{where} is of the kind {url.scheme[:40]!r}: use {_LIKE}; leave it empty for files in the folder alone"
            )
        if "@" in url.netloc or url.fragment:
            raise ConfigurationError(
                f"{where} has credentials or a fragment in the address: keep credentials in a file of mode 0600 that "
                "credentials=/PATH names"
            )
        if _BUCKET.fullmatch(url.netloc) is None or ".." in url.netloc:
            raise ConfigurationError(f"{where}: {url.netloc[:70]!r} is no name of a bucket: use {_LIKE}")
        query = _query(url, where)
        for key in ("credentials", "root"):
            if (value := query.get(key, "")) and not value.startswith("/"):
                raise ConfigurationError(f"{where}: {key} = {value[:60]!r} is no path from / on: give the whole path")
        region = query.get("region", "")
        if region and _REGION.fullmatch(region) is None:
            raise ConfigurationError(f"{where}: {region[:40]!r} is no region: use one such as eu-central-1")
        return cls(
            bucket=url.netloc,
            prefix=_prefix(url.path, where),
            endpoint=_endpoint(query.get("endpoint", ""), region, where),
            region=region or _ANY_REGION,
            credentials_file=query.get("credentials", ""),
            root=query.get("root", ""),
        )

    def credentials(self, environment: Mapping[str, str] = os.environ) -> Credentials:
        """As they are now: whoever asks again has those that took their place. Raises ConfigurationError,
        StorageError naming the file, without any part of them."""
        if not self.credentials_file:
            access, secret = environment.get(_ACCESS.upper(), ""), environment.get(_SECRET.upper(), "")
            if not (access and secret):
                raise ConfigurationError(
                    f"{_KEY} names no credentials, and {_ACCESS.upper()} and {_SECRET.upper()} are not in the "
                    "environment: set them, or keep them in a file of mode 0600 that credentials=/PATH names"
                )
            return Credentials(access, secret, environment.get(_TOKEN.upper()) or None)
        return _of_file(Path(self.credentials_file))

    def root_certificates(self) -> bytes | None:
        """PEM; None where the system's are meant. Raises ConfigurationError or StorageError naming the file."""
        if not self.root:
            return None
        try:
            content = Path(self.root).read_bytes()
        except OSError as error:
            raise StorageError(
                f"{self.root} cannot be read: {error.strerror or error}; {_KEY} names it as root of the server's "
                "certificate"
            ) from error
        try:
            x509.load_pem_x509_certificates(content)
        except ValueError as error:
            raise ConfigurationError(f"{self.root} holds no certificates (PEM): {_KEY} names it as root") from error
        return content


def _query(url: SplitResult, where: str) -> dict[str, str]:
    found: dict[str, str] = {}
    try:
        pairs = parse_qsl(url.query, keep_blank_values=True, strict_parsing=bool(url.query))
    except ValueError as error:
        raise ConfigurationError(f"{where} has parameters that cannot be read: use {_LIKE}") from error
    for key, value in pairs:
        if key not in _PARAMETERS or key in found or not value:
            raise ConfigurationError(
                f"{where} has the parameter {key[:40]!r}, has it twice, or without a value: known are "
                f"{', '.join(_PARAMETERS)}"
            )
        found[key] = value
    return found


def _prefix(path: str, where: str) -> str:
    parts = [part for part in path.split("/") if part]
    if any(_PART.fullmatch(part) is None for part in parts) or len(path) > _MOST_PREFIX:
        raise ConfigurationError(
            f"{where}: {path[:80]!r} is no prefix: use letters, digits, '.', '_', '-' and '/', {_MOST_PREFIX} at most, "
            "no part beginning with '.' or '-'"
        )
    return "".join(f"{part}/" for part in parts)


def _endpoint(text: str, region: str, where: str) -> str:
    if not text:
        if not region:
            raise ConfigurationError(f"{where} names no endpoint and no region: use {_LIKE}")
        return f"https://s3.{region}.amazonaws.com"
    try:
        url = urlsplit(text)
        host, port = url.hostname or "", url.port
    except ValueError as error:
        raise ConfigurationError(f"{where}: endpoint {text[:80]!r} is no address: use https://HOST") from error
    if (
        url.scheme not in ("http", "https")
        or _HOST.fullmatch(host) is None
        or "@" in url.netloc
        or url.path.strip("/")
        or url.query
        or url.fragment
    ):
        raise ConfigurationError(
            f"{where}: endpoint {text[:80]!r} is no address: use https://HOST or https://HOST:PORT"
        )
    if url.scheme == "http" and not is_loopback(host):
        raise ConfigurationError(
            f"{where}: {text[:80]} is on another machine, without TLS: whoever is on the way could read and change "
            "models; use https, with root=/PATH.pem where its certificate is of an authority of your own"
        )
    shown = f"[{host}]" if ":" in host else host
    return f"{url.scheme}://{shown}" + (f":{port}" if port else "")


def _of_file(path: Path) -> Credentials:
    try:
        with path.open("rb") as file:
            mode = os.fstat(file.fileno()).st_mode & 0o7777
            content = file.read(_MOST_BYTES + 1)
    except OSError as error:
        raise StorageError(
            f"{path} cannot be read: {error.strerror or error}; {_KEY} names it for credentials"
        ) from error
    if mode & _OTHERS:
        raise ConfigurationError(
            f"{path} has mode {mode:04o}, and others can read the credentials in it: chmod 600 it and change them"
        )
    parser = configparser.RawConfigParser(interpolation=None, strict=True)
    try:
        parser.read_string(content[:_MOST_BYTES].decode())
        found = dict(parser["default"])
    except (KeyError, UnicodeDecodeError, configparser.Error):
        # `from None`: the parser's words quote the file's.
        raise ConfigurationError(_unusable(path)) from None
    access, secret = found.get(_ACCESS, ""), found.get(_SECRET, "")
    if not (access and secret) or len(content) > _MOST_BYTES:
        raise ConfigurationError(_unusable(path))
    return Credentials(access, secret, found.get(_TOKEN) or None)


def _unusable(path: Path) -> str:
    return (
        f"{path} holds no credentials: write [default], then {_ACCESS} = ... and {_SECRET} = ... in lines of their own"
    )
