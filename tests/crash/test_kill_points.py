"""Every named point is a function that the product has, and every one of them is in the plan of kills."""

import pytest

from lorica.soak.federation import COORDINATOR
from tests.support.kill_plan import AGENT_KILLS, COORDINATOR_KILLS
from tests.support.kill_points import COORDINATOR as COORDINATOR_POINTS
from tests.support.kill_points import PROGRAMS, SILO_AGENT, Point
from tests.support.masked_kill_plan import KILLS as MASKED_KILLS


@pytest.mark.parametrize(
    "point",
    [
        pytest.param(point, id=f"{program}-{name}")
        for program, points in PROGRAMS.items()
        for name, point in points.items()
    ],
)
def test_a_point_is_a_function_of_the_product(point: Point) -> None:
    _, _, function = point.place()
    assert callable(function)


def test_every_point_has_its_kill() -> None:
    kills = (*COORDINATOR_KILLS, *AGENT_KILLS, *MASKED_KILLS)
    assert {kill.point for kill in kills if kill.process == COORDINATOR} == set(COORDINATOR_POINTS)
    assert {kill.point for kill in kills if kill.process != COORDINATOR} == set(SILO_AGENT)
    assert len(kills) >= 60
