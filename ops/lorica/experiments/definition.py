"""What a study is: one TOML file, and the ten learning set-ups that it names (Zhang et al., ACL 2023, tables 2 and 3,
figures 5 and 6).

A set-up is a way to bring silos together and values of the plan. Everything else of the plan is the study's own, the
same for each set-up.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Final, Literal, TypeVar

from pydantic import BeforeValidator, Field, field_validator, model_validator

from lorica.hostile.named import NOBODY, Hostility, attack_named
from lorica_security.console.strict_toml import NameText, Section, parse_toml
from lorica_security.errors import ConfigurationError
from lorica_security.identifiers import SiloName, silo_name
from silo_wire.canonical import canonical_json, digest_of
from silo_wire.plans.sections.named_silos import is_among
from silo_wire.plans.sections.semi_supervised import SemiSupervisedSection

Way = Literal["together", "alone", "centralized"]
Value = str | int | float | bool | list[str]
"""Of a plan's key."""
_Item = TypeVar("_Item")
Listed = Annotated[tuple[_Item, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
"""Which TOML has as a list."""


@dataclass(frozen=True, slots=True)
class Setup:
    """`together`: one federation. `alone`: a federation of one for each silo. `centralized`: one silo with all data."""

    label: str
    way: Way
    values: Mapping[str, Value]


_MU: Final = "training.fedprox_mu"
_SGD: Final[dict[str, Value]] = {"aggregation.server_optimizer": "sgd", "aggregation.server_learning_rate": 1.0}
_ONE: Final[dict[str, Value]] = {**_SGD, "aggregation.momentum": 0.0, "aggregation.weighting": "equal"}
_ADAM: Final[dict[str, Value]] = {
    "aggregation.server_optimizer": "adam",
    "aggregation.server_learning_rate": 0.01,
    "aggregation.weighting": "size",
}


def _opt(weighting: str) -> dict[str, Value]:
    return {**_SGD, "aggregation.momentum": 0.9, "aggregation.weighting": weighting}


def _avg(weighting: str, mu: float = 0.0) -> dict[str, Value]:
    return {**_SGD, "aggregation.momentum": 0.0, "aggregation.weighting": weighting, _MU: mu}


PROXIMAL: Final = 0.01
"""FedProx's mu, unless the study says otherwise."""

PAPER_SETUPS: Final[Mapping[str, Setup]] = {
    "finetuning": Setup("Finetuning", "alone", _ONE),
    "centralized": Setup("Centralized", "centralized", _ONE),
    "fedopt": Setup("FedOPT", "together", _opt("size")),
    "fedopt-lorar": Setup("FedOPT + Lorar", "together", _opt("lorar")),
    "fedavg": Setup("FedAvg", "together", _avg("size")),
    "fedavg-lorar": Setup("FedAvg + Lorar", "together", _avg("lorar")),
    "fedprox": Setup("FedProx", "together", _avg("size", PROXIMAL)),
    "fedprox-lorar": Setup("FedProx + Lorar", "together", _avg("lorar", PROXIMAL)),
    "fedopt-loss-reduction": Setup("FedOPT, loss reduction alone", "together", _opt("loss_reduction")),
    "fedopt-equal": Setup("FedOPT, equal weights", "together", _opt("equal")),
}
"""What the paper compares, and a study has that says nothing of set-ups."""
SETUPS: Final[Mapping[str, Setup]] = {**PAPER_SETUPS, "fedadam": Setup("FedAdam", "together", _ADAM)}


class PracticeSection(Section):
    """Public text-to-SQL for a model from scratch: what its tokenizer is made from, and what it is warmed up on
    (warm_up.py)."""

    pairs: Annotated[int, Field(ge=1)]  # over random schemas
    task: Literal["sql", "wikisql"] = "sql"  # "wikisql": over random tables, in the form of that task
    # with it: so many pairs more, afterwards and by the same values, most of whose columns have names that are no words
    strange: Annotated[int, Field(ge=0)] = 0
    wikisql: str = ""  # a .jsonl.gz of its labelled questions
    seed: int = 1
    training: dict[str, Value] = Field(
        default_factory=dict
    )  # keys of a plan's [training]; without epochs: the tokenizer alone

    @model_validator(mode="after")
    def _training_has_an_end(self) -> "PracticeSection":
        if self.training and not self.warms_up:
            raise ValueError("[start.practice.training] has no epochs, so that nothing would be trained: add them")
        if self.strange and (self.task == "sql" or not self.warms_up):
            raise ValueError('[start.practice] strange goes with task = "wikisql" and epochs: remove it')
        if self.task == "wikisql" and self.wikisql:
            raise ValueError(
                '[start.practice] wikisql has SQL as the task "sql" writes it, and task = "wikisql" another: remove one'
            )
        return self

    @property
    def warms_up(self) -> bool:
        return "epochs" in self.training


class StartSection(Section):
    """The model that every run begins with: `folder` (Hugging Face's form), or `size` from scratch, maybe warmed up by
    `practice`."""

    folder: str = ""
    size: str = ""
    vocabulary: Annotated[int, Field(ge=0)] = 0  # with size; 0: the size's own
    practice: PracticeSection | None = None  # with size
    added_tokens: Listed[str] = ()  # with folder: what its tokenizer has no piece for

    @model_validator(mode="after")
    def _one_of_them(self) -> "StartSection":
        if bool(self.folder) == bool(self.size):
            raise ValueError("[start] needs either folder or size: give one of them")
        if self.folder and self.vocabulary:
            raise ValueError("[start] vocabulary goes with size: a folder has its own, remove it")
        if self.folder and self.practice:
            raise ValueError("[start.practice] is for a model from scratch: remove it, or give size instead of folder")
        if self.added_tokens and not self.folder:
            raise ValueError(
                "[start] added_tokens goes with folder: a tokenizer that is made has pieces for all of ASCII"
            )
        return self


_ATTACK: Final = "hostile.attack"
_COUNT: Final = "hostile.count"
VARIANT: Final = "variant"
"""In a run's point: the name of its variant."""
_UNLABELLED: Final = "semi_supervised.unlabelled"
_SETUP: Final = "setup"
"""In a variant: the one set-up that it is of."""


class HostileSection(Section):
    """Which silos are hostile and what they do (ops/lorica/hostile). `attack` and `count` may be keys of the grid, as
    `hostile.attack` and `hostile.count`."""

    silos: Annotated[Listed[str], Field(min_length=1)]
    attack: str = NOBODY
    count: Annotated[int, Field(ge=0)] = 0  # the first so many of silos; 0: all of them

    @field_validator("attack")
    @classmethod
    def _attack_is_known(cls, value: str) -> str:
        if value != NOBODY:
            attack_named(value)
        return value

    @model_validator(mode="after")
    def _there_are_so_many(self) -> "HostileSection":
        if self.count > len(self.silos):
            raise ValueError(f"[hostile] count = {self.count} of {len(self.silos)} silos: name more, or lower it")
        return self

    def at(self, point: Mapping[str, Value]) -> "HostileSection":
        """With what a point of the grid says of it."""
        changed = {key.removeprefix("hostile."): value for key, value in point.items() if key in (_ATTACK, _COUNT)}
        return HostileSection.model_validate({**self.model_dump(), **changed})

    @property
    def hostility(self) -> Hostility | None:
        """None: nobody is hostile."""
        if self.attack == NOBODY:
            return None
        return Hostility(
            attack_named(self.attack), tuple(silo_name(it) for it in self.silos[: self.count or len(self.silos)])
        )


class Study(Section):
    """Paths are as the file has them, from the folder of the data (by default its own), and only `run_study` goes
    there."""

    name: NameText
    silos: Annotated[str, Field(min_length=1)]  # folder of the silos' folders
    start: StartSection
    setups: Listed[str] = tuple(PAPER_SETUPS)
    seeds: Annotated[Listed[int], Field(min_length=1)] = (1,)
    preset: str = "default"
    at_most: dict[str, Annotated[int, Field(ge=1)]] = Field(default_factory=dict)  # training examples of a silo
    lower_case: bool = False  # SQL outside quotes, of silos and of the practice: schemas are in lower case
    scored: Listed[str] = ()  # silos whose test split is scored at the end; empty: all that have labels
    # of silos without labels, so many training questions whose answers are compared with the silos' own after each
    # round of silos with labels, which the training never sees
    pseudo_labels: Annotated[int, Field(ge=0)] = 0
    compare_with: str = ""  # a variant: the row that others are compared with, in metrics of the task
    compare_losses: bool = False  # with compare_with: losses on dev as well, of runs that are of one federation each
    plan: dict[str, Value] = Field(default_factory=dict)
    grid: dict[str, Annotated[Listed[Value], Field(min_length=1)]] = Field(default_factory=dict)
    only: dict[str, dict[str, Value]] = Field(default_factory=dict)  # values for one set-up
    # values that go together, by name; each in turn, with each set-up, or with the one that it names as `setup`
    variants: dict[str, dict[str, Value]] = Field(default_factory=dict)
    hostile: HostileSection | None = None

    @field_validator("setups")
    @classmethod
    def _known(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        for name in value:
            if name not in SETUPS:
                raise ValueError(f"set-up {name!r} is unknown: use {', '.join(SETUPS)}")
        return value

    @field_validator("only")
    @classmethod
    def _only_known(cls, value: dict[str, dict[str, Value]]) -> dict[str, dict[str, Value]]:
        cls._known(tuple(value))
        return value

    @model_validator(mode="after")
    def _mu_is_of_fedprox(self) -> "Study":
        if _MU in self.plan:
            raise ValueError(
                f"[plan] {_MU} would make every set-up but FedAvg and FedProx proximal: "
                "write it into [only.fedprox] and [only.fedprox-lorar]"
            )
        return self

    @model_validator(mode="after")
    def _points_mean_something(self) -> "Study":
        for key in self.grid:
            if key == VARIANT:
                raise ValueError(f"[grid] {VARIANT} is no key of a plan: write [variants.NAME] with values of a plan")
            if key.startswith("hostile."):
                if key not in (_ATTACK, _COUNT):
                    raise ValueError(f"[grid] {key} is unknown: use {_ATTACK} or {_COUNT}")
                if self.hostile is None:
                    raise ValueError(f"[grid] {key} needs [hostile] silos: name the silos that are hostile")
        for run in self.runs():
            if run.study.hostile is not None:
                run.study.hostile.at(run.point)
        return self

    @model_validator(mode="after")
    def _compared_with_a_variant(self) -> "Study":
        if self.compare_with and self.compare_with not in self.variants:
            raise ValueError(f"compare_with = {self.compare_with!r} is no variant: use {', '.join(self.variants)}")
        return self

    @model_validator(mode="after")
    def _losses_of_one_federation(self) -> "Study":
        if self.compare_losses and not self.compare_with:
            raise ValueError("compare_losses needs the row to compare with: add compare_with, or remove it")
        if self.compare_losses and any(SETUPS[run.setup].way == "alone" for run in self.runs()):
            raise ValueError("compare_losses is of runs that are of one federation each: leave finetuning out")
        return self

    @model_validator(mode="after")
    def _pseudo_labels_of_one_federation(self) -> "Study":
        if self.pseudo_labels and any(SETUPS[run.setup].way == "alone" for run in self.runs()):
            raise ValueError("pseudo_labels is of runs that are of one federation each: leave finetuning out")
        return self

    @field_validator("variants")
    @classmethod
    def _variants_of_known_set_ups(cls, value: dict[str, dict[str, Value]]) -> dict[str, dict[str, Value]]:
        cls._known(tuple(str(values[_SETUP]) for values in value.values() if _SETUP in values))
        return value

    @model_validator(mode="after")
    def _each_run_once(self) -> "Study":
        seen: set[str] = set()
        for run in self.runs():
            if run.key in seen:
                raise ValueError(
                    f"{run.setup}, seed {run.seed}{run.at} would be run twice: name each set-up, seed and value of "
                    f"the grid once, and in [only.{run.setup}] nothing that the grid goes over"
                )
            seen.add(run.key)
        return self

    @classmethod
    def read(cls, path: Path) -> "Study":
        """Raises ConfigurationError naming the file, the key, the value and the remedy."""
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ConfigurationError(f"{path} cannot be read: {error.strerror or error}") from error
        except UnicodeDecodeError as error:
            raise ConfigurationError(f"{path} is not UTF-8 text: save it as such") from error
        return parse_toml(cls, text, str(path))

    def runs(self) -> "Iterator[Run]":
        """Seed by seed, so that a study that is cut off has as many seeds of each set-up as possible."""
        points: list[dict[str, Value]] = [
            dict(zip(self.grid, values, strict=True)) for values in itertools.product(*self.grid.values())
        ]
        points = [point for point in points if not self._counts_nobody_again(point)]
        if self.variants:
            points = [{**point, VARIANT: name} for point in points for name in self.variants]
        for seed, point in itertools.product(self.seeds, points):
            own = self.variants.get(str(point.get(VARIANT)), {}).get(_SETUP)
            for setup in self.setups if own is None else (str(own),):
                yield Run(study=self, setup=setup, seed=seed, point=point)

    def pupils(self, silos: Iterable[SiloName]) -> list[SiloName]:
        """Those of `silos` that train without labels in some row."""
        named = [
            name
            for run in self.runs()
            for name in SemiSupervisedSection.model_validate({"unlabelled": run.values.get(_UNLABELLED, [])}).unlabelled
        ]
        return [silo for silo in silos if is_among(silo, named)]

    def _counts_nobody_again(self, point: Mapping[str, Value]) -> bool:
        """Where nobody is hostile, their number says nothing: only its first value is run."""
        if self.hostile is None or _COUNT not in point or point[_COUNT] == self.grid[_COUNT][0]:
            return False
        return point.get(_ATTACK, self.hostile.attack) == NOBODY


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    study: Study
    setup: str
    seed: int
    point: Mapping[str, Value]

    @property
    def values(self) -> dict[str, object]:
        """Of the plan: the study's, the set-up's, the variant's, the grid's, and what the study has for this set-up
        alone; later ones win."""
        variant = self.study.variants.get(str(self.point.get(VARIANT)), {})
        variant = {key: value for key, value in variant.items() if key != _SETUP}
        point = {key: value for key, value in self.point.items() if key not in (_ATTACK, _COUNT, VARIANT)}
        own = self.study.only.get(self.setup, {})
        return {**self.study.plan, **SETUPS[self.setup].values, **variant, **point, **own}

    @property
    def hostility(self) -> Hostility | None:
        """Which silos do what; None where all are honest."""
        return None if self.study.hostile is None else self.study.hostile.at(self.point).hostility

    @property
    def at(self) -> str:
        """The point of the grid, to stand behind a name; empty without a grid."""
        return "".join(f", {key} = {value}" for key, value in self.point.items())

    @property
    def key(self) -> str:
        """Tells this run from every other of any study: of all that its result depends on but the data."""
        # What a study does not say is not in its key: keys that this file has learnt since leave those of earlier
        # results alone.
        start = self.study.start.model_dump(exclude_defaults=True)
        content = [self.setup, self.seed, self.values, start, self.study.preset, self.study.at_most]
        content += ["lower case"] * self.study.lower_case
        content += [list(self.study.scored)] if self.study.scored else []
        content += [self.study.pseudo_labels] if self.study.pseudo_labels else []
        if self.study.hostile is not None:  # such a run is scored otherwise, whoever is hostile in it
            hostility = self.hostility
            content.append([] if hostility is None else [hostility.attack.name, *hostility.silos])
        return f"{self.setup}-{self.seed}-{digest_of(canonical_json(content))[:12]}"
