"""Where tools of other environments are: those that look at ops/compose and ops/helm in that of `make deployment-tools`,
else on the path; MLflow, TensorBoard and an S3 server in that of `make tracking-tools`."""

import os
import shutil
import sys

import pytest

WHY_NOT = "is not here: make deployment-tools"


def tool(name: str) -> str:
    """Its path; the test that needs it is skipped, saying so, where it is missing."""
    found = shutil.which(name, path=f"{sys.prefix}-audit/bin{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        pytest.skip(f"{name} {WHY_NOT}")
    return found


def tracking_tool(name: str) -> str:
    """As `tool`."""
    found = shutil.which(name, path=f"{sys.prefix}-tracking/bin{os.pathsep}{sys.prefix}/bin")
    if found is None:
        pytest.skip(f"{name} is not here: make tracking-tools")
    return found
