"""The list of where features cross says what is so: its tests are there, what it calls refused is refused, whatever is
left is called untried, and the documents have its table."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.test_crossings import REPLAYED, RUNS
from tests.support import ROOT
from tests.support.crossings import BACKENDS, FEATURES, FLAGS, MEETINGS, PAIRS, REFUSALS, TOGETHER, UNTRIED, refusal
from tests.support.crossings import table as crossings_table
from tests.support.crossings import tried
from tests.support.families import make_checkpoint
from tests.training.checks.conftest import command, model  # noqa: F401  # fixtures


@pytest.mark.parametrize("meeting", MEETINGS, ids=lambda meeting: meeting.test)
def test_a_test_that_is_named_is_there(meeting: Any) -> None:
    file, name, parameters = re.fullmatch(r"(.+\.py)::(\w+)(?:\[(.+)\])?", meeting.test).groups()  # type: ignore[union-attr]
    text = (ROOT / file).read_text("utf-8")
    assert re.search(rf"^def {name}\(", text, re.MULTILINE)
    assert not parameters or f'"{parameters}"' in text
    assert meeting.features <= FEATURES.keys() and set(meeting.backends) <= set(BACKENDS)


def test_every_run_with_many_features_is_in_the_list() -> None:
    listed = [each.test.partition("[")[2].rstrip("]") for each in MEETINGS if "::test_a_run_with_many" in each.test]
    assert sorted(listed) == sorted([*RUNS, *REPLAYED])


@pytest.mark.parametrize("backend", BACKENDS)
def test_each_pair_is_tried_or_refused_or_said_to_be_untried(backend: str) -> None:
    refused = {pair for pair in PAIRS if refusal(pair, backend)}
    assert not [sorted(pair) for pair in refused if tried(pair, backend)], "refused and tried"
    rest = {pair for pair in PAIRS if not tried(pair, backend)} - refused
    assert rest == UNTRIED[backend]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("features", TOGETHER, ids=lambda features: "-".join(sorted(features)))
def test_those_between_which_a_fault_may_lie_are_tried_together(features: frozenset[str], backend: str) -> None:
    assert bool(tried(features, backend)) != bool(refusal(features, backend))


@pytest.fixture(scope="module")
def mixture(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:  # noqa: F811
    """With the tokenizer of ``model``."""
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_hidden_layers": 1}
    folder = make_checkpoint(tmp_path_factory.mktemp("mixture"), "qwen3_moe", 96, **experts)
    for file in model.glob("token*"):
        (folder / file.name).write_bytes(file.read_bytes())
    return folder


@pytest.mark.parametrize(
    ("refused_pair", "backend"),
    [(each, backend) for each in REFUSALS for backend in each.backends],
    ids=lambda value: value if isinstance(value, str) else "-".join(sorted(value.pair)),
)
def test_what_the_list_calls_refused_is_refused_with_its_sentence(
    refused_pair: Any,
    backend: str,
    refused: Callable[..., str],
    model: Path,  # noqa: F811
    mixture: Path,
    tmp_path: Path,
    no_engine: None,
) -> None:
    places = {"MODEL": model, "MIXTURE": mixture, "DIR": tmp_path}
    asked = {"--actor.backend": backend} | refused_pair.flags
    for name in refused_pair.pair:
        asked |= {flag: places.get(value, value) for flag, value in FLAGS[name].items()}
    assert refused_pair.sentence in refused(asked)


def test_the_documents_have_its_table() -> None:
    """``python3 -m tests.support.crossings`` prints it."""
    page = (ROOT / "docs" / "refusals.md").read_text("utf-8")
    _, begun, rest = page.partition("<!-- made by tests.support.crossings -->\n\n")
    assert begun and rest.partition("\n\n<!-- end -->")[0] == "\n".join(crossings_table())
