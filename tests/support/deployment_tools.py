"""Where the tools are that look at ops/compose and ops/helm: in the environment of `make deployment-tools`, else on the
path."""

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
