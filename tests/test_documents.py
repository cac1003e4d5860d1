"""What the documents name is there: links, anchors, flags, metrics."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from openrlhf_gtpo.algorithms import ESTIMATORS, SURROGATES
from openrlhf_gtpo.report import names

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
ALL = [*PAGES, *sorted((ROOT / "docs" / "results").glob("*.md")), ROOT / "requirements" / "README.md"]


def text_of(page: Path) -> str:
    """A page without its blocks of code."""
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """GitHub's anchors of a page's headings."""
    headings = re.findall(r"^#+ (.*)$", text_of(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", text_of(page)):
        path, _, anchor = link.partition("#")
        if "://" in link:
            continue
        target = (page.parent / path).resolve() if path else page
        assert target.exists() and (not anchor or anchor in anchors(target)), link


@pytest.mark.parametrize("page", ALL, ids=lambda page: page.name)
def test_files_and_programs_exist(page: Path) -> None:
    """In the words, a file by the end of its path; in commands too, a whole path and a module. NAMES in capitals are
    for the reader to fill in."""
    rooms = "benchmarks|docker|docs|examples|openrlhf_gtpo|requirements|tests"
    below = [path for room in rooms.split("|") for path in (ROOT / room).rglob("*.*")]
    listed = [str(path.relative_to(ROOT)) for path in (*ROOT.glob("*.*"), *below)]
    text = page.read_text(encoding="utf-8")
    ends = re.findall(r"`([\w./-]+\.(?:py|sh))(?:::\w+)?`", text_of(page))
    paths = re.findall(rf"(?<![\w./-])((?:{rooms})/[\w./-]*\w\.(?:py|sh|yaml|md|txt|lock|json|xz))\b", text)
    modules = re.findall(r"\b(?:python3? -m |`)((?:openrlhf_gtpo|benchmarks)(?:\.[a-z_]+)+)", text)
    files = {f"/{path}" for path in listed} | {f"/{path.removesuffix('/__init__.py')}.py" for path in listed}
    named = {*ends, *paths, *(f"{module.replace('.', '/')}.py" for module in modules)}
    others = ("vllm/", "openrlhf/")  # of packages
    gone = [name for name in named if not any(file.endswith(f"/{name}") for file in files)]
    assert [name for name in sorted(gone) if not (re.search("[A-Z]{3}", name) or name.startswith(others))] == []


def test_flags_exist_and_are_documented() -> None:
    """The settings of an estimator or surrogate have their beginning in the documents, as ``--algo.gtpo.*``."""
    program = [sys.executable, "-m", "openrlhf_gtpo.cli.train_ppo_ray", "--help"]
    listed = subprocess.run(program, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    ours, upstreams = (set(re.findall(r"^  --([\w.]+)", half, re.M)) for half in listed.split("OpenRLHF's own:"))
    text = "".join(page.read_text(encoding="utf-8") for page in PAGES).replace("[no-]", "").replace("--no-", "--")
    text = re.sub(r"(--\S*)\{(\w+),(\w+)\}(\S*)", r"\1\2\4 \1\3\4", text)
    named = set(re.findall(r"--([a-z]\w*\.[\w.]*(?:\*|\w))", text)) - {"a.b", "algo.NAME.*", "actor.NAME.*"}
    beginnings = {name for name in named if name.endswith("*")}
    assert sorted(named - beginnings - ours - upstreams) == []
    assert [name for name in beginnings if not any(flag.startswith(name[:-1]) for flag in ours | upstreams)] == []
    methods = {f"{kind}.{name}.*" for kind in ("algo", "actor") for name in (*ESTIMATORS, *SURROGATES)}
    settings = {flag for flag in ours if f"{flag.rpartition('.')[0]}.*" in beginnings & methods}
    assert sorted(ours - settings - named) == []


def test_metrics_are_those_of_a_run() -> None:
    text = text_of(ROOT / "docs" / "metrics.md")
    named = set(re.findall(r"`([a-z_0-9]+/[a-z_0-9]+|[a-z_0-9]+/\*)`", text)) - {"1/2"}
    constants = [value for name, value in vars(names).items() if name.isupper() and isinstance(value, str)]
    written = {name for name in (*constants, *names.SAMPLER_AUDIT.values()) if "/" in name}
    groups = {name for name in written if name.endswith("/")}  # with one metric for each phase, field or warning
    in_groups = tuple(name[:-1] for name in named if name.endswith("*"))
    assert sorted(name for name in written - groups - named if not name.startswith(in_groups)) == []
    assert sorted(name for name in named - written if not name.startswith(tuple(groups))) == []


def test_the_readme_is_short_and_begins_with_what_to_run() -> None:
    """On a CPU and on a GPU, before the first screen ends; the reader scrolls twice at most."""
    lines = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()
    commands = [line.partition("#")[0].strip() for line in lines[:20] if line.startswith("bash ")]
    assert commands == ["bash examples/scripts/quickstart.sh", "bash examples/scripts/quickstart.sh --gpu"]
    assert len(lines) <= 150
