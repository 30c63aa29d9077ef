"""A training that was killed and went on gives what an undisturbed one gives, bit for bit; a checkpoint never does
harm."""

import json
import os
import signal
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

from lorica.demo.processes import environment
from silo_agent.rounds.update import TrainingStopped
from silo_agent.training.checkpoint import CheckpointFile, TrainingIdentity, TrainingState, training_identity
from silo_agent.training.data.batches import EncodedExamples
from silo_agent.training.loss_log import LossLog
from silo_wire.canonical import Digest
from tests.support.checkpointed_training import EPOCHS, PAIRS, STEPS_PER_EPOCH, SiloFiles, settings_of
from tests.support.warm_processes import WarmProcesses

pytestmark = pytest.mark.slow

STEPS = EPOCHS * STEPS_PER_EPOCH
CPU = torch.device("cpu")
SETTINGS: list[dict[str, Any]] = [
    {"optimizer": "adamw"},
    {"optimizer": "adafactor"},
    {
        "optimizer": "adamw",
        "fedprox_mu": 0.0,
        "gradient_accumulation": 1,
        "learning_rate_schedule": "constant",
        "loss_reduction": "logged",
    },
    {"optimizer": "adafactor", "precision": "bfloat16", "max_grad_norm": 0.0, "loss_reduction": "as_published"},
    {"teacher": "ema"},
    {"teacher": "mlm"},
]


class Watched:
    """One training of `silo`: what it did and what it told."""

    def __init__(self, silo: SiloFiles, *, stop_after: int | None = None, **how: Any) -> None:
        self.steps: list[tuple[float, float]] = []
        self.notices: list[tuple[str, str]] = []
        trainer = how.pop("trainer", None) or silo.trainer()
        torch.manual_seed(
            len(list(silo.checkpoint.parent.iterdir()))
        )  # the process's own random state is of no account
        try:
            self.summary = silo.train(
                trainer,
                on_progress=lambda fraction, loss: self.steps.append((fraction, loss)),
                on_notice=lambda event, detail: self.notices.append((event, detail)),
                should_stop=lambda: len(self.steps) == stop_after,
                **how,
            ).summary
        except TrainingStopped:
            self.summary = None
        self.update = silo.update.read_bytes() if self.summary else b""

    @property
    def events(self) -> list[str]:
        return [event for event, _ in self.notices]


def unhurried(summary: Any) -> Any:
    return replace(summary, seconds=0.0)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Watched]:
    """The same training without a break, made once for each plan."""

    @cache
    def of_plan(training: tuple[tuple[str, Any], ...]) -> Watched:
        return Watched(SiloFiles(tmp_path_factory.mktemp("undisturbed"), **dict(training)))

    return lambda **training: of_plan(tuple(sorted(training.items())))


# ---- going on -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("training", SETTINGS, ids=lambda training: " ".join(map(str, training.values())))
def test_a_training_that_goes_on_is_the_undisturbed_one_bit_for_bit(
    tmp_path: Path, undisturbed: Callable[..., Watched], training: dict[str, Any]
) -> None:
    """Stopped in its second epoch and, gone on, in its third; dropout is on, and loss windows reach over epochs."""
    whole = undisturbed(**training)
    per_epoch, silo = len(whole.steps) // EPOCHS, SiloFiles(tmp_path / "silo", **training)
    first = Watched(silo, stop_after=per_epoch + 1)
    second = Watched(silo, stop_after=per_epoch + 1)
    third = Watched(silo)
    assert [first.summary, second.summary] == [None, None]
    assert first.steps == whole.steps[: per_epoch + 1]
    assert second.steps == whole.steps[per_epoch : 2 * per_epoch + 1]
    assert third.steps == whole.steps[2 * per_epoch :]
    assert third.update == whole.update
    assert unhurried(third.summary) == unhurried(whole.summary)
    assert [first.events, second.events, third.events] == [[], ["training-resumed"], ["training-resumed"]]
    assert third.notices[0][1] == f"after epoch 2, optimizer step {2 * per_epoch}"


def test_the_seconds_of_all_processes_are_counted_but_not_those_between_them(tmp_path: Path) -> None:
    """Two epochs of 4 steps, a clock that is read once at the start, at each checkpoint and at the end."""
    silo = SiloFiles(tmp_path / "silo", epochs=2)

    def clocked(*readings: float) -> Any:
        trainer = silo.trainer()
        trainer._clock = iter(readings).__next__
        return trainer

    Watched(silo, stop_after=STEPS_PER_EPOCH, trainer=clocked(10.0, 17.0))
    assert Watched(silo, trainer=clocked(500.0, 502.5)).summary.seconds == 9.5


def test_another_attempt_of_the_round_goes_on_too(tmp_path: Path) -> None:
    """The same plan, round, silo and model make the same training, whatever the attempt."""
    silo = SiloFiles(tmp_path / "silo")
    first, again = Watched(silo), Watched(silo)
    assert len(again.steps) == STEPS_PER_EPOCH
    assert again.update == first.update


def test_one_epoch_leaves_no_checkpoint_and_the_last_of_several_adds_none(tmp_path: Path) -> None:
    silo = SiloFiles(tmp_path / "one", epochs=1)
    Watched(silo)
    assert not silo.checkpoint.exists()
    silo = SiloFiles(tmp_path / "two", epochs=2)
    Watched(silo, stop_after=STEPS_PER_EPOCH)
    after_the_first = silo.checkpoint.stat().st_mtime_ns
    Watched(silo)
    assert silo.checkpoint.stat().st_mtime_ns == after_the_first


def test_it_is_a_private_safetensors_file_of_everything_but_the_model(tmp_path: Path) -> None:
    silo = SiloFiles(tmp_path / "silo", optimizer="adafactor")
    Watched(silo)
    assert stat.S_IMODE(silo.checkpoint.stat().st_mode) == 0o600
    assert sorted(path.name for path in silo.checkpoint.parent.iterdir()) == ["model", "round.checkpoint", "update"]
    with safe_open(silo.checkpoint, "pt") as file:
        names = set(file.keys())
        parameters = sum(file.get_tensor(name).numel() for name in names if name.startswith("parameter."))
        content = json.loads(file.metadata()["checkpoint"])
    assert parameters == silo.bundle.layout.parameters
    assert {"optimizer.0.exp_avg_sq_row", "random.order", "random.cpu", "digest"} <= names
    assert (content["epochs"], content["steps"]) == (2, 2 * STEPS_PER_EPOCH)
    assert content["training"]["plan"] == silo.bundle.plan.digest


# ---- kill -9 ------------------------------------------------------------------------------------------------------


class Process:
    """`tests.support.checkpointed_training`, run to its end."""

    def __init__(self, folder: Path, optimizer: str, fault: str = "none", *, within: tuple[str, ...] = ()) -> None:
        module, arguments = "tests.support.checkpointed_training", [str(folder), optimizer, fault]
        if within:
            self.returncode, output = within_command(within, module, arguments)
        else:
            with WarmProcesses(folder.parent) as processes:
                processes.start("training", module, arguments)
                self.returncode, output = processes.result("training", 250)
            (folder.parent / "training.log").unlink()
        records = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        self.errors = "\n".join(line for line in output.splitlines() if not line.startswith("{"))
        self.steps = [(record["fraction"], record["loss"]) for record in records if "fraction" in record]
        self.notices = [(record["notice"], record["detail"]) for record in records if "notice" in record]
        self.steps_before_notices = [
            sum("fraction" in earlier for earlier in records[:index])
            for index, record in enumerate(records)
            if "notice" in record
        ]
        self.summary = next((record["summary"] for record in records if "summary" in record), None)


def within_command(within: tuple[str, ...], module: str, arguments: list[str]) -> tuple[int, str]:
    """The exit code and the output of a process that another command starts."""
    done = subprocess.run(
        [*within, sys.executable, "-m", module, *arguments],
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=250,
        check=False,
    )
    return done.returncode, done.stdout


@pytest.mark.parametrize(
    ("optimizer", "fault", "done_before", "kept"),
    [
        ("adamw", f"step:{STEPS_PER_EPOCH + 2}", STEPS_PER_EPOCH + 2, STEPS_PER_EPOCH),
        ("adafactor", f"step:{STEPS_PER_EPOCH + 2}", STEPS_PER_EPOCH + 2, STEPS_PER_EPOCH),
        ("ema", f"step:{STEPS_PER_EPOCH + 2}", STEPS_PER_EPOCH + 2, STEPS_PER_EPOCH),
        ("adamw", "writing:1", STEPS_PER_EPOCH, 0),
        ("adamw", "writing:2", 2 * STEPS_PER_EPOCH, STEPS_PER_EPOCH),
        ("adamw", "trained", STEPS, 2 * STEPS_PER_EPOCH),
    ],
)
def test_a_killed_process_and_its_successor_do_what_an_undisturbed_one_does(
    tmp_path: Path, undisturbed: Callable[..., Watched], optimizer: str, fault: str, done_before: int, kept: int
) -> None:
    whole = undisturbed(**settings_of(optimizer))
    folder = tmp_path / "silo"
    killed = Process(folder, optimizer, fault)
    assert (killed.returncode, len(killed.steps)) == (-signal.SIGKILL, done_before), killed.errors
    assert not (folder / "update").exists()
    successor = Process(folder, optimizer)
    assert successor.returncode == 0, successor.errors
    assert [event for event, _ in successor.notices] == (["training-resumed"] if kept else [])
    assert killed.steps == whole.steps[:done_before]
    assert successor.steps == whole.steps[kept:], "the epochs that the checkpoint holds are not repeated"
    assert (folder / "update").read_bytes() == whole.update
    assert {**successor.summary, "seconds": 0} == {**asdict(whole.summary), "seconds": 0}
    assert not (folder / "round.checkpoint.part").exists()


# ---- checkpoints of no use ------------------------------------------------------------------------------------------


IDENTITY = TrainingIdentity(
    plan=Digest("0" * 64),
    round=3,
    silo="clinic",
    model=Digest("1" * 64),
    examples=Digest("2" * 64),
    device="cpu",
    threads=2,
    torch="2.13.0",
    transformers="5.0.0",
)
STATE = TrainingState(
    epochs=1,
    steps=5,
    seconds=1.5,
    log=LossLog(2, [3.0, 2.5], 3, 1.25, 7),
    parameters=[torch.arange(6.0).reshape(2, 3), torch.tensor([0.1]).bfloat16()],
    optimizer={0: {"step": 5, "RMS": torch.tensor(0.3), "exp_avg": torch.ones(2, 3)}, 1: {}},
    random={"cpu": torch.get_rng_state()},
    kept=[torch.arange(4.0), torch.tensor([[0.25]])],
)


def checkpoint_file(
    path: Path, notices: list[str] | None = None, every_s: float = 0.0, **changes: Any
) -> CheckpointFile:
    told: list[str] = [] if notices is None else notices
    return CheckpointFile(
        path,
        replace(IDENTITY, **changes),
        update_bytes=100,
        notice=lambda event, detail: told.append(f"{event}: {detail}"),
        every_s=every_s,
    )


def test_one_that_is_not_worth_enough_training_is_not_written(tmp_path: Path) -> None:
    """10 seconds from the beginning, from the one before, or from the one that was gone on from."""

    def saved(file: CheckpointFile, *seconds: float) -> list[float]:
        found = []
        for number, each in enumerate(seconds):
            file.save(replace(STATE, epochs=number + 1, seconds=each))
            state = checkpoint_file(tmp_path / "c").load(CPU)
            found.append(state.seconds if state else 0.0)
        return found

    assert saved(checkpoint_file(tmp_path / "c", every_s=10.0), 4, 9, 12, 17, 23) == [0, 0, 12, 12, 23]
    again = checkpoint_file(tmp_path / "c", every_s=10.0)
    assert again.load(CPU) is not None
    assert saved(again, 30, 33) == [23, 33]


def test_what_was_saved_is_loaded(tmp_path: Path) -> None:
    notices: list[str] = []
    checkpoint_file(tmp_path / "c").save(STATE)
    state = checkpoint_file(tmp_path / "c", notices).load(CPU)
    assert state is not None
    assert (state.epochs, state.steps, state.seconds, state.log) == (1, 5, 1.5, STATE.log)
    for ours, theirs in zip(state.parameters, STATE.parameters, strict=True):
        assert (ours.dtype, ours.shape) == (theirs.dtype, theirs.shape)
        assert torch.equal(ours, theirs)
    assert state.optimizer[0]["step"] == 5
    assert torch.equal(torch.as_tensor(state.optimizer[0]["RMS"]), torch.tensor(0.3))
    assert torch.equal(torch.as_tensor(state.optimizer[0]["exp_avg"]), torch.ones(2, 3))
    assert state.optimizer[1] == {}
    assert torch.equal(state.random["cpu"], STATE.random["cpu"])
    assert all(map(torch.equal, state.kept, STATE.kept))
    assert len(state.kept) == len(STATE.kept)
    assert notices == ["training-resumed: after epoch 1, optimizer step 5"]


def test_nothing_there_is_nothing_to_tell(tmp_path: Path) -> None:
    notices: list[str] = []
    assert checkpoint_file(tmp_path / "c", notices).load(CPU) is None
    assert notices == []


@pytest.mark.parametrize("field", [field.name for field in fields(TrainingIdentity)])
def test_one_of_another_training_is_deleted(tmp_path: Path, field: str) -> None:
    notices: list[str] = []
    checkpoint_file(tmp_path / "c").save(STATE)
    other = 7 if isinstance(getattr(IDENTITY, field), int) else "other"
    assert checkpoint_file(tmp_path / "c", notices, **{field: other}).load(CPU) is None
    (notice,) = notices
    assert notice.startswith(f"checkpoint-ignored: {tmp_path / 'c'} is of another training (its {field} is ")
    assert list(tmp_path.iterdir()) == []


@given(data=st.data())
def test_a_damaged_one_is_deleted(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    path = tmp_path_factory.mktemp("damaged") / "c"
    checkpoint_file(path).save(STATE)
    raw = bytearray(path.read_bytes())
    match data.draw(st.sampled_from(["changed", "cut", "longer", "other"])):
        case "changed":
            raw[data.draw(st.integers(0, len(raw) - 1))] ^= data.draw(st.integers(1, 255))
        case "cut":
            del raw[data.draw(st.integers(0, len(raw) - 1)) :]
        case "longer":
            raw += data.draw(st.binary(min_size=1, max_size=80))
        case _:
            raw = bytearray(data.draw(st.binary(max_size=200)))
    path.write_bytes(raw)
    notices: list[str] = []
    assert checkpoint_file(path, notices).load(CPU) is None
    (notice,) = notices
    assert notice.startswith(f"checkpoint-ignored: {path} is ")
    assert list(path.parent.iterdir()) == []


def test_one_that_cannot_be_read_is_done_without(tmp_path: Path) -> None:
    notices: list[str] = []
    (tmp_path / "c").mkdir()
    checkpoint = checkpoint_file(tmp_path / "c", notices)
    assert checkpoint.load(CPU) is None
    checkpoint.save(STATE)
    checkpoint.save(STATE)
    assert [notice.split(":")[0] for notice in notices] == ["checkpoint-ignored", "checkpoint-not-written"]
    assert not (tmp_path / "c.part").exists()


def flipped(silo: SiloFiles) -> None:
    raw = bytearray(silo.checkpoint.read_bytes())
    raw[len(raw) // 2] ^= 1
    silo.checkpoint.write_bytes(raw)


def halved(silo: SiloFiles) -> None:
    os.truncate(silo.checkpoint, silo.checkpoint.stat().st_size // 2)


@pytest.mark.parametrize("damage", [flipped, halved])
def test_after_damage_training_begins_anew_and_ends_the_same(
    tmp_path: Path, undisturbed: Callable[..., Watched], damage: Callable[[SiloFiles], None]
) -> None:
    whole = undisturbed(optimizer="adamw")
    silo = SiloFiles(tmp_path / "silo")
    Watched(silo, stop_after=STEPS_PER_EPOCH + 1)
    damage(silo)
    again = Watched(silo)
    assert again.events == ["checkpoint-ignored"]
    assert again.steps == whole.steps
    assert again.update == whole.update


@pytest.mark.parametrize("other", ["round", "silo", "plan", "data"])
def test_what_belongs_to_other_work_is_not_gone_on_from(tmp_path: Path, other: str) -> None:
    """As many steps, and the same bytes, as where there is no checkpoint."""
    runs = []
    for folder in (tmp_path / "used", tmp_path / "fresh"):
        if folder.name == "used":
            Watched(SiloFiles(folder), stop_after=STEPS_PER_EPOCH + 1)
        silo = SiloFiles(folder, **({"learning_rate": 2e-2} if other == "plan" else {}))
        trainer = silo.trainer(
            "bank" if other == "silo" else "clinic", [*PAIRS[:-1], PAIRS[0]] if other == "data" else PAIRS
        )
        runs.append(Watched(silo, trainer=trainer, round_number=2 if other == "round" else 1))
    used, fresh = runs
    assert (used.events, fresh.events) == (["checkpoint-ignored"], [])
    assert (used.steps, used.update) == (fresh.steps, fresh.update)
    assert len(used.steps) == STEPS


def test_the_identity_covers_the_threads_and_every_token(monkeypatch: pytest.MonkeyPatch) -> None:
    def identity(inputs: list[list[int]], targets: list[list[int]]) -> TrainingIdentity:
        rows = [tuple(np.asarray(row, dtype=np.int32) for row in side) for side in (inputs, targets)]
        examples = EncodedExamples(inputs=rows[0], targets=rows[1], inputs_cut=0, targets_cut=0, targets_with_unknown=0)
        return training_identity(
            plan=Digest("0" * 64), round_number=1, silo="s", model=Digest("1" * 64), examples=examples, device=CPU
        )

    first = identity([[1, 2], [3]], [[4], [5]])
    assert first == identity([[1, 2], [3]], [[4], [5]])
    others = [
        identity([[1], [2, 3]], [[4], [5]]),
        identity([[3], [1, 2]], [[5], [4]]),
        identity([[1, 2], [3]], [[4], [6]]),
    ]
    assert len({first.examples, *(other.examples for other in others)}) == 4
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert identity([[1]], [[1]]).threads == 77
    assert (first.torch, first.device) == (torch.__version__, "cpu")


# ---- full disks -----------------------------------------------------------------------------------------------------


def told_once(notices: list[tuple[str, str]], silo_folder: Path, reason: str) -> None:
    ((event, detail),) = notices
    assert event == "checkpoint-not-written"
    assert detail.startswith(f"{silo_folder / 'round.checkpoint'} cannot be written ({reason}")
    assert detail.endswith("free some space")


def test_a_checkpoint_that_the_disk_refuses_is_done_without(
    tmp_path: Path, undisturbed: Callable[..., Watched]
) -> None:
    """The update is a third of a checkpoint with AdamW's moments: it still fits."""
    whole = undisturbed(optimizer="adamw")
    folder = tmp_path / "silo"
    limited = Process(folder, "adamw", f"file-size:{2 * len(whole.update)}")
    assert limited.returncode == 0, limited.errors
    told_once(limited.notices, folder, "File too large")
    assert (folder / "update").read_bytes() == whole.update
    assert sorted(path.name for path in folder.iterdir()) == ["model", "update"]


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts a file system of its own")
@pytest.mark.parametrize(
    ("sizes", "epochs"),
    [
        pytest.param(3.5, 1, id="the first would leave no room"),
        pytest.param(6.5, 2, id="a second beside the first would leave no room"),
    ],
)
def test_a_checkpoint_leaves_room_for_the_update(
    tmp_path: Path, undisturbed: Callable[..., Watched], sizes: float, epochs: int
) -> None:
    """On a file system with room for `sizes` times the model beside the round model; a checkpoint takes three."""
    whole = undisturbed(optimizer="adamw")
    disk = tmp_path / "disk"
    disk.mkdir()
    script = (
        f'mount -t tmpfs -o size={int((1 + sizes) * len(whole.update))} tmpfs {disk} && "$@" && ls {disk}/silo >&2 '
        f"&& cp {disk}/silo/update {tmp_path}"
    )
    limited = Process(disk / "silo", "adamw", within=("unshare", "--mount", "sh", "-c", script, "sh"))
    assert limited.returncode == 0, limited.errors
    told_once(limited.notices, disk / "silo", "")
    assert limited.steps_before_notices == [epochs * STEPS_PER_EPOCH]
    assert (tmp_path / "update").read_bytes() == whole.update
    assert limited.errors.split() == ["model", "update"]
