"""Buckets: in a folder and in memory, as obstore has them; of moto, a process on loopback; of OpenStack Swift, where it
is installed. And what servers say that refuse, each named with its remedy."""

import os
import ssl
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from obstore.store import LocalStore, MemoryStore
from prometheus_client import CollectorRegistry

from lorica_coordinator.edges.kept.bucket import Bucket
from lorica_coordinator.edges.kept.bucket_place import BucketPlace
from lorica_coordinator.edges.kept.settled import probe
from lorica_coordinator.edges.telemetry.metrics import BUCKET_CALLS, CoordinatorMetrics
from lorica_security.errors import ConfigurationError, IntegrityError, StorageError
from tests.support.certificates import authority_and_server
from tests.support.hub_server import Answer, Asked, LoopbackServer, serving
from tests.support.s3_server import S3Server, running_moto, write_credentials
from tests.support.swift_server import running_swift

SECRET = "secret-of-the-test"


@pytest.fixture(scope="module")
def moto(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running_moto(tmp_path_factory.mktemp("moto")) as server:
        yield server


@pytest.fixture(scope="module")
def swift(tmp_path_factory: pytest.TempPathFactory) -> Iterator[S3Server]:
    with running_swift(tmp_path_factory.mktemp("swift")) as server:
        yield server


@pytest.fixture(params=["folder", "memory", "moto", "swift"])
def bucket(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bucket]:
    prefix = f"{request.node.name.replace('[', '-').strip(']')[-40:]}/"
    match request.param:
        case "folder":
            yield Bucket("s3://folder/", prefix, LocalStore(tmp_path))
        case "memory":
            yield Bucket("s3://memory/", prefix, MemoryStore())
        case server:
            yield request.getfixturevalue(server).bucket(prefix)


def test_every_bucket_puts_gets_lists_and_deletes_whole_objects(bucket: Bucket) -> None:
    probe(bucket)
    assert list(bucket.names()) == []
    contents = {"a/index": b"", "a/000000-x": bytes(range(256)) * 5000, "ab/index": b"other"}
    for name, content in contents.items():
        bucket.put(name, content)
    bucket.put("ab/index", b"written over")
    assert set(bucket.names()) == set(contents)
    assert set(bucket.names("a")) == {"a/index", "a/000000-x"}
    assert bytes(bucket.get("a/000000-x", 1 << 21) or b"") == contents["a/000000-x"]
    assert bytes(bucket.get("ab/index", 12) or b"") == b"written over"
    empty = bucket.get("a/index", 0)
    assert empty is not None
    assert len(empty) == 0
    assert bucket.get("a/none", 9) is None
    with pytest.raises(IntegrityError, match=r"ab/index has 12 bytes, more than the 11 that it may have"):
        bucket.get("ab/index", 11)
    bucket.delete(["a/index", "a/none", "ab/index"])
    assert list(bucket.names()) == ["a/000000-x"]


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost", "[::1]", "127.1.2.3"])
def test_what_is_sent_in_clear_goes_past_every_proxy(
    host: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A proxy of the environment may be on another machine."""
    proxy = Refusing(lambda _: (200, {"ETag": '"x"'}, b""))
    with serving(proxy):
        for name in ("HTTP_PROXY", "http_proxy", "ALL_PROXY", "all_proxy"):
            monkeypatch.setenv(name, proxy.origin)
        bucket = S3Server(f"http://{host}:9", write_credentials(tmp_path)).bucket("north", patience_s=0.1)
        with pytest.raises(StorageError):
            bucket.put("x", b"of a model")
    assert proxy.asked == []


def test_credentials_that_are_lost_while_it_runs_are_named(
    moto: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lorica_coordinator.edges.kept.bucket._CREDENTIALS_S", 0.0)
    credentials = write_credentials(tmp_path)
    bucket = S3Server(moto.endpoint, credentials).bucket("lost")
    bucket.put("x", b"x")
    credentials.chmod(0o644)
    with pytest.raises(StorageError, match="has mode 0644, and others can read the credentials") as caught:
        bucket.put("x", b"x")
    assert SECRET not in str(caught.value)
    credentials.unlink()
    with pytest.raises(StorageError, match="credentials cannot be read: No such file"):
        bucket.put("x", b"x")


def test_calls_are_counted_with_their_bytes_and_failures(moto: S3Server) -> None:
    metrics = CoordinatorMetrics(CollectorRegistry())
    for bucket in (moto.bucket("counted"), moto.bucket("counted", bucket="nowhere")):
        bucket.called = metrics.bucket_called
        with suppress(StorageError):
            bucket.put("x", b"12345")
        with suppress(StorageError):
            bucket.get("x", 99)
            list(bucket.names())
            bucket.delete(["x"])

    def values(name: str) -> dict[str, float]:
        found = {call: metrics.registry.get_sample_value(name, {"call": call}) for call in BUCKET_CALLS}
        return {call: value for call, value in found.items() if value is not None}

    assert values("lorica_bucket_bytes_total") == {"put": 5, "get": 5, "list": 0, "delete": 0}
    assert values("lorica_bucket_failures_total") == {"put": 1, "get": 1, "list": 0, "delete": 0}
    assert all(seconds > 0 for seconds in values("lorica_bucket_seconds_total").values())


def test_a_bucket_that_is_not_there_is_named(moto: S3Server) -> None:
    bucket = moto.bucket("x", bucket="nowhere")
    uses: tuple[Callable[[], object], ...] = (
        lambda: bucket.put("x", b"x"),
        lambda: bucket.get("x", 1),
        lambda: list(bucket.names()),
        lambda: bucket.delete(["x"]),
    )
    for use in uses:
        with pytest.raises(StorageError, match=r"s3://nowhere/x/ cannot be used .*there is no such bucket: make it"):
            use()


def said(code: str, status: int) -> Callable[[Asked], Answer]:
    body = f"<?xml version='1.0'?>\n<Error><Code>{code}</Code><Message>\x1b[2J no \u202e</Message></Error>"
    return lambda _: (status, {"Content-Type": "application/xml"}, body.encode())


class Refusing(LoopbackServer):
    """An S3 server that says one thing alone."""

    def __init__(self, answer: Callable[[Asked], Answer]) -> None:
        super().__init__()
        self.say = answer

    def answer(self, asked: Asked) -> Answer:
        return self.say(asked)


@pytest.mark.parametrize(
    ("code", "status", "remedy"),
    [
        ("AccessDenied", 403, "let them put, get, list and delete below the prefix"),
        ("RequestTimeTooSkewed", 403, "this host's clock is wrong by minutes: set it"),
        ("InvalidAccessKeyId", 403, "it does not know the credentials"),
        ("SignatureDoesNotMatch", 403, "it does not know the credentials"),
        ("ExpiredToken", 400, "the credentials have ended"),
        ("QuotaExceeded", 507, "it is full: give it room"),
        ("SlowDown", 503, "check that the server runs and is reached"),
        ("InternalError", 500, "check that the server runs and is reached"),
    ],
)
def test_what_a_server_refuses_is_named_with_the_remedy(code: str, status: int, remedy: str, tmp_path: Path) -> None:
    server = Refusing(said(code, status))
    with serving(server):
        bucket = S3Server(server.origin, write_credentials(tmp_path)).bucket("north", patience_s=0.3)
        with pytest.raises(StorageError) as caught:
            bucket.put("t/x", b"content")
    words = str(caught.value)
    assert words.startswith("s3://lorica/north/ cannot be used (put t/x: ")
    assert remedy in words
    assert words.isprintable()
    assert len(words) < 800
    assert SECRET not in words
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("lacks", ["PUT", "GET", "LIST", "DELETE"])
def test_rights_that_are_lacking_show_at_the_start(moto: S3Server, lacks: str, tmp_path: Path) -> None:
    """Read-only, no list, no delete: each is found before a plan relies on it."""
    bucket = moto.bucket(f"lacks-{lacks.lower()}")
    server = Refusing(said("AccessDenied", 403))
    with serving(server):
        refusing = S3Server(server.origin, write_credentials(tmp_path)).bucket("x", patience_s=0.3)
        method = {"PUT": "put", "GET": "get", "LIST": "names", "DELETE": "delete"}[lacks]
        setattr(bucket, method, getattr(refusing, method))
        with pytest.raises(StorageError, match="the credentials may not do this: let them put, get, list and delete"):
            probe(bucket)


def test_a_server_that_is_away_is_named(tmp_path: Path) -> None:
    bucket = S3Server("http://127.0.0.1:9", write_credentials(tmp_path)).bucket("north", patience_s=0.3)
    with pytest.raises(StorageError, match=r"check that the server runs and is reached.*rounds go on then"):
        bucket.put("x", b"x")


def test_nothing_in_the_environment_leads_elsewhere(moto: S3Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """AWS_* that obstore would read: another endpoint, no signature, any certificate."""
    for name, value in {
        "AWS_ENDPOINT_URL_S3": "http://127.0.0.1:9",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
        "AWS_ENDPOINT": "http://127.0.0.1:9",
        "AWS_SKIP_SIGNATURE": "true",
        "AWS_ALLOW_INVALID_CERTIFICATES": "true",
        "AWS_ALLOW_HTTP": "true",
        "AWS_VIRTUAL_HOSTED_STYLE_REQUEST": "true",
        "AWS_BUCKET": "elsewhere",
        "AWS_ACCESS_KEY_ID": "another",
        "AWS_SESSION_TOKEN": "another",
        **{f"{kind}_PROXY": "http://127.0.0.1:9" for kind in ("HTTP", "HTTPS", "ALL")},
        **{f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https", "all")},
        "AWS_PROXY_URL": "http://127.0.0.1:9",
    }.items():
        monkeypatch.setenv(name, value)
    bucket = moto.bucket("environment")
    probe(bucket)
    store: Any = bucket._store
    assert store.config["bucket"] == "lorica"
    assert store.config["skip_signature"] == "false"
    assert store.client_options["allow_invalid_certificates"] == "false"
    elsewhere = BucketPlace.parse(
        f"s3://lorica/x?endpoint=https://s3.example.org&credentials={moto.credentials}", Path("f")
    )
    client: Any = Bucket.at(elsewhere)._store
    assert client.client_options["allow_http"] == "false"
    assert os.environ["AWS_ALLOW_HTTP"] == "true"


def test_a_block_is_not_digested_once_more_for_the_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request is signed, its content is not: that is a quarter of what a block costs."""
    monkeypatch.setenv("AWS_UNSIGNED_PAYLOAD", "false")
    server = Refusing(lambda _: (200, {"ETag": '"x"'}, b""))
    with serving(server):
        S3Server(server.origin, write_credentials(tmp_path)).bucket("x").put("block", b"of a model")
    (asked,) = server.asked
    headers = {name.lower(): value for name, value in asked.headers.items()}
    assert headers["x-amz-content-sha256"] == "UNSIGNED-PAYLOAD"
    assert "SignedHeaders=" in headers["authorization"]
    assert "x-amz-content-sha256" in headers["authorization"]


def test_a_server_is_believed_by_its_certificate_alone(tmp_path: Path) -> None:
    """Its certificate is for an address: another root's does not fit, another name does not, and no root at all."""
    root, (key, certificate) = authority_and_server("127.0.0.1")
    (tmp_path / "root.pem").write_bytes(root)
    (tmp_path / "other.pem").write_bytes(authority_and_server("127.0.0.1")[0])
    pair = tmp_path / "pair.pem"
    pair.write_bytes(key + certificate)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(pair)
    server = Refusing(lambda _: (200, {"ETag": '"x"'}, b""))
    credentials = write_credentials(tmp_path)

    def bucket(host: str, more: str) -> Bucket:
        url = f"s3://lorica/north?endpoint=https://{host}:{server.port}&credentials={credentials}{more}"
        return Bucket.at(BucketPlace.parse(url, Path("f")), patience_s=0.3)

    with serving(server, context):
        for host, more in (
            ("127.0.0.1", f"&root={tmp_path}/other.pem"),
            ("localhost", f"&root={tmp_path}/root.pem"),
            ("127.0.0.1", ""),
        ):
            with pytest.raises(StorageError, match=r"its certificate is not trusted here: name its root"):
                bucket(host, more).put("x", b"of a model")
        assert server.asked == []
        bucket("127.0.0.1", f"&root={tmp_path}/root.pem").put("x", b"of a model")
        assert [asked.method for asked in server.asked] == ["PUT"]
    for content in (b"", b"-----BEGIN CERTIFICATE-----\nx\n"):
        (tmp_path / "none.pem").write_bytes(content)
        with pytest.raises((ConfigurationError, StorageError), match=r"none\.pem"):
            bucket("127.0.0.1", f"&root={tmp_path}/none.pem")
