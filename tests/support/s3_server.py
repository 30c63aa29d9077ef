"""An S3 server for tests: moto, a process on loopback."""

import os
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from lorica.demo.ports import free_ports
from lorica_coordinator.edges.kept.bucket import Bucket
from lorica_coordinator.edges.kept.bucket_place import BucketPlace
from tests.support.deployment_tools import tracking_tool
from tests.support.waiting import until

BUCKET = "lorica"


@dataclass(frozen=True, slots=True)
class S3Server:
    """`credentials` is a file of the kind that `[storage] blobs` names."""

    endpoint: str
    credentials: Path

    def url(self, prefix: str, bucket: str = BUCKET) -> str:
        """For `[storage] blobs`."""
        return f"s3://{bucket}/{prefix}?endpoint={self.endpoint}&credentials={self.credentials}"

    def place(self, prefix: str, bucket: str = BUCKET) -> BucketPlace:
        return BucketPlace.parse(self.url(prefix, bucket), Path("federation.toml"))

    def bucket(self, prefix: str, bucket: str = BUCKET, *, patience_s: float = 2.0) -> Bucket:
        return Bucket.at(self.place(prefix, bucket), patience_s=patience_s, request_s=10.0)


def write_credentials(folder: Path, access: str = "access", secret: str = "secret-of-the-test") -> Path:
    path = folder / "credentials"
    path.write_text(f"[default]\naws_access_key_id = {access}\naws_secret_access_key = {secret}\n")
    path.chmod(0o600)
    return path


@contextmanager
def running_moto(folder: Path) -> Iterator[S3Server]:
    """With the bucket BUCKET. What it stores is in its memory."""
    (port,) = free_ports(1)
    environment = {"PATH": os.defpath, "HOME": str(folder), "LANG": "C.UTF-8"}
    with (folder / "moto.log").open("wb") as log:
        process = subprocess.Popen(
            [tracking_tool("moto_server"), "-H", "127.0.0.1", "-p", str(port)],
            stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, cwd=folder,
        )  # fmt: skip
    try:
        endpoint = f"http://127.0.0.1:{port}"

        def made() -> bool:
            try:
                with urllib.request.urlopen(urllib.request.Request(f"{endpoint}/{BUCKET}", method="PUT"), timeout=5):
                    return True
            except OSError:
                return False

        def alive() -> None:
            assert process.poll() is None, (folder / "moto.log").read_text()[-500:]

        until(made, alive, 60)
        yield S3Server(endpoint, write_credentials(folder))
    finally:
        process.terminate()
        process.wait(10)
