"""An exported model to a hub that speaks the Hugging Face Hub's interface, by its own library (`huggingface_hub`).

The library decides what is asked; this module decides what may leave. The token goes to the hub alone, whatever the
hub answers: a request that would carry it elsewhere is not sent. Large files go where the hub says, as it does with
every client, over TLS. The library's second way for large files (Xet) is a program of its own that none of this would
hold, and is not used.
"""

import re
import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from socket import SHUT_RDWR, socket
from threading import Lock, Timer
from typing import Any, Final
from urllib.parse import urlsplit

import httpx2
from huggingface_hub import CommitOperationAdd, HfApi, constants, set_client_factory
from huggingface_hub.errors import HfHubHTTPError, OfflineModeIsEnabled
from huggingface_hub.utils._http import default_client_factory
from huggingface_hub.utils.tqdm import disable_progress_bars

from lorica_security.daemon.listen_address import is_loopback
from lorica_security.errors import (
    AuthenticationError,
    ConfigurationError,
    LoricaError,
    MalformedMessage,
    StateError,
    Unreachable,
)
from lorica_security.host.files import read_private
from lorica_security.on_disk.provenance import PROVENANCE_FILE, digests_of
from lorica_security.visible_text import visible

TOKEN: Final = "HF_TOKEN"  # noqa: S105  # a variable's name
ENDPOINT: Final = "HF_ENDPOINT"
THE_HUB: Final = "https://huggingface.co"
TIMEOUT_S: Final = 60.0
"""For each connection, and for each piece that is sent or read."""
PUSH_S: Final = 600.0
LEAST_BYTES_S: Final = 100_000
"""A push has PUSH_S and what its files take at so many bytes a second: in pieces of a byte a minute a hub that answers,
or that reads, would hold it for ever."""
MOST_ANSWER_BYTES: Final = 4 << 20
MOST_REQUESTS: Final = 20_000
"""Of one push: a file of parameters in the most parts that a storage takes, twice. The library asks again for ever
where a hub keeps saying that it is busy."""
MOST_WORDS: Final = 300
_REPOSITORY: Final = re.compile(r"[A-Za-z0-9][\w-]{0,95}/[A-Za-z0-9][\w.-]{0,95}", re.ASCII)
_COMMIT: Final = re.compile(r"[0-9a-f]{40}")
_PORTS: Final = {"https": 443, "http": 80}

Origin = tuple[str, str, int]
"""Scheme, host, port."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hub:
    """One repository of one hub, with the token that may write it."""

    endpoint: str
    repository: str
    token: str = field(repr=False)
    public: bool

    @property
    def where(self) -> str:
        return f"{self.endpoint}/{self.repository}"


def hub_of(repository: str, *, token_file: Path | None, public: bool, environment: Mapping[str, str]) -> Hub:
    """By HF_ENDPOINT (or the Hugging Face Hub), and the token in `token_file` or HF_TOKEN.

    Raises ConfigurationError for a name that is none, an endpoint that would be reached in clear, no token or one that
    is none, or a file of it that others may read.
    """
    if not _REPOSITORY.fullmatch(repository):
        raise ConfigurationError(f"--push {repository!r} is no repository: use OWNER/NAME")
    endpoint = environment.get(ENDPOINT, "").rstrip("/") or THE_HUB
    try:
        scheme, host, _ = _origin(endpoint)
    except ValueError as error:
        raise ConfigurationError(f"{ENDPOINT} {endpoint!r} is no address: {error}") from error
    parts = urlsplit(endpoint)
    if parts.username is not None or parts.query or parts.fragment:
        raise ConfigurationError(f"{ENDPOINT} is to be https://HOST alone; a token goes into {TOKEN} or --token-file")
    if scheme == "http" and not is_loopback(host):
        raise ConfigurationError(f"{ENDPOINT} {endpoint} is not on this machine, and would be reached in clear: https")
    if token_file is not None:
        token, place = read_private(token_file).decode(errors="replace").strip(), str(token_file)
    else:
        token, place = environment.get(TOKEN, "").strip(), TOKEN
    if not token:
        raise ConfigurationError(f"{place} holds no token: set {TOKEN}, or give --token-file FILE")
    if not token.isascii() or not token.isprintable() or " " in token:
        raise ConfigurationError(f"{place} holds no token: it is one word of ASCII")
    return Hub(endpoint=endpoint, repository=repository, token=token, public=public)


def push(folder: Path, hub: Hub, *, message: str) -> str:
    """Every file of an exported model as one commit, which readers of the repository see whole or not at all; its hash.

    A repository that is not there is made, private unless `hub.public`. Raises ConfigurationError for one that
    everybody reads and that was not asked for, AuthenticationError, Unreachable, StateError for what the hub refuses,
    MalformedMessage for an answer that is none, IntegrityError for a folder with anything but plain files.
    """
    names = [*digests_of(folder), PROVENANCE_FILE]
    within = PUSH_S + sum((folder / name).stat().st_size for name in names) / LEAST_BYTES_S
    operations = [CommitOperationAdd(path_in_repo=name, path_or_fileobj=str(folder / name)) for name in names]
    if not sys.stderr.isatty():
        disable_progress_bars()
    try:
        with _held(hub, within), warnings.catch_warnings(action="ignore"):  # they are the hub's words
            api = HfApi(endpoint=hub.endpoint, token=hub.token)
            api.create_repo(hub.repository, private=not hub.public, exist_ok=True)
            _require_private(api, hub)
            commit = api.create_commit(hub.repository, operations, commit_message=message)
    except OfflineModeIsEnabled as error:
        raise ConfigurationError("HF_HUB_OFFLINE is set, so that nothing is pushed: unset it") from error
    except HfHubHTTPError as error:
        raise _refused(hub, error.response.status_code, str(error)) from None
    except httpx2.HTTPError as error:
        raise Unreachable(f"{hub.where} does not answer: {_words(hub, error)}") from None
    except RuntimeError as error:  # the library's, around whatever happened to a large file
        raise _of_large_file(hub, error) from None
    except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError) as error:
        raise MalformedMessage(f"{hub.where} answers what no hub does: {_words(hub, error)}") from None
    if not _COMMIT.fullmatch(commit.oid):
        raise MalformedMessage(f"{hub.where} answers with no commit's hash: look whether the model is there")
    return commit.oid


def _require_private(api: HfApi, hub: Hub) -> None:
    if not hub.public and api.model_info(hub.repository).private is not True:
        raise ConfigurationError(
            f"{hub.where} is not private, and everybody would have the model: say --public if they may, or choose "
            "another repository"
        )


@contextmanager
def _held(hub: Hub, within: float) -> Iterator[None]:
    """The library's requests, of this process, held to what may leave; as they were afterwards. After `within` seconds
    their connections end, whatever they wait for, and raise Unreachable."""
    guard = _Guard(hub)
    clock = Timer(within, guard.end)
    clock.daemon = True
    before = constants.HF_HUB_DISABLE_XET

    def held() -> httpx2.Client:
        client = default_client_factory()
        client.follow_redirects = False
        client.timeout = TIMEOUT_S
        client.headers["Accept-Encoding"] = "identity"
        client.event_hooks = {
            "request": [*client.event_hooks["request"], guard.request],
            "response": [guard.response],
        }
        return client

    constants.HF_HUB_DISABLE_XET = True
    set_client_factory(held)
    clock.start()
    try:
        yield
    except Exception as error:
        if guard.is_over:
            raise Unreachable(
                f"{hub.where} did not take the model within {within:.0f} s, and the push was ended: try again, or "
                "from a faster line"
            ) from error
        raise
    finally:
        clock.cancel()
        guard.end()
        set_client_factory(default_client_factory)
        constants.HF_HUB_DISABLE_XET = before


class _Guard:
    """Looks at each request before it is sent, and at each answer before it is read."""

    def __init__(self, hub: Hub) -> None:
        self._hub = hub
        self._origin = _origin(hub.endpoint)
        self._requests = 0
        self._connections: list[socket] = []
        self._lock = Lock()
        self.is_over = False

    def end(self) -> None:
        """What waits for a connection of this push hears that it has ended."""
        with self._lock:
            self.is_over = True
            for connection in self._connections:
                with connection, suppress(OSError):  # the hub was quicker
                    connection.shutdown(SHUT_RDWR)
            self._connections.clear()

    def _connected(self, event: str, said: Mapping[str, Any]) -> None:
        """By the library's library, of what happens to a request."""
        if event == "connection.connect_tcp.complete":
            with self._lock:
                self._connections.append(said["return_value"].get_extra_info("socket").dup())
            if self.is_over:
                self.end()

    def request(self, request: httpx2.Request) -> None:
        """Raises LoricaError, which ends the push; nothing of the request has left."""
        request.extensions["trace"] = self._connected
        if self.is_over:
            raise Unreachable(f"{self._hub.where} had its time")
        self._requests += 1
        if self._requests > MOST_REQUESTS:
            raise StateError(f"{self._hub.where} did not take the model in {MOST_REQUESTS} requests")
        try:
            origin = _origin(str(request.url))
        except ValueError as error:
            raise MalformedMessage(f"{self._hub.where} names an address that is none: {error}") from error
        given = request.headers.get("Authorization")
        if origin == self._origin:
            if given not in (None, f"Bearer {self._hub.token}"):
                raise StateError("another token than the one that was given would have left: it did not")
            return
        where = f"{origin[1]}:{origin[2]}"
        if given is not None or "Cookie" in request.headers or self._hub.token in str(request.url):
            raise MalformedMessage(f"{self._hub.where} would have the token sent to {visible(where)}: it was not sent")
        if origin[0] != "https" and not (is_loopback(origin[1]) and is_loopback(self._origin[1])):
            raise MalformedMessage(f"{self._hub.where} would have the model sent to {visible(where)} in clear")

    def response(self, response: httpx2.Response) -> None:
        if response.headers.get("Content-Encoding", "identity") != "identity":
            raise MalformedMessage(f"{self._hub.where} compresses its answers, which nobody asked for")
        for name in ("Retry-After", "RateLimit"):  # the library would sleep for as long as the hub says
            response.headers.pop(name, None)
        assert isinstance(response.stream, httpx2.SyncByteStream)
        response.stream = _Bounded(response.stream, self._hub.where)


class _Bounded(httpx2.SyncByteStream):
    """An answer, as far as it is as short as a hub's answers are."""

    def __init__(self, stream: httpx2.SyncByteStream, where: str) -> None:
        self._stream, self._where = stream, where

    def __iter__(self) -> Iterator[bytes]:
        read = 0
        for piece in self._stream:
            read += len(piece)
            if read > MOST_ANSWER_BYTES:
                raise MalformedMessage(f"{self._where} answers with more than {MOST_ANSWER_BYTES} bytes")
            yield piece

    def close(self) -> None:
        self._stream.close()


def _origin(url: str) -> Origin:
    """Raises ValueError."""
    parts = urlsplit(url)
    if parts.scheme not in _PORTS or not parts.hostname:
        raise ValueError("use https://HOST")
    return parts.scheme, parts.hostname, parts.port or _PORTS[parts.scheme]


def _refused(hub: Hub, status: int, words: str) -> LoricaError:
    said = f"{hub.where} answers with {status}: {_words(hub, words)}"
    if status in (401, 403):
        return AuthenticationError(f"{said}; look whether the token may write the repository")
    if status == 429 or status >= 500:
        return Unreachable(f"{said}; try again later")
    return StateError(said)


def _of_large_file(hub: Hub, error: BaseException) -> LoricaError:
    """What lies below the library's own words."""
    cause = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
        if isinstance(cause, LoricaError):
            return cause
        if isinstance(cause, HfHubHTTPError):
            return _refused(hub, cause.response.status_code, str(cause))
    return Unreachable(f"{hub.where} did not take a large file: {_words(hub, cause)}")


def _words(hub: Hub, said: object) -> str:
    """Of the hub's, in one line that shows no token."""
    return visible(" ".join(str(said).replace(hub.token, "TOKEN").split())[:MOST_WORDS])
