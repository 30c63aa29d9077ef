"""What a plan's rule makes of deltas, as an attacker computes it: by the coordinator's own arithmetic, in memory."""

from collections.abc import Sequence

import numpy as np
import torch

from lorica.hostile.attack import Exact, Row, Rows
from lorica_coordinator.aggregation import krum
from lorica_coordinator.aggregation.centred_clipping import centred_mean, parts
from lorica_coordinator.aggregation.geometric_median import median_shares
from lorica_coordinator.aggregation.neighbour_mixing import mixed, nearest
from lorica_coordinator.aggregation.squared_distances import between, inner_products, to_centre
from lorica_coordinator.aggregation.streaming_sum import Scratch
from lorica_coordinator.aggregation.trimmed_mean import trimmed_mean
from lorica_coordinator.aggregation.weighting import SiloSummary, WeightCaps, weigh
from silo_wire.plans.robust import median_trims, trimmed_silos
from silo_wire.plans.sections.aggregation import AggregationSection


def made_of(section: AggregationSection, summaries: Sequence[SiloSummary], rows: Rows, centre: Row) -> Exact:
    """The mean delta that the rule of `section` makes of `rows`, in the order of `summaries`; `centre` is that of the
    round before. What is longer than `max_delta_norm` is cut first."""
    caps = WeightCaps(
        max_weight=section.max_weight or None,
        max_weight_share=section.max_weight_share or None,
        max_delta_norm=None,
    )
    cohort = weigh(summaries, weighting=section.weighs, caps=caps)
    names = [silo.silo for silo in cohort.silos]
    rows = _cut(rows, section.max_delta_norm)
    table = torch.from_numpy(rows.copy())
    out = torch.empty(rows.shape[1])
    match section.reducer:
        case "trimmed_mean":
            made = trimmed_mean(table, trimmed_silos(section.trimmed_share, len(rows)), out)
        case "median":
            made = trimmed_mean(table, median_trims(len(rows)), out)
        case "nearest_neighbour_mixing":
            with_which = nearest(between(names, [rows]), section.hostile_silos)
            made = trimmed_mean(mixed(table, with_which, torch.empty_like(table)), section.hostile_silos, out)
        case "centred_clipping":
            counted = parts(to_centre(names, [(rows, centre)]).tolist(), section.clipping_radius)
            scratch = Scratch.of(rows.shape[1], torch.device("cpu"))
            named = zip(names, table, strict=True)
            made = centred_mean(named, torch.from_numpy(centre), cohort, counted, scratch)
        case "multi_krum":
            return _mean(rows[krum.kept(between(names, [rows]), section.hostile_silos)])
        case "geometric_median":
            return np.array(median_shares(inner_products(names, [rows]))) @ rows.astype(np.float64)
        case _:
            shares = np.array([silo.share for silo in cohort.silos])
            return cohort.length * shares @ rows.astype(np.float64)
    return made.double().numpy()


def _mean(rows: Rows) -> Exact:
    exact: Exact = rows.mean(axis=0, dtype=np.float64)
    return exact


def _cut(rows: Rows, longest: float) -> Rows:
    if not longest:
        return rows
    lengths = np.linalg.norm(rows.astype(np.float64), axis=1)
    shorter: Rows = (rows * np.minimum(1.0, longest / np.maximum(lengths, 1e-300))[:, np.newaxis]).astype(np.float32)
    return shorter
