"""Which split each line is of: as the source says it, or so that no template, or no group, is in two of them.

The same lines are divided in the same way wherever and in whatever order they are read: groups are taken by the hash of
their name.
"""

import hashlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from lorica_security.errors import ConfigurationError, DataError
from silo_agent.edges.data_import.examples import Imported
from silo_agent.edges.data_import.findings import shortened
from silo_agent.edges.data_import.templates import Templates
from silo_agent.training.data.text_to_sql_data import SPLITS, Split

SOURCE, TEMPLATE = "source", "template"
HELD_OUT: tuple[Split, ...] = ("dev", "test")


@dataclass(frozen=True, slots=True, kw_only=True)
class Division:
    """`how` says in words how the lines were divided, `leaks` what of dev and test is in train all the same."""

    splits: Mapping[Split, Sequence[Imported]]
    how: str
    leaks: tuple[str, ...]


def divide(examples: Sequence[Imported], *, by: str | None, shares: Mapping[Split, float]) -> Division:
    """`by` is SOURCE, TEMPLATE or a key of lines; None is SOURCE where the source has splits, else TEMPLATE.

    `shares` are those of dev and test where these are made. Raises ConfigurationError or DataError where they cannot
    be.
    """
    form, templates = examples[0].form, Templates()
    group = {
        example.id: templates.of(example.query) if form.databases else _words(example.question) for example in examples
    }
    what = "template of the SQL" if form.databases else form.question
    of_source = any(example.split for example in examples)
    by = by or (SOURCE if of_source else TEMPLATE)
    if by == SOURCE:
        splits, how = _as_source(examples, group, of_source, shares, what)
    elif by == TEMPLATE:
        splits = _divided(examples, lambda example: group[example.id], shares, what.split()[0])
        how = f"by {what} ({len(set(group.values())):,} {'templates' if form.databases else 'of them'})"
    elif by in examples[0].values:
        splits = _divided(examples, lambda example: example.values[by], shares, by)
        how = f"by {by} ({len({example.values[by] for example in examples}):,} of them)"
    else:
        known = ", ".join((SOURCE, TEMPLATE, *examples[0].values))
        raise ConfigurationError(
            f"--split-by {shortened(by)} is none of {known}: correct it, or map that key with --map"
        )
    return Division(splits=splits, how=how, leaks=tuple(_leaks(splits, group)))


def _as_source(
    examples: Sequence[Imported], group: Mapping[str, str], of_source: bool, shares: Mapping[Split, float], what: str
) -> tuple[dict[Split, list[Imported]], str]:
    if not of_source:
        raise ConfigurationError(
            "--split-by source: no name of a file says whether it is train, dev or test; leave the option out"
        )
    splits = {name: [example for example in examples if example.split == name] for name in SPLITS}
    if not splits["train"]:
        raise DataError("the source has no train split: give --split-by template to divide all of its lines anew")
    if splits["dev"]:
        return splits, "as the source is"
    made = _divided(splits["train"], lambda example: group[example.id], {"dev": shares["dev"]}, what.split()[0])
    return {**splits, **made}, f"as the source is; it has no dev, which was taken from train by {what}"


def _divided(
    examples: Sequence[Imported], group_of: Callable[[Imported], str], shares: Mapping[Split, float], what: str
) -> dict[Split, list[Imported]]:
    """Groups into dev and test as far as they fit, all others into train."""
    groups: defaultdict[str, list[Imported]] = defaultdict(list)
    for example in examples:
        groups[group_of(example)].append(example)
    left = sorted(groups, key=_hash)
    splits: dict[Split, list[Imported]] = {}
    for split in HELD_OUT:
        if not (share := shares.get(split, 0.0)):
            continue
        taken = _fitting(left, groups, max(1, round(share * len(examples))))
        if not taken and len(left) > 1:
            taken = [min(left, key=lambda name: (len(groups[name]), _hash(name)))]
        splits[split] = [example for name in taken for example in groups[name]]
        left = [name for name in left if name not in set(taken)]
    if not splits.get("dev"):
        raise DataError(
            f"{len(examples):,} lines cannot be divided by {what}: all have one {what}; give --split-by id to "
            "divide them line by line, or a KEY that they differ in"
        )
    chosen = {name: {example.id for example in lines} for name, lines in splits.items()}
    held_out = set().union(*chosen.values())
    in_order: dict[Split, list[Imported]] = {"train": [example for example in examples if example.id not in held_out]}
    for name, ids in chosen.items():
        in_order[name] = [example for example in examples if example.id in ids]
    return in_order


def _fitting(names: Sequence[str], groups: Mapping[str, Sequence[Imported]], most: int) -> list[str]:
    taken, lines = [], 0
    for name in names:
        if lines + len(groups[name]) <= most:
            taken.append(name)
            lines += len(groups[name])
    return taken if len(taken) < len(names) else taken[:-1]


def _hash(name: str) -> bytes:
    return hashlib.sha256(name.encode()).digest()


def _leaks(splits: Mapping[Split, Sequence[Imported]], group: Mapping[str, str]) -> Iterator[str]:
    train = splits["train"]
    questions = {_words(example.question) for example in train}
    templates = {group[example.id] for example in train}
    for split in HELD_OUT:
        lines = splits.get(split, ())
        if same := sum(_words(example.question) in questions for example in lines):
            yield f"{same:,} of {len(lines):,} {train[0].form.question}s of {split} stand in train too"
        if train[0].form.databases and (same := sum(group[example.id] in templates for example in lines)):
            yield f"{same:,} of {len(lines):,} questions of {split} have SQL of a template that train has too"
        for key in train[0].more if train else ():
            values = {example.more[key] for example in train}
            if same := len({example.more[key] for example in lines} & values):
                yield f"values of {key} that are in {split} and in train: {same:,}"


def _words(question: str) -> str:
    return " ".join(question.casefold().split())
