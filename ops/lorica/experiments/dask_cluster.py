"""Runs of a study for whoever is free: workers of a Dask cluster, over mutual TLS or not at all.

A run goes to a worker as pickled code, and its line comes back so: whoever has a certificate of the cluster's authority
runs code on every machine of it, on this one as well. So that authority is one of the cluster alone, and no silo, no
coordinator and nobody of another institution has a certificate of it.
"""

import re
import secrets
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from lorica.source_commit import commit, source_digest
from lorica_security.errors import ConfigurationError, StateError
from lorica_security.host import files

_ADDRESS: Final = re.compile(r"tls://[A-Za-z0-9.:\[\]-]{1,253}:[0-9]{1,5}")
_PARTS: Final = ("ca.pem", "cert.pem", "key.pem")
CONNECT_S: Final = 20
_Outcome = TypeVar("_Outcome")


@dataclass(frozen=True, slots=True)
class DaskCluster:
    """`tls`: a folder with `ca.pem`, the authority of the cluster, and `cert.pem` and `key.pem`, this client's."""

    scheduler: str
    tls: Path

    def __post_init__(self) -> None:
        """Raises ConfigurationError."""
        if _ADDRESS.fullmatch(self.scheduler) is None:
            raise ConfigurationError(
                f"--dask {self.scheduler[:60]!r} is no tls://HOST:PORT: whoever reaches a scheduler without TLS runs "
                "code on its workers; start it with --tls-ca-file, --tls-cert and --tls-key"
            )
        for name in _PARTS:
            if not (self.tls / name).is_file():
                raise ConfigurationError(f"--dask-tls {self.tls} has no {name}: it is to hold {', '.join(_PARTS)}")
        files.read_private(self.tls / _PARTS[-1])

    @contextmanager
    def workers(self, out: Path) -> Iterator[Executor]:
        """Raises ConfigurationError where the scheduler cannot be reached, StateError where the cluster is lost."""
        try:
            from distributed import Client
            from distributed.security import Security
        except ImportError as error:
            raise ConfigurationError(
                "--dask wants the wheel's extra `cluster`: install it here and at the workers"
            ) from error
        ca, certificate, key = (str(self.tls / name) for name in _PARTS)
        security = Security(tls_ca_file=ca, tls_client_cert=certificate, tls_client_key=key, require_encryption=True)
        try:
            client = Client(self.scheduler, security=security, timeout=CONNECT_S, set_as_default=False)
        except (OSError, ValueError) as error:
            raise ConfigurationError(
                f"no scheduler answers at {self.scheduler} with a certificate of {ca} ({_first_line(error)}): start "
                "it, or correct --dask and --dask-tls"
            ) from error
        mark = out / f".seen-{secrets.token_hex(8)}"
        mark.touch()
        try:
            with client:
                executor = client.get_executor(pure=False)
                try:
                    yield _Alike(executor, mark)
                finally:
                    executor.shutdown(wait=False)
        finally:
            mark.unlink(missing_ok=True)


@dataclass(frozen=True, slots=True)
class Release:
    """Of two that are equal one does what the other would; a commit alone is none where wheels are installed."""

    commit: str
    source: str
    torch: str

    @classmethod
    def own(cls) -> "Release":
        return cls(commit(), source_digest(), torch.__version__)

    def __str__(self) -> str:
        return f"source {self.source[:12]} (commit {self.commit or 'unknown'}) with torch {self.torch}"


class _Alike(Executor):
    """Gives each call to a worker that proves first that it is of this release and sees this folder."""

    def __init__(self, executor: Any, mark: Path) -> None:
        self._executor, self._mark, self._release = executor, mark, Release.own()

    def submit(self, function: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        return self._executor.submit(_at_worker, self._mark, self._release, function, *arguments, **named)


def lost(error: BaseException) -> StateError | None:
    """What is to be told where the cluster, and not a run, is why a call has no outcome; else None."""
    from distributed.client import FutureCancelledError
    from distributed.comm.core import CommClosedError
    from distributed.scheduler import KilledWorker

    if not isinstance(error, (FutureCancelledError, CommClosedError, KilledWorker)):
        return None
    return StateError(
        f"the Dask cluster lost a run ({_first_line(error)}): look at its workers' logs, whether memory ran out, and "
        "run the same command again"
    )


def _at_worker(mark: Path, of: Release, function: Callable[..., _Outcome], *arguments: Any) -> _Outcome:
    from distributed import get_worker

    worker = get_worker()
    if worker.state.nthreads != 1:
        raise ConfigurationError(
            f"worker {worker.name} does {worker.state.nthreads} runs at a time in one process, whose logs and threads "
            "would mix: start it with --nthreads 1, and with --nworkers for more"
        )
    if not mark.is_file():
        raise ConfigurationError(
            f"worker {worker.name} does not see {mark.parent}: give it the folder of --out by the same path"
        )
    if (own := Release.own()) != of:
        raise ConfigurationError(f"worker {worker.name} runs {own}, this command {of}: give all the same")
    return function(*arguments)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), type(error).__name__)[:200]
