"""What the modules of the `silo-agent` command share: options, who the silo is, its settings,
its data and its workshop, and word to a running agent."""

import codecs
import json
import os
import signal
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from lorica_security.errors import ConfigurationError, LoricaError
from lorica_security.host.files import is_there
from silo_agent.edges.disk.silo_folder import ENVIRONMENT_VARIABLE, SiloFolder

if TYPE_CHECKING:
    from silo_agent.edges.disk.round_journal import RoundJournal
    from silo_agent.edges.keys.key_store import SiloCredentials
    from silo_agent.edges.workshop.silo_sources import SiloSources
    from silo_agent.policy.silo_policy import SiloPolicy
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
    """What a command line chose; `start` records it, so that the commands beside it use the same.

    `rules` is the file of settings that the last `start` read; "" where it read none.
    """

    data: str = ""
    database: str = ""
    config: str = ""
    rules: str = ""

    def file(self, folder: SiloFolder) -> Path | None:
        """silo.toml of --config or of the folder; also a link to a file that is not there, which is not for nothing."""
        if self.config:
            return Path(self.config)
        return folder.settings if os.path.lexists(folder.settings) else None

    def settings(self, folder: SiloFolder) -> "Settings":
        """What that file says, with what the command line gives over it.

        Raises ConfigurationError where it cannot be read, or where it is gone from a silo that had rules: defaults
        allow more.
        """
        from silo_agent.settings import Settings

        file = self.file(folder)
        if file is None:
            _require_new(folder, self.rules)
        settings = Settings() if file is None else Settings.read(file)
        given = Settings.model_validate({"data": {"folder": self.data}, "database": {"url": self.database}})
        given = given.resolved(Path.cwd())
        changes: dict[str, object] = {}
        if self.data:
            changes["data"] = settings.data.model_copy(update={"folder": given.data.folder})
        if self.database:
            changes["database"] = given.database
        return settings.model_copy(update=changes)


def _require_new(folder: SiloFolder, rules: str) -> None:
    """Raise ConfigurationError where a silo without silo.toml had one before, or has masked: it would run with no rules
    at all."""
    if rules:
        raise ConfigurationError(
            f"the last start read {rules}, and now there is no {folder.settings}: this silo would run by default "
            "rules, which allow more; put the file back, mount what it lies on, or give --config. A silo that means "
            "to have no rules has an empty one"
        )
    if _may_have_masked(folder):
        raise ConfigurationError(
            f"this silo has masked, and there is no {folder.settings}: by default rules its next update may leave "
            "without a mask; put the file back, mount what it lies on, or write one with [policy] "
            "require_secure_aggregation = true"
        )


def _may_have_masked(folder: SiloFolder) -> bool:
    """Whether lineages.json names a plan, or says nothing; that a silo holds release groups is no masked round."""
    from lorica_security.identity.seal import unsealed

    if not is_there(folder.lineages):
        return is_there(folder.masking / "memory")
    try:
        return bool(json.loads(unsealed(folder.lineages.read_bytes()))["plans"])
    except (OSError, ValueError, KeyError, TypeError, LoricaError):
        return True


def chosen(folder: SiloFolder, data: Path | None, database: str | None, config: Path | None) -> Choice:
    """This command line over what `start` recorded."""
    last = Choice()
    if folder.enrolment.exists() and folder.journal.exists():
        with open_journal(folder, credentials_of(folder)) as journal:
            last = started_with(journal)
    return Choice(
        data=str(data.absolute()) if data else last.data,
        database=database or last.database,
        config=str(config.absolute()) if config else last.config,
        rules=last.rules,
    )


def started_with(journal: "RoundJournal") -> Choice:
    """What the last `start` recorded."""
    recorded = json.loads(journal.fact("started_with") or "{}")
    return Choice(**{field.name: recorded.get(field.name, "") for field in fields(Choice)})


def credentials_of(folder: SiloFolder) -> "SiloCredentials":
    from lorica_security.host.key_file import settle
    from silo_agent.edges.keys.key_store import load_credentials

    if folder.root.is_dir():
        settle(folder.root, folder.lock, "silo agent")
    return load_credentials(folder)


def settled_credentials_of(folder: SiloFolder) -> "SiloCredentials":
    """For what is sealed by the identity key. Raises StateError while a rotation of that key is not finished."""
    from silo_agent.edges.keys.key_store import check_settled

    credentials = credentials_of(folder)
    check_settled(folder)
    return credentials


def policy_of(folder: SiloFolder, credentials: "SiloCredentials", settings: "Settings") -> "SiloPolicy":
    """The silo's rules, with the approvals that its people gave by command."""
    from silo_agent.edges.memory.silo_record import record_of
    from silo_agent.policy.silo_policy import SiloPolicy

    return SiloPolicy(
        rules=settings.policy,
        silo=credentials.silo,
        record=record_of(folder, credentials),
        processes=settings.training.processes,
        rank_interface=settings.training.rank_interface,
        sharded=settings.training.sharded,
    )


@contextmanager
def open_journal(folder: SiloFolder, credentials: "SiloCredentials") -> "Iterator[RoundJournal]":
    from lorica_security.host import ballast
    from silo_agent.edges.disk.round_journal import RoundJournal

    ballast.make_room(folder.root)
    with closing(RoundJournal(folder.journal, updates=folder.updates, silo=credentials.silo)) as journal:
        yield journal


def tell_agent(folder: SiloFolder) -> str:
    """Have the running agent look again at what people decided (SIGHUP); in words, whether there was one."""
    from lorica_security.host.process_lock import holder

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


def json_text(value: object, *, indent: int | None = None) -> str:
    """For stdout: letters as they are where it is UTF-8, as JSON's are, else JSON's escapes."""
    encoding = codecs.lookup(sys.stdout.encoding or "utf-8").name
    return json.dumps(value, indent=indent, ensure_ascii=encoding != "utf-8")


def silo_sources(folder: SiloFolder, settings: "Settings") -> "SiloSources":
    from silo_agent.edges.workshop.silo_sources import SiloSources

    return SiloSources(settings, scratch=folder.root / "database")
