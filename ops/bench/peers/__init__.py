"""Other systems at the same work as Lorica's rounds: each installed from PyPI, in its real deployment, on loopback; and the floor."""

from collections.abc import Mapping

from ops.bench.peers.floor import Floor
from ops.bench.peers.flwr import Flwr
from ops.bench.peers.nvflare import Nvflare
from ops.bench.peers.peer import Peer

PEERS: Mapping[str, Peer] = {peer.name: peer for peer in (Flwr(), Nvflare(), Floor())}
