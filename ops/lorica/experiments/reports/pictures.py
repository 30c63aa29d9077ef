"""Drawing a study's pictures with matplotlib; what is drawn, the report says."""

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from lorica_security.errors import ConfigurationError

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Curve = dict[float, list[float]]
"""By round, the values of the seeds."""


@dataclass(frozen=True, slots=True)
class Curves:
    """Curves by label; the least and the greatest value of the seeds are drawn as a band around their mean."""

    file: str
    title: str
    shown: Mapping[str, Curve]
    of: str
    along: str = "round"

    def draw(self, axes: "Axes") -> None:
        for number, (label, curve) in enumerate(self.shown.items()):
            if not curve:
                continue
            along, color = sorted(curve), f"C{number}"  # the same of a label in pictures where others have no curve
            axes.plot(along, [statistics.fmean(curve[at]) for at in along], label=label, linewidth=1.5, color=color)
            least, most = [min(curve[at]) for at in along], [max(curve[at]) for at in along]
            axes.fill_between(along, least, most, alpha=0.15, color=color)
        axes.set(xlabel=self.along)


_MEAN: Final[dict[str, Any]] = {"s": 160, "marker": "_", "linewidths": 2.5}
_SEED: Final[dict[str, Any]] = {"s": 14, "alpha": 0.6, "linewidths": 0}


@dataclass(frozen=True, slots=True)
class Dots:
    """By label and name, the values of the seeds: a dot each, and a bar at their mean. Labels stand side by side."""

    file: str
    title: str
    shown: Mapping[str, Mapping[str, Sequence[float]]]
    of: str

    def draw(self, axes: "Axes") -> None:
        names = list(dict.fromkeys(name for of_one in self.shown.values() for name in of_one))
        for number, (label, of_one) in enumerate(self.shown.items()):
            aside = 0.22 * (number - (len(self.shown) - 1) / 2)
            at = [names.index(name) + aside for name in of_one]
            axes.scatter(at, list(map(statistics.fmean, of_one.values())), **_MEAN, label=label, color=f"C{number}")
            for where, values in zip(at, of_one.values(), strict=True):
                axes.scatter([where] * len(values), values, **_SEED, color=f"C{number}")
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.set_xticks(range(len(names)), names, rotation=20)


Picture = Curves | Dots


def draw(picture: Picture, out: Path) -> None:
    """Its file in `out`; raises ConfigurationError where there is no matplotlib."""
    # Here, not above: it takes a second to load, and an installation that runs no studies has none.
    try:
        import matplotlib as mpl
        from matplotlib import pyplot
    except ImportError as error:
        raise ConfigurationError(
            "pictures need matplotlib, which is not installed: install Lorica's wheel with [lab]"
        ) from error

    pyplot.switch_backend("svg")
    mpl.rcParams["svg.hashsalt"] = "lorica"  # the same results give the same bytes
    canvas, axes = pyplot.subplots(figsize=(9, 4.5))
    picture.draw(axes)
    axes.set(title=picture.title, ylabel=picture.of)
    axes.grid(visible=True, alpha=0.3)
    axes.legend(
        fontsize="small", loc="upper left", bbox_to_anchor=(1.0, 1.0)
    )  # beside the curves, which it would cover
    canvas.tight_layout()
    canvas.savefig(out / picture.file, metadata={"Date": None})
    pyplot.close(canvas)
