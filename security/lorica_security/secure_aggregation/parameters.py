"""The numbers that a cohort agrees on: how many shares open a secret, how many must survive, how reals become integers.

- n >= 3: a sum of two shows each the other.
- Threshold t with max(3, n // 2 + 1) <= t <= n: two disjoint sets of t silos do not exist.
- c colluding silos (or ones whose disk was restored, and who therefore answer twice): 2t > n + c. Two survivor sets of
  one attempt would need t signatures each, hence n + c in all at most.
- min_survivors >= max(3, c + 2): at least two of a sum do not collude.
- least_sum: the fewest silos that a sum can be over, given the release groups, the threshold and min_survivors.
"""

from collections.abc import Collection
from dataclasses import dataclass

from lorica_security.errors import MalformedMessage
from lorica_security.identifiers import SiloName
from lorica_security.secure_aggregation.groups.release_groups import Link, Partition
from lorica_security.secure_aggregation.masked_vectors.fixed_point import FixedPoint, Ranges
from lorica_security.secure_aggregation.masked_vectors.noise_shares import NoiseShares
from lorica_security.secure_aggregation.transcript import Part

LEAST_COHORT = 3


def least_threshold(cohort: int) -> int:
    return max(3, cohort // 2 + 1)


def default_threshold(cohort: int) -> int:
    """More than two thirds: with it, up to a third of the cohort may collude."""
    return max(3, 2 * cohort // 3 + 1)


def threshold_for(cohort: int, *, colluders: int, asked: int | None) -> int:
    """`asked` None: the default; any other is raised to what the cohort and the colluders need."""
    return max(
        default_threshold(cohort) if asked is None else asked, least_threshold(cohort), (cohort + colluders) // 2 + 1
    )


def least_survivors(colluders: int) -> int:
    return max(3, colluders + 2)


@dataclass(frozen=True, kw_only=True)
class Parameters:
    """Checked at construction; raises MalformedMessage, which says what would be allowed."""

    cohort: int
    threshold: int
    colluders: int
    min_survivors: int
    least_sum: int
    fixed_point: FixedPoint

    def __post_init__(self) -> None:
        n, t, c = self.cohort, self.threshold, self.colluders
        if n < LEAST_COHORT:
            raise MalformedMessage(f"cohort of {n} silos: secure aggregation needs at least {LEAST_COHORT}")
        if not least_threshold(n) <= t <= n:
            raise MalformedMessage(f"threshold {t} for {n} silos: allowed are {least_threshold(n)} to {n}")
        if c < 0 or 2 * t <= n + c:
            raise MalformedMessage(
                f"threshold {t} of {n} silos does not hold against {c} colluders: twice the threshold must exceed "
                f"{n + c}"
            )
        if not least_survivors(c) <= self.min_survivors <= n:
            raise MalformedMessage(
                f"min_survivors is {self.min_survivors} for {n} silos and {c} colluders: "
                f"allowed are {least_survivors(c)} to {n}"
            )
        if not self.min_survivors <= self.least_sum <= n:
            raise MalformedMessage(
                f"least_sum is {self.least_sum} for {n} silos: allowed are min_survivors, {self.min_survivors}, to {n}"
            )
        if self.fixed_point.cohort != n:
            raise MalformedMessage(f"fixed point is for {self.fixed_point.cohort} silos, the cohort has {n}")

    @property
    def honest(self) -> int:
        """The fewest silos of a sum whose noise whoever looks at it does not know."""
        return _unknown(self.least_sum, self.colluders)

    @property
    def parts(self) -> tuple[Part, ...]:
        """What the roster digest covers."""
        return (
            self.cohort,
            self.threshold,
            self.colluders,
            self.min_survivors,
            self.least_sum,
            self.fixed_point.parts,
        )


def too_few(partition: Partition, parameters: Parameters, silos: Collection[SiloName]) -> str | None:
    """What is wanting for a sum over those of `silos` whose groups are among them whole; None: nothing."""
    if len(silos) < parameters.threshold:
        return f"at least {parameters.threshold} must"
    whole = len(partition.whole(silos))
    if whole < parameters.least_sum:
        return f"at least {parameters.least_sum} must, in whole release groups: {whole} of these are"
    return None


@dataclass(frozen=True, kw_only=True)
class NoiseTerms:
    """Of a plan whose silos make noise before they mask. `makers` is on how many of a sum it counts, where the plan
    fixes that for every cohort; None: as many as each cohort allows. The rest as in NoiseShares.
    """

    noise_multiplier: float
    makers: int | None = None
    reach: float = 1.0
    grain: float = 0.0

    def shares(self, *, cohort: int, honest: int, elements: int) -> NoiseShares:
        """Raises MalformedMessage where fewer silos of a sum are `honest` than the plan counts on, and as NoiseShares
        does."""
        if self.makers is not None and self.makers > honest:
            raise MalformedMessage(
                f"the plan counts on noise of {self.makers} silos of a sum, and of the fewest that release groups "
                f"leave in one only {honest} surely make theirs: raise min_survivors by {self.makers - honest}"
            )
        return NoiseShares(
            cohort=cohort,
            honest=honest if self.makers is None else self.makers,
            noise_multiplier=self.noise_multiplier,
            elements=elements,
            reach=self.reach,
            grain=self.grain,
        )


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What the coordinator opens an attempt with, before it knows who will be in the cohort; `link` has the release
    groups.

    `threshold` None is the default; any other is raised to what the cohort and the colluders need. `noise` is what
    silos make before they mask, of which the cohort is not known yet; None: none.
    """

    model: bytes
    ranges: Ranges
    link: Link
    min_cohort: int = LEAST_COHORT
    min_survivors: int = LEAST_COHORT
    colluders: int = 0
    threshold: int | None = None
    noise: NoiseTerms | None = None

    def parameters(self, silos: Collection[SiloName]) -> Parameters:
        """For this cohort; raises MalformedMessage where the terms do not hold for it."""
        cohort = len(silos)
        if cohort < self.min_cohort:
            raise MalformedMessage(f"{cohort} silos advertised keys: the terms ask for at least {self.min_cohort}")
        threshold = threshold_for(cohort, colluders=self.colluders, asked=self.threshold)
        least_sum = self.link.partition.least_sum(silos, threshold=threshold, min_survivors=self.min_survivors)
        if least_sum is None:
            raise MalformedMessage(
                f"no sum can come out of {cohort} silos: release groups that are among them whole have fewer than "
                f"{self.min_survivors} silos, or fewer than {threshold} are left to sign"
            )
        return Parameters(
            cohort=cohort,
            threshold=threshold,
            colluders=self.colluders,
            min_survivors=self.min_survivors,
            least_sum=least_sum,
            fixed_point=self._fixed_point(cohort, _unknown(least_sum, self.colluders)),
        )

    def _fixed_point(self, cohort: int, honest: int) -> FixedPoint:
        if self.noise is None:
            return FixedPoint.of(cohort=cohort, ranges=self.ranges)
        return self.noise.shares(cohort=cohort, honest=honest, elements=self.ranges.elements).fixed_point(self.ranges)


def _unknown(least_sum: int, colluders: int) -> int:
    """Of so many silos in a sum, those whose noise another one does not know: it knows its own, and that of who works
    with it."""
    return least_sum - max(colluders, 1)
