"""silo.toml: everything that a silo's people may set. All of it is optional; an unknown key is refused.

    [data]      folder and how bad it may be          [database]  what a model's SQL may be tried on
    [policy]    what this silo refuses (policy/)    [training]  device, threads
    [sql]       what one statement may cost           [storage]   what is kept on disk
    [metrics]   where Prometheus may ask              [personal]  models of this silo's own

Relative paths are taken from the folder of silo.toml.
"""

import os
import re
from collections.abc import Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from lorica_security.console.strict_toml import Section, parse_toml
from lorica_security.daemon.listen_address import AddressOrNone
from lorica_security.errors import ConfigurationError
from silo_agent.policy.rules import PolicyRules


class DataSection(Section):
    folder: str = ""  # with train.jsonl, dev.jsonl, schema.json; `--data` comes first
    max_bad_lines_share: Annotated[float, Field(ge=0, lt=1)] = 0.01  # above it, the silo does not start


class DatabaseSection(Section):
    url: str = ""  # sqlite:///PATH or postgresql://USER:PASSWORD@HOST/DATABASE of a read-only role; empty: none
    max_unpacked_bytes: Annotated[int, Field(ge=1, le=1 << 44)] = 32 << 30  # of a db.sqlite.gz beside the data


_BETWEEN_WORDS = re.compile(r"[\s\"';&|()]+")
"""Of a shell: a word of launch may be a whole script."""


def words_of_launch(launch: Sequence[str]) -> list[str]:
    return [word for words in launch for word in _BETWEEN_WORDS.split(words) if word]


def _unpickles(launch: list[str]) -> str:
    """The option by which torchrun has a rendezvous of its own, whose state is a pickle; "" where no word is one.

    torchrun takes shortened options, `_` for `-`, and variables PET_OPTION.
    """
    words = words_of_launch(launch)
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if not name.startswith(("-", "PET_")):
            continue
        name = name.removeprefix("PET_").lower().replace("_", "-").lstrip("-")
        said = value if equals else following
        if _shortens(name, "stan", "standalone"):
            return word
        if _shortens(name, "rdzv-b", "rdzv-backend") and said != "static":
            return f"rdzv-backend {said}"
        if _shortens(name, "nn", "nnodes") and ":" in said:  # elastic: c10d
            return f"nnodes {said}"
    return ""


def _shortens(name: str, least: str, option: str) -> bool:
    """`least` is the shortest that torchrun takes for `option`."""
    return name.startswith(least) and option.startswith(name)


class TrainingSection(Section):
    device: Annotated[str, Field(pattern=r"^(auto|cpu|cuda(:\d{1,3})?)$")] = "auto"
    threads: Annotated[int, Field(ge=0, le=1024)] = 0  # 0: PyTorch's own choice; of a rank, its share of the cores
    processes: Annotated[int, Field(ge=0, le=1024)] = 0  # that train together, called ranks; 0: the agent's own alone
    sharded: bool = False  # each rank holds a part of the model, its gradients and AdamW's state, and not all of it
    # what starts the ranks, {processes} being their number: ["srun", "--ntasks={processes}"]; empty: the agent, here
    launch: list[Annotated[str, Field(min_length=1, max_length=4096)]] = Field(default_factory=list, max_length=100)
    # the network interface that ranks listen on, without TLS or authentication; lo: nobody else's machine hears it
    rank_interface: Annotated[str, Field(pattern=r"^[A-Za-z0-9._-]{1,15}$")] = "lo"
    rank_timeout_s: Annotated[float, Field(ge=1, le=86_400)] = 600.0  # without a step: ranks are started again

    @model_validator(mode="after")
    def _check_launch(self) -> "TrainingSection":
        if self.launch and not self.processes:
            raise ValueError("[training] launch starts ranks, and processes is 0: set processes to their number")
        if self.sharded and self.processes < 2:
            raise ValueError(
                f"[training] sharded deals the model out to ranks, and processes is {self.processes}: set processes to "
                "2 or more, or leave sharded out"
            )
        if self.processes > 1 and ":" in self.device:
            raise ValueError(
                f"[training] device = {self.device!r} is one GPU, and processes is {self.processes}: give cuda, by "
                "which each rank has the GPU of its own number on its machine"
            )
        if wrong := _unpickles(self.launch):
            raise ValueError(
                f"[training] launch has torchrun with {wrong}, whose store listens on every address of the machine and "
                "unpickles what anybody writes there: leave launch out where all ranks run on one machine, else give "
                "torchrun --rdzv-backend=static, or start ranks by srun"
            )
        return self


class SqlSection(Section):
    """Bounds on one statement of a model, and what must hold it."""

    seconds: Annotated[float, Field(ge=0.01, le=3600)] = 5.0
    rows: Annotated[int, Field(ge=1, le=10_000_000)] = 10_000
    result_bytes: Annotated[int, Field(ge=1 << 10, le=1 << 28)] = 4 << 20
    memory_bytes: Annotated[int, Field(ge=1 << 25, le=1 << 40)] = 256 << 20
    require_jail: bool = False  # no statement where the kernel lacks a wall of the jail
    # where a plan has answers tried on the database in training: of one question, and of all of a round
    question_seconds: Annotated[float, Field(ge=0.01, le=3600)] = 1.0
    round_seconds: Annotated[float, Field(ge=0.01, le=86_400)] = 60.0


class StorageSection(Section):
    models_kept: Annotated[int, Field(ge=1, le=1000)] = 2  # round models in the cache


class MetricsSection(Section):
    listen: AddressOrNone = ""  # ADDRESS:PORT, best on loopback; empty: nothing listens


class PersonalSection(Section):
    """The models that this silo trains for itself: none of them leaves, nor what they score."""

    method: Literal["none", "finetune", "ditto", "heads", "adapters"] = "none"
    epochs: Annotated[int, Field(ge=1, le=1000)] = 3  # of the personal model, from each global model on
    learning_rate: Annotated[float, Field(ge=0, le=1)] = 0.0  # of both, or of adapters alone; 0: the plan's
    ditto_lambda: Annotated[float, Field(gt=0, le=1000)] = 0.1  # how strongly ditto pulls towards the global model
    adapter_rank: Annotated[int, Field(ge=1, le=256)] = 8  # of the changes that "adapters" trains


class Settings(Section):
    data: DataSection = DataSection()
    database: DatabaseSection = DatabaseSection()
    policy: PolicyRules = PolicyRules()
    training: TrainingSection = TrainingSection()
    sql: SqlSection = SqlSection()
    storage: StorageSection = StorageSection()
    metrics: MetricsSection = MetricsSection()
    personal: PersonalSection = PersonalSection()

    @classmethod
    def read(cls, path: Path) -> "Settings":
        """Parse a silo.toml; raises ConfigurationError naming the file, the key, the value and the remedy."""
        try:
            text = path.read_text(encoding="utf-8")
        except FileNotFoundError as error:
            if path.is_symlink():
                raise ConfigurationError(
                    f"{path} is a link to {path.readlink()}, which is not there: mount or restore what it names"
                ) from error
            raise ConfigurationError(f"{path} is missing: correct --config, or put the file back") from error
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error.strerror}") from error
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{path} is not UTF-8 text: save it as such") from error
        return parse_toml(cls, text, str(path)).resolved(path.parent.absolute())

    def resolved(self, base: Path) -> "Settings":
        """With relative paths taken from `base`."""
        folder = self.data.folder and str(base / Path(self.data.folder).expanduser())
        launch = self.training.launch
        if launch and os.sep in launch[0]:  # else it is looked for along PATH
            launch = [str(base / Path(launch[0]).expanduser()), *launch[1:]]
        return self.model_copy(
            update={
                "training": self.training.model_copy(update={"launch": launch}),
                "data": self.data.model_copy(update={"folder": folder}),
                "database": self.database.model_copy(update={"url": _resolved_url(self.database.url, base)}),
                "policy": self.policy.model_copy(update=_resolved_registry(self.policy.shared_budget, base)),
            }
        )


def _resolved_registry(shared_budget: str, base: Path) -> dict[str, str]:
    """Nothing where it is not a path: what people did not set stays unset."""
    if shared_budget in ("", "none"):
        return {}
    return {"shared_budget": str(base / Path(shared_budget).expanduser())}


def _resolved_url(url: str, base: Path) -> str:
    if not url:
        return url
    if "://" not in url:
        return str(base / Path(url).expanduser())
    scheme, _, rest = url.partition(":///")
    if scheme == "sqlite" and rest and not rest.startswith("/"):
        return f"sqlite:///{base / rest}"
    return url
