"""OpenStack Swift with its S3 interface, as Debian packages it: four servers and memcached on loopback, one replica, all
of it below a folder. A server whose S3 is nobody's but its own."""

import getpass
import os
import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import pytest
from obstore import sign
from obstore.store import S3Store

from lorica.demo.ports import free_ports
from tests.support.s3_server import BUCKET, S3Server, write_credentials
from tests.support.waiting import until

PACKAGES = "swift-proxy swift-account swift-container swift-object memcached"
MEMCACHED = shutil.which("memcached")
USER, SECRET = "test:tester", "testing"
KINDS = ("account", "container", "object")
COMMON = """
[DEFAULT]
bind_ip = 127.0.0.1
bind_port = {port}
devices = {folder}/devices
mount_check = false
swift_dir = {folder}/etc
user = {user}
workers = 0
fallocate_reserve = 0
log_level = ERROR
"""
STORAGE = """
[pipeline:main]
pipeline = {kind}-server
[app:{kind}-server]
use = egg:swift#{kind}
"""
PROXY = """
[pipeline:main]
pipeline = catch_errors gatekeeper healthcheck cache s3api tempauth slo dlo proxy-server
[app:proxy-server]
use = egg:swift#proxy
account_autocreate = true
[filter:s3api]
use = egg:swift#s3api
s3_acl = false
location = us-east-1
[filter:tempauth]
use = egg:swift#tempauth
user_test_tester = testing .admin
[filter:cache]
use = egg:swift#memcache
memcache_servers = 127.0.0.1:{memcached}
"""
PLAIN_FILTERS = ("catch_errors", "gatekeeper", "healthcheck", "slo", "dlo")
SWIFT = """
[swift-hash]
swift_hash_path_suffix = of-the-test
swift_hash_path_prefix = of-the-test
[storage-policy:0]
name = one
default = yes
"""


PYTHON = "/usr/bin/python3"
"""Debian's own, whose Swift is."""
LAUNCH = """
import sys
from swift.common import utils
utils.SWIFT_CONF_FILE = sys.argv[1]
from swift.common.ring.builder import RingBuilder
from swift.common.wsgi import run_wsgi
if sys.argv[2] == "ring":
    builder = RingBuilder(4, 1, 1)
    device = {"region": 1, "zone": 1, "ip": "127.0.0.1", "port": int(sys.argv[4]), "device": "d1", "weight": 1}
    builder.add_dev({"replication_ip": "127.0.0.1", "replication_port": int(sys.argv[4]), "meta": "", **device})
    builder.rebalance()
    builder.get_ring().save(sys.argv[3])
else:
    sys.exit(run_wsgi(sys.argv[3], sys.argv[2]))
"""
"""What Swift's own commands do, on a swift.conf that is not in /etc."""


def _require_installed() -> None:
    try:
        found = subprocess.run([PYTHON, "-c", "import swift"], capture_output=True, check=False).returncode == 0
    except OSError:
        found = False
    if not found or MEMCACHED is None:
        pytest.skip(f"OpenStack Swift is not installed (Debian: apt-get install {PACKAGES}): not tested against it")


@contextmanager
def running_swift(folder: Path) -> Iterator[S3Server]:
    """With the bucket BUCKET; skips where it is not installed."""
    _require_installed()
    etc = folder / "etc"
    for name in ("etc", "devices/d1", "cache"):
        (folder / name).mkdir(parents=True)
    proxy, memcached, *ports = free_ports(2 + len(KINDS))
    of_all = {"folder": folder, "user": getpass.getuser()}
    (etc / "swift.conf").write_text(SWIFT)
    environment = {"PATH": os.defpath, "LANG": "C.UTF-8", "HOME": str(folder)}
    launch = [PYTHON, "-c", LAUNCH, str(etc / "swift.conf")]
    for kind, port in zip(KINDS, ports, strict=True):
        text = (COMMON + STORAGE).format(kind=kind, port=port, **of_all)
        (etc / f"{kind}.conf").write_text(text)
        subprocess.run([*launch, "ring", str(etc / f"{kind}.ring.gz"), str(port)], check=True, env=environment)
    filters = "".join(f"[filter:{name}]\nuse = egg:swift#{name}\n" for name in PLAIN_FILTERS)
    text = (COMMON + PROXY).format(port=proxy, memcached=memcached, **of_all) + filters
    (etc / "proxy.conf").write_text(text)
    commands = [
        [str(MEMCACHED), "-u", getpass.getuser(), "-l", "127.0.0.1", "-p", str(memcached), "-U", "0", "-m", "16"],
        *([*launch, f"{kind}-server", str(etc / f"{kind}.conf")] for kind in (*KINDS, "proxy")),
    ]
    with (folder / "log").open("wb") as log:
        processes = [
            subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment)
            for command in commands
        ]
    try:

        def alive() -> None:
            assert all(process.poll() is None for process in processes), (folder / "log").read_text()[-1500:]

        until(lambda: _answers(proxy), alive, 60)
        server = S3Server(f"http://127.0.0.1:{proxy}", write_credentials(folder, USER, SECRET))
        _make_bucket(server)
        yield server
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.wait(10)


def _answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/healthcheck", timeout=2) as reply:
            return bool(reply.read() == b"OK")
    except OSError:
        return False


def _make_bucket(server: S3Server) -> None:
    """By a signed address: Swift makes none for who has not signed."""
    store = S3Store(
        endpoint=server.endpoint, region="us-east-1", access_key_id=USER, secret_access_key=SECRET, bucket=BUCKET,
        client_options={"allow_http": True},
    )  # fmt: skip
    address = sign(store, "PUT", "", timedelta(minutes=1))
    with urllib.request.urlopen(urllib.request.Request(address, method="PUT"), timeout=10):
        pass
