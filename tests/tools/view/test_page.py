"""The page's numbers are those of ``algorithms``, and what it cannot show is named."""

import base64
import dataclasses
import json
import math
import re
import zlib
from pathlib import Path
from typing import Any, get_args, get_type_hints

import numpy as np
import pytest
import torch

from openrlhf_gtpo.algorithms import ESTIMATORS, grpo_s_parts, gtpo_advantages, gtpo_parts, gtpo_shares
from openrlhf_gtpo.cli import view
from openrlhf_gtpo.report.rollouts import read_dump
from openrlhf_gtpo.tools.view.credit import credit, padded, read_methods
from openrlhf_gtpo.tools.view.page import decimal_codes, make_page
from tests.support.dumps import columns, write


def read_codes(codes: np.ndarray) -> list[float]:
    """Decode them as page.js does."""
    return [math.nan if not c & 2047 else float(f"{(c & 2047) - 1024}e{(c >> 11) - 20}") for c in codes.tolist()]


def unpack(page: str, array: int, kind: type) -> np.ndarray:
    (text,) = re.findall(f'<script type="text/plain" id="array{array}">(.*?)</script>', page)
    planes = np.frombuffer(zlib.decompress(base64.b64decode(text)), np.uint8)
    return np.ascontiguousarray(planes.reshape(np.dtype(kind).itemsize, -1).T).view(kind)[:, 0]


def data_of(page: str) -> dict[str, Any]:
    return json.loads(re.findall('<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[0])


def printed(values: Any) -> list[float]:
    return [float(f"{float(x):.3g}") for x in values]


def test_a_number_has_three_digits_of_any_size() -> None:
    random = np.random.default_rng(0)
    values = random.normal(size=20000) * 10.0 ** random.integers(-12, 9, 20000)
    values = np.concatenate([values, [0.0, 9.995, 9.994999, 0.9996, -999.6, 1e-18, 123.5, 1.125]])
    assert read_codes(decimal_codes(values)) == printed(values)
    assert all(map(math.isnan, read_codes(decimal_codes(np.array([np.nan, np.inf, -np.inf])))))


@pytest.mark.parametrize(
    "text", ["gtpo", "gtpo:variant=v2:kappa=3", "gtpo:compare=response:entropy_mean=geometric", "grpo_s:variant=v1"]
)
def test_the_pages_numbers_are_those_of_the_algorithms(text: str, tmp_path: Path) -> None:
    dump = read_dump(write(tmp_path))
    (method,) = read_methods([text], dump)
    page, _ = make_page([dump], [method], 10**9)
    (step,) = data_of(page)["steps"]
    (made,) = step["credits"]
    mask, entropy = padded(dump.columns["mask"]), padded(dump.columns["entropy"])
    outcome = torch.tensor(dump.columns["outcome"]).float()
    batch = (entropy, mask, outcome, torch.tensor(dump.columns["group"]), method.config)
    penalty = torch.tensor(dump.columns["length_penalty"])
    advantages = ESTIMATORS[method.name].advantages(*batch, penalty)
    shown = unpack(page, step["mask"], np.uint8).astype(bool)
    assert shown.tolist() == dump.columns["mask"].values.tolist()

    def tokens(array: int) -> list[float]:
        values = np.array(read_codes(unpack(page, array, np.uint16)))
        assert np.isnan(values[~shown]).all()
        return values[shown].tolist()

    assert tokens(made["advantage"]) == printed(advantages[mask])
    assert tokens(step["entropy"]) == printed(entropy[mask])
    assert tokens(step["ratio"]) == printed(padded(dump.columns["ratio"])[mask])
    assert tokens(step["clipped"]) == padded(dump.columns["clipped"])[mask].tolist()
    assert advantages[mask].unique().numel() > 5
    if method.name == "gtpo":
        double = (entropy.double(), *batch[1:])
        assert tokens(made["share"]) == printed(gtpo_shares(*double))
        rewards = gtpo_parts(*double).reward + penalty[:, None]
        assert tokens(made["reward"]) == printed(rewards[mask])
        # By hand, with the mean and std that the page prints.
        full = credit(dump, method).parts
        by_hand = (full.reward - full.mean[:, None]) / (full.std[:, None] + 1e-9)
        learned = advantages != 0
        torch.testing.assert_close(by_hand[learned].float(), advantages[learned])
    else:
        assert made["share"] == printed(ESTIMATORS["grpo_s"].shares(*batch))
        assert made["row_entropy"] == printed(grpo_s_parts(*batch).row_entropy)


def variants_of(name: str) -> list[str]:
    """The estimator with each of its variants, or as it is if its settings have none."""
    variants = get_args(get_type_hints(ESTIMATORS[name].config).get("variant"))
    return [f"{name}:variant={variant}" for variant in variants] or [name]


WITH_FORMULA = [text for name, estimator in ESTIMATORS.items() if estimator.formula for text in variants_of(name)]


@pytest.mark.parametrize("text", WITH_FORMULA)
def test_the_formula_on_the_page_is_the_one_that_was_computed(text: str, tmp_path: Path) -> None:
    """With outcome and share filled in, it gives the reward of either polarity."""
    table = columns()
    table["length_penalty"] = np.zeros(12)
    dump = read_dump(write(tmp_path, table=table))
    (method,) = read_methods([text], dump)
    made = credit(dump, method)
    mask = padded(dump.columns["mask"])
    for row, succeeded in enumerate(made.success.tolist()):
        formula = ESTIMATORS[method.name].formula(method.config, succeeded)
        share, reward = made.parts.share[row], made.parts.reward[row]
        pairs = zip(share[mask[row]], reward[mask[row]]) if share.dim() else [(share, reward)]
        for one, expected in pairs:
            text_of = (
                formula.replace("−", "-").replace("·", "*").format(outcome=table["outcome"][row], share=float(one))
            )
            value = eval(text_of, {"clip": lambda x, low, high: min(max(x, low), high)})
            assert value == pytest.approx(float(expected), abs=1e-9), formula


def test_another_variant_has_its_own_defaults_and_the_other_settings_of_the_run(tmp_path: Path) -> None:
    """A dump holds alpha1 and alpha2 as the run's variant set them, which the clipped variants would refuse."""
    for run, text, expected in (
        ({"scope": "batch"}, "gtpo:variant=v2", {"variant": "v2", "scope": "batch"}),
        ({"alpha2": 0.3}, "gtpo:variant=v2", {"variant": "v2", "alpha2": 0.3}),
        ({"alpha1": 0.5}, "gtpo:kappa=3", {"alpha1": 0.5, "kappa": 3.0}),
        ({"variant": "v2"}, "gtpo:variant=v3", {"variant": "v3"}),
        ({"variant": "v2"}, "gtpo:alpha2=0.2", {"variant": "v2", "alpha2": 0.2}),
    ):
        kind = ESTIMATORS["gtpo"].config
        dump = read_dump(write(tmp_path, config=dataclasses.asdict(kind(**run)) | {"peers": "all"}))
        assert read_methods([text], dump)[0].config == kind(**expected)


def test_an_estimator_without_parts_shows_its_advantages(tmp_path: Path) -> None:
    texts = [json.dumps({"parsed": str(row)}) for row in range(12)]
    dump = read_dump(write(tmp_path, table=columns() | {"texts": texts}))
    methods = read_methods(["gtpo", "forking_tokens:top_fraction=0.5"], dump)
    page, _ = make_page([dump], methods, 10**9)
    (step,) = data_of(page)["steps"]
    assert step["guided"] == [0, 0, 0, 1] * 3
    assert step["texts"] == [{"parsed": str(row)} for row in range(12)]
    made = step["credits"][1]
    assert [made[name] for name in ("share", "reward", "mean", "std")] == [None] * 4
    advantages = credit(dump, methods[1]).advantages[padded(dump.columns["mask"])]
    shown = [x for x in read_codes(unpack(page, made["advantage"], np.uint16)) if not math.isnan(x)]
    assert shown == printed(advantages) and 0 < np.count_nonzero(shown) < len(shown)


def test_advantages_that_no_method_made_are_shown_as_they_were_trained_on(tmp_path: Path) -> None:
    """A run's own credit is on the page only once if nothing (a KL reward, a clip range) was done to it."""
    table = columns()
    dump = read_dump(write(tmp_path / "other", table=table))
    methods = read_methods([], dump)
    assert data_of(make_page([dump], methods, 10**9)[0])["steps"][0]["trained"] is not None
    mask, entropy = padded(dump.columns["mask"]), padded(dump.columns["entropy"])
    outcome, groups = torch.tensor(table["outcome"]).float(), torch.tensor(table["group"])
    own = gtpo_advantages(entropy, mask, outcome, groups, methods[0].config, torch.tensor(table["length_penalty"]))
    table["advantages"] = [row[: len(one)].numpy() for row, one in zip(own, table["mask"])]
    dump = read_dump(write(tmp_path / "own", table=table))
    assert data_of(make_page([dump], methods, 10**9)[0])["steps"][0]["trained"] is None


def test_what_a_response_says_stays_text(tmp_path: Path) -> None:
    dump = read_dump(write(tmp_path))
    page, _ = make_page([dump], read_methods([], dump), 10**9)
    assert page.count("<script") == page.count("</script>") and "<img" not in page
    data = data_of(page)
    assert "<script>" in data["pieces"] and "</script>" in data["prompts"][0]
    outside = page.replace("http-equiv", "")
    assert "http" not in re.sub(r">[A-Za-z0-9+/=]*</script>", "", outside)


def test_a_million_tokens_are_sampled_in_whole_groups_and_credited_among_all(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dump = write(tmp_path, table=columns(groups=25, samples=8, longest=5000))
    page = tmp_path / "view.html"
    assert view.main([str(dump), "--output", str(page), "--max-tokens", "100000"]) == 0
    assert "the page shows a sample of the groups, with advantages computed over all" in capsys.readouterr().err
    (step,) = data_of(page.read_text())["steps"]
    assert 50_000 < step["offsets"][-1] <= 100_000 and len(step["row"]) % 8 == 0
    assert {step["group"].count(group) for group in step["group"]} == {8}
    everything = read_dump(dump)
    (method,) = read_methods(["gtpo"], everything)
    means = credit(everything, method).parts.mean[step["row"]]
    assert step["credits"][0]["mean"] == printed(means)
