"""What release groups cost in rounds: how often an attempt brings no sum, and how many silos a sum is of, where silos
drop out.

Each silo falls silent with the same probability, on its own, before its vector has come. All sets of silent silos are
gone through, by the rule that the machines follow (`parameters.too_few`): figures are exact.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations

from rich.table import Table

from lorica_security.identifiers import FederationName, SiloName
from lorica_security.secure_aggregation.groups.release_groups import Partition, first_link
from lorica_security.secure_aggregation.masked_vectors.fixed_point import Ranges
from lorica_security.secure_aggregation.parameters import Terms, too_few
from lorica_security.secure_aggregation.transcript import DIGEST_BYTES

SILOS = tuple(range(3, 13))
DROP_OUT = 0.02
LEAST_GROUP = 3
_RANGES = Ranges.of(sizes=(1,), largest_delta=(1.0,), largest_weight=1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Availability:
    """`lost`: the part of attempts that bring no sum. `summed`: the part of the cohort that an attempt's sum is of, on
    average."""

    sizes: tuple[int, ...]
    lost: float
    summed: float


def availability(sizes: Sequence[int], *, drop_out: float = DROP_OUT) -> Availability:
    """Of groups of these sizes, all of them in the cohort, under the default threshold."""
    partition = Partition.of(_groups(sizes))
    silos = tuple(sorted(partition.members))
    link = first_link(FederationName("bench"), partition)
    parameters = Terms(model=bytes(DIGEST_BYTES), ranges=_RANGES, link=link).parameters(silos)
    lost, summed = 0.0, 0.0
    for count in range(len(silos) + 1):
        chance = drop_out**count * (1 - drop_out) ** (len(silos) - count)
        for silent in combinations(silos, count):
            there = tuple(silo for silo in silos if silo not in silent)
            if too_few(partition, parameters, there) is not None:
                lost += chance
            else:
                summed += chance * len(partition.whole(there)) / len(silos)
    return Availability(sizes=tuple(sizes), lost=lost, summed=summed)


def _groups(sizes: Sequence[int]) -> Iterator[list[SiloName]]:
    names = iter(range(sum(sizes)))
    for size in sizes:
        yield [SiloName(f"silo-{next(names):02}") for _ in range(size)]


def even(silos: int, groups: int) -> tuple[int, ...]:
    """Sizes of so many groups, which differ by one at most; the larger ones come first."""
    return tuple(silos // groups + (index < silos % groups) for index in range(groups))


def choices(silos: int) -> tuple[tuple[int, ...], ...]:
    """One group of all, and every even division down to groups of three."""
    return tuple(even(silos, groups) for groups in range(1, silos // LEAST_GROUP + 1))


def table(silos: Sequence[int] = SILOS, *, drop_out: float = DROP_OUT) -> Table:
    made = Table(title=f"attempts, where each silo drops out with probability {drop_out:g}", title_style="dim")
    for heading in ("silos", "groups", "attempts without a sum, %", "silos in the sum of the others, %"):
        made.add_column(heading, justify="right")
    for count in silos:
        for sizes in choices(count):
            found = availability(sizes, drop_out=drop_out)
            summed = found.summed / (1 - found.lost)
            made.add_row(str(count), " + ".join(map(str, sizes)), f"{found.lost:.2%}", f"{summed:.1%}")
    return made
