"""Every method of a store is one transaction: where another one was in its way, it is done again, a few times."""

from collections.abc import Callable
from functools import partial, wraps
from typing import Any, TypeVar

Store = TypeVar("Store", bound=type)


def in_tries(kind: Store) -> Store:
    """Have each public method of `kind` done by `place.in_tries`, which says when it is tried again; `close` apart."""
    for name, method in list(vars(kind).items()):
        if callable(method) and not name.startswith("_") and name != "close":
            setattr(kind, name, _tried(method))
    return kind


def _tried(method: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(method)
    def tried(store: Any, *arguments: Any, **named: Any) -> Any:
        return store.place.in_tries(partial(method, store, *arguments, **named))

    return tried
