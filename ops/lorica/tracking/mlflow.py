"""Points as runs of an MLflow server, by its REST interface (docs: https://mlflow.org/docs/latest/rest-api.html).

MLflow's own client is not used: it reports on its use to its makers unless told otherwise, and brings thirty packages
into the environment that holds the federation's keys (ADR 27).
"""

import re
import time
from collections.abc import Mapping, Sequence
from itertools import groupby
from typing import Any, Final

from lorica.tracking.http_json import HttpJson
from lorica.tracking.point import Point, Run
from lorica_security.errors import MalformedMessage, StateError

TRACKED: Final = "lorica.tracked"
"""Tag of a run: the newest point that it has, as its key. It is sent with the last numbers of that point."""
MOST_METRICS: Final = 500
"""In one request; the server takes 1,000."""
PATIENCE_S: Final = 20.0
"""Of one `take`: what a slow server has not got by then it gets at the next, so that other tools have their turn."""
_ID: Final = re.compile(r"[0-9A-Za-z_-]{1,64}")
_MISSING: Final = "RESOURCE_DOES_NOT_EXIST"
_THERE: Final = "RESOURCE_ALREADY_EXISTS"


class Mlflow:
    """One run for each plan, found again by its tags."""

    def __init__(self, server: HttpJson, experiment: str) -> None:
        self._server, self._name = server, experiment
        self._runs: dict[Run, str] = {}
        self._tracked: dict[Run, str] = {}

    @property
    def where(self) -> str:
        return self._server.where

    def take(self, points: Sequence[Point]) -> int:
        """Raises Unreachable, MalformedMessage and StateError for what the server answers."""
        return sum(self._of_run(run, list(of_run)) for run, of_run in groupby(points, lambda point: point.run))

    def _of_run(self, run: Run, points: Sequence[Point]) -> int:
        if run not in self._runs:
            self._runs[run], self._tracked[run] = self._found(run)
        keys = [_key(point) for point in points]
        begin = keys.index(self._tracked[run]) + 1 if self._tracked[run] in keys else 0
        until = time.monotonic() + PATIENCE_S
        sent = 0
        for point, key in zip(points[begin:], keys[begin:], strict=True):
            try:
                self._send(self._runs[run], point, key)
            except StateError as error:
                del self._runs[run]  # it may have been deleted there: it is looked for, or made, anew
                raise StateError(f"{error}; restore what was deleted there, or choose another --experiment") from error
            self._tracked[run] = key
            sent += 1
            if time.monotonic() > until:
                break
        return sent

    def _send(self, run_id: str, point: Point, key: str) -> None:
        """A point whose tag did not arrive is sent again: its numbers have the same key, step and instant, which the
        server's databases keep once."""
        instant = round(1000 * point.unix_s)
        metrics = [
            {"key": f"{point.what}/{name}", "value": value, "timestamp": instant, "step": point.round}
            for name, value in point.values.items()
        ]
        parts = [metrics[at : at + MOST_METRICS] for at in range(0, len(metrics), MOST_METRICS)] or [[]]
        for number, part in enumerate(parts, 1):
            tags = [{"key": TRACKED, "value": key}] if number == len(parts) else []
            self._server.post("runs/log-batch", {"run_id": run_id, "metrics": part, "params": [], "tags": tags})

    def _found(self, run: Run) -> tuple[str, str]:
        """Its id, and the newest point that it has."""
        experiment = self._experiment()
        wanted = {"lorica.plan": run.plan, "lorica.of": run.of, "lorica.federation": run.federation}
        reply = self._server.post(
            "runs/search",
            {
                "experiment_ids": [experiment],
                "filter": " and ".join(f"tags.`{key}` = '{_quoted(value)}'" for key, value in wanted.items()),
                "max_results": 1,
            },
        )
        found = reply.get("runs", [])
        if not isinstance(found, list) or not all(isinstance(one, Mapping) for one in found):
            raise MalformedMessage("the MLflow server's answer has no runs")
        if found:
            info, tags = _part(found[0], "info"), _tags(found[0])
            return _id(info, "run_id"), tags.get(TRACKED, "")
        made = self._server.post(
            "runs/create",
            {
                "experiment_id": experiment,
                "run_name": run.title,
                "tags": [{"key": key, "value": value} for key, value in wanted.items()],
            },
        )
        return _id(_part(_part(made, "run"), "info"), "run_id"), ""

    def _experiment(self) -> str:
        try:
            reply = self._server.get("experiments/get-by-name", {"experiment_name": self._name})
        except StateError as error:
            if _MISSING not in str(error):
                raise
            return self._new_experiment()
        return _id(_part(reply, "experiment"), "experiment_id")

    def _new_experiment(self) -> str:
        return _id(self._server.post("experiments/create", {"name": self._name}), "experiment_id")


def _key(point: Point) -> str:
    return f"{point.round}.{point.attempt}.{point.what}"


def _quoted(value: str) -> str:
    """In a filter: digests and names of silos and federations, of which none has a quotation mark."""
    if not re.fullmatch(r"[0-9A-Za-z .-]{0,120}", value):
        raise StateError(f"{value!r} cannot be searched for at an MLflow server")
    return value


def _part(reply: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = reply.get(name)
    if not isinstance(part, Mapping):
        raise MalformedMessage(f"the MLflow server's answer has no {name}")
    return part


def _id(part: Mapping[str, Any], name: str) -> str:
    found = part.get(name)
    if not isinstance(found, str) or not _ID.fullmatch(found):
        raise MalformedMessage(f"the MLflow server's answer has no {name}")
    return found


def _tags(run: Mapping[str, Any]) -> dict[str, str]:
    tags = _part(run, "data").get("tags", [])
    if not isinstance(tags, list) or not all(isinstance(tag, Mapping) for tag in tags):
        raise MalformedMessage("the MLflow server's answer has no tags")
    return {str(tag.get("key")): str(tag.get("value")) for tag in tags}
