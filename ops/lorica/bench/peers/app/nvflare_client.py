"""A silo's training script (Client API, in the process of its job): adds the silo's constant to what it was sent."""

import nvflare.client as flare
from nvflare.app_common.abstract.fl_model import FLModel

from .constant_work import step


def main(silos: int) -> None:
    """The site's name ends in its number."""
    flare.init()
    constant = step(int(flare.get_site_name().rpartition("-")[2]), silos)
    while flare.is_running():
        model = flare.receive()
        if model is None:
            break
        for tensor in model.params.values():
            tensor += constant
        flare.send(FLModel(params=model.params))
