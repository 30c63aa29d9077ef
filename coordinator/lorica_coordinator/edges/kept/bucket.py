"""A bucket of an S3 server, by what every such server can: put, get, list and delete of whole objects.

Nothing of AWS_* in the environment leads elsewhere or checks less than BucketPlace says. What the server answers is
somebody else's: objects are read up to the size that is asked for, names up to MOST_NAMES, and its words are quoted on
one line.
"""

import re
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, Self, TypeVar

from lorica_coordinator.edges.kept.bucket_place import BucketPlace
from lorica_security.errors import ConfigurationError, IntegrityError, LoricaError, StorageError
from lorica_security.visible_text import visible

if TYPE_CHECKING:
    from obstore.store import ClientConfig, S3Store

R = TypeVar("R")

MOST_NAMES: Final = 1_000_000
REQUEST_S: Final = 60.0
"""Of one request, its answer included."""
PATIENCE_S: Final = 30.0
"""For how long a request that failed is done again."""
TRIES: Final = 4
_CREDENTIALS_S: Final = 300.0
"""So long credentials are used before they are read anew."""
_DELETED_AT_ONCE: Final = 1000
_PAST_PROXIES: "Final[ClientConfig]" = {
    "proxy_url": "http://127.0.0.1:9",
    "proxy_excludes": "127.0.0.0/8,localhost,::1",
}
"""For a server on this machine that is spoken to in clear: $HTTP_PROXY would have it all. Who is in no such place is
sent to a port that discards; over TLS a proxy sees ciphertext."""
_REMEDIES: Final = (
    ("NoSuchBucket", "there is no such bucket: make it, or correct [storage] blobs"),
    ("RequestTimeTooSkewed", "this host's clock is wrong by minutes: set it, by NTP"),
    ("RequestExpired", "this host's clock is wrong by minutes: set it, by NTP"),
    ("InvalidAccessKeyId", "it does not know the credentials: give those of [storage] blobs anew"),
    ("SignatureDoesNotMatch", "it does not know the credentials: give those of [storage] blobs anew"),
    ("ExpiredToken", "the credentials have ended: give those of [storage] blobs anew"),
    ("QuotaExceeded", "it is full: give it room"),
    ("507 Insufficient", "it is full: give it room"),
    ("AccessDenied", "the credentials may not do this: let them put, get, list and delete below the prefix"),
    ("403 Forbidden", "the credentials may not do this: let them put, get, list and delete below the prefix"),
    ("401 Unauthorized", "it does not know the credentials: give those of [storage] blobs anew"),
    ("InvalidCertificate", "its certificate is not trusted here: name its root by root=/PATH.pem in [storage] blobs"),
)
_ELSE: Final = "check that the server runs and is reached, and [storage] blobs; rounds go on then"


Called = Callable[[str, int, float, bool], None]
"""Hears of each call: put, get, list or delete, the bytes of the object, seconds, and whether it failed."""


class Bucket:
    """Names are below the place's prefix. May be used from several threads. All raise StorageError with the remedy."""

    def __init__(self, name: str, prefix: str, store: Any) -> None:
        """`prefix` ends with a slash, or is empty; `store` is one of obstore's."""
        self.name = name
        self._prefix = prefix
        self._store = store
        self._api: Any = _api()
        self.called: Called = lambda call, size, seconds, failed: None

    @classmethod
    def at(cls, place: BucketPlace, *, patience_s: float = PATIENCE_S, request_s: float = REQUEST_S) -> Self:
        """Connects to nothing yet. Raises ConfigurationError where credentials or the package are missing."""
        return cls(place.name, place.prefix, _store(place, patience_s, request_s))

    def put(self, name: str, content: bytes | memoryview) -> None:
        """In place of what was there; durable when it returns, as far as the server keeps its word."""
        path = self._prefix + name
        self._try("put", name, lambda: self._put(path, content), size=len(content))

    def _put(self, path: str, content: bytes | memoryview) -> None:
        self._api.put(self._store, path, content, use_multipart=False)

    def get(self, name: str, most: int) -> memoryview | None:
        """None where it is not there. Raises IntegrityError for one of more than `most` bytes, without reading it."""

        def get() -> memoryview | None:
            try:
                found = self._api.get(self._store, self._prefix + name)
            except FileNotFoundError as error:
                if "NoSuchBucket" in str(error):
                    raise
                return None
            if found.meta["size"] > most:
                raise IntegrityError(
                    f"{self.name}{name} has {found.meta['size']} bytes, more than the {most} that it may have: "
                    "restore it from the bucket's versions"
                )
            return memoryview(found.bytes())

        return self._try("get", name, get)

    def names(self, below: str = "") -> Iterator[str]:
        """Of all objects below the prefix, or a folder of it."""
        folder = f"{self._prefix}{below}" or None
        listed = self._try("list", below, lambda: self._api.list(self._store, folder, chunk_size=1000))
        count = 0
        while chunk := self._try("list", below, lambda: next(listed, None)):
            for item in chunk:
                count += 1
                if count > MOST_NAMES:
                    raise StorageError(
                        f"{self.name} has more than {MOST_NAMES} objects: give the coordinator a prefix of its own"
                    )
                path = str(item["path"])
                if path.startswith(self._prefix):
                    yield path[len(self._prefix) :]

    def delete(self, names: Iterable[str]) -> None:
        """Those that are there."""
        paths = [self._prefix + name for name in names]
        for start in range(0, len(paths), _DELETED_AT_ONCE):
            some = paths[start : start + _DELETED_AT_ONCE]
            self._try("delete", some[0][len(self._prefix) :], lambda some=some: self._delete(some))  # type: ignore[misc]

    def _delete(self, paths: list[str]) -> None:
        try:
            self._api.delete(self._store, paths)
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise
            if len(paths) > 1:  # a server that stops at one that is gone
                for path in paths:
                    self._delete([path])

    def _try(self, doing: str, name: str, work: Callable[[], R], *, size: int = 0) -> R:
        begun, failed = time.monotonic(), True
        try:
            done = work()
            failed, size = False, len(done) if isinstance(done, memoryview) else size
            return done
        except LoricaError:
            raise
        except (self._api.exceptions.BaseError, OSError, ValueError) as error:
            raise self._failed(doing, name, error) from None  # its cause quotes the whole request
        finally:
            self.called(doing, 0 if failed else size, time.monotonic() - begun, failed)

    def _failed(self, doing: str, name: str, error: Exception) -> StorageError:
        said = str(error)
        remedy = next((remedy for word, remedy in _REMEDIES if word in said), _ELSE)
        return StorageError(f"{self.name} cannot be used ({doing} {name}: {_short(said)}): {remedy}")


def _short(said: str) -> str:
    """The first of the library's words, on one line, and the server's own code."""
    code = re.search(r"<Code>([A-Za-z]{1,64})</Code>", said)
    first = " ".join(said.partition("Debug source")[0].partition("<?xml")[0].split())[:300]
    return visible(first.rstrip(" :-") + (f" {code[1]}" if code else ""))


def _store(place: BucketPlace, patience_s: float, request_s: float) -> "S3Store":
    try:
        from obstore.store import S3Store
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    place.credentials()  # raises now, rather than in the first request

    def credentials() -> Any:
        found = place.credentials()
        return {
            "access_key_id": found.access_key_id,
            "secret_access_key": found.secret_access_key,
            "token": found.token,
            "expires_at": datetime.now(UTC) + timedelta(seconds=_CREDENTIALS_S),
        }

    root = place.root_certificates()
    return S3Store(
        place.bucket,
        region=place.region,
        # Both: the environment's AWS_ENDPOINT_URL_S3 would go before `endpoint`.
        endpoint=place.endpoint,
        aws_endpoint_url_s3=place.endpoint,
        skip_signature=False,
        virtual_hosted_style_request=False,
        unsigned_payload=True,  # that saves a digest: a block that was changed on its way does not open
        credential_provider=credentials,
        client_options={
            "allow_http": place.in_clear,
            "allow_invalid_certificates": False,
            "connect_timeout": timedelta(seconds=min(10.0, request_s)),
            "timeout": timedelta(seconds=request_s),
            **({} if root is None else {"root_certificate": root}),
            **(_PAST_PROXIES if place.in_clear else {}),
        },
        retry_config={
            "max_retries": TRIES,
            "retry_timeout": timedelta(seconds=patience_s),
            "backoff": {
                "init_backoff": timedelta(milliseconds=100),
                "max_backoff": timedelta(seconds=10),
                "base": 2,
            },
        },
    )


def _api() -> Any:
    try:
        import obstore
    except ModuleNotFoundError as error:
        raise _missing(error) from error
    return obstore


def _missing(error: ModuleNotFoundError) -> ConfigurationError:
    return ConfigurationError(
        f"[storage] blobs is in a bucket, and the package {error.name} is not installed: "
        "pip install 'obstore>=0.12,<0.13'"
    )
