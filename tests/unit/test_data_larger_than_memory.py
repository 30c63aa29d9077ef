"""A silo's files of any size: read once, bounded in memory, and trained on with the bits that memory gives; whatever
becomes of the files meanwhile."""

import gzip
import json
import os
import tracemalloc
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.tiny_t5 import CORPUS, SCHEMA, bundle_of, random_model, write_model

from lorica_security.errors import DataError
from silo_agent.edges.workshop.silo_sources import SiloSources
from silo_agent.settings import Settings
from silo_agent.training import silo_trainer
from silo_agent.training.data import text_to_sql_data
from silo_agent.training.data.batches import EncodedExamples, shuffled_batches
from silo_agent.training.data.data_card import data_card
from silo_agent.training.data.spool import SpoolPlace
from silo_agent.training.data.stored import Stored
from silo_agent.training.data.text_to_sql_data import (
    KEPT_BAD_LINES,
    DataLimits,
    Example,
    load_silo_data,
    read_splits,
)
from silo_agent.training.device import DeviceSettings
from silo_agent.training.silo_trainer import SiloTrainer

CPU = DeviceSettings(device="cpu", threads=1)
LINES = 30
NOTHING = SpoolPlace(None, 0)
"""Nothing stays in memory."""


def line(number: int, **changes: object) -> bytes:
    entry = {
        "id": f"e-{number}",
        "question": CORPUS[number % len(CORPUS)],
        "query": f"select {CORPUS[number * 7 % len(CORPUS)]}",
        "db_id": "places",
        "patient": number // 3,
        **changes,
    }
    return json.dumps(entry).encode() + b"\n"


def written(folder: Path, train: bytes | None = None) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "schema.json").write_bytes(SCHEMA.to_json())
    (folder / "train.jsonl").write_bytes(train or b"".join(map(line, range(LINES))))
    (folder / "dev.jsonl").write_bytes(b"".join(map(line, range(10_000, 10_004))))
    for path in folder.iterdir():
        os.utime(path, (1, 1))  # not of this very tick of the file system's clock
    return folder


def in_memory(encoded: EncodedExamples) -> EncodedExamples:
    """As tuples, which is what there was before there were spools."""
    return replace(
        encoded,
        inputs=tuple(encoded.inputs),
        targets=tuple(encoded.targets),
        units=None if encoded.units is None else tuple(encoded.units),
        other_inputs=tuple(map(tuple, encoded.other_inputs)),
    )


# --- the same bits

TRAINING = {"epochs": 2, "batch_size": 4, "max_input_tokens": 40, "max_output_tokens": 12, "dropout": 0.1}
PRIVATE: Mapping[str, Any] = {
    "training": {**TRAINING, "epochs": 1, "dropout": 0.0},
    "privacy": {
        "level": "record",
        "noise_multiplier": 3.0,
        "steps": 2,
        "expected_batch_size": 6,
        "augmentations": 2,
        "unit_field": "patient",
    },
    "evaluation": {"every": 0, "initial": False, "last": False},
}
UNLABELLED: Mapping[str, Any] = {
    "training": TRAINING,
    "aggregation": {"weighting": "equal", "momentum": 0.0},
    "semi_supervised": {"unlabelled": ["lab"], "order": "together", "teacher": "mlm"},
}
PLANS: Mapping[str, Mapping[str, Any]] = {
    "plain": {"training": {**TRAINING, "dropout": 0.1}},
    "by length": {"training": {**TRAINING, "length_grouping": 3, "gradient_accumulation": 2}},
    "private, by patient, with views": PRIVATE,
    "without labels": UNLABELLED,
}


def trained(folder: Path, work: Path, plan: Mapping[str, Any], place: SpoolPlace, how: Callable[..., Any]) -> str:
    """The digest of the update, which `how` had a hand in."""
    work.mkdir()
    private = plan is PRIVATE
    data = load_silo_data(
        folder,
        DataLimits(spool=place),
        unit_field="patient" if private else "",
        private=private,
        labelled=plan is not UNLABELLED,
    )
    model = random_model(3, dropout_rate=plan["training"]["dropout"])
    trainer = SiloTrainer(bundle_of(model, **plan), data, "lab", CPU, own_entropy=bytes(32))
    how(trainer)
    manifest = write_model(model, work / "model")
    made = trainer.train(round_number=1, model_path=work / "model", model=manifest, update_path=work / "update")
    return str(made.manifest.digest)


@pytest.mark.parametrize("name", PLANS)
def test_an_update_has_the_same_bits_from_memory_from_a_file_and_when_its_lines_are_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.setattr(silo_trainer.secrets, "token_bytes", lambda size: bytes(range(size)))
    plan, folder = PLANS[name], written(tmp_path / "data")
    gone = written(tmp_path / "gone")

    def from_tuples(trainer: SiloTrainer) -> None:
        trainer._encoded["train"] = in_memory(trainer.encoded("train"))

    def from_a_file(trainer: SiloTrainer) -> None:
        (gone / "train.jsonl").write_bytes(b"{broken\n")
        assert isinstance(inputs := trainer.encoded("train").inputs, Stored)
        assert inputs.records.in_file

    wanted = trained(folder, tmp_path / "tuples", plan, SpoolPlace(), from_tuples)
    assert trained(folder, tmp_path / "memory", plan, SpoolPlace(), lambda trainer: None) == wanted
    assert trained(gone, tmp_path / "file", plan, SpoolPlace(tmp_path / "spool", 0), from_a_file) == wanted


def as_before(
    examples: EncodedExamples, *, batch_size: int, generator: torch.Generator, grouped: int
) -> list[list[int]]:
    """The order of batches as it was made of lists."""

    def key(index: int) -> tuple[int, int]:
        return len(examples.targets[index]), len(examples.inputs[index])

    order: list[int] = torch.randperm(len(examples), generator=generator).tolist()
    if grouped == 1:
        return [order[start : start + batch_size] for start in range(0, len(order), batch_size)]
    batches: list[list[int]] = []
    for start in range(0, len(order), grouped * batch_size):
        ordered = sorted(order[start : start + grouped * batch_size], key=key, reverse=True)
        batches += [ordered[at : at + batch_size] for at in range(0, len(ordered), batch_size)]
    return [batches[at] for at in torch.randperm(len(batches), generator=generator).tolist()]


@given(
    lengths=st.lists(st.tuples(st.integers(1, 4), st.integers(1, 4)), min_size=1, max_size=40),
    batch_size=st.integers(1, 7),
    grouped=st.integers(1, 5),
    seed=st.integers(0, 9),
    begin=st.integers(-9, 9),
    step=st.sampled_from([1, 3, -2]),
)
def test_the_order_of_batches_is_what_it_was_as_lists(
    lengths: list[tuple[int, int]], batch_size: int, grouped: int, seed: int, begin: int, step: int
) -> None:
    rows = [tuple(np.zeros(length[side], dtype=np.int32) for length in lengths) for side in (0, 1)]
    examples = EncodedExamples(inputs=rows[0], targets=rows[1], inputs_cut=0, targets_cut=0, targets_with_unknown=0)
    how = {"batch_size": batch_size, "grouped": grouped}
    ours, theirs = torch.Generator().manual_seed(seed), torch.Generator().manual_seed(seed)
    for _ in range(2):
        batches = shuffled_batches(examples, generator=ours, **how)
        wanted = as_before(examples, generator=theirs, **how)
        assert list(batches) == wanted
        assert batches[begin::step] == wanted[begin::step]
        assert batches[-1] == wanted[-1]


@given(
    examples=st.lists(
        st.builds(
            Example,
            id=st.text(),
            question=st.text(),
            query=st.text(),
            db_id=st.text(),
            unit=st.text(),
            counted=st.none() | st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9))).map(tuple),
        ),
        max_size=5,
    )
)
def test_any_example_comes_back_from_a_spool_as_it_was(examples: list[Example]) -> None:
    for number, example in enumerate(examples):
        packed = text_to_sql_data._packed(number, example)
        assert text_to_sql_data._unpacked(packed) == (number, example)


# --- bounded


def test_reading_and_tokenising_take_memory_that_does_not_grow_with_the_lines(tmp_path: Path) -> None:
    """Beyond a few bytes a line: the bench has the figures of a whole process."""
    peaks = []
    for lines in (500, 4_000):
        text = " ".join(CORPUS)[:400]
        folder = written(tmp_path / str(lines), b"".join(line(n, question=f"{n} {text}") for n in range(lines)))
        tracemalloc.start()
        data = load_silo_data(folder, DataLimits(spool=SpoolPlace(tmp_path / "spool", 1 << 16)))
        data_card(data)
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        size = (folder / "train.jsonl").stat().st_size
    assert peaks[1] - peaks[0] < 3_500 * 100 < size / 4


def test_bad_lines_are_all_counted_and_the_first_of_them_told(tmp_path: Path) -> None:
    """Not UTF-8, too long, and an id that stands twice: in the order of their lines."""
    lines = list(map(line, range(4_000)))
    for at in range(1, 3_000, 2):
        lines[at] = b'{"id": "\xff"}\n'
    lines[0] = b'{"id": "' + b"x" * 20_000 + b'"}\n'
    lines[4] = lines[2]
    lines[3_500] = lines[3_499]
    folder = written(tmp_path / "data", b"".join(lines))
    limits = DataLimits(max_bad_fraction=0.5, max_line_bytes=10_000, spool=NOTHING)
    data = load_silo_data(folder, limits)
    assert (len(data.bad_lines), data.more_bad_lines) == (KEPT_BAD_LINES, 1_503 - KEPT_BAD_LINES)
    assert [bad.line for bad in data.bad_lines[:4]] == [1, 2, 4, 5]
    assert data.bad_lines[3].reason == "id 'e-2' stands already at train.jsonl:3"
    assert [bad.line for bad in data.bad_lines] == sorted(bad.line for bad in data.bad_lines)
    assert len(data.train) == 4_000 - 1_503
    assert data.train[-1].id == "e-3999"
    (tmp_path / "silo.toml").write_text(f'[data]\nfolder = "{folder}"\nmax_bad_lines_share = 0.5\n')
    told = SiloSources(Settings.read(tmp_path / "silo.toml"), tmp_path / "scratch").summary()
    assert (told.bad_lines, len(told.problems)) == (1_503, 20)
    with pytest.raises(DataError, match=r"train.jsonl has 1503 bad lines of 4000, .* the first: line 1: longer than"):
        load_silo_data(folder, replace(limits, max_bad_fraction=0.3))


# --- files that are none, or change


def test_what_is_no_ordinary_file_is_refused_at_once_and_a_link_to_one_is_read(tmp_path: Path) -> None:
    folder = written(tmp_path / "data")
    train = folder / "train.jsonl"
    train.rename(tmp_path / "elsewhere.jsonl")
    for make in (os.mkfifo, os.mkdir, lambda path: os.symlink("/dev/zero", path)):
        make(train)
        with pytest.raises(DataError, match=r"train\.jsonl is no ordinary file"):
            load_silo_data(folder)
        train.rmdir() if train.is_dir() else train.unlink()
    train.symlink_to("nowhere")
    with pytest.raises(DataError, match=r"train\.jsonl is missing"):
        load_silo_data(folder)
    train.unlink()
    train.symlink_to(tmp_path / "elsewhere.jsonl")
    assert len(load_silo_data(folder).train) == LINES


def appended(path: Path) -> None:
    with path.open("ab") as file:
        file.write(line(999))


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size // 2)


def written_over(path: Path) -> None:
    """In place, with as many bytes."""
    with path.open("r+b") as file:
        file.write(line(999))


def replaced(path: Path) -> None:
    """As an export should: a whole new file under the name of the old one."""
    new = path.with_name("new")
    new.write_bytes(line(999))
    new.replace(path)


EDITS = {
    "appended to": appended,
    "cut": cut,
    "written over": written_over,
    "replaced": replaced,
    "deleted": Path.unlink,
}


@given(name=st.sampled_from(sorted(EDITS)), at=st.integers(0, LINES - 1), packed=st.booleans())
def test_attack_a_file_that_changes_while_it_is_read_is_refused_or_read_as_it_was(
    tmp_path_factory: pytest.TempPathFactory, name: str, at: int, packed: bool
) -> None:
    folder = written(tmp_path_factory.mktemp("data"))
    path = folder / "train.jsonl"
    if packed:
        path.with_name("train.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
        path = path.with_name("train.jsonl.gz")
        os.utime(path, (1, 1))
    read = 0

    def form(value: Mapping[str, object], unit_field: str) -> Example:
        nonlocal read
        if read == at:
            EDITS[name](path)
        read += 1
        return Example(str(value["id"]), "a", "b", "c")

    def reading() -> Any:
        return read_splits(folder, DataLimits(spool=NOTHING), form, unit_field="", private=False, labelled=True)

    if name in ("replaced", "deleted"):
        assert [example.id for example in reading().train] == [f"e-{number}" for number in range(LINES)]
        return
    with pytest.raises(DataError, match=rf"{path.name} (was written to while it was read|cannot be read)"):
        reading()
