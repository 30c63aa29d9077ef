"""What silos sent in a closed round is nowhere below the coordinator's folder any more: not in spools, spares, records,
the database."""

import os

import numpy as np

from lorica_coordinator.edges.models.spool import Spools
from lorica_coordinator.vectors.stored_vector import VectorReader
from tests.integration.test_attacks_on_a_round import Play, play
from tests.support.byte_search import Needles
from tests.support.coordinator import FederationTemplate, federation_template

__all__ = ["FederationTemplate", "federation_template", "play"]

PIECE = 16


def pieces(content: bytes) -> list[bytes]:
    return [content[at : at + PIECE] for at in range(0, len(content) - PIECE + 1, PIECE)]


async def test_no_byte_of_an_update_is_found_while_its_round_is_open_nor_after(play: Play) -> None:
    draws = np.random.default_rng(7)
    sent = {
        silo.name: (draws.standard_normal(play.layout.parameters) * 0.01).astype("<f4").tobytes()
        for silo in (play.hospital, play.bank)
    }
    needles = Needles(piece for content in sent.values() for piece in pieces(content))
    root, state = play.at.coordinator.folder.root, play.at.coordinator.settings.state_folder

    first = play.hospital.update(play.order, play.layout, data=sent[play.hospital.name])
    await play.hospital.upload(first)
    assert needles.below(root) == {}
    # The file is there and is the update, to the process that has its key.
    vector = Spools(state / "spools").committed(play.order.key, play.hospital.name, first.header.manifest.digest)
    found = bytearray(play.layout.total_bytes)
    reader = VectorReader(vector)
    reader.read_into(memoryview(found))
    reader.close()
    assert found == first.data
    shown = play.scratch / "shown"
    shown.write_bytes(found)
    assert needles.in_file(shown), "the search finds what there is"
    shown.unlink()
    (key,) = (state / "spools").rglob("*.key")
    other_name = play.scratch / "the same file"
    os.link(key, other_name)
    secret = other_name.read_bytes()
    assert any(secret)

    order = await play.bank.order(type(play.order), 1)
    await play.bank.upload(play.bank.update(order, play.layout, data=sent[play.bank.name]))
    await play.evaluate(1)
    assert needles.below(root) == {}
    assert len(list((state / "spools").rglob("*.spare"))) == 2, "their files wait to be written over"
    assert other_name.read_bytes() == bytes(len(secret)), "the key was overwritten where it lay"
    assert Needles([secret]).below(root) == {}
