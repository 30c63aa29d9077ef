"""flwr's SecAgg+ (SecAggPlusWorkflow, secaggplus_mod), in the same deployment as its plain rounds.

Its silos mask the model itself, not a delta, as 64-bit integers, and send it in one message. Clipping range and
quantization range are its defaults; every silo has a pairwise mask with every other, as in Lorica. Vectors of some 100
M parameters and more do not fit into a message.
"""

import statistics
from dataclasses import dataclass, field, replace
from pathlib import Path

from lorica.bench.figures import Run
from lorica.bench.peers.flwr import COSTS, Flwr
from lorica_security.errors import StateError


@dataclass(frozen=True, slots=True, kw_only=True)
class PeerMasks:
    """A peer's masked rounds. CPU seconds are medians: of encoding and masking at one silo, and of its server's
    unmasking.

    The error is beside the growth of the model over all rounds.
    """

    run: Run
    mask_cpu_s: float
    unmask_cpu_s: float
    relative_l2_error: float


@dataclass(frozen=True, slots=True)
class FlwrSecAgg:
    """`most_parameters` is what it can do on a small machine."""

    name: str = "flwr"
    most_parameters: int = 25_000_000
    flwr: Flwr = field(default_factory=lambda: Flwr(server="flwr_secagg_server", client="flwr_secagg_client"))

    def install(self, venv: Path) -> None:
        self.flwr.install(venv)

    def run(self, *, venv: Path, work: Path, silos: int, parameters: int, rounds: int) -> PeerMasks:
        """As Peer.run."""
        run = self.flwr.run(venv=venv, work=work, silos=silos, parameters=parameters, rounds=rounds)
        noted: dict[str, list[float]] = {"mask": [], "unmask": [], "error": []}
        for line in (work / COSTS).read_text(encoding="utf-8").splitlines():
            name, value = line.split()
            noted[name].append(float(value))
        if (len(noted["mask"]), len(noted["unmask"])) != (silos * (rounds + 1), rounds + 1):
            raise StateError(
                f"flwr masked {len(noted['mask'])} vectors and unmasked {len(noted['unmask'])} sums: see {work}"
            )
        return PeerMasks(
            run=replace(run, system="flwr SecAgg+"),
            mask_cpu_s=statistics.median(noted["mask"]),
            unmask_cpu_s=statistics.median(noted["unmask"]),
            relative_l2_error=noted["error"][0],
        )
