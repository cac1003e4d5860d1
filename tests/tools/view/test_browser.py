"""The page in a real Chromium: keys, filters, numbers, hostile text, accessibility; and it sends no requests."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openrlhf_gtpo.report.rollouts import find_dumps, read_dump
from openrlhf_gtpo.tools.view.credit import credit, padded, read_methods
from openrlhf_gtpo.tools.view.page import make_page
from tests.support.dumps import HOSTILE, write

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
METHODS = ["gtpo", "grpo_s", "gtpo:alpha2=4"]
playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this host (apt-get install chromium)"),
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def dumps_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("run")
    for step in (1, 2):
        write(folder, step)
    return folder


@pytest.fixture
def open_page(browser: Any, dumps_folder: Path, tmp_path: Path) -> Iterator[Any]:
    """Open the page with these settings of the screen; it must log nothing and request nothing else until the end."""
    dumps = [read_dump(path) for path in find_dumps(dumps_folder)]
    file = tmp_path / "view.html"
    file.write_text(make_page(dumps, read_methods(METHODS, dumps[0]), 10**9)[0])
    logged: list[str] = []
    requests: list[str] = []
    pages = []

    def open_it(**screen: Any) -> Any:
        pages.append(page := browser.new_page(**screen))
        page.on("console", lambda message: logged.append(message.text))
        page.on("pageerror", lambda error: logged.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(file.as_uri())
        page.wait_for_selector("body[data-ready]")
        return page

    yield open_it
    assert logged == [] and requests == [file.as_uri()] * len(pages)
    for page in pages:
        assert page.evaluate("window.harmed") is None
        page.close()


def number(text: str) -> float:
    return float(text.split()[0].replace("−", "-"))


def numbers(page: Any) -> dict[str, float]:
    """The chosen token's numbers, by name."""
    shown = page.locator("#values dd[data-value]:not([data-value=clipped])").evaluate_all(
        "all => all.map(one => [one.dataset.value, one.textContent])"
    )
    return {name: number(text) for name, text in shown}


def three_digits(value: Any) -> float:
    return float(f"{float(value):.3g}")


def test_the_numbers_of_a_token_are_those_of_the_algorithms(open_page: Any, dumps_folder: Path) -> None:
    """By pointer and by keys, for tokens with holes between them; and the formula has the numbers of the peers."""
    page = open_page()
    assert page.input_value("#value") == "advantage"
    dump = read_dump(find_dumps(dumps_folder)[0])
    made = credit(dump, read_methods(["gtpo"], dump)[0])
    entropy, log_probs = padded(dump.columns["entropy"]), padded(dump.columns["log_probs"])
    for row, token in ((0, 3), (1, 5), (3, 0), (9, 4)):
        page.locator(f"#list button[data-row='{row}']").click()
        page.locator(f"#token{token}").hover()
        shown = numbers(page)
        for name, expected in (
            ("entropy", entropy),
            ("log_prob", log_probs),
            ("ratio", padded(dump.columns["ratio"])),
            ("share", made.parts.share),
            ("reward", made.parts.reward),
            ("advantage", made.advantages),
        ):
            assert shown[name] == three_digits(expected[row, token]), name
        acts = padded(dump.columns["mask"])[row]
        between = " and 2 between turns," if row % 3 == 1 else ""
        assert f", {acts.sum()} tokens,{between}" in page.locator("#facts").text_content()
        assert f" of {acts.sum()}" in page.locator("#token").text_content() or not acts[token]
        said = page.locator("#values dd[data-value=clipped]").text_content()
        assert said.strip() == ("yes" if padded(dump.columns["clipped"])[row, token] else "no")
    page.locator("#list button[data-row='0']").click()
    page.locator("#text").press("Home")
    for _ in range(2):
        page.locator("#text").press("ArrowRight")
    share, reward, advantage = page.locator(".formula").all_text_contents()[:3]
    own, peer = (three_digits(entropy[row, 2]) for row in (0, 2))
    part = three_digits(made.parts.share[0, 2])
    assert share == f"share = {own:g} / mean({own:g}, {peer:g}) = {part:g}over the 2 correct alive at t = 3"
    assert reward == f"r⁺ = 1·1 + 0.1·{part:g} = {three_digits(made.parts.reward[0, 2]):g}"
    mean, std = three_digits(made.parts.mean[0]), three_digits(made.parts.std[0])
    assert advantage.startswith(f"A = ({three_digits(made.parts.reward[0, 2]):g} − {mean:g}) / {std:g} = ")


def test_two_credits_side_by_side(open_page: Any, dumps_folder: Path) -> None:
    """The page shows the difference of their advantages, and marks the tokens whose sign changes."""
    page = open_page()
    page.select_option("#value", "difference")
    page.select_option("#other", "2")
    dump = read_dump(find_dumps(dumps_folder)[0])
    gtpo, grpo_s, other = (credit(dump, method).advantages for method in read_methods(METHODS, dump))
    flips = [int(((gtpo[row] * other[row]) < 0).sum()) for row in range(12)]
    assert max(flips) > 0
    for row in range(12):
        page.locator(f"#list button[data-row='{row}']").click()
        assert page.locator("#text .flips").count() == flips[row]
    page.locator("#list button[data-row='0']").click()
    page.locator("#token1").hover()
    shown = numbers(page)
    expected = three_digits(gtpo[0, 1]) - three_digits(other[0, 1])
    assert shown["difference"] == three_digits(expected)
    page.select_option("#credit", "1")
    assert numbers(page)["advantage"] == three_digits(grpo_s[0, 1])


def test_what_a_response_says_is_text_of_which_nothing_is_hidden(open_page: Any) -> None:
    page = open_page()
    shown = page.locator("#text span").all_text_contents()[: len(HOSTILE)]
    assert shown == [piece.replace("\u202e", "⟨U+202E⟩") for piece in HOSTILE]
    everything = set()
    for row in range(12):
        page.locator(f"#list button[data-row='{row}']").click()
        everything |= set(page.locator("#text span").all_text_contents())
    assert {"↵\n", "⇥\t", "␣␣", "…", "<|im_end|>", " مرحبا", "学"} <= everything
    assert page.locator("#text script, #prompt script, #text img").count() == 0
    page.check("#blanks")
    assert "·" in page.locator("#text").text_content()
