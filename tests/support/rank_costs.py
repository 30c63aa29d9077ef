"""What a training costs in ranks beside one process, on this machine.

    python -m tests.support.rank_costs FOLDER SIZE RANKS TIMES [private]

With `private` a round is STEPS steps of record-level privacy, on some BATCH records each. Each way trains the same round by turns, TIMES times after one that is not counted, with one thread a process. Printed
is a JSON object of medians: CPU seconds of one process, of each rank and of the agent beside them, and of a clock.
"""

import json
import statistics
import sys
import time
from pathlib import Path

import psutil

from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.query_log import query_log
from lorica.demo.silos.silos import write_silo
from silo_agent.edges.ranks import frames
from silo_agent.service.ports import RoundModel
from silo_wire.model_folders.seeded_model import seeded_t5, sized_config
from silo_wire.model_folders.seeded_tokenizer import train_tokenizer
from silo_wire.plans.sizes import SIZES
from silo_wire.public_text import public_text
from tests.support.rank_silo import RankSilo
from tests.support.tiny_t5 import bundle_of, write_model

RECORDS = 80
TRAINING = {
    "learning_rate": 1e-3,
    "epochs": 1,
    "batch_size": 8,
    "dropout": 0.0,
    "schema_in_input": False,
    "max_input_tokens": 64,
    "max_output_tokens": 64,
}
BATCH, STEPS = 32, 4
PRIVATE = {
    "evaluation": {"every": 0, "initial": False, "last": False},
    "privacy": {
        "level": "record",
        "noise_multiplier": 1.0,
        "steps": STEPS,
        "nominal_records": RECORDS,
        "expected_batch_size": BATCH,
    },
}


class Sized(RankSilo):
    def grown(self, size: str, ranks: int, *, private: bool) -> "Sized":
        """With a model of `size` in place of the tests' own."""
        tokenizer = train_tokenizer(public_text(), SIZES[size].vocabulary)
        model = seeded_t5(sized_config(SIZES[size], tokenizer), 1)
        training = {**TRAINING, **({"max_grad_norm": 1.0} if private else {"gradient_accumulation": ranks})}
        self.bundle = bundle_of(
            model,
            tokenizer=tokenizer.backend_tokenizer.to_str().encode(),
            source=f"size:{size}",
            training=training,
            **(PRIVATE if private else {}),
        )
        self.model = RoundModel(
            file=self.root / "model", manifest=write_model(model, self.root / "model", chunk_bytes=1 << 20)
        )
        return self


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return times.user + times.system


def main(folder: str, size: str, ranks: str, times: str, how: str = "") -> None:
    root, me = Path(folder), psutil.Process()
    data = query_log(CLINIC, records=RECORDS, seed=3).log
    write_silo(root / "data", CLINIC, seed=3, splits=data)
    one, several = (
        Sized(root, processes).grown(size, int(ranks), private=how == "private") for processes in (0, int(ranks))
    )
    alone, together = one.workshop(), several.trainer()
    alone.prepare(one.bundle, None)
    together.prepare(several.bundle, None)
    hellos = map(frames.Hello.read, several.ranks.glob("group-*/hello-*.json"))
    them = [psutil.Process(hello.pid) for hello in hellos if hello is not None]
    found: dict[str, list[float]] = {}
    for number in range(int(times) + 1):
        took: dict[str, float] = {}
        began, before = time.monotonic(), cpu_s(me)
        one.train(alone)
        took |= {"one_cpu_s": cpu_s(me) - before, "one_wall_s": time.monotonic() - began}
        theirs, before, began = list(map(cpu_s, them)), cpu_s(me), time.monotonic()
        several.train(together)
        took |= {"agent_cpu_s": cpu_s(me) - before, "ranks_wall_s": time.monotonic() - began}
        took["largest_rank_cpu_s"] = max(cpu_s(it) - then for it, then in zip(them, theirs, strict=True))
        if number:
            for name, value in took.items():
                found.setdefault(name, []).append(value)
    assert one.update.read_bytes() == several.update.read_bytes() or int(ranks) > 2 or how == "private"
    together.close()
    medians = {name: round(statistics.median(values), 4) for name, values in found.items()}
    medians["rank_to_one"] = round(medians["largest_rank_cpu_s"] / medians["one_cpu_s"], 3)
    print(json.dumps({"size": size, "parameters": one.bundle.layout.parameters, "ranks": int(ranks), **medians}))


if __name__ == "__main__":
    main(*sys.argv[1:])
