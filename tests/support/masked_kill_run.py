"""A masked plan under kills, and what is left of its secrets: looked for in every file of the dead, and of all at the
end."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from lorica.soak.federation import COORDINATOR, MortalFederation
from tests.support.byte_search import Needles
from tests.support.kill_run import Death, Executioner, Kill, KillRun
from tests.support.masked_kill_plan import SHAPE as MASKED_SHAPE
from tests.support.repeatable_draws import Draws
from tests.support.revealed_shares import but_revealed

Found = Mapping[str, set[bytes]]
"""By file, which secrets are in it."""


@dataclass(frozen=True)
class Traces:
    """In a dead process's files: secrets of the round in which it died, and of earlier ones."""

    of_this_round: Found
    of_earlier_rounds: Found


@dataclass(frozen=True, kw_only=True)
class MaskedEnd:
    """`secrets` were made in the run, `left` are those that are in a file of the coordinator's or a silo's at its end.

    In evidence of a round they are but for the shares that its silos revealed: these are what it shows.
    """

    run: KillRun
    traces: Mapping[Kill, Traces]
    secrets: Mapping[bytes, int]
    left: Found
    draws: Mapping[str, int]
    """How often what was drawn: by silo (or coordinator), round and attempt."""


@dataclass
class MaskedRun:
    """Looks at the dead of the kills in `LOOKED_AT`."""

    federation: MortalFederation
    kills: Sequence[Kill]
    traces: dict[Kill, Traces] = field(default_factory=dict)
    executioner: type[Executioner] = Executioner

    LOOKED_AT = ("shares-revealed", "shares-journalled", "log-not-cleared", "erasing", "erased")

    def __post_init__(self) -> None:
        self._draws = Draws(self.federation.root / "known")
        self._executioner = self.executioner(self.federation, self.kills, self._at_death, self._draws)

    def run(self) -> MaskedEnd:
        self._draws.make()
        run = self._executioner.run()
        secrets = self._secrets()
        needles = Needles(secrets)
        counters = sorted((self._draws.folder / "draws").iterdir())
        return MaskedEnd(
            run=run,
            traces=self.traces,
            secrets=secrets,
            left={
                f"{folder.name}/{name}": found
                for folder in (self.federation.folder.root, self.federation.root / "agents")
                for name, found in but_revealed(folder, needles.below(folder), MASKED_SHAPE.federation).items()
            },
            draws={counter.name: counter.stat().st_size for counter in counters},
        )

    def give_up(self) -> None:
        self._executioner.give_up()

    def _secrets(self) -> dict[bytes, int]:
        """With the round of each; a process that has just started knows of none yet."""
        rounds: dict[bytes, int] = {}
        for number, secret in self._draws.secrets():
            rounds[secret] = max(number, rounds.get(secret, 0))
        return rounds

    def _at_death(self, death: Death) -> None:
        if death.kill.point not in self.LOOKED_AT:
            return
        secrets, folder = self._secrets(), self._folder(death.kill.process)
        parts = []
        for wanted in (range(death.at(), death.at() + 1), range(1, death.at())):
            needles = Needles(secret for secret, number in secrets.items() if number in wanted)
            parts.append(but_revealed(folder, needles.below(folder), MASKED_SHAPE.federation))
        self.traces[death.kill] = Traces(*parts)

    def _folder(self, process: str) -> Path:
        return self.federation.folder.root if process == COORDINATOR else self.federation.agent(process).root
