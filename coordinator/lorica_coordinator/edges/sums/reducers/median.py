"""The median, parameter by parameter: the trimmed mean that leaves out all but the middle silo, or the middle two.

Yin, Chen, Kannan and Bartlett, ICML 2018, definition 1. Of an even number of silos it is the mean of the two values in
the middle. What it promises is the trimmed mean's (trimmed_mean.py), for the most hostile silos that any rule can bear:
fewer than half. For that it forgets more of what honest silos say than any other.
"""

from lorica_coordinator.edges.sums.reducers.trimmed_mean import TrimmedMean
from silo_wire.plans.robust import MEDIAN, median_trims


class Median(TrimmedMean):
    """No key of the plan changes it."""

    rule = MEDIAN

    def _trimmed(self, silos: int) -> int:
        return median_trims(silos)
