"""What a round of a T5-base takes on lines of four speeds, by the types that models and updates travel in."""

from typing import Final

from lorica.documentation.markdown import markdown_table
from lorica.simulation.forecast.estimate_report import bytes_text, seconds_text
from lorica.simulation.forecast.lines import LINES, seconds
from lorica.simulation.forecast.traffic import Traffic
from silo_wire.manifest import Layout, ParameterDtype, TensorSpec, UpdateDtype

T5_BASE: Final = Layout("float32", (TensorSpec("all", (222_903_552,)),))
_ROWS: Final[tuple[tuple[ParameterDtype, UpdateDtype], ...]] = (
    ("float32", "float32"),
    ("float32", "bfloat16"),
    ("float32", "int8"),
    ("bfloat16", "float32"),
    ("bfloat16", "bfloat16"),
    ("bfloat16", "int8"),
)


def lines_table() -> str:
    rows = []
    for model, update in _ROWS:
        traffic = Traffic(down=T5_BASE.as_type(model).total_bytes, up=T5_BASE.as_type(update).total_bytes)
        times = (seconds_text(seconds(traffic, line)) for line in LINES.values())
        rows.append((f'`"{model}"`', f'`"{update}"`', bytes_text(traffic.down), bytes_text(traffic.up), *times))
    return markdown_table(("`wire.model`", "`wire.update`", "down", "up", *LINES), rows)
