"""The conformity audit as `lorica privacy-audit --target conformity` runs it, on less: its plans in a small world,
where noise is measured to 4 %. Prints the promises that were broken as JSON.
"""

import json
import tempfile
from pathlib import Path

import torch

from lorica.privacy_audit.conformity.audited_trainings import World, plans
from lorica.privacy_audit.conformity.conformity import conformity
from lorica.privacy_audit.silo_level import silo_level

SMALL = 128
"""Words of the small world's vocabulary."""


def broken_promises(work: Path) -> dict[str, str]:
    """Each with what was found of it; `work` is an empty folder."""
    for part in ("records", "silos"):
        (work / part).mkdir()
    checks = [
        *conformity(World.of(1, vocabulary=SMALL), plans(loss_draws=400), work / "records"),
        *silo_level(work / "silos"),
    ]
    return {check.promise: check.fault for check in checks if check.fault is not None}


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="lorica-breaks-") as folder:
        print(json.dumps(broken_promises(Path(folder))))
