"""What secure aggregation draws in a process of a test: the same in each run of a plan, and known to the test.

An attempt's id, and each silo's root of it, are digests of their names and of how often they were drawn before, by
whichever process: a silo that drew anew where it should have gone on with its first root would mask and round
differently. All bytes that become a `Secret` are written down with their round, so that a test can look for them where
they must not be any more.

    FOLDER/draws/<who>-<round>-<attempt>    a byte for each draw
    FOLDER/secrets/<process>                lines of round and bytes, in hexadecimal

The product knows nothing of this: its functions are patched from outside, as for the kills.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from blake3 import blake3

from lorica_security.secure_aggregation.attempt import Attempt
from lorica_security.secure_aggregation.keys.secret import Secret

DIFFERENT = 12
"""Bytes that a secret has at least; what has fewer is short or a constant, and would be found by chance."""


@dataclass(frozen=True, slots=True)
class Draws:
    folder: Path

    def make(self) -> None:
        for part in ("draws", "secrets"):
            (self.folder / part).mkdir(parents=True)

    def drawn(self, who: str, attempt: Attempt) -> bytes:
        """32 bytes, others at each call for the same attempt."""
        with (self.folder / "draws" / f"{who}-{attempt.round}-{attempt.number}").open("ab") as counter:
            counter.write(b".")
            number = counter.tell()
        return blake3(f"{who}/{attempt.round}/{attempt.number}/{number}".encode()).digest()

    def install(self, program: str, process: str, round_now: Callable[[], int | None]) -> None:
        """Into this process; `process` names it, and the silo."""
        (self._of_the_coordinator if program == "coordinator" else self._of_a_silo)(process)
        self._write_down(process, round_now)

    def _of_the_coordinator(self, process: str) -> None:
        from lorica_coordinator.service.loop import round_loop

        opened = round_loop.masking_opened

        async def opening(command: Any, **parts: Any) -> Any:
            event = await opened(command, **parts)
            attempt = replace(event.opening.attempt, id=self.drawn(process, event.opening.attempt))
            return replace(event, opening=replace(event.opening, attempt=attempt))

        round_loop.masking_opened = opening

    def _of_a_silo(self, process: str) -> None:
        from lorica_security.secure_aggregation.silo.events import OpenAttempt
        from silo_agent.service.masking import Masking

        event_of = Masking._event

        def event(masking: Masking, *arguments: Any) -> Any:
            found = event_of(masking, *arguments)
            if isinstance(found, OpenAttempt):
                found.root.erase()
                found = replace(found, root=Secret(self.drawn(process, found.attempt)))
            return found

        Masking._event = event  # type: ignore[method-assign]

    def _write_down(self, process: str, round_now: Callable[[], int | None]) -> None:
        make, take = Secret.__init__, Secret.taking.__func__  # type: ignore[attr-defined]
        log = (self.folder / "secrets" / process).open("a", buffering=1)

        def note(data: bytearray) -> None:
            if len(set(data)) >= DIFFERENT:
                log.write(f"{round_now() or 0} {data.hex()}\n")

        def made(secret: Secret, data: Any) -> None:
            make(secret, data)
            note(secret._buffer)

        def taken(kind: type[Secret], buffer: bytearray) -> Secret:
            secret: Secret = take(kind, buffer)
            note(buffer)
            return secret

        Secret.__init__ = made  # type: ignore[method-assign]
        Secret.taking = classmethod(taken)  # type: ignore[method-assign, assignment]

    # --- for the test

    def secrets(self) -> Iterator[tuple[int, bytes]]:
        """(round, bytes) of every secret so far; a line that a kill cut off is none."""
        for log in sorted((self.folder / "secrets").iterdir()):
            for line in log.read_text().splitlines(keepends=True):
                number, _, data = line.partition(" ")
                if line.endswith("\n"):
                    yield int(number), bytes.fromhex(data.strip())
