"""What every test shares: property tests that no busy machine can fail, and the folder of real data."""

import os
from pathlib import Path

import pytest
from hypothesis import settings

import silo_wire  # noqa: F401  # before any test module imports grpc

settings.register_profile("lorica", deadline=None, derandomize=bool(os.environ.get("CI")))
settings.load_profile("lorica")

REPOSITORY = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def shared_text2sql() -> Path:
    """The paper's eight silos; a test that needs them is skipped, saying so, where they are missing."""
    folder = Path(os.environ.get("LORICA_SHARED_DATA", REPOSITORY.parent / "shared" / "data")) / "text2sql"
    if not folder.is_dir():
        pytest.skip(f"the paper's text-to-SQL silos are not at {folder}: set LORICA_SHARED_DATA to their folder")
    return folder
