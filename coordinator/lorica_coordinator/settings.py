"""federation.toml: everything that an operator may set. One file; an unknown key is refused, an error names its key."""

import json
import os
from collections.abc import Sequence
from datetime import timedelta
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Literal, Self

from pydantic import Field, ValidationInfo, field_validator, model_validator

from lorica_security.console.strict_toml import NameText, Section, parse_toml
from lorica_security.daemon.listen_address import AddressOrNone, AddressText, address
from lorica_security.errors import ConfigurationError, StorageError
from lorica_security.identifiers import federation_name
from lorica_security.pki.hosts import parse_host

SETTINGS_FILE = "federation.toml"
STATE = "state"
SILOS_PORT = 7443
ENROLMENT_PORT = 7444
METRICS_PORT = 9464
STATUS_PORT = 9465

PublicPort = Annotated[int, Field(ge=0, le=65_535)]
RetentionDays = Annotated[float, Field(ge=0, le=36_500)]
LifetimeDays = Annotated[float, Field(gt=0, le=3650)]


def reachable(host: str) -> str:
    """Where this host itself reaches what listens on `host`."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)  # noqa: S104  # nosec B104  # looked up, not bound


class PublicSection(Section):
    """How silos reach this coordinator; a port of 0 is the one listened on."""

    hosts: Annotated[list[str], Field(min_length=1)] = Field(default_factory=lambda: ["localhost"])
    silos_port: PublicPort = 0
    enrolment_port: PublicPort = 0
    this_machine_alone: bool = False

    @field_validator("hosts")
    @classmethod
    def _host_names(cls, value: list[str]) -> list[str]:
        for host in value:
            try:
                parse_host(host)
            except ConfigurationError as error:
                raise ValueError(f"{host!r} is not a host name or IP address: give one without port") from error
        return value


class ListenSection(Section):
    silos: AddressText = f"0.0.0.0:{SILOS_PORT}"
    enrolment: AddressText = f"0.0.0.0:{ENROLMENT_PORT}"
    metrics: AddressText = f"127.0.0.1:{METRICS_PORT}"
    status: AddressOrNone = f"127.0.0.1:{STATUS_PORT}"  # empty: no status page
    status_token_file: str = ""  # opens the page on other addresses beside certificates; empty: certificates alone


class CertificatesSection(Section):
    access_lifetime_days: LifetimeDays = 30
    silo_lifetime_days: LifetimeDays = 7
    own_lifetime_days: LifetimeDays = 7

    @property
    def silo_lifetime(self) -> timedelta:
        return timedelta(days=self.silo_lifetime_days)

    @property
    def own_lifetime(self) -> timedelta:
        return timedelta(days=self.own_lifetime_days)

    @property
    def access_lifetime(self) -> timedelta:
        return timedelta(days=self.access_lifetime_days)


class InvitationsSection(Section):
    validity_hours: Annotated[float, Field(gt=0, le=2160)] = 72

    @property
    def validity_s(self) -> float:
        return self.validity_hours * 3600


class AggregationSettings(Section):
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: Annotated[int, Field(ge=0, le=1024)] = 1


class StorageSection(Section):
    database: str = ""  # empty: SQLite in the state folder
    """An address with, it may be, a password: no error shows it (edges/database/postgresql/place.py reads it)."""
    blobs: str = ""  # empty: in the state folder alone
    """The bucket that models and updates are kept in beside the folder (edges/kept/bucket_place.py reads it)."""

    attempt_keys: str = ""  # empty: in the state folder

    @field_validator("database", "blobs", mode="before")
    @classmethod
    def _text(cls, value: object, info: ValidationInfo) -> object:
        if not isinstance(value, str):
            raise ValueError(f"[storage] {info.field_name} is no text: put it in quotes")
        return value

    @model_validator(mode="after")
    def _keys_of_a_database(self) -> Self:
        if self.attempt_keys and not self.database:
            raise ValueError(
                f"[storage] attempt_keys = {self.attempt_keys!r} is for a [storage] database in PostgreSQL: "
                "name one, or leave both empty"
            )
        if self.attempt_keys and not self.attempt_keys.startswith("/"):
            raise ValueError(
                f"[storage] attempt_keys = {self.attempt_keys!r} is no path from / on: give the whole path, "
                "which is the same folder for every coordinator"
            )
        return self


class RetentionSection(Section):
    models_days: RetentionDays = 30
    copies_days: RetentionDays = 30
    records_days: RetentionDays = 0


class Settings(Section):
    federation: NameText
    state: Annotated[str, Field(min_length=1)] = STATE
    public: PublicSection = PublicSection()
    listen: ListenSection = ListenSection()
    certificates: CertificatesSection = CertificatesSection()
    invitations: InvitationsSection = InvitationsSection()
    aggregation: AggregationSettings = AggregationSettings()
    storage: StorageSection = StorageSection()
    retention: RetentionSection = RetentionSection()

    @classmethod
    def parse(cls, text: str, where: str) -> "Settings":
        """Raises ConfigurationError naming `where`, the key, the value and the remedy."""
        return parse_toml(cls, text, where)

    @classmethod
    def read(cls, path: Path) -> "Settings":
        """The settings in `path`, `state` taken from its folder; raises ConfigurationError naming file, key and
        value."""
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            raise ConfigurationError(f"{path} is missing: make it with coordinator init, or correct --dir") from error
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{path} is not UTF-8 text: save it as such") from error
        except OSError as error:
            raise StorageError(f"{path} cannot be read: {error.strerror or error}") from error
        settings = cls.parse(text, str(path))
        base, token = path.parent.absolute(), settings.listen.status_token_file
        listen = settings.listen.model_copy(
            update={"status_token_file": token and str(base / Path(token).expanduser())}
        )
        settings = settings.model_copy(
            update={"state": str(base / Path(settings.state).expanduser()), "listen": listen}
        )
        if keys := settings.storage.attempt_keys:
            require_apart(Path(keys), settings.state_folder, f"{path}: [storage] attempt_keys")
        return settings

    @property
    def state_folder(self) -> Path:
        return Path(self.state)

    @property
    def public_silos_port(self) -> int:
        return self.public.silos_port or address(self.listen.silos).port

    @property
    def public_enrolment_port(self) -> int:
        return self.public.enrolment_port or address(self.listen.enrolment).port


def require_apart(keys: Path, state: Path, where: str) -> None:
    """Raises ConfigurationError, which says `where` they are named, where `keys` lies in or above a folder of `state`
    that keys are destroyed or updates kept in, by whatever links. It may be the folder of keys there."""
    own = state / "attempt-keys"
    if _is_within(keys, own) and _is_within(own, keys):
        return
    for one in (own, state / "spools"):
        if _is_within(keys, one) or _is_within(one, keys):
            raise ConfigurationError(
                f"{where} = {str(keys)!r} is in {one}, or that is in it: keys in use would be "
                "destroyed with former ones; name a folder apart from the state folder, and move what lies in it "
                "there while no coordinator runs"
            )


def _is_within(path: Path, folder: Path) -> bool:
    """Whether `path` is `folder` or below it; also where that goes by links, or by two mounts of one folder."""
    path = Path(os.path.realpath(path))
    if path.is_relative_to(os.path.realpath(folder)):
        return True
    for one in (path, *path.parents):
        try:
            if one.samefile(folder):
                return True
        except OSError:
            continue  # one that is not there
    return False


def settings_text(
    federation: str,
    hosts: Sequence[str],
    *,
    silos_port: int = SILOS_PORT,
    enrolment_port: int = ENROLMENT_PORT,
    metrics_host: str = "127.0.0.1",
    metrics_port: int = METRICS_PORT,
    status_host: str = "127.0.0.1",
    status_port: int = STATUS_PORT,
    status_token_file: str = "",
    this_machine_alone: bool = False,
    database: str = "",
    blobs: str = "",
    attempt_keys: str = "",
) -> str:
    """The commented file that `coordinator init` writes; a `status_port` of 0 leaves the status page out.

    Raises ConfigurationError for values that are not allowed.
    """
    text = files("lorica_coordinator").joinpath("federation_template.toml").read_text(encoding="utf-8")
    listed = ", ".join(f'"{host}"' for host in hosts)
    for default, chosen in (
        ('federation = "example"', f'federation = "{federation_name(federation)}"'),
        ('hosts = ["localhost"]', f"hosts = [{listed}]"),
        ("this_machine_alone = false", f"this_machine_alone = {json.dumps(this_machine_alone)}"),
        (f'silos = "0.0.0.0:{SILOS_PORT}"', f'silos = "0.0.0.0:{silos_port}"'),
        (f'enrolment = "0.0.0.0:{ENROLMENT_PORT}"', f'enrolment = "0.0.0.0:{enrolment_port}"'),
        (f'metrics = "127.0.0.1:{METRICS_PORT}"', f'metrics = "{metrics_host}:{metrics_port}"'),
        (
            f'status = "127.0.0.1:{STATUS_PORT}"',
            f'status = "{status_host}:{status_port}"' if status_port else 'status = ""',
        ),
        ('status_token_file = ""', f"status_token_file = {json.dumps(status_token_file)}"),
        ('database = ""', f"database = {json.dumps(database)}"),
        ('blobs = ""', f"blobs = {json.dumps(blobs)}"),
        ('attempt_keys = ""', f"attempt_keys = {json.dumps(attempt_keys)}"),
    ):
        text = text.replace(default, chosen, 1)
    Settings.parse(text, SETTINGS_FILE)
    return text
