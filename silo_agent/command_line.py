"""What the modules of the `silo-agent` command share: options, who the silo is, its settings, and word to a running agent."""

import json
import os
import signal
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from silo_agent.edges.silo_folder import ENVIRONMENT_VARIABLE, SiloFolder

if TYPE_CHECKING:
    from silo_agent.edges.key_store import SiloCredentials
    from silo_agent.edges.round_journal import RoundJournal
    from silo_agent.policy import SiloPolicy
    from silo_agent.settings import Settings

Dir = Annotated[
    Path | None,
    typer.Option("--dir", help=f"The silo's folder. Default: ${ENVIRONMENT_VARIABLE}, else the user's data folder."),
]
Data = Annotated[Path | None, typer.Option("--data", help="Folder with train.jsonl, dev.jsonl and schema.json.")]
Database = Annotated[
    str | None, typer.Option("--database", help="sqlite:///PATH or postgresql://..., opened read-only.")
]
Config = Annotated[Path | None, typer.Option("--config", help="silo.toml; default: the one in the silo's folder.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What a command line chose; `start` records it, so that the commands beside it use the same."""

    data: str = ""
    database: str = ""
    config: str = ""

    def settings(self, folder: SiloFolder) -> "Settings":
        """silo.toml of --config or of the folder, if there is one, with what the command line gives over it."""
        from silo_agent.settings import Settings

        if self.config:
            settings = Settings.read(Path(self.config))
        elif folder.settings.exists():
            settings = Settings.read(folder.settings)
        else:
            settings = Settings()
        given = Settings.model_validate({"data": {"folder": self.data}, "database": {"url": self.database}})
        given = given.resolved(Path.cwd())
        changes: dict[str, object] = {}
        if self.data:
            changes["data"] = settings.data.model_copy(update={"folder": given.data.folder})
        if self.database:
            changes["database"] = given.database
        return settings.model_copy(update=changes)


def chosen(folder: SiloFolder, data: Path | None, database: str | None, config: Path | None) -> Choice:
    """This command line over what `start` recorded."""
    recorded = {}
    if folder.enrolment.exists() and folder.journal.exists():
        with open_journal(folder, credentials_of(folder)) as journal:
            recorded = json.loads(journal.fact("started_with") or "{}")
    return Choice(
        data=str(data.absolute()) if data else recorded.get("data", ""),
        database=database or recorded.get("database", ""),
        config=str(config.absolute()) if config else recorded.get("config", ""),
    )


def credentials_of(folder: SiloFolder) -> "SiloCredentials":
    from silo_agent.edges.key_store import load_credentials

    return load_credentials(folder)


def policy_of(folder: SiloFolder, credentials: "SiloCredentials", settings: "Settings") -> "SiloPolicy":
    """The silo's rules, with the approvals that its people gave by command."""
    from silo_agent.edges.silo_record import record_of
    from silo_agent.policy import SiloPolicy

    return SiloPolicy(rules=settings.policy, silo=credentials.silo, record=record_of(folder, credentials))


@contextmanager
def open_journal(folder: SiloFolder, credentials: "SiloCredentials") -> "Iterator[RoundJournal]":
    from silo_agent.edges.round_journal import RoundJournal

    with closing(RoundJournal(folder.journal, updates=folder.updates, silo=credentials.silo)) as journal:
        yield journal


def tell_agent(folder: SiloFolder) -> str:
    """Have the running agent look again at what people decided (SIGHUP); in words, whether there was one."""
    from security.process_lock import holder

    agent = holder(folder.lock)
    if agent is None:
        return "no agent is running"
    with suppress(ProcessLookupError):  # it has just ended, and looks again when it starts
        os.kill(agent, signal.SIGHUP)
    return f"the running agent (process {agent}) was told"


def one_line(value: object) -> str:
    """A value of the database, or a peer's text, on a terminal: no control characters."""
    text = "NULL" if value is None else str(value)
    return "".join(character if character.isprintable() else " " for character in text)
