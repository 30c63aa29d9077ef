"""What a coordinator does while another one leads: it says so once, shows that it is alive, and is not ready.

It listens on /metrics alone, from a thread, and on no other port. While another process has its folder, that one's
address is the leader's, or of whoever leads next, and is left free for it; but for a name, which may lead each process
to an address of its own (ops/compose/standby.yml). Any signal ends it.
"""

import asyncio
import threading
import time
from collections.abc import Callable
from ipaddress import ip_address
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import structlog
from prometheus_client import CollectorRegistry

from lorica_coordinator.edges.telemetry.leadership_metrics import STANDS_BY, LeadershipCollector
from lorica_coordinator.settings import Settings
from lorica_security.daemon.heartbeat import is_alive, tell_systemd
from lorica_security.daemon.host_metrics import register_host
from lorica_security.daemon.listen_address import address, is_loopback
from lorica_security.daemon.metrics_port import metrics_port
from lorica_security.host.process_lock import ProcessLock
from silo_wire.wire_version import OURS

_log = structlog.get_logger(__name__)
STAND_BY_S: Final = 0.5


class StandingBy:
    """Call it again and again until `end`: then its port is free for the leader's own."""

    def __init__(self, settings: Path, load: Callable[[], None] = lambda: None) -> None:
        """`settings`: the file, read when it comes to that. `load`s what takes seconds, so that taking over does
        not."""
        self._file, self._load = settings, load
        self._thread: threading.Thread | None = None
        self._said = False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None
        self._begun = threading.Event()
        self.lock: ProcessLock | None = None
        """The folder's, once this process has it: nobody else shows in its file that it is alive, or stands by."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()

    def end(self) -> None:
        """Another one leads no more, or this process ends."""
        if self.lock is not None:
            self.lock.tell(stands_by=False)
        if self._thread is None:
            return
        self._begun.wait()
        if self._loop is not None and self._over is not None:
            self._loop.call_soon_threadsafe(self._over.set)
        self._thread.join()

    def __call__(self) -> None:
        if self.lock is not None:
            self.lock.tell(stands_by=True)
        if self._thread is None:
            settings = Settings.read(self._file)
            if self.lock is not None or _may_differ(address(settings.listen.metrics).host):
                self._thread = threading.Thread(target=self._serve, args=(settings,), daemon=True)
                self._thread.start()
        if not self._said:
            self._said = True
            _log.info("stands by", detail="another coordinator leads; this one takes over")
            tell_systemd("READY=1")
            self._load()
        if self.lock is None:
            tell_systemd("WATCHDOG=1")
        else:
            is_alive(self.lock.path)
        time.sleep(STAND_BY_S)

    def _serve(self, settings: Settings) -> None:
        try:
            asyncio.run(self._served(settings))
        except OSError as error:
            _log.info("shows no metrics while it stands by", at=settings.listen.metrics, error=error.strerror)
        finally:
            self._begun.set()

    async def _served(self, settings: Settings) -> None:
        registry = CollectorRegistry()
        register_host(registry, settings.state_folder, str(OURS))
        registry.register(LeadershipCollector(lambda: STANDS_BY))
        at = address(settings.listen.metrics)
        async with metrics_port(at, registry, hosts=settings.public.hosts, ready=lambda: False):
            self._over, self._loop = asyncio.Event(), asyncio.get_running_loop()
            self._begun.set()
            await self._over.wait()
            self._loop = None


def _may_differ(host: str) -> bool:
    """Whether processes on one folder may have addresses of their own by `host`."""
    try:
        ip_address(host)
    except ValueError:
        return not is_loopback(host)
    return False
