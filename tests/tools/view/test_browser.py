"""The page in a real Chromium: keys, filters, numbers, hostile text, accessibility; and it sends no requests."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from openrlhf_gtpo.report.rollouts import find_dumps, read_dump
from openrlhf_gtpo.tools.view.credit import credit, padded, read_methods
from openrlhf_gtpo.tools.view.page import make_page
from tests.support.dumps import HOSTILE, columns, write

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


def test_a_formula_has_the_entropy_that_the_credit_computed_with(browser: Any, tmp_path: Path) -> None:
    """Two failures whose first tokens have entropies below `entropy_eps`, one of them 0."""
    table = columns(groups=1, samples=2)
    table["outcome"][:] = 0
    table["entropy"][0][0], table["entropy"][1][0] = 0, 1e-9
    dump = read_dump(write(tmp_path, 1, table))
    (tmp_path / "view.html").write_text(make_page([dump], read_methods(["gtpo"], dump), 10**9)[0])
    page = browser.new_page()
    page.goto((tmp_path / "view.html").as_uri())
    page.wait_for_selector("body[data-ready]")
    page.locator("#text").press("Home")
    shown = page.locator(".formula").first.text_content()
    page.close()
    assert shown.startswith("share = (1/0.000001) / mean(1/0.000001, 1/0.000001) = 1over")


def test_keys_go_through_tokens_and_through_the_group(open_page: Any) -> None:
    page = open_page()
    text = page.locator("#text")
    text.press("End")
    assert page.locator("#token").text_content().endswith("token t = 12 of 12")
    text.press("ArrowLeft")
    text.press("ArrowDown")  # to the second response, which is no longer than the first
    assert "response 2" in page.locator("#reading-title").text_content()
    text.press("Home")
    text.press("ArrowUp")
    assert "response 1" in page.locator("#reading-title").text_content()
    assert page.locator("#token").text_content() == '"<script>", token t = 1 of 12'
    chosen = page.locator("#text [aria-selected=true]")
    assert chosen.count() == 1 and text.get_attribute("aria-activedescendant") == chosen.get_attribute("id")
    page.locator("#list button").nth(1).click()
    page.locator("#token2").click()  # between two turns
    assert page.locator("#token").text_content().endswith("not sampled by the policy: it is given nothing")


def test_filter_sort_and_brush(open_page: Any) -> None:
    page = open_page()
    table = columns(seed=1)
    page.select_option("#outcome-filter", "1")
    assert page.locator("#count").text_content() == f"{int(table['outcome'].sum())} of 12 responses"
    page.select_option("#outcome-filter", "")
    page.select_option("#cut-filter", "1")
    assert page.locator("#list button").count() == sum(table["truncated"])
    page.select_option("#cut-filter", "")
    page.select_option("#sort", "length")
    page.select_option("#order", "-1")
    rows = [int(row) for row in page.locator("#list button").evaluate_all("all => all.map(one => one.dataset.row)")]
    lengths = [len(table["tokens"][row]) for row in rows]
    assert lengths == sorted(lengths, reverse=True) and len(set(lengths)) > 2
    highest = max(values[mask].max() for values, mask in zip(table["entropy"], table["mask"]))
    page.locator("#from").fill(str(three_digits(highest) - 1e-3))
    page.locator("#from").press("Enter")
    page.locator("#from").blur()
    assert page.locator("#count").text_content() == "1 of 12 responses"
    page.locator("#brush button").click()
    page.locator("#count", has_text="12 of 12 responses").wait_for()  # the page's policy forbids a function of ours
    page.locator("#prompt-filter").select_option(index=2)
    assert page.locator("#list button").count() == 4
    box = page.locator("#histogram").bounding_box()
    page.locator("#histogram").dispatch_event("pointerup", {"clientX": box["x"] + 60})  # pressed elsewhere: no range
    assert page.locator("#to").input_value() == "" and page.locator("#text .out").count() == 0
    page.mouse.move(box["x"] + 5, box["y"] + 5)
    page.mouse.down()
    page.mouse.move(box["x"] + 60, box["y"] + 5)
    page.mouse.up()
    assert number(page.locator("#to").input_value()) > number(page.locator("#from").input_value())
    assert page.locator("#text .out").count() > 0


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


def test_the_matrix_leads_to_a_token_and_a_prompt_to_its_other_step(open_page: Any) -> None:
    page = open_page()
    box = page.locator("#matrix canvas").bounding_box()
    page.mouse.click(box["x"] + box["width"] * 2.5 / 12, box["y"] + box["height"] * 2.5 / 4)
    assert "response 3" in page.locator("#reading-title").text_content()
    assert "token t = 3 of" in page.locator("#token").text_content()
    page.locator("#elsewhere button").click()
    page.locator("#reading-title", has_text="Step 2").wait_for()
    assert page.locator("#kept h3").text_content().startswith("Step 1: prompt 1, response 3")
    assert page.locator("#kept .text span").count() > 0
    page.locator("#let-go").click()
    assert not page.locator("#kept").is_visible()


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


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [375, 2560])
def test_accessible_at_any_width_in_light_and_dark(scheme: str, width: int, open_page: Any) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="axe-playwright-python is not installed")
    page = open_page(viewport={"width": width, "height": 900}, color_scheme=scheme)
    for value in ("entropy", "difference"):
        page.select_option("#value", value)
        found = axe.Axe().run(page)
        assert found.violations_count == 0, found.generate_report()
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")


def test_right_to_left_text_runs_right_to_left(browser: Any, tmp_path: Path) -> None:
    """The arrow keys follow the eye: left is the next token."""
    table = columns(groups=1)
    table["pieces"][0] = [" مرحبا"] * len(table["pieces"][0])
    dump = read_dump(write(tmp_path, table=table))
    file = tmp_path / "view.html"
    file.write_text(make_page([dump], read_methods([], dump), 10**9)[0])
    page = browser.new_page()
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-ready]")
    assert page.evaluate("getComputedStyle(document.getElementById('text')).direction") == "rtl"
    page.locator("#text").press("ArrowLeft")
    assert "t = 2 of" in page.locator("#token").text_content()
    page.close()


def test_what_a_dump_lacks_is_left_out(browser: Any, tmp_path: Path) -> None:
    """Without entropies the page shows the advantage that was trained on, also after a step colored by what this one
    lacks; for a response without tokens it says so."""
    table = columns(groups=1) | {"entropy": None, "log_probs": None, "ratio": None, "clipped": None}
    for name in ("tokens", "pieces", "mask", "advantages"):
        table[name][1] = table[name][1][:0]
    dump, whole = read_dump(write(tmp_path, table=table, estimator="group_norm")), read_dump(write(tmp_path, 2))
    file = tmp_path / "view.html"
    file.write_text(make_page([dump, whole], read_methods([], dump), 10**9)[0])
    page = browser.new_page()
    errors: list[Any] = []
    page.on("pageerror", lambda error: errors.append(error))
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-ready]")
    assert page.locator("#value option").all_text_contents() == ["advantage of the step"]
    page.locator("#token3").hover()
    assert numbers(page) == {"trained": three_digits(table["advantages"][0][3])}
    assert "Not in the dump: entropies" in page.locator("#notes").text_content()
    page.locator("#list button[data-row='1']").click()
    assert page.locator("#text").text_content() == "The response has no tokens."
    page.select_option("#step", index=1)
    page.select_option("#value", "ratio")
    page.select_option("#step", index=0)
    page.wait_for_function("$('value').value === 'trained'")
    assert errors == []
    page.close()


def test_the_page_names_the_credit_and_the_scale_that_it_shows(browser: Any, tmp_path: Path) -> None:
    """If the first credit refuses a step, the choice shows the one in its place; certain tokens have log-prob 0."""
    table = columns(groups=4, samples=1)
    for row, values in enumerate(table["log_probs"]):
        values[row % 2 :: 2] = 0
    dump = read_dump(write(tmp_path, table=table))
    file = tmp_path / "view.html"
    file.write_text(make_page([dump], read_methods(["gtpo", "gtpo:scope=batch"], dump), 10**9)[0])
    page = browser.new_page()
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-ready]")
    assert page.locator("#credit").evaluate("select => select.value") == "1"
    page.select_option("#value", "log_prob")
    assert page.locator("#high").text_content() == "≥ 0"
    page.close()


def test_a_click_is_answered_within_a_tenth_of_a_second(browser: Any, tmp_path: Path) -> None:
    """In groups of 8 responses of up to 1000 tokens; for the fastest of ten, which a busy host does not spoil."""
    dump = read_dump(write(tmp_path, table=columns(groups=20, samples=8, longest=1000)))
    file = tmp_path / "view.html"
    file.write_text(make_page([dump], read_methods([], dump), 10**9)[0])
    page = browser.new_page()
    page.goto(file.as_uri())
    page.wait_for_selector("body[data-ready]")
    seconds = page.evaluate(
        "async () => { const times = []; for (let row = 1; row < 11; row++) {"
        "const start = performance.now(); document.querySelectorAll('#list button')[row].click();"
        "document.body.offsetHeight; times.push(performance.now() - start);"
        "await new Promise(requestAnimationFrame); } return times; }"
    )
    assert min(seconds) < 100, seconds
    page.close()
