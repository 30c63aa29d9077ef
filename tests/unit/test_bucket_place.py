"""Which buckets federation.toml may name: what leads elsewhere or in clear is refused, and no credential is shown.

What somebody chooses who can edit the address, or hand it over: every part of it, each parameter, how often it stands
there; and who shares the machine, the mode of the file with credentials.
"""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lorica_coordinator.edges.kept.bucket_place import BucketPlace
from lorica_coordinator.edges.kept.opening import bucket_place
from lorica_coordinator.settings import Settings
from lorica_security.daemon.listen_address import is_loopback
from lorica_security.errors import ConfigurationError, StorageError

SECRET = "hunter2secret"
FILE = Path("federation.toml")
ELSEWHERE = "endpoint=https://s3.example.org"


@pytest.mark.parametrize(
    ("address", "name", "endpoint", "region"),
    [
        ("lorica/north?region=eu-central-1", "s3://lorica/north/", "https://s3.eu-central-1.amazonaws.com", "eu-central-1"),
        (f"lorica?{ELSEWHERE}", "s3://lorica/", "https://s3.example.org", "us-east-1"),
        (f"lorica/a/b/?{ELSEWHERE}:8443/", "s3://lorica/a/b/", "https://s3.example.org:8443", "us-east-1"),
        ("lorica/a?endpoint=http://127.0.0.1:9000&region=x", "s3://lorica/a/", "http://127.0.0.1:9000", "x"),
        ("lorica/a?endpoint=http://localhost:9000", "s3://lorica/a/", "http://localhost:9000", "us-east-1"),
        ("lorica/a?endpoint=http://[::1]:9000", "s3://lorica/a/", "http://[::1]:9000", "us-east-1"),
    ],
)  # fmt: skip
def test_a_place_that_is_taken(address: str, name: str, endpoint: str, region: str) -> None:
    place = BucketPlace.parse(f"s3://{address}", FILE)
    assert (place.name, place.endpoint, place.region) == (name, endpoint, region)


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("nothing of the kind", "is of the kind ''"),
        ("https://lorica/north?region=x", "is of the kind 'https'"),
        ("s3://", "is no name of a bucket"),
        ("s3://Lorica/north?region=x", "is no name of a bucket"),
        ("s3://lo..rica/north?region=x", "is no name of a bucket"),
        (f"s3://key:{SECRET}@lorica/north?region=x", "has credentials or a fragment in the address"),
        ("s3://lorica/north?region=x#y", "has credentials or a fragment"),
        ("s3://lorica/north", "names no endpoint and no region"),
        ("s3://lorica/../other?region=x", "is no prefix"),
        (f"s3://lorica/{'x' * 300}?region=x", "is no prefix"),
        ("s3://lorica/n?region=X!", "is no region"),
        ("s3://lorica/n?region=x&region=y", "has the parameter 'region', has it twice"),
        ("s3://lorica/n?region=", "without a value"),
        (f"s3://lorica/n?region=x&secret_access_key={SECRET}", "has the parameter 'secret_access_key'"),
        ("s3://lorica/n?region=x&credentials=relative", "is no path from /"),
        ("s3://lorica/n?region=x&root=relative.pem", "is no path from /"),
        ("s3://lorica/n?endpoint=http://s3.example.org", "is on another machine, without TLS"),
        ("s3://lorica/n?endpoint=http://192.0.2.7:9000", "is on another machine, without TLS"),
        ("s3://lorica/n?endpoint=http://localhost.example.org", "is on another machine, without TLS"),
        ("s3://lorica/n?endpoint=ftp://127.0.0.1", "is no address"),
        ("s3://lorica/n?endpoint=http://127.0.0.1@s3.example.org", "is no address"),
        ("s3://lorica/n?endpoint=https://s3.example.org/path", "is no address"),
        ("s3://lorica/n?endpoint=https://s3.example.org:99999", "is no address"),
    ],
)
def test_a_place_that_is_refused(address: str, said: str) -> None:
    with pytest.raises(ConfigurationError) as caught:
        BucketPlace.parse(address, FILE)
    assert said in str(caught.value)
    assert "[storage] blobs" in str(caught.value)
    assert SECRET not in str(caught.value)


PIECES = st.sampled_from(
    ["http", "https", "://", "@", ":", "/", "?", "#", "&", "127.0.0.1", "localhost", "s3.example.org", "[::1]", "[",
     "]", "%40", "%2f", "\\", "endpoint=", "region=x", "root=/r", "credentials=/c", " ", "\t", "\n", "0", "9000", "é"]
)  # fmt: skip


@settings(max_examples=400, deadline=None)
@given(begin=st.sampled_from(["", "http://", "https://"]), pieces=st.lists(PIECES, max_size=6))
def test_no_address_whatever_leads_to_another_machine_in_clear(begin: str, pieces: list[str]) -> None:
    try:
        place = BucketPlace.parse(f"s3://lorica/n?endpoint={begin}{''.join(pieces)}", FILE)
    except ConfigurationError:
        return
    scheme, _, rest = place.endpoint.partition("://")
    host = rest.rsplit(":", 1)[0].strip("[]") if rest.rpartition(":")[2].isdigit() else rest.strip("[]")
    assert scheme == "https" or is_loopback(host)
    assert place.in_clear == (scheme == "http")
    assert place.endpoint.isascii()
    assert place.endpoint.isprintable()


def of_file(path: Path) -> BucketPlace:
    return BucketPlace.parse(f"s3://lorica/n?region=x&credentials={path}", FILE)


def test_credentials_come_from_a_private_file_as_it_is_now_or_from_the_environment(tmp_path: Path) -> None:
    path = tmp_path / "credentials"
    path.write_text(f"[default]\naws_access_key_id = AK\naws_secret_access_key = {SECRET}%x\n")
    path.chmod(0o600)
    found = of_file(path).credentials({"AWS_ACCESS_KEY_ID": "another", "AWS_SECRET_ACCESS_KEY": "another"})
    assert (found.access_key_id, found.secret_access_key, found.token) == ("AK", f"{SECRET}%x", None)
    assert SECRET not in f"{found!r} {found}"
    path.write_text("[default]\naws_access_key_id=NEW\naws_secret_access_key=new\naws_session_token=t\n")
    assert of_file(path).credentials({}).token == "t"
    place = BucketPlace.parse("s3://lorica/n?region=x", FILE)
    assert place.credentials({"AWS_ACCESS_KEY_ID": "AK", "AWS_SECRET_ACCESS_KEY": SECRET}).access_key_id == "AK"
    for environment in ({}, {"AWS_ACCESS_KEY_ID": "AK"}, {"AWS_SECRET_ACCESS_KEY": SECRET}):
        with pytest.raises(ConfigurationError, match="are not in the environment: set them, or keep them in a file"):
            place.credentials(environment)


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644])
def test_credentials_that_others_can_read_are_refused(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "credentials"
    path.write_text(f"[default]\naws_access_key_id = AK\naws_secret_access_key = {SECRET}\n")
    path.chmod(mode)
    with pytest.raises(ConfigurationError, match=f"has mode {mode:04o}, and others can read the credentials"):
        of_file(path).credentials()


@pytest.mark.parametrize(
    "content",
    [b"", b"[default]\n", b"[other]\naws_access_key_id=a\n", SECRET.encode(), b"\xff\xfe", b"[default]\nx\n" * 9000,
     f"[default]\naws_secret_access_key = {SECRET}\n".encode(), f"[default]\n[default]\nx = {SECRET}\n".encode()],
)  # fmt: skip
def test_a_file_without_credentials_is_named_and_not_quoted(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "credentials"
    path.write_bytes(content)
    path.chmod(0o600)
    with pytest.raises(ConfigurationError, match=r"holds no credentials: write \[default\]") as caught:
        of_file(path).credentials()
    assert SECRET not in str(caught.value)
    assert caught.value.__cause__ is None


def test_files_that_are_missing_are_named(tmp_path: Path) -> None:
    with pytest.raises(StorageError, match=f"{tmp_path}/none cannot be read: No such file"):
        of_file(tmp_path / "none").credentials()
    place = BucketPlace.parse(f"s3://lorica/n?region=x&root={tmp_path}/none.pem", FILE)
    with pytest.raises(StorageError, match="names it as root of the server's certificate"):
        place.root_certificates()
    assert BucketPlace.parse("s3://lorica/n?region=x", FILE).root_certificates() is None


def test_without_a_database_elsewhere_it_is_refused() -> None:
    text = 'federation = "c"\n[storage]\nblobs = "s3://lorica/n?region=x"\n'
    with pytest.raises(ConfigurationError, match=r"blobs is set, and database is not: .* set \[storage\] database"):
        bucket_place(Settings.parse(text, "it"), FILE)
    with pytest.raises(ConfigurationError, match=r"\[storage\] blobs is no text: put it in quotes"):
        Settings.parse('federation = "c"\n[storage]\nblobs = 1\n', "it")
