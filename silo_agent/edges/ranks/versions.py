"""What ranks of one training have to have the same of."""

import platform

import torch
import transformers

from lorica_security.host.software_version import software_version


def versions() -> dict[str, str]:
    """Of everything that the bits of a training come from."""
    return {
        "lorica": software_version(),
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
    }
