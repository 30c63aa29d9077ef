"""What ML-KEM-768 costs beside X25519: CPU time of its operations within any work of this process, watched from
outside."""

import time
from collections.abc import Callable
from typing import Any, TypeVar

from cryptography.hazmat.primitives.asymmetric.mlkem import MLKEM768PrivateKey, MLKEM768PublicKey

from lorica_security.secure_aggregation.keys import key_agreement

Result = TypeVar("Result")
_KEYS = (MLKEM768PrivateKey, MLKEM768PublicKey)


def watched(work: Callable[[], Result]) -> tuple[Result, float]:
    """What `work` returns, and the CPU seconds that ML-KEM took of it in this thread: keys made, read and checked,
    secrets either way."""
    spent: list[float] = []
    for key in _KEYS:
        setattr(key_agreement, key.__name__, _Watched(key, spent))
    try:
        result = work()
    finally:
        for key in _KEYS:
            setattr(key_agreement, key.__name__, key)
    return result, sum(spent)


class _Watched:
    """A kind of keys, or a key, whose calls are timed."""

    def __init__(self, inner: Any, spent: list[float]) -> None:
        self._inner, self._spent = inner, spent

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*given: Any) -> Any:
            begun = time.thread_time()
            result = getattr(self._inner, name)(*given)
            self._spent.append(time.thread_time() - begun)
            return _Watched(result, self._spent) if isinstance(result, _KEYS) else result

        return call
