"""The notebooks, each executed whole by a kernel of its own; here with fewer rounds, by `make notebooks` as they are."""

import os
from pathlib import Path
from typing import Final

import nbformat
import pytest
from nbclient import NotebookClient

from lorica.demo.processes import environment

ROOT: Final = Path(__file__).resolve().parents[2]
NOTEBOOKS: Final = {path.stem: path for path in sorted((ROOT / "ops" / "notebooks").glob("*.ipynb"))}
WHOLE: Final = bool(os.environ.get("LORICA_WHOLE_NOTEBOOKS"))
LONGEST_S: Final = 1200

SLICES: Final = {
    "clinical_notes": "ROUNDS, NOTES = 2, 24",
    "first_federation": "ROUNDS, WORKERS = 1, 1",
    "from_flower_or_nvflare": "ROUNDS, EPOCHS = 1, 1",
    "personal_models": "ROUNDS, EPOCHS = 1, 1",
    "private_and_masked": "ROUNDS, WORKERS, TOKENS = 1, 1, 16",
    "your_own_metric": "ROUNDS, EPOCHS = 2, 1",
}
"""What the cell of parameters says in place of its own."""
LEFT_OUT: Final = {"personal_models"}
"""Of the suite, as it runs a federation of processes: test_try.py and the tests of silo-agent do the same."""

SAYS: Final = {
    "clinical_notes": ("ROUGE-L", "model:", "ward:"),
    "first_federation": ("plan first", "round 1: applied"),
    "from_flower_or_nvflare": ("round 1: exact match",),
    "personal_models": ("personal", "local", "global"),
    "private_and_masked": ("masked\n  bank: examples 0, loss reduction 0.0, share 0.0", "noise multiplier"),
    "your_own_metric": ("round 2: named", "does not take part"),
}
"""What only comes of a notebook that did what it says."""


def test_each_is_known_here() -> None:
    assert set(NOTEBOOKS) == set(SLICES) == set(SAYS)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_it_is_valid_and_has_no_output(name: str) -> None:
    """Outputs would be of one machine, with its paths, and go out of date."""
    notebook = nbformat.read(NOTEBOOKS[name], 4)
    nbformat.validate(notebook)
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in code)
    assert [cell.metadata.get("tags") for cell in code].count(["parameters"]) == 1
    assert notebook.cells[0].source.startswith("# ")


@pytest.mark.slow
@pytest.mark.timeout(LONGEST_S)
@pytest.mark.parametrize("name", [name for name in NOTEBOOKS if WHOLE or name not in LEFT_OUT])
def test_it_runs_to_its_end(name: str, tmp_path: Path) -> None:
    notebook = nbformat.read(NOTEBOOKS[name], 4)
    if not WHOLE:
        (parameters,) = (cell for cell in notebook.cells if cell.metadata.get("tags") == ["parameters"])
        parameters.source = SLICES[name]
    at = {"resources": {"metadata": {"path": str(tmp_path)}}}
    client = NotebookClient(notebook, timeout=LONGEST_S, kernel_name="python3", **at)
    client.execute(env=environment(TMPDIR=str(tmp_path), JUPYTER_RUNTIME_DIR=str(tmp_path)))
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    said = "".join(output.get("text", "") for output in outputs if output.get("name") == "stdout")
    assert [words for words in SAYS[name] if words not in said] == []
