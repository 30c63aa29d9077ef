"""Ranks on two hosts, which torchrun starts: the bytes of one process, and ports on the interface that is named alone."""

import subprocess
import sys
from pathlib import Path

import pytest

from silo_agent.edges.ranks import frames
from tests.support import network_hosts
from tests.support.rank_silo import RankSilo, require_nothing_left
from tests.support.two_hosts import INTERFACE, PORT, two_hosts
from tests.support.waiting import until

WHY_NOT = network_hosts.why_not()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(WHY_NOT), reason=f"no two hosts: {WHY_NOT}"),
]

TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


def ranks_that_run(root: Path) -> str:
    return subprocess.run(["pgrep", "-f", f"rank_process {root}/"], capture_output=True, text=True, check=False).stdout


def test_ranks_on_two_hosts_write_the_bytes_of_one_process(tmp_path: Path) -> None:
    with two_hosts() as hosts:
        launch = {"launch": hosts.by_torchrun(TORCHRUN), "rank_interface": INTERFACE}
        one, two = RankSilo(tmp_path), RankSilo(tmp_path, 2, own=launch)
        own = one.workshop()
        own.prepare(one.bundle, None)
        one.train(own)
        trainer = two.trainer()
        try:
            trainer.prepare(two.bundle, None)
            (group,) = two.ranks.glob("group-*")
            hellos = [frames.Hello.read(group / f"hello-{rank}.json") for rank in (0, 1)]
            assert len({hello.host for hello in hellos if hello is not None}) == 2
            heard = [hosts.heard(host) for host in (hosts.first, hosts.second)]
            for listening, address in zip(heard, hosts.addresses, strict=True):
                ranks = {each for each in listening if not each.endswith(f":{PORT}")}  # which is torchrun's own store
                assert ranks, "each rank listens for the other"
                assert {each.rpartition(":")[0] for each in ranks} == {address}
            two.train(trainer)
        finally:
            trainer.close()
        assert two.update.read_bytes() == one.update.read_bytes()
        until(lambda: not ranks_that_run(tmp_path), lambda: None, 60.0)
        require_nothing_left(tmp_path)
