"""The status page in a real browser where there is much to see: a hundred silos, and a masked plan after a plain one.

The coordinator and its page are real; the records of its rounds are made up (lorica.bench.made_rounds).
"""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from lorica.bench.made_rounds import MadePlan, fill, make_folder, silo_names
from lorica.demo.ports import free_ports
from tests.support.browser import Browser, browsing
from tests.support.coordinator import running

SILOS, PLAIN_ROUNDS, MASKED_ROUNDS = 100, 60, 12
MASKED = {
    "aggregation.secure_aggregation": True,
    "aggregation.weighting": "equal",
    "aggregation.max_delta_norm": 1.0,
    "schedule.rounds": 20,
}

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@contextmanager
def served(root: Path) -> Iterator[str]:
    """The address of the page, whose coordinator runs in a thread with an event loop of its own."""
    folder = make_folder(root, free_ports(4))
    plans = [
        MadePlan(name="open-trial", done=PLAIN_ROUNDS, best=0.5, values={"schedule.rounds": PLAIN_ROUNDS}),
        MadePlan(name="covered", done=MASKED_ROUNDS, values=MASKED),
    ]
    fill(folder, plans, silo_names(SILOS), now=time.time())
    ready, found = threading.Event(), []
    loop = asyncio.new_event_loop()
    over = asyncio.Event()

    async def serve() -> None:
        async with running(folder) as at:
            assert at.serving.page is not None
            found.append(f"http://127.0.0.1:{at.serving.page.port}/")
            ready.set()
            await over.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        assert ready.wait(60)
        yield found[0]
    finally:
        loop.call_soon_threadsafe(over.set)
        thread.join()
        loop.close()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    root = tmp_path_factory.mktemp("many")
    with browsing(root / "browser") as browser, served(root / "coordinator") as address:
        browser.size(1280, 900)
        browser.colours("light")
        browser.open(address)
        browser.until("document.querySelectorAll('.switches button').length === 5")  # both plans are read
        yield browser


def drawn(page: Browser) -> None:
    of = "document.getElementById('curves').dataset"
    page.until(f"{of}.drawn && {of}.drawn === {of}.version")


def charts(page: Browser, panel: int) -> list[str]:
    found: list[str] = page.run(
        f"[...document.querySelectorAll('.panel')[{panel}].querySelectorAll('figure')].map((one) => one.dataset.chart)"
    )
    return found


def test_plans_stand_side_by_side_and_only_the_plain_one_tells_of_silos(page: Browser) -> None:
    drawn(page)
    assert charts(page, 0) == ["score", "weight-sum"]
    button = (
        "[...document.querySelectorAll('.switches button')].find((one) => one.textContent.startsWith('open-trial'))"
    )
    page.driver.execute_script(f"{button}.click()")
    page.until("document.querySelectorAll('.panel').length === 2")
    assert charts(page, 0) == ["score", "weight-sum"]
    assert charts(page, 1) == ["score", "loss", "share", "reduction"]
    said = page.run("[...document.querySelectorAll('.panel')].map((one) => one.textContent)")
    assert ["clinic-042" in one for one in said] == [False, True]
    compared = page.run("document.querySelector('[data-chart=compare] [role=img]').ariaLabel")
    assert compared.startswith(f"Exact match, MicroAvg of 2 plans, rounds 1 to {PLAIN_ROUNDS}, higher is better: ")
    page.picture("side-by-side")


def test_the_masked_plans_numbers_name_nobody(page: Browser) -> None:
    plans = page.run("fetch('/curves').then((reply) => reply.json())")["plans"]
    assert [(plan["name"], plan["silos"], len(plan["points"])) for plan in plans] == [
        ("open-trial", True, PLAIN_ROUNDS),
        ("covered", False, MASKED_ROUNDS),
    ]
    covered = page.run(f"fetch('/curves/{plans[1]['digest']}').then((reply) => reply.json())")
    assert covered == {"digest": plans[1]["digest"], "silos": [], "measures": [], "rounds": []}
    told = page.run(f"fetch('/curves/{plans[0]['digest']}').then((reply) => reply.json())")
    assert (len(told["silos"]), len(told["rounds"])) == (SILOS, PLAIN_ROUNDS)
    assert "clinic" not in json.dumps(plans)


def test_one_of_a_hundred_silos_is_marked_in_every_chart(page: Browser) -> None:
    drawn(page)
    page.driver.execute_script(
        "const one = document.querySelector('figure[data-chart=loss] .choose');"
        "one.value = 'clinic-042'; one.dispatchEvent(new Event('change'))"
    )
    page.until("[...document.querySelectorAll('.choose')].every((one) => one.value === 'clinic-042')")
    assert page.run("document.activeElement.closest('figure').dataset.chart") == "loss"
    page.picture("marked")


def test_a_hundred_silos_fit_a_telephone_and_the_dark(page: Browser) -> None:
    rows = "document.querySelectorAll('#silos-table tbody tr').length"
    assert page.run(rows) == SILOS
    for name, size in (("phone", (360, 780)), ("desktop", (1280, 900))):
        page.size(*size)
        for scheme in ("light", "dark"):
            page.colours(scheme)
            drawn(page)
            page.picture(f"many-{name}-{scheme}")
        assert page.run("document.documentElement.scrollWidth") <= size[0], f"{name} scrolls sideways"
        assert page.run("document.getElementById('silos-scroll').clientHeight") < 600
    assert page.run("getComputedStyle(document.querySelector('#silos-table thead th')).position") == "sticky"
    scrolled = "document.getElementById('silos-scroll').scrollTop"
    page.driver.execute_script(f"{scrolled} = 300; document.querySelector('#silos h2').textContent = 'out of date'")
    page.until("document.querySelector('#silos h2').textContent === 'Silos'")  # it was replaced
    assert page.run(scrolled) == 300
    assert page.complaints() == []
