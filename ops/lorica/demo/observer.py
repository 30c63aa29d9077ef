"""How the demo sees the federation: through the operator's own calls."""

import time
from collections.abc import Callable, Sequence

from lorica_coordinator.edges.operator_host.operator_client import OperatorAccess
from lorica_security.errors import StateError, Unreachable
from silo_wire.v1 import operator_pb2, operator_pb2_grpc

RETRY_S = 0.2


class FederationView:
    """The coordinator of one state folder, as its operator sees it."""

    def __init__(self, access: OperatorAccess) -> None:
        self._access = access

    def wait_until_serving(self, check: Callable[[], None], longest_s: float) -> None:
        """Return once the coordinator answers; `check` raises when its process has ended."""
        deadline = time.monotonic() + longest_s
        while True:
            check()
            try:
                self.look()
            except Unreachable as error:
                if time.monotonic() > deadline:
                    raise StateError(f"the coordinator did not answer within {longest_s:.0f} s: {error}") from error
                time.sleep(RETRY_S)
            else:
                return

    def look(self) -> tuple[operator_pb2.StatusReply, Sequence[operator_pb2.RoundRecord]]:
        """Status and rounds, over one connection."""
        return self._access.call(_status_and_rounds)


async def _status_and_rounds(
    stub: "operator_pb2_grpc.OperatorAsyncStub",
) -> tuple[operator_pb2.StatusReply, Sequence[operator_pb2.RoundRecord]]:
    status = await stub.GetStatus(operator_pb2.GetStatusRequest())
    return status, (await stub.ListRounds(operator_pb2.ListRoundsRequest())).rounds
