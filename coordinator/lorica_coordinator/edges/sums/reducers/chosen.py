"""Which reducer a plan asks for: `[aggregation] secure_aggregation` and `reducer`, `[privacy] level` and `[adapters]
train` say it."""

from collections.abc import Sequence
from typing import Final

from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.edges.sums.delta_source import DeltaForm
from lorica_coordinator.edges.sums.next_model import NextModel
from lorica_coordinator.edges.sums.reducers.centred_clipping import CentredClipping
from lorica_coordinator.edges.sums.reducers.geometric_median import GeometricMedian
from lorica_coordinator.edges.sums.reducers.masked import Masked
from lorica_coordinator.edges.sums.reducers.median import Median
from lorica_coordinator.edges.sums.reducers.multi_krum import MultiKrum
from lorica_coordinator.edges.sums.reducers.nearest_neighbour_mixing import NearestNeighbourMixing
from lorica_coordinator.edges.sums.reducers.noised import Noised
from lorica_coordinator.edges.sums.reducers.plain import Plain
from lorica_coordinator.edges.sums.reducers.reducer import Reducer
from lorica_coordinator.edges.sums.reducers.reproject import Reproject
from lorica_coordinator.edges.sums.reducers.trimmed_mean import TrimmedMean
from lorica_coordinator.edges.sums.release_ledger import ReleaseLedger
from lorica_coordinator.rounds.updates import CommittedUpdate
from silo_wire.plans.adapters import Pair
from silo_wire.plans.privacy import PrivacySection
from silo_wire.plans.sections.aggregation import AggregationSection
from silo_wire.plans.sections.training import TrainingSection

_ROBUST: Final = (TrimmedMean, Median, MultiKrum, CentredClipping, NearestNeighbourMixing, GeometricMedian)
REDUCERS: Final = (Plain, *_ROBUST, Reproject, Masked, Noised)
"""All of them: the class says what holds for every plan, such as its name and which promises of privacy it keeps."""
_BY_NAME: Final = {it.name: it for it in _ROBUST}


def of_updates(
    section: AggregationSection,
    training: TrainingSection | None,
    privacy: PrivacySection | None,
    *,
    spools: Spools,
    form: DeltaForm,
    into: NextModel,
    releases: ReleaseLedger | None,
    reprojected: Sequence[Pair] = (),
) -> Reducer[Sequence[CommittedUpdate]]:
    """Of updates in the clear; `reprojected`: the adapters, where the plan has their products averaged."""
    if privacy is not None and privacy.level == "silo":
        return Noised(section, privacy, releases=releases, spools=spools, into=into)
    if section.robust is not None:
        return _BY_NAME[section.robust.name](section, spools=spools, form=form, into=into)
    if reprojected:
        return Reproject(section, reprojected, spools=spools, into=into)
    return Plain(section, training, spools=spools, form=form, into=into)


def of_masks(privacy: PrivacySection | None, *, spools: Spools, into: NextModel) -> Masked:
    """Of masked vectors."""
    nominal_silos = privacy.nominal_silos if privacy is not None and privacy.level == "silo" else None
    return Masked(spools=spools, into=into, nominal_silos=nominal_silos)
