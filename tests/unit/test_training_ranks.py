"""Two ranks with at most two batches a step come to what one process comes to, bit for bit; what ranks cannot do yet
is refused by name.

Ranks are threads here, which meet by the same gloo; tests/integration/test_rank_processes.py has them as processes.
"""

import os
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path
from socket import gethostname
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.run import get_args_parser

from lorica_security.errors import ConfigurationError, LoricaError, PolicyRefusal, StateError, StorageError
from silo_agent.edges.ranks import frames
from silo_agent.edges.ranks.launching import (
    Place,
    check_launch,
    device_of_rank,
    heard_on,
    place_of,
    rank_command,
    rank_environment,
)
from silo_agent.edges.ranks.rank_group import (
    News,
    RankGroup,
    _ended,
    _kill_if_same,
    _kill_session,
    require_alike,
    require_versions,
    until_next_look,
)
from silo_agent.edges.ranks.rank_process import GONE, _Bench, _require_private
from silo_agent.policy.rank_limits import rank_refusals
from silo_agent.policy.silo_policy import SiloPolicy
from silo_agent.rounds.update import TrainingStopped
from silo_agent.service.ports import TrainedUpdate, WorkCancelled
from silo_agent.service.refusals import RULES
from silo_agent.settings import Settings, TrainingSection
from silo_agent.training.checkpoint import examples_digest
from silo_agent.training.device import DeviceSettings
from silo_agent.training.ranks.ranks import ALONE, Alone, AnotherRankFailed, Ranks, Together
from silo_agent.training.silo_trainer import LocalUpdate, SiloTrainer
from silo_agent.training.update.parts import part_of
from silo_wire.manifest import Layout, Manifest, TensorSpec
from silo_wire.messages import TrainingSummary
from silo_wire.plans.plan import Plan, PlanBundle
from tests.support.rank_silo import PAIRS, SILO, TRAINING, WIDE, RankSilo, in_ranks
from tests.support.tiny_t5 import bundle_of, random_model, silo_data, write_model
from tests.unit.test_training_private_trainer import examples_of

NO_SCORES = {"every": 0, "initial": False, "last": False}
PRIVATE_TRAINING = {"max_grad_norm": 1.0, "dropout": 0.0, "epochs": 1, "gradient_accumulation": 1, "fedprox_mu": 0.0}
PRIVATE_SECTIONS: dict[str, Any] = {
    "evaluation": NO_SCORES,
    "privacy": {"level": "record", "noise_multiplier": 3.0, "steps": 4},
}
PRIVATE: dict[str, Any] = {"training": PRIVATE_TRAINING, **PRIVATE_SECTIONS}
ASKED_OF_BUNDLES = ("layout", "parameters_in_memory", "update_bytes", "base_layout")


class Round:
    """One silo's round below `folder`."""

    def __init__(
        self, folder: Path, wire: str = "float32", sections: Mapping[str, Any] | None = None, **training: Any
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        model = random_model(d_ff=WIDE)
        training = {**TRAINING, "epochs": 1, **training}
        self.bundle = bundle_of(model, training=training, wire={"update": wire}, **(sections or {}))
        self.folder, self.model = folder, folder / "model"
        self.manifest = write_model(model, self.model)

    def trained(
        self, ranks: Ranks = ALONE, name: str = "update", own_entropy: bytes | None = None, **how: Any
    ) -> LocalUpdate:
        trainer = SiloTrainer(
            self.bundle,
            silo_data(PAIRS),
            SILO,
            DeviceSettings(device="cpu", threads=1),
            own_entropy=own_entropy,
            ranks=ranks,
        )
        return trainer.train(
            round_number=1, model_path=self.model, model=self.manifest, update_path=self.folder / name, **how
        )

    def bytes(self, name: str = "update") -> bytes:
        return (self.folder / name).read_bytes()


def unhurried(update: LocalUpdate) -> tuple[TrainingSummary, Manifest, float]:
    return replace(update.summary, seconds=0.0), update.manifest, update.delta_norm


@pytest.mark.parametrize(
    ("wire", "training"),
    [
        ("float32", {"optimizer": "adamw"}),
        ("float32", {"optimizer": "adafactor", "loss_reduction": "logged", "fedprox_mu": 0.0}),
        ("bfloat16", {"optimizer": "sgd", "loss_reduction": "as_published", "gradient_accumulation": 1}),
    ],
)
def test_two_ranks_write_the_bytes_of_one_process(tmp_path: Path, wire: str, training: dict[str, Any]) -> None:
    """Also in a step of a single batch, in which one rank has nothing to do; in bfloat16 with the residual. With one
    batch a step a sum of gradients has one summand."""
    own = Round(tmp_path / "one", wire, **training)
    one = own.trained()
    two = Round(tmp_path / "two", wire, **training)
    (two.folder / "update").write_bytes(bytes(9 << 20))  # of an earlier round, and longer
    outcomes = in_ranks(2, two.trained)
    assert [unhurried(outcome) for outcome in outcomes] == [unhurried(one)] * 2
    assert two.bytes() == own.bytes()
    assert outcomes[0].mark == outcomes[1].mark
    left = [sorted(path.read_bytes() for path in it.folder.glob("*.residual")) for it in (own, two)]
    assert left[0] == left[1]
    assert len(left[0]) == (wire == "bfloat16")


@pytest.mark.parametrize("masked", [False, True])
def test_two_ranks_write_the_bytes_of_one_process_of_a_plan_with_silo_level_privacy(
    masked: bool, tmp_path: Path
) -> None:
    """Whose noise is on sums of updates: of the coordinator, or the agent's own under the mask. Under masks numbers are
    spread by what the silo's secret says of each place."""
    sections = {
        "privacy": {"level": "silo", "target_epsilon": 4.0, "noise_multiplier": 5.0, "nominal_silos": 400},
        "aggregation": {
            "weighting": "lorar",
            "max_weight": 500.0,
            "max_delta_norm": 2.0,
            "secure_aggregation": masked,
        },
        "schedule": {"rounds": 3, "min_silos": 3},
        "evaluation": NO_SCORES,
    }
    own, two = (Round(tmp_path / name, "float32", sections) for name in ("one", "two"))
    one = own.trained(own_entropy=bytes(32))
    outcomes = in_ranks(2, lambda ranks: two.trained(ranks, own_entropy=bytes(32)))
    assert [unhurried(outcome) for outcome in outcomes] == [unhurried(one)] * 2
    assert two.bytes() == own.bytes()


def test_three_ranks_come_to_the_same_each_time_and_all_hold_it(tmp_path: Path) -> None:
    it = Round(tmp_path, gradient_accumulation=3)
    first = in_ranks(3, it.trained)
    again = in_ranks(3, lambda ranks: it.trained(ranks, "again"))
    assert len({unhurried(outcome) for outcome in (*first, *again)}) == 1
    assert it.bytes() == it.bytes("again")


def test_a_training_of_ranks_goes_on_from_their_checkpoint_and_one_process_does_not(tmp_path: Path) -> None:
    """Nor do ranks from that of one process: sums have another order."""
    undisturbed = Round(tmp_path / "undisturbed", epochs=2)
    in_ranks(2, undisturbed.trained)
    it, notices = Round(tmp_path / "stopped", epochs=2), []
    steps = {0: 0, 1: 0}

    def run(ranks: Together, stop_after: int | None) -> Any:
        def on_progress(fraction: float, loss: float) -> None:
            steps[ranks.rank] += 1

        return it.trained(
            ranks,
            checkpoint_path=it.folder / "checkpoint",
            on_progress=on_progress,
            on_notice=lambda event, detail: notices.append((ranks.rank, event, detail)),
            should_stop=lambda: ranks.rank == 0 and steps[0] == stop_after,
        )

    stopped = in_ranks(2, lambda ranks: run(ranks, 4))
    assert [type(outcome) for outcome in stopped] == [TrainingStopped] * 2, "both are told by rank 0"
    whole = (it.folder / "checkpoint").read_bytes()
    steps.update({0: 0, 1: 0})
    resumed = in_ranks(2, lambda ranks: run(ranks, None))
    assert all(isinstance(outcome, LocalUpdate) for outcome in resumed), resumed
    assert {event for _, event, _ in notices} == {"training-resumed"}
    assert steps == {0: 3, 1: 3}
    assert it.bytes() == undisturbed.bytes()
    (it.folder / "checkpoint").write_bytes(whole)
    notices.clear()
    alone = Alone()
    steps[0] = 0
    run(alone, None)  # type: ignore[arg-type]
    assert [event for _, event, _ in notices] == ["checkpoint-ignored"]
    assert "(its backend is gloo, here it is )" in notices[0][2]
    assert steps[0] == 6


def test_a_checkpoint_that_one_rank_cannot_read_is_used_by_none(tmp_path: Path) -> None:
    """Else ranks would make different steps, and wait for each other for ever."""
    it = Round(tmp_path, epochs=2)
    in_ranks(2, it.trained)
    expected, steps = it.bytes(), {0: 0, 1: 0}

    def run(ranks: Together, stop_after: int | None) -> Any:
        def on_progress(fraction: float, loss: float) -> None:
            steps[ranks.rank] += 1

        path = it.folder / ("checkpoint" if ranks.rank == 0 or stop_after else "nothing")
        return it.trained(
            ranks, checkpoint_path=path, on_progress=on_progress, should_stop=lambda: steps[0] == stop_after
        )

    in_ranks(2, lambda ranks: run(ranks, 4))
    steps.update({0: 0, 1: 0})
    in_ranks(2, lambda ranks: run(ranks, None))
    assert steps == {0: 6, 1: 6}
    assert it.bytes() == expected


def test_ranks_that_hold_different_numbers_say_which() -> None:
    def work(ranks: Together) -> None:
        ranks.require_same("the model", [torch.full((3,), float(ranks.rank == 1))])

    for error in in_ranks(3, work):
        assert isinstance(error, StateError)
        assert "the model of ranks 1 is not that of rank 0: run all ranks" in str(error)


def test_a_part_that_cannot_be_written_keeps_all_ranks_from_the_update(tmp_path: Path) -> None:
    it = Round(tmp_path)
    outcomes = in_ranks(2, lambda ranks: it.trained(ranks, "update" if ranks.rank == 0 else "nowhere/update"))
    assert isinstance(outcomes[0], AnotherRankFailed)
    assert isinstance(outcomes[1], StorageError)
    assert not (tmp_path / "update").exists()


def test_what_ranks_do_together_they_do_all_or_not_at_all() -> None:
    def work(ranks: Together) -> None:
        with ranks.all_or_none():
            if ranks.rank == 1:
                raise StorageError("the disk is full")

    first, second = in_ranks(2, work)
    assert isinstance(first, AnotherRankFailed)
    assert str(second) == "the disk is full"


def test_each_rank_draws_dropout_of_its_own_and_all_one_order() -> None:
    def work(ranks: Together) -> tuple[Any, Any]:
        return ranks.seed(7), ranks.seed(bytes(32))

    numbers, keys = zip(*in_ranks(3, work), strict=True)
    assert numbers[0] == 7, "one rank alone is one process"
    assert keys[0] == bytes(32)
    assert len(set(numbers)) == len(set(keys)) == 3
    assert all(0 <= number < 1 << 63 for number in numbers)
    assert all(len(key) == 32 for key in keys)


class Rank(Alone):
    def __init__(self, rank: int, world: int) -> None:
        object.__setattr__(self, "rank", rank)
        object.__setattr__(self, "world", world)
        object.__setattr__(self, "backend", "gloo")


@given(
    st.integers(1, 3_000_000), st.integers(1, 40), st.sampled_from([4096, 1 << 20, 1000, 1021]), st.sampled_from([2, 4])
)
def test_parts_are_the_whole_and_each_begins_with_a_chunk(
    elements: int, world: int, chunk_bytes: int, item_bytes: int
) -> None:
    layout = Layout("float32", (TensorSpec("w", (elements,)),))
    total = elements * item_bytes
    model = Manifest(layout.digest, total, chunk_bytes, (bytes(32),) * -(-total // chunk_bytes))
    parts = [part_of(layout, model, item_bytes, Rank(rank, world)) for rank in range(world)]
    written = [part for part in parts if len(part)]
    assert [part.start for part in written] == [0, *(part.stop for part in written[:-1])]
    assert written[-1].stop == elements
    for part in written:
        assert part.start * item_bytes % chunk_bytes == 0
        assert part.start * 4 % layout.chunk_bytes == 0


# ---- what is refused ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sections", "named"),
    [
        (
            {
                "training": {"drift_correction": "scaffold", "optimizer": "sgd", "steps": 4, "max_grad_norm": 1.0},
                "aggregation": {"weighting": "equal", "momentum": 0.0, "max_delta_norm": 0.0},
            },
            '[training] drift_correction = "scaffold"',
        ),
        (
            {
                "aggregation": {"weighting": "equal"},
                "semi_supervised": {"unlabelled": ["clinic"], "order": "together", "teacher": "ema"},
            },
            '[semi_supervised] teacher = "ema"',
        ),
    ],
)
def test_a_plan_that_ranks_cannot_train_is_refused_by_name(sections: dict[str, Any], named: str) -> None:
    plan = bundle_of(random_model(), **sections).plan
    (refusal,) = rank_refusals(SILO, plan, 2)
    assert refusal.rule == "processes"
    assert refusal.rule in RULES, "or the agent could neither count nor keep it"
    assert named in str(refusal)
    assert "set processes to 0" in str(refusal)
    assert not list(rank_refusals(SILO, plan, 0))


def joint(bundle: PlanBundle) -> Plan:
    section = bundle.plan.privacy.model_copy(update={"level": "record", "noise": "joint"})
    return bundle.plan.model_copy(update={"privacy": section})


def test_joint_noise_is_refused_by_name() -> None:
    """Its sum is written without noise, which comes under the mask."""
    (refusal,) = rank_refusals(SILO, joint(bundle_of(random_model())), 2)
    assert '[privacy] noise = "joint"' in str(refusal)


def test_record_level_privacy_is_for_ranks_that_no_network_is_between() -> None:
    """What they tell each other are sums without noise."""
    plan = bundle_of(random_model(), **PRIVATE).plan
    assert not list(rank_refusals(SILO, plan, 2))
    assert not list(rank_refusals(SILO, bundle_of(random_model()).plan, 2, "ib0"))
    (refusal,) = rank_refusals(SILO, plan, 2, "ib0")
    assert refusal.rule in RULES
    assert 'rank_interface = "ib0"' in str(refusal)
    assert "before they have noise" in str(refusal)
    assert not list(rank_refusals(SILO, plan, 0, "ib0"))


def test_a_policy_knows_what_ranks_meet_on() -> None:
    bundle = bundle_of(random_model(), **PRIVATE)
    rules = Settings.model_validate({"policy": {"max_epsilon": 1000.0, "max_epsilon_alone": 1000.0}}).policy
    for interface, refused in (("lo", []), ("ib0", ["processes"])):
        policy = SiloPolicy(rules=rules, silo=SILO, processes=2, rank_interface=interface)
        assert [refusal.rule for refusal in policy.objections(bundle)] == refused


@pytest.mark.parametrize(
    ("launch", "named"),
    [
        (["torchrun", "--standalone", "--nproc-per-node={processes}"], "--standalone"),
        (["torchrun", "--rdzv-backend=c10d"], "rdzv-backend c10d"),
        (["torchrun", "--rdzv_backend", "etcd-v2"], "rdzv-backend etcd-v2"),
        (["torchrun", "--nnodes=1:4"], "nnodes 1:4"),
        (["torchrun", "--stan"], "--stan"),
        (["torchrun", "--rdzv-b", "c10d"], "rdzv-backend c10d"),
        (["torchrun", "--rdzv_back=etcd"], "rdzv-backend etcd"),
        (["torchrun", "--rdzv-backend="], "rdzv-backend "),
        (["torchrun", "--nn", "1:4"], "nnodes 1:4"),
        (["sh", "-c", 'exec torchrun "--standalone" "$@"', "sh"], "--standalone"),
        (["sh", "-c", "torchrun --nnodes '1:4'; true"], "nnodes 1:4"),
        (["env", "PET_STANDALONE=1", "torchrun"], "PET_STANDALONE=1"),
        (["env", "PET_RDZV_BACKEND=c10d", "torchrun"], "rdzv-backend c10d"),
    ],
)
def test_a_launch_whose_rendezvous_is_a_pickle_is_refused(launch: list[str], named: str) -> None:
    with pytest.raises(ValueError, match="unpickles") as raised:
        TrainingSection(processes=2, launch=launch)
    assert named in str(raised.value)


@pytest.mark.parametrize(
    "launch",
    [
        ["srun", "--ntasks={processes}", "--nodes=2", "--nodelist", "a:b"],
        ["torchrun", "--rdzv-backend=static", "--nnodes=2", "--rdzv-b", "static", "--start-method=spawn"],
        ["/opt/standalone/start"],
    ],
)
def test_a_launch_of_others_is_not_taken_for_that(launch: list[str]) -> None:
    assert TrainingSection(processes=2, launch=launch).launch == launch


def test_what_torchrun_shortens_is_what_is_looked_for() -> None:
    """Each is the shortest that torch's own parser takes; one letter less means several options."""
    parser = get_args_parser()
    for shortest, option in (("--stan", "--standalone"), ("--rdzv-b", "--rdzv-backend"), ("--nn", "--nnodes")):
        assert {found[1] for found in parser._get_option_tuples(shortest)} == {option}
        assert len(parser._get_option_tuples(shortest[:-1])) > 1


def test_a_launch_without_processes_is_refused() -> None:
    with pytest.raises(ValueError, match="set processes to their number"):
        TrainingSection(launch=["srun"])


def test_a_launch_that_is_not_there_is_named_with_its_remedy() -> None:
    with pytest.raises(ConfigurationError, match="'no-such-launcher', and no such program is found: install it"):
        check_launch(TrainingSection(processes=2, launch=["no-such-launcher", "{processes}"]))
    with pytest.raises(ConfigurationError, match=rf"'ib9' is no network interface of {gethostname()}: give .*\blo,"):
        check_launch(TrainingSection(processes=2, rank_interface="ib9"))
    assert "2 ranks, on lo" in check_launch(TrainingSection(processes=2))
    assert check_launch(TrainingSection()) == "training is in the agent's own process"


def test_the_command_has_the_number_of_ranks_and_the_folder() -> None:
    section = TrainingSection(processes=3, launch=["no-such-launcher", "--ntasks={processes}"])
    command = rank_command(section, Path("/silo/ranks"))
    assert command[:2] == ["no-such-launcher", "--ntasks=3"]
    assert command[-1] == "/silo/ranks"


def test_a_launcher_is_run_from_where_it_was_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks are started in the group's folder. A path is taken from the folder of silo.toml, like any other."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "start").write_text("#!/bin/sh\n")
    (tmp_path / "start").chmod(0o755)
    monkeypatch.setenv("PATH", ".")
    for launch in (["./start"], ["start"]):
        assert rank_command(TrainingSection(processes=1, launch=launch), Path("/g"))[0] == str(tmp_path / "start")
    settings = Settings.model_validate({"training": {"processes": 1, "launch": ["bin/start", "a/b"]}})
    assert settings.resolved(Path("/silo")).training.launch == ["/silo/bin/start", "a/b"]
    named = Settings.model_validate({"training": {"processes": 1, "launch": ["srun"]}})
    assert named.resolved(Path("/silo")).training.launch == ["srun"]


def test_a_rank_is_not_told_how_to_open_keys_or_the_database() -> None:
    told = rank_environment(
        {"PATH": "/bin", "LORICA_KEY_PASSPHRASE_FILE": "/p", "PGPASSWORD": "secret", "PET_STANDALONE": "1"}
    )
    assert told == {"PATH": "/bin"}


NUMBERED = [
    ({"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "SLURM_PROCID": "0", "SLURM_NTASKS": "9"}, Place(1, 2, 0)),
    ({"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "SLURM_PROCID": "0"}, Place(1, 2, 0)),
    ({"SLURM_PROCID": "3", "SLURM_NTASKS": "4", "SLURM_LOCALID": "1", "WORLD_SIZE": "1"}, Place(3, 4, 1)),
    ({"JOB_COMPLETION_INDEX": "1", "SLURM_NTASKS": "9"}, Place(1, 2, 0)),
]


@pytest.mark.parametrize(("environment", "place"), NUMBERED)
def test_a_rank_takes_its_place_from_one_launcher_alone(environment: dict[str, str], place: Place) -> None:
    assert place_of(environment, 2) == place


@pytest.mark.parametrize("environment", [environment for environment, _ in NUMBERED])
def test_a_number_that_the_agent_was_given_is_no_ranks(environment: dict[str, str]) -> None:
    """An agent that srun, torchrun or a Job started would make each rank the same one."""
    with pytest.raises(
        ConfigurationError, match=r"without its number: have it set one of RANK, .*JOB_COMPLETION_INDEX"
    ):
        place_of(rank_environment(environment), 2)


@pytest.mark.parametrize(
    ("environment", "named"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "RANK = 2 is no rank of 2"),
        ({"JOB_COMPLETION_INDEX": "1"}, "JOB_COMPLETION_INDEX = 1 is no rank of 1"),
        ({"RANK": "-1"}, "RANK = '-1' is no number"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE = 'two' is no number"),
    ],
)
def test_a_number_that_is_no_ranks_is_refused(environment: dict[str, str], named: str) -> None:
    with pytest.raises(ConfigurationError, match=named):
        place_of(environment, 1)


def test_a_second_process_of_one_rank_is_refused(tmp_path: Path) -> None:
    """Both would write one update."""
    folder = tmp_path / "group"
    folder.mkdir(mode=0o700)
    start = dict.fromkeys(frames.Start.model_fields, "") | {
        "world": 1,
        "sharded": False,
        "max_bad_lines_share": 0.0,
        "tasks": [],
        "threads": 1,
        "timeout_s": 1.0,
        "base": None,
    }
    frames.Start.model_validate(start).write(folder / frames.START)
    assert frames.claim(folder / "rank-0")
    environment = os.environ | {"RANK": "0", "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-P", "-m", "silo_agent.edges.ranks.rank_process", str(folder)]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == GONE
    assert "two processes are rank 0" in ended.stderr
    assert not (folder / "hello-0.json").exists()


@pytest.mark.parametrize(
    ("wanted", "local", "gpus", "device"),
    [
        ("auto", 1, 2, "cuda:1"),
        ("cuda", 1, 2, "cuda:1"),
        ("auto", 1, 0, "auto"),
        ("cpu", 1, 2, "cpu"),
        ("cuda:3", 0, 4, "cuda:3"),
    ],
)
def test_each_rank_of_a_machine_has_a_gpu_of_its_own(wanted: str, local: int, gpus: int, device: str) -> None:
    assert device_of_rank(wanted, local, gpus) == device


def test_ranks_do_not_share_a_gpu() -> None:
    for wanted, gpus in (("auto", 1), ("cuda", 1), ("cuda", 0)):
        with pytest.raises(ConfigurationError, match=f"rank 1 of this machine finds {gpus} GPUs"):
            device_of_rank(wanted, 1, gpus)
    with pytest.raises(ValueError, match="'cuda:0' is one GPU, and processes is 2: give cuda"):
        TrainingSection(processes=2, device="cuda:0")
    assert TrainingSection(processes=1, device="cuda:0").device == "cuda:0"


def test_nccl_listens_on_the_interface_of_that_name_and_not_on_those_that_begin_so() -> None:
    assert heard_on("eth1") == {"GLOO_SOCKET_IFNAME": "eth1", "NCCL_SOCKET_IFNAME": "=eth1"}


def test_the_policy_of_a_silo_with_ranks_refuses_before_anything_starts() -> None:
    bundle = bundle_of(random_model())
    noised = SimpleNamespace(**{name: getattr(bundle, name) for name in ASKED_OF_BUNDLES}, plan=joint(bundle))
    rules = Settings().policy
    others = {refusal.rule for refusal in SiloPolicy(rules=rules, silo=SILO).objections(noised)}  # type: ignore[arg-type]
    with_ranks = SiloPolicy(rules=rules, silo=SILO, processes=2).objections(noised)  # type: ignore[arg-type]
    assert {refusal.rule for refusal in with_ranks} - others == {"processes"}


def test_a_rank_refuses_a_folder_that_others_may_look_into(tmp_path: Path) -> None:
    folder = tmp_path / "group"
    folder.mkdir(mode=0o700)
    _require_private(folder)
    for mode in (0o701, 0o710, 0o720, 0o777):
        folder.chmod(mode)
        with pytest.raises(ConfigurationError, match="not a folder of this account's alone"):
            _require_private(folder)
    folder.chmod(0o700)
    (tmp_path / "link").symlink_to(folder)
    with pytest.raises(ConfigurationError, match="not a folder of this account's alone"):
        _require_private(tmp_path / "link")


def test_settings_have_one_process_unless_they_say_so() -> None:
    training = Settings().training
    assert (training.processes, training.launch, training.rank_interface) == (0, [], "lo")


def test_ranks_of_another_version_are_named_with_the_remedy() -> None:
    own = {"torch": "2.13.0", "lorica": "1.0"}
    alike, other = (
        frames.Hello(rank=rank, world=2, host=f"node{rank}", pid=1, born="", versions=versions)
        for rank, versions in enumerate([own, own | {"torch": "2.12.1"}])
    )
    require_versions([alike], own)
    with pytest.raises(ConfigurationError) as raised:
        require_versions([alike, other], own)
    assert str(raised.value).startswith("rank 1 on node1 runs torch 2.12.1, this agent runs 2.13.0: install the same")


@pytest.mark.parametrize(
    ("other", "named"),
    [
        ({"examples": "b"}, "examples of rank 1 (b) are not those of this agent (a): have all ranks read the same"),
        ({"entropy": "f"}, "entropy of rank 1 (f) are not those of this agent (e): have all ranks read the training.e"),
        ({"threads": 8}, "threads of rank 1 (8) are not those of rank 0 (4): set [training] threads"),
    ],
)
def test_ranks_that_are_not_alike_are_named_with_the_remedy(other: dict[str, Any], named: str) -> None:
    first = frames.Ready(examples="a", entropy="e", device="cpu", threads=4)
    require_alike([first, first], "a", "e")
    with pytest.raises(ConfigurationError) as raised:
        require_alike([first, first.model_copy(update=other)], "a", "e")
    assert str(raised.value).startswith(named)


def test_ranks_that_are_alike_and_read_other_data_than_their_agent_are_refused() -> None:
    first = frames.Ready(examples="b", entropy="e", device="cpu", threads=4)
    with pytest.raises(ConfigurationError, match=r"rank 0 \(b\) are not those of this agent \(a\).* start the agent"):
        require_alike([first, first], "a", "e")


def test_ranks_that_read_another_secret_than_their_agents_are_refused() -> None:
    """Alike, as where a folder of another silo is mounted: with privacy they would draw noise that another knows."""
    first = frames.Ready(examples="a", entropy="f", device="cpu", threads=4)
    with pytest.raises(ConfigurationError, match=r"entropy of rank 0 \(f\) are not those of this agent \(e\)"):
        require_alike([first, first], "a", "e")


def test_a_commitment_is_to_one_secret_and_one_plan() -> None:
    plans = [bundle_of(random_model(), seed=seed).plan.digest for seed in (1, 2)]
    made = {frames.committed(entropy, plan) for entropy in (bytes(32), bytes(range(32))) for plan in plans}
    assert len(made) == 4


def test_examples_of_other_units_or_views_are_others() -> None:
    """Private ranks that group lines otherwise would draw samples of others."""
    examples = replace(examples_of(4), units=((0, 1), (2, 3)))
    others = [
        examples_of(4),
        replace(examples, units=((0,), (1, 2, 3))),
        replace(examples, units=((0, 1), (2,), (3,))),
        replace(examples, other_inputs=(examples.targets,)),
        replace(examples, other_inputs=(examples.inputs,)),
    ]
    assert len({examples_digest(each) for each in (examples, *others)}) == 6


def test_ranks_do_not_train_privately_what_their_agent_would_not(tmp_path: Path) -> None:
    """Before a rank is started for it: [policy] max_model_value is the agent's to keep."""
    silo = RankSilo(tmp_path, 2, PRIVATE_TRAINING, sections=PRIVATE_SECTIONS)
    silo.policy = replace(silo.policy, rules=silo.policy.rules.model_copy(update={"max_model_value": 1e-6}))
    trainer = silo.trainer()
    trainer._own.prepare(silo.bundle, None)
    with pytest.raises(PolicyRefusal, match=r"allows 1e-06 under record-level privacy"):
        silo.train(trainer)
    assert not silo.ranks.exists()


# ---- who is ended --------------------------------------------------------------------------------------------------


@pytest.fixture
def sleeper() -> Iterator[subprocess.Popen[bytes]]:
    """A process that heads a session of its own, and ends when its stdin does."""
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, start_new_session=True) as process:
        yield process
        process.kill()


def hello_of(pid: int, born: str) -> frames.Hello:
    return frames.Hello(rank=0, world=1, host="here", pid=pid, born=born, versions={})


def test_a_rank_is_known_by_when_it_began_whatever_the_clock_was_set_to(
    sleeper: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """psutil's time of birth is a clock's: it moves when that is set, and a rank that hangs was spared."""
    hello = hello_of(sleeper.pid, frames.born(sleeper.pid))
    monkeypatch.setattr(psutil.Process, "create_time", lambda self: 0.0)
    _kill_if_same(hello)
    assert not psutil.pid_exists(sleeper.pid)


def test_a_process_that_has_a_ranks_number_by_now_is_left_alone(sleeper: subprocess.Popen[bytes]) -> None:
    for born in ("", frames.born(sleeper.pid) + "1", frames.born(os.getppid())):
        _kill_if_same(hello_of(sleeper.pid, born))
    assert sleeper.poll() is None
    assert frames.born(os.getpid()).split()[1].isdigit()
    assert not frames.born(1 << 30)


def test_a_launcher_that_ended_keeps_its_number_until_its_session_is_ended() -> None:
    """Once it were waited for, the number could be another's, who would be ended."""
    process = subprocess.Popen(["sh", "-c", "sleep 600 & exit 7"], start_new_session=True)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert _ended(process.pid) == _ended(process.pid) == 7
    _kill_session(process.pid)
    assert process.wait() == 7
    assert _ended(process.pid) == 0


def test_a_session_whose_leader_is_no_child_is_left_alone() -> None:
    """As where the number of a launcher that was waited for is another's by now."""
    shell = subprocess.Popen(
        ["setsid", "--fork", "sh", "-c", "echo $$; exec cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert shell.stdout is not None
    assert shell.stdin is not None
    _kill_session(int(shell.stdout.readline()))
    shell.stdin.write(b"it lives\n")
    shell.stdin.close()
    assert shell.stdout.readline() == b"it lives\n"
    shell.stdout.close()
    shell.wait()


# ---- frames ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error",
    [StateError("a"), StorageError("b"), WorkCancelled(), AnotherRankFailed("c"), PolicyRefusal("tasks", "d")],
)
def test_an_error_comes_out_as_it_went_in(error: Exception, tmp_path: Path) -> None:
    frames.Out(out=frames.Raised.of(error)).write(tmp_path / "out")
    read = frames.Out.read(tmp_path / "out")
    assert read is not None
    assert isinstance(read.out, frames.Raised)
    made = read.out.exception()
    assert str(made) == str(error)
    assert isinstance(error, type(made))


def test_an_update_comes_out_as_it_went_in(tmp_path: Path) -> None:
    done = Round(tmp_path).trained()
    update = TrainedUpdate(manifest=done.manifest, summary=done.summary, mark=done.mark)
    frames.Out(out=frames.Done.of(update)).write(tmp_path / "out")
    assert (tmp_path / "out").stat().st_mode & 0o777 == 0o600
    read = frames.Out.read(tmp_path / "out")
    assert read is not None
    assert isinstance(read.out, frames.Done)
    assert read.out.update() == update


@given(st.binary(max_size=200) | st.just(b'{"event": 1, "detail": ""}') | st.just(b'{"event": "a"}'))
def test_what_is_no_frame_is_an_error_that_names_the_file(tmp_path_factory: pytest.TempPathFactory, raw: bytes) -> None:
    path = tmp_path_factory.mktemp("frames") / "notice-1-1.json"
    path.write_bytes(raw)
    with pytest.raises(LoricaError, match="is no frame of a rank"):
        frames.Notice.read(path)


def test_a_frame_that_cannot_be_written_is_an_error_that_names_the_folder_and_leaves_no_part(tmp_path: Path) -> None:
    """As on a full disk: an OSError would end the agent, and in a rank be taken for a fault of the plan."""
    (tmp_path / "met-0").mkdir()
    for path in (tmp_path / "met-0", tmp_path / "gone" / "met-0"):
        with pytest.raises(StorageError, match=f"{path.parent} cannot be written"):
            frames.put(path, b"1")
    with pytest.raises(StorageError, match="gone cannot be written"):
        frames.claim(tmp_path / "gone" / "rank-0")
    assert [path.name for path in tmp_path.iterdir()] == ["met-0"]


def test_a_training_goes_on_where_what_is_told_of_it_cannot_be_written(tmp_path: Path) -> None:
    bench = _Bench.__new__(_Bench)
    bench._folder, bench._rank, bench._number = tmp_path / "full", 0, 1
    bench._signs, bench._signed = count(1), -1e9
    bench._sign()
    bench._progress(0.5, 1.0)
    bench._folder = tmp_path
    bench._signed = -1e9
    bench._sign()
    bench._progress(0.5, 1.0)
    assert frames.number_in(tmp_path / "met-0") == 2
    assert frames.number_in(tmp_path / "progress-1") == 0.5


def test_a_group_whose_call_cannot_be_written_is_not_there_for_another(tmp_path: Path) -> None:
    """Its ranks would wait for the call that never came."""
    group = RankGroup.__new__(RankGroup)
    group._section, group._calls, group._folder, group.whole = TrainingSection(processes=2), count(1), tmp_path, True
    (tmp_path / "call-1.json").mkdir()
    call = frames.Call.model_construct(round=1)
    with pytest.raises(StorageError, match="cannot be written"):
        group.train(call, progress=lambda _: None, notice=lambda *_: None, cancelled=lambda: False)
    assert not group.whole


def test_a_group_that_has_no_place_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "ranks").write_bytes(b"")
    with pytest.raises(LoricaError, match="ranks"):
        RankGroup(TrainingSection(processes=2), frames.Start.model_construct(), b"", {}, tmp_path / "ranks", "e")


def test_an_agent_looks_less_often_at_a_call_that_takes_long_and_hears_its_end_soon_all_the_same() -> None:
    assert until_next_look(0.0) == 0.05
    assert until_next_look(1.0) == 0.05
    assert until_next_look(1e5) == 0.25
    now, looks = 0.0, 0
    while now < 13.0:
        now, looks = now + until_next_look(now), looks + 1
    assert looks < 150  # of 260 in all, 20 a second


def test_an_agent_waits_as_long_as_it_says_between_two_looks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks fail once its call has taken 10 s, by a clock that goes on while it waits."""
    now, waits = 100.0, list[float]()

    def wait(seconds: float) -> None:
        nonlocal now
        waits.append(seconds)
        now += seconds
        if now > 110.0:
            for rank in range(2):
                failed = frames.Raised.of(StateError("that is all"))
                frames.Out(out=failed).write(tmp_path / f"out-1-{rank}.json")

    monkeypatch.setattr("silo_agent.edges.ranks.rank_group.time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(RankGroup, "_require_running", lambda _: None)
    group = RankGroup.__new__(RankGroup)
    group._section, group._calls, group._folder = TrainingSection(processes=2), count(1), tmp_path
    group._over = SimpleNamespace(wait=wait)  # type: ignore[assignment]
    call = frames.Call.model_construct(round=1)
    monkeypatch.setattr(frames.Call, "write", lambda *_: None)
    with pytest.raises(StateError, match="that is all"):
        group.train(call, progress=lambda _: None, notice=lambda *_: None, cancelled=lambda: False)
    taken = [sum(waits[:looks]) for looks in range(len(waits))]
    assert waits == pytest.approx([until_next_look(one) for one in taken])
    assert waits[0] < waits[-1]
    assert 10.0 < sum(waits) < 11.0


def test_the_agent_looks_for_frames_where_there_may_be_some(tmp_path: Path) -> None:
    """Once more after each change, for one that a coarse time of change hides; and each second whatever it says."""
    now, folder = [0.0], tmp_path / "frames"
    folder.mkdir()
    news = News(folder, lambda: now[0])

    def looks(times: int) -> list[bool]:
        return [news.may_be_there() for _ in range(times)]

    assert looks(4) == [True, True, False, False]
    frames.put(folder / "progress-1", b"0.5")
    at = folder.stat().st_mtime_ns
    os.utime(folder, ns=(at + 1, at + 1))
    assert looks(3) == [True, True, False]
    now[0] += 1.1
    assert looks(2) == [True, False]
    folder.rename(tmp_path / "elsewhere")
    assert looks(2) == [True, True], "what is wrong is said by whoever looks"


def test_a_link_in_the_folder_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "target").write_text('{"event": "a", "detail": ""}')
    (tmp_path / "notice").symlink_to(tmp_path / "target")
    with pytest.raises(StateError, match="cannot be read"):
        frames.Notice.read(tmp_path / "notice")
