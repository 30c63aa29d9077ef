"""`coordinator watch` as people have it: on a terminal, in a pipe, from another host; while the coordinator goes and
comes back."""

import asyncio
import os
import pty
import re
import signal
import sys
from datetime import UTC, datetime
from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from lorica_coordinator.edges.operator_host.access_folder import AccessFolder, granted_text
from lorica_security.identifiers import Identity, Role
from silo_wire.v1 import operator_pb2
from tests.support.background import in_the_background
from tests.support.coordinator import FEDERATION, HOSPITAL, FederationTemplate, RunningCoordinator, running
from tests.support.coordinator import federation_template as federation_template

PATIENCE_S = 120.0
COLOUR = re.compile(r"\x1b\[[0-9;]*3[0-7]m")
PAINT = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class Watch:
    """A `coordinator watch` whose output can be waited for."""

    def __init__(self, process: asyncio.subprocess.Process, output: asyncio.StreamReader) -> None:
        self.process, self._output = process, output
        self.raw = self.all = ""

    @classmethod
    async def begin(cls, folder: Path, *, terminal: bool, environment: dict[str, str]) -> "Watch":
        loop = asyncio.get_running_loop()
        ours, theirs = pty.openpty() if terminal else os.pipe()
        process = await asyncio.create_subprocess_exec(
            *in_the_background(
                *(sys.executable, "-m", "lorica_coordinator.cli", "watch", "--dir", str(folder), "--every", "0.5")
            ),
            stdin=theirs if terminal else asyncio.subprocess.DEVNULL,
            stdout=theirs,
            stderr=theirs,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "TERM": "xterm", **environment},
        )
        os.close(theirs)
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(ours, "rb"))
        return cls(process, reader)

    async def says(self, words: str) -> None:
        """Wait until it says so, after what was waited for before."""
        try:
            async with asyncio.timeout(PATIENCE_S):
                while words not in self.plain:
                    part = await self._output.read(4096)
                    assert part, f"it ended before it said {words!r}: {self.raw}"
                    self.raw += part.decode(errors="replace")
                    self.all += part.decode(errors="replace")
        except TimeoutError:
            pytest.fail(f"it never said {words!r}: {self.plain[-2000:]}")
        self.raw = self.raw[self.raw.rindex(words.split()[-1]) :]

    @property
    def plain(self) -> str:
        return PAINT.sub("", self.raw)

    async def end(self) -> int:
        """Read on meanwhile: who writes to a full terminal waits, and does not end."""
        self.process.send_signal(signal.SIGINT)
        rest = asyncio.ensure_future(self._output.read())
        try:
            async with asyncio.timeout(PATIENCE_S):
                return await self.process.wait()
        finally:
            rest.cancel()
            await asyncio.gather(rest, return_exceptions=True)  # a terminal ends with an error


async def a_viewers_access(at: RunningCoordinator, root: Path) -> Path:
    folder, identity = AccessFolder(root), Identity(FEDERATION, Role.VIEWER, "victor")
    request = x509.load_pem_x509_csr(folder.ask(identity)).public_bytes(Encoding.DER)
    async with at.operator() as operator:
        wanted = operator_pb2.GrantAccessRequest(role="viewer", name="victor", csr_der=request)
        folder.accept(granted_text(identity, await operator.GrantAccess(wanted)), now=datetime.now(UTC))
    return root


@pytest.mark.slow
async def test_it_goes_on_while_the_coordinator_is_away(
    federation_template: FederationTemplate, tmp_path: Path
) -> None:
    folder = federation_template.copy(tmp_path / "coordinator")
    home = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    async with running(folder, offer="default") as at:
        elsewhere = await a_viewers_access(at, tmp_path / "laptop")
        watches = (
            await Watch.begin(folder.root, terminal=True, environment=home),
            await Watch.begin(elsewhere, terminal=False, environment={**home, "FORCE_COLOR": "1"}),
            await Watch.begin(elsewhere, terminal=True, environment={**home, "NO_COLOR": "1"}),
        )
        for watch in watches:
            await watch.says("waiting for")
        await watches[0].says(HOSPITAL)
    for watch in watches:
        await watch.says("trying again")
    assert COLOUR.search(watches[0].all)
    assert not COLOUR.search(watches[2].all)
    async with running(folder):
        for watch in watches:
            await watch.says("waiting for")
        assert await asyncio.gather(*(watch.end() for watch in watches)) == [0, 0, 0]
    assert "\x1b" not in watches[1].all
