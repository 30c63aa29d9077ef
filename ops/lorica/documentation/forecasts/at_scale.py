"""What a round costs past one machine, from figures that were measured on one: which limit comes first, and what sums
by range, regions and a sparse graph of masks would change. Arithmetic; nothing here was run at these sizes.

Figures are of ops/docs/benchmarks.md. Degrees of the graph are by the exact tails of hypergeometric distributions, for
Bell et al. 2020 (CCS, https://eprint.iacr.org/2020/704) in the model of active adversaries.
"""

from dataclasses import dataclass
from math import comb
from typing import Final

from lorica.documentation.markdown import markdown_table
from lorica.simulation.forecast.estimate_report import bytes_text, seconds_text

COORDINATOR_S: Final = 17e-9
"""CPU seconds of the coordinator for a parameter and silo, in the clear: 13.3 s for 32 silos of 25 M."""
SUM_S: Final = 3.5e-9
"""Of them in the sum, by the clock: 2.8 s."""
MASKS_S: Final = (7.6e-9, 0.63e-9)
"""CPU seconds of a silo for a parameter: masks at all, and each further silo (1.7 + 0.14 n at T5-base's size)."""
LOST_PAIR_S: Final = 0.46e-9
"""CPU seconds of the coordinator for a parameter and pair of a lost silo and a survivor."""
CONNECTION_BYTES: Final = 2.5e6
JOURNAL_BYTES: Final = 8.7e6 / 64**2
"""Of a masked attempt, for each pair of silos in order."""
CORES: Final = 1.6
"""That one event loop keeps busy."""
VCPU_HOUR: Final = 0.05
GIGABYTE_OUT: Final = 0.08
"""What a cloud asks in US dollars: for a virtual core an hour, for 10^9 bytes that leave it. Assumed, not looked up."""
FAILURE: Final = 2.0**-30
"""Chance at most that some neighbourhood of the graph cannot be unmasked, or is open to its colluders."""
REGION: Final = 20

MODELS: Final = {"T5-base": 222_903_552, "3 B": 2_851_598_336, "11 B": 11_307_321_344}
FORMS: Final = {"float32": (4.0, 4.0), "bfloat16 down, int8 up": (2.0, 1.0 + 4 / 1024)}
"""Bytes of a number, down and up."""

_PARTS: Final = ("the coordinator's bytes", "its sum", "a silo's masks", "masks of lost silos")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Of one round in the clear, all silos on lines that are fast enough."""

    silos: int
    parameters: int
    down: float
    up: float

    @property
    def wire(self) -> float:
        """Bytes, both ways."""
        return (self.down + self.up) * self.parameters * self.silos

    @property
    def moving_s(self) -> float:
        """Seconds that one coordinator needs, by bytes: the figure was measured with float32."""
        return COORDINATOR_S * self.wire / 8 / CORES

    @property
    def sum_s(self) -> float:
        return SUM_S * self.parameters * self.silos

    @property
    def masks_s(self) -> float:
        """CPU seconds of each silo."""
        at_all, each = MASKS_S
        return (at_all + each * self.silos) * self.parameters

    @property
    def lost_s(self) -> float:
        """CPU seconds of the coordinator where a tenth of the silos is lost."""
        lost = self.silos // 10
        return LOST_PAIR_S * self.parameters * lost * (self.silos - lost)

    @property
    def dollars(self) -> float:
        """For the coordinator's core time and for the models that leave it."""
        out = self.down * self.parameters * self.silos / 1e9 * GIGABYTE_OUT
        return out + self.moving_s * CORES / 3600 * VCPU_HOUR


def first_limit_table() -> str:
    """By number of silos and size of the model, float32, a tenth of the silos lost."""
    rows = []
    for silos in (8, 64, 500):
        for name, parameters in MODELS.items():
            cost = _cost(silos, parameters, "float32")
            waits = dict(zip(_PARTS, (cost.moving_s, cost.sum_s, cost.masks_s, cost.lost_s), strict=True))
            rows.append(
                (
                    str(silos),
                    name,
                    bytes_text(round(cost.wire)),
                    *(seconds_text(wait) for wait in waits.values()),
                    bytes_text(round(silos * CONNECTION_BYTES)),
                    bytes_text(round(silos**2 * JOURNAL_BYTES)),
                    max(waits, key=lambda part: waits[part]),
                )
            )
    return markdown_table(
        ("silos", "model", "wire", *_PARTS, "connections", "masked journal", "what takes longest"), rows
    )


def hundreds_table() -> str:
    """Of 11 B parameters, by silos and by what travels."""
    rows = []
    for silos in (100, 200, 500):
        for form in FORMS:
            cost = _cost(silos, MODELS["11 B"], form)
            rows.append(
                (
                    str(silos),
                    form,
                    bytes_text(round(cost.wire)),
                    seconds_text(cost.moving_s),
                    seconds_text(cost.sum_s),
                    f"{cost.dollars:,.0f} USD",
                )
            )
    return markdown_table(("silos", "types", "wire", "moving bytes", "sum", "cloud, a round"), rows)


def ranges_table() -> str:
    """The sum of 64 silos, dealt out by ranges of parameters."""
    rows = []
    for name, parameters in MODELS.items():
        whole = _cost(64, parameters, "float32")
        times = (seconds_text(whole.sum_s / jobs) for jobs in (1, 4, 16, 64))
        rows.append((name, seconds_text(whole.moving_s), *times, bytes_text(parameters * 4 * 66)))
    heads = ("model", "moving bytes", "sum, one process", "4 jobs", "16 jobs", "64 jobs", "read and written by them")
    return markdown_table(heads, rows)


def regions_table() -> str:
    """What masks cost by the shape of the federation, T5-base's size."""
    rows = []
    for silos in (60, 200, 400):
        graph, hostile = degree(silos, 1 / 10), degree(silos, 1 / 3)
        for shape, peers in (
            ("everybody with everybody", silos - 1),
            (f"regions of {REGION}", REGION - 1),
            (f"graph, a tenth colludes: {graph} neighbours", graph),
            (f"graph, a third colludes: {hostile} neighbours", hostile),
        ):
            at_all, each = MASKS_S
            masks = (at_all + each * (peers + 1)) * MODELS["T5-base"]
            journal = round(silos * (peers + 1) * JOURNAL_BYTES)
            rows.append((str(silos), shape, seconds_text(masks), bytes_text(journal)))
    return markdown_table(("silos", "masks between", "a silo's masks, CPU", "journal of all coordinators"), rows)


def _cost(silos: int, parameters: int, form: str) -> Cost:
    down, up = FORMS[form]
    return Cost(silos=silos, parameters=parameters, down=down, up=up)


def degree(silos: int, colluding: float, lost: float = 1 / 10) -> int:
    """The fewest neighbours of each silo with which no neighbourhood fails, but with a chance of FAILURE.

    A neighbourhood of k, d of them lost and c of them colluding, needs a threshold t with k - d >= t and 2t > k + c:
    so k > 2d + c. Raises ValueError where not even all others are enough.
    """
    each = FAILURE / (2 * silos)
    for k in range(2, silos):
        worst_lost = _most(silos - 1, int(lost * silos), k, each)
        worst_colluding = _most(silos - 1, int(colluding * silos), k, each)
        if k > 2 * worst_lost + worst_colluding:
            return k
    raise ValueError(f"{silos} silos are too few for a graph: {colluding:.0%} collude and {lost:.0%} are lost")


def _most(others: int, marked: int, drawn: int, chance: float) -> int:
    """The largest number of marked ones among `drawn` that is not rarer than `chance`."""
    left, total = 0, comb(others, drawn)
    for count in range(min(marked, drawn), 0, -1):
        left += comb(marked, count) * comb(others - marked, drawn - count)
        if left > chance * total:
            return count
    return 0
