"""Other systems at the same work as Lorica's rounds: each installed from PyPI, in its real deployment, on loopback; and
the floor."""

from collections.abc import Mapping

from lorica.bench.peers.floor import Floor
from lorica.bench.peers.flwr import Flwr
from lorica.bench.peers.nvflare import Nvflare
from lorica.bench.peers.peer import Peer

PEERS: Mapping[str, Peer] = {peer.name: peer for peer in (Flwr(), Nvflare(), Floor())}
