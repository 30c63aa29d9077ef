"""What a benchmark of masked rounds reports of one system at one size."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields

from lorica.bench.figures import Figures
from lorica.bench.masked.checks import ModelCheck
from lorica.bench.masked.cryptography import MaskFigures
from lorica.bench.peers.flwr_secagg import PeerMasks

Json = Mapping[str, str | int | float | None]

_OF_A_ROUND = [field.name for field in fields(Figures) if field.name not in ("system", "silos", "parameters")]


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """`rounds` of whole rounds, `masks` of the cryptography: None where that was not measured, or there is none."""

    system: str
    silos: int
    parameters: int
    rounds: Figures | None = None
    masks: MaskFigures | PeerMasks | None = None

    @property
    def mask_cpu_s(self) -> float | None:
        """Of one silo: from its delta to its vector."""
        match self.masks:
            case MaskFigures():
                return self.masks.mask.cpu_s
            case PeerMasks():
                return self.masks.mask_cpu_s
        return None

    @property
    def unmask_cpu_s(self) -> float | None:
        """Of the coordinator: from the vectors to the mean delta."""
        match self.masks:
            case MaskFigures():
                return self.masks.whole.mean.cpu_s
            case PeerMasks():
                return self.masks.unmask_cpu_s
        return None

    @property
    def relative_l2_error(self) -> float | None:
        match self.masks:
            case MaskFigures():
                return self.masks.whole.relative_l2_error
            case PeerMasks():
                return self.masks.relative_l2_error
        return None

    def to_json(self) -> Json:
        """The keys of the other benchmark and the three of this one, null where nothing was measured; and the rest of
        `MaskFigures`."""
        whole: Json = dict.fromkeys(_OF_A_ROUND) if self.rounds is None else self.rounds.to_json()
        more = _of(self.masks) if isinstance(self.masks, MaskFigures) else {}
        return {
            "system": self.system,
            "silos": self.silos,
            "parameters": self.parameters,
            **{name: whole[name] for name in _OF_A_ROUND},
            "mask_cpu_s": _rounded(self.mask_cpu_s),
            "unmask_cpu_s": _rounded(self.unmask_cpu_s),
            "relative_l2_error": self.relative_l2_error,
            **more,
        }


@dataclass(frozen=True, slots=True)
class Growth:
    """CPU seconds that one more silo costs: each silo for its masks, and the coordinator for the sum, at one number of
    parameters."""

    mask_s: float
    unmask_s: float


def growth(measured: Sequence[MaskFigures]) -> Growth | None:
    """By least squares; None for fewer than two cohorts."""
    silos = [one.silos for one in measured]
    if len(set(silos)) < 2:
        return None
    return Growth(
        mask_s=statistics.linear_regression(silos, [one.mask.cpu_s for one in measured]).slope,
        unmask_s=statistics.linear_regression(silos, [one.whole.mean.cpu_s for one in measured]).slope,
    )


def _of(masks: MaskFigures) -> Json:
    lost = masks.lost
    return {
        "keys_cpu_s": _rounded(masks.keys.cpu_s),
        "kem_cpu_s_a_silo": round(masks.kem_cpu_s / masks.silos, 6),
        "mask_wall_s": _rounded(masks.mask.wall_s),
        "mask_peak_bytes": masks.mask.peak_bytes,
        "unmask_wall_s": _rounded(masks.whole.mean.wall_s),
        "unmask_peak_bytes": masks.whole.mean.peak_bytes,
        "aggregate_cpu_s": _rounded(masks.whole.aggregate.cpu_s),
        "aggregate_peak_bytes": masks.whole.aggregate.peak_bytes,
        "plain_aggregate_cpu_s": _rounded(masks.plain.cpu_s),
        **_of_check("spot", masks.spot),
        **_of_check("joint", masks.joint),
        "lost_unmask_cpu_s": None if lost is None else _rounded(lost.mean.cpu_s),
        "lost_relative_l2_error": None if lost is None else lost.relative_l2_error,
    }


def _of_check(name: str, check: ModelCheck) -> Json:
    return {
        f"{name}_cpu_s": _rounded(check.silo.cpu_s),
        f"{name}_peak_bytes": check.silo.peak_bytes,
        f"{name}_fetched_bytes": check.fetched_bytes,
        f"{name}_shown_cpu_s": _rounded(check.shown_cpu_s),
    }


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 3)
