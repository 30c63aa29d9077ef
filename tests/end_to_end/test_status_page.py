"""The status page in a real browser, while two real silos train: what a person sees, by mouse, telephone or
keyboard."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver import ActionChains

from lorica.demo.plan import set_arguments
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
CHARTS = ["score", "loss", "share", "reduction"]
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
        it.coordinator("plan", "new", "triage", "--size", "micro", *set_arguments(VALUES))
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
    page.until("document.querySelector('figure[data-chart=loss]')", federation.processes.check)
    page.picture("running")
    page.until(f"document.getElementById('round-{ROUNDS}-1')", federation.processes.check)
    page.until("document.querySelector('.phase').innerText === 'finished'", federation.processes.check)
    drawn(page)
    assert page.run("window.mark") == "the same document"
    assert page.run("document.title") == "northern-care: finished"
    assert page.run("document.getElementById('connection').innerText") == "live"
    assert page.run("[...document.querySelectorAll('figure')].map((figure) => figure.dataset.chart)") == CHARTS
    last = f"document.getElementById('round-{ROUNDS}-1')"
    silos = page.run(f"[...{last}.querySelectorAll('tbody tr')].map((row) => row.textContent)")
    assert [row.strip().startswith(silo) for row, silo in zip(silos, SILOS, strict=True)] == [True] * len(SILOS)
    record = federation.view().look()[1][-1]
    assert f"MicroAvg {record.micro_exact_match:.1%}" in page.run(f"{last}.querySelector('summary').textContent")
    for silo in record.silos:
        assert f"{silo.share:.1%}" in page.run(f"{last}.textContent")


def drawn(page: Browser) -> None:
    """Until the curves are those that the page speaks of."""
    of = "document.getElementById('curves').dataset"
    page.until(f"{of}.drawn && {of}.drawn === {of}.version")


def test_a_person_points_at_a_curve_and_comes_closer(federation: Federation, page: Browser) -> None:
    drawn(page)
    over = page.driver.find_element("css selector", "figure[data-chart=loss] .u-over")
    shown = "document.querySelector('figure[data-chart=loss] .canvas').dataset.rounds"
    page.driver.execute_script("arguments[0].scrollIntoView({ block: 'center' })", over)
    tip = "document.querySelector('figure[data-chart=loss] .tip')"
    assert page.run(f"{tip}.hidden")
    width = over.size["width"]
    ActionChains(page.driver).move_to_element_with_offset(over, width // 2 - 1, 0).perform()
    page.until(f"!{tip}.hidden")
    said = page.run(f"{tip}.innerText").splitlines()
    record = federation.view().look()[1][-1]
    assert said == [f"round {ROUNDS}", *(f"{silo.silo}: {float(f'{silo.loss_min:.4g}'):g}" for silo in record.silos)]
    assert page.run(shown) == f"1 to {ROUNDS}"
    drag = ActionChains(page.driver).move_to_element_with_offset(over, -int(width * 0.4), 0).click_and_hold()
    drag.move_by_offset(int(width * 0.8), 0).release().perform()
    page.until(f"{shown} === '2 to {ROUNDS - 1}'")
    ActionChains(page.driver).double_click(over).perform()
    page.until(f"{shown} === '1 to {ROUNDS}'")
    toggle = (
        "[...document.querySelectorAll('figure[data-chart=loss] .key')].find((one) => one.textContent === 'clinic')"
    )
    page.driver.execute_script(f"{toggle}.click()")
    assert page.run(f"{toggle}.getAttribute('aria-pressed')") == "false"
    page.driver.execute_script(f"{toggle}.click()")


def test_a_warning_leads_to_the_runbook_that_the_coordinator_serves(federation: Federation, page: Browser) -> None:
    link = page.driver.find_element("css selector", "#now a.help").get_attribute("href")
    assert link.endswith("/runbook.html#phase-finished")
    page.open(link)
    assert page.run("document.querySelector(location.hash).textContent") == "Phase finished"
    assert page.complaints() == []


def test_every_round_has_a_page_that_needs_no_script(federation: Federation, page: Browser) -> None:
    page.scripts(allowed=False)
    page.open(page.driver.find_element("css selector", "#plans a").get_attribute("href"))
    rows = page.driver.find_elements("css selector", "tbody tr")
    assert [row.text.split()[0] for row in rows] == [f"{number}.1" for number in range(ROUNDS, 0, -1)]
    page.open(page.driver.find_elements("css selector", "tbody th a")[-1].get_attribute("href"))
    first = federation.view().look()[1][0]
    text = page.driver.find_element("tag name", "main").text
    for silo in first.silos:
        assert f"{silo.share:.1%}" in text
    assert page.complaints() == []


def test_it_fits_a_telephone_and_the_dark(federation: Federation, page: Browser) -> None:
    for name, size in (("phone", PHONE), ("desktop", DESKTOP)):
        page.size(*size)
        for scheme in ("light", "dark"):
            page.colours(scheme)
            drawn(page)
            page.driver.execute_script("document.querySelectorAll('details').forEach((one) => one.open = false)")
            page.picture(f"{name}-{scheme}")
        page.driver.execute_script("document.querySelectorAll('details').forEach((one) => one.open = true)")
        assert page.run("document.documentElement.scrollWidth") <= size[0], f"{name} scrolls sideways"
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(18, 22, 28)"
    page.colours("light")
    assert page.run("getComputedStyle(document.body).backgroundColor") == "rgb(245, 246, 248)"


def test_everything_can_be_reached_by_keyboard_and_stays_under_it(federation: Federation, page: Browser) -> None:
    drawn(page)
    page.driver.execute_script("document.querySelectorAll('details').forEach((one) => one.open = false)")
    reached: list[str] = []
    for _ in range(80):
        page.press("TAB")
        words = page.run("document.activeElement.innerText.split('\\n')[0]")
        if reached and words == reached[0]:
            break
        reached.append(words)
    rounds = page.run("[...document.querySelectorAll('summary')].map((one) => one.innerText)")
    assert reached[0] == "To the content"
    assert len(rounds) == ROUNDS
    assert {*rounds, "last 10", "MacroAvg", "state", "all rounds", "runbook"} <= set(reached)
    page.driver.execute_script("document.querySelectorAll('summary')[1].focus()")
    page.press("ENTER")
    assert page.run("document.querySelectorAll('details')[1].open")
    page.driver.execute_script("document.querySelector('#history h2').textContent = 'out of date'")
    page.until("document.querySelector('#history h2').textContent === 'Last rounds'")  # it was replaced
    assert page.run("document.querySelectorAll('details')[1].open")
    assert page.run("document.activeElement === document.querySelectorAll('summary')[1]")


def test_a_table_stays_in_the_order_that_a_person_asked_for(federation: Federation, page: Browser) -> None:
    drawn(page)
    names = "[...document.querySelectorAll('#silos-table tbody th')].map((one) => one.textContent)"
    assert page.run(names) == list(SILOS)
    for _ in range(2):
        page.driver.execute_script("document.querySelector('#silos-table thead button').click()")
    assert page.run(names) == list(SILOS)[::-1]
    assert page.run("document.querySelector('#silos-table th').getAttribute('aria-sort')") == "descending"
    page.driver.execute_script("document.querySelector('#silos h2').textContent = 'out of date'")
    page.until("document.querySelector('#silos h2').textContent === 'Silos'")
    assert page.run(names) == list(SILOS)[::-1]


def test_charts_say_in_words_what_they_show(federation: Federation, page: Browser) -> None:
    drawn(page)
    tree = page.driver.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    pictures = [node for node in tree if node.get("role", {}).get("value") == "image" and not node.get("ignored")]
    assert len(pictures) == len(CHARTS)
    score, loss, *_ = (node["name"]["value"] for node in pictures)
    record = federation.view().look()[1][-1]
    assert score.startswith(f"Exact match on held-out questions, rounds 1 to {ROUNDS}, higher is better: MacroAvg ")
    assert f"MicroAvg {record.micro_exact_match:.1%}" in score
    for silo in record.silos:
        assert f"{silo.silo} {float(f'{silo.loss_min:.4g}'):g}" in loss


def test_it_asks_nobody_else_and_breaks_none_of_its_own_rules(federation: Federation, page: Browser) -> None:
    drawn(page)
    origin = f"http://127.0.0.1:{federation.ports[3]}/"
    asked = page.requested()
    assert {f"{origin}live", f"{origin}curves", f"{origin}uPlot.iife.min.js"} <= set(asked)
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
    for word in ("finished", *SILOS, "Exact match, MicroAvg", "Curves need JavaScript"):
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
