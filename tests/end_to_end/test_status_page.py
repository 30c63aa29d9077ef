"""The status page in a real browser, while two real silos train: what a person sees, by mouse, telephone or
keyboard."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from lorica.demo.silos.clinic import CLINIC
from lorica.demo.silos.insurer import INSURER
from lorica.demo.silos.silos import keep_first, write_silo
from tests.support.browser import Browser, browsing
from tests.support.federation import Federation
from tests.support.warm_processes import WarmProcesses

SILOS = ("clinic", "insurer")
ROUNDS = 4
VALUES = {
    "schedule.rounds": ROUNDS,
    "schedule.min_silos": len(SILOS),
    "training.epochs": 2,
    "training.batch_size": 4,
    "training.gradient_accumulation": 1,
    "training.schema_in_input": "false",
    "training.max_input_tokens": 32,
    "training.max_output_tokens": 16,
    "evaluation.every": 1,
    "evaluation.initial": "false",
}
LINES = 24
PHONE, DESKTOP = (360, 780), (1280, 900)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser")) as found:
        yield found


@pytest.fixture(scope="module")
def federation(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    """Enrolled and ready; nothing has been started."""
    root = tmp_path_factory.mktemp("page")
    data = {silo: root / "data" / silo for silo in SILOS}
    for specification in (CLINIC, INSURER):
        write_silo(data[specification.name], specification, seed=3)
        for file in data[specification.name].glob("*.jsonl"):
            keep_first(file, LINES)
    (root / "logs").mkdir()
    with WarmProcesses(root / "logs") as processes:
        it = Federation(root, processes, data)
        it.init("--no-plan", "--federation", "northern-care")
        settings = [argument for key, value in VALUES.items() for argument in ("--set", f"{key}={value}")]
        it.coordinator("plan", "new", "triage", "--size", "micro", *settings)
        it.serve("--plan", "triage")
        for silo in SILOS:
            it.agent(silo, "enroll", it.coordinator("invite", silo).strip())
            it.start_agent(silo)
        it.wait(it.all_ready)
        yield it


@pytest.fixture
def page(federation: Federation, browser: Browser) -> Browser:
    browser.scripts(allowed=True)
    browser.size(*DESKTOP)
    browser.colours("light")
    browser.open(f"http://127.0.0.1:{federation.ports[3]}/")
    browser.until(SAYS.format("Silos"))
    return browser


SAYS = "document.body.innerText.includes({!r})"


def test_it_follows_the_rounds_without_being_loaded_again(federation: Federation, page: Browser) -> None:
    page.driver.execute_script("window.mark = 'the same document'")
    page.until(SAYS.format("gathering"))
    federation.coordinator("plan", "start", "triage")
    page.until(SAYS.format("What silos brought to round"), federation.processes.check)
    page.picture("running")
    page.until(SAYS.format(f"What silos brought to round {ROUNDS}"), federation.processes.check)
    page.until("document.querySelector('.phase').innerText === 'finished'", federation.processes.check)
    assert page.run("window.mark") == "the same document"
    assert page.run("document.title") == "northern-care: finished"
    assert page.run("document.getElementById('connection').innerText") == "live"
    drawn = page.run("[...document.querySelectorAll('figure')].map((figure) => figure.id)")
    assert drawn == ["chart-exact-match", "chart-loss", "chart-shares", "chart-loss-reduction"]
    silos = page.run("[...document.querySelectorAll('#contributions tbody tr')].map((row) => row.innerText)")
    assert [row.split()[0] for row in silos] == list(SILOS)
    record = federation.view().look()[1][-1]
    assert f"{record.micro_exact_match:.1%}" in page.run("document.getElementById('history').innerText")
    for silo in record.silos:
        assert f"{silo.share:.1%}" in page.run("document.getElementById('contributions').innerText")


def test_it_fits_a_telephone_and_the_dark(federation: Federation, page: Browser) -> None:
    for name, size in (("phone", PHONE), ("desktop", DESKTOP)):
        page.size(*size)
        for scheme in ("light", "dark"):
            page.colours(scheme)
            page.driver.execute_script("document.querySelectorAll('details').forEach((one) => one.open = false)")
            page.picture(f"{name}-{scheme}")
        page.driver.execute_script("document.querySelectorAll('details').forEach((one) => one.open = true)")
        assert page.run("document.documentElement.scrollWidth") <= size[0], f"{name} scrolls sideways"
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 28)"
    page.colours("light")
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(245, 246, 248)"


def test_everything_can_be_reached_by_keyboard_and_stays_under_it(federation: Federation, page: Browser) -> None:
    page.until("document.getElementById('connection').innerText === 'live'")
    reached = []
    for _ in range(40):
        page.press("TAB")
        words = page.run("document.activeElement.innerText.split('\\n')[0]")
        if words in reached:
            break
        reached.append(words)
    tables = page.run("[...document.querySelectorAll('summary')].map((one) => one.innerText)")
    assert reached[0] == "To the content"
    assert len(tables) == 4
    assert set(tables) <= set(reached)
    page.driver.execute_script("document.querySelectorAll('summary')[1].focus()")
    page.press("ENTER")
    assert page.run("document.querySelectorAll('details')[1].open")
    page.driver.execute_script("document.querySelector('#charts h2').textContent = 'out of date'")
    page.until("document.querySelector('#charts h2').textContent === 'Rounds'")  # it was replaced
    assert page.run("document.querySelectorAll('details')[1].open")
    assert page.run("document.activeElement === document.querySelectorAll('summary')[1]")


def test_charts_say_in_words_what_they_show(federation: Federation, page: Browser) -> None:
    tree = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    pictures = [node for node in tree if node.get("role", {}).get("value") == "image" and not node.get("ignored")]
    assert len(pictures) == 4
    assert pictures[0]["name"]["value"].startswith("Exact match on held-out questions")
    rows = page.run("[...document.querySelectorAll('#chart-loss-table tbody tr')].map((row) => row.textContent.trim())")
    assert len(rows) == ROUNDS
    losses = {
        f"{silo.loss_min:.4g}" for record in federation.view().look()[1] for silo in record.silos if silo.examples
    }
    assert losses == set(
        page.run("[...document.querySelectorAll('#chart-loss-table td')].map((one) => one.textContent)")
    )


def test_it_asks_nobody_else_and_breaks_none_of_its_own_rules(federation: Federation, page: Browser) -> None:
    page.until("document.getElementById('connection').innerText === 'live'")
    origin = f"http://127.0.0.1:{federation.ports[3]}/"
    asked = page.requested()
    assert f"{origin}live" in asked
    assert {address for address in asked if not address.startswith((origin, "data:", "chrome", "about:"))} == set()
    assert page.complaints() == []
    page.driver.execute_script(
        "document.body.insertAdjacentHTML('beforeend', '<img src=x onerror=\"window.hit = 1\">')"
    )
    page.until("performance.getEntriesByType('resource').length > 0")
    page.driver.execute_script(
        "const s = document.createElement('script'); s.textContent = 'window.hit = 2'; document.body.append(s)"
    )
    assert page.run("window.hit") is None
    assert any("Content Security Policy" in line for line in page.complaints())


def test_it_works_without_javascript(federation: Federation, page: Browser) -> None:
    page.scripts(allowed=False)
    page.open(f"http://127.0.0.1:{federation.ports[3]}/")
    text = page.driver.find_element("tag name", "main").text
    for word in ("finished", *SILOS, "Exact match on held-out questions"):
        assert word in text
    assert page.driver.find_elements("css selector", "noscript meta[http-equiv=refresh]")
    assert page.driver.find_element("link text", "Refresh").get_attribute("href").endswith("/")


def test_it_says_so_when_the_coordinator_is_away_and_goes_on_when_it_is_back(
    federation: Federation, page: Browser
) -> None:
    page.driver.execute_script("window.mark = 'the same document'")
    federation.processes.stop("coordinator")
    page.until("document.getElementById('connection').innerText.includes('trying again')")
    assert page.run("getComputedStyle(document.getElementById('connection')).color") == "rgb(179, 38, 30)"
    federation.serve("--plan", "triage")
    page.until("document.getElementById('connection').innerText === 'live'", federation.processes.check)
    assert page.run("window.mark") == "the same document"
    assert Path(page.picture("back-again")).stat().st_size > 10_000
