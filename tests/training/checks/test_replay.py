"""Dumps that a replay cannot train on, and flags that do not go with one, are refused in one sentence."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from openrlhf_gtpo.report.rollouts import VERSION, dump_file, vocabulary_digest, write_dump
from openrlhf_gtpo.training import host, run
from openrlhf_gtpo.training.checks.model import Model
from tests.support.command_lines import argv_of

pytestmark = pytest.mark.usefixtures("no_engine")

FLAG = "--train.replay_rollouts"
NOT_SAMPLED = ("--vllm.num_engines", "--reward.remote_url", "--data.prompt_dataset")


@pytest.fixture
def dump(model: Path, tmp_path: Path) -> Callable[..., Path]:
    """Writes a dump that the command line can replay unless ``settings`` or ``table`` spoil it; returns its folder."""
    vocabulary = vocabulary_digest(Model(str(model), "--actor.model_name_or_path").tokenizer)

    def write(step: int = 1, folder: str = "rollouts", table: dict[str, Any] | None = None, **settings: Any) -> Path:
        ones: list[Any] = [1.0] * 4
        tokens: list[Any] = [[2, 3]] * 4
        columns = {"row": range(4), "group": [0] * 4, "prompt": ["a"] * 4, "outcome": ones, "length_penalty": ones}
        columns |= {"truncated": [False] * 4, "prompt_tokens": [[1]] * 4, "pieces": [["b", "c"]] * 4}
        columns |= {"mask": [[True, True]] * 4, "tokens": tokens}
        columns |= dict.fromkeys(("log_probs", "entropy", "advantages"), tokens)
        columns |= dict.fromkeys(("rollout_log_probs", "ratio", "clipped", "guided", "versions", "texts"))
        known = {"version": VERSION, "step": step, "batch_rows": 4, "vocabulary": vocabulary, "max_steps": 8}
        known |= {"temperature": 1.0, "entropy": "actor", "model": "other"}
        write_dump(dump_file(tmp_path / folder, step), known | settings, columns | (table or {}))
        return tmp_path / folder

    return write


def test_a_replay_needs_neither_engine_nor_prompts_nor_reward(
    command: dict[str, Any], dump: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    bare = command | dict.fromkeys((*NOT_SAMPLED, "--data.input_key", "--data.label_key")) | {FLAG: dump()}
    args = run.parse(argv_of(bare))
    run.check(args)
    assert host.gpus_of(args).engines == host.gpus_of(args).reward == 0
    assert "no effect" not in capsys.readouterr().err

    args = run.parse(argv_of(command | {FLAG: dump(), "--algo.preset": None, "--eval.dataset": "no-such-set",
                                        "--train.agent_func_path": "nowhere.py"}))  # fmt: skip
    run.check(args)
    (said,) = (line for line in capsys.readouterr().err.splitlines() if "no effect" in line)
    assert "have no effect here: --data.input_key" in said and "--train.agent_func_path, --vllm.num_engines" in said
    run.parse(argv_of(bare | {FLAG: dump(), "--algo.guide.ratio_cap": 3}))  # for the rows of a dump's guide
    assert "no effect" not in capsys.readouterr().err
    assert said.count("--eval.dataset") == said.count("--reward.remote_url") == 1


@pytest.mark.parametrize(
    ("settings", "sentence"),
    [
        ({"version": 1}, "is of version 1, which lacks what a replay needs; dump the step again."),
        ({"batch_rows": 16}, "holds 4 of the step's 16 responses, .*; dump with --logger.dump_rows 16."),
        ({"vocabulary": "x"}, "has token ids from the vocabulary of other, but --actor.model_name"),
        ({"table": {"group": [0, 0, 1, 1]}}, "has 2 responses to a prompt; give --rollout.n_samples_per_prompt 2"),
        ({"temperature": 0.7}, "was sampled at temperature 0.7, but .* at --rollout.temperature 1; give the same."),
    ],
)
def test_a_dump_that_cannot_be_replayed(
    refused: Callable[..., str], dump: Callable[..., Path], settings: dict[str, Any], sentence: str
) -> None:
    folder = dump(**settings)
    assert re.match(f"{FLAG}: {folder}/step_000001.parquet {sentence}", refused({FLAG: folder}))


def test_files_that_are_no_whole_dumps(refused: Callable[..., str], dump: Callable[..., Path], tmp_path: Path) -> None:
    assert refused({FLAG: ""}).endswith("to be a folder with dumps, got an empty string.")
    assert refused({FLAG: tmp_path / "nowhere"}).endswith("nowhere does not exist; give a dump or a run's folder.")
    (tmp_path / "empty").mkdir()
    assert "has no step_*.parquet" in refused({FLAG: tmp_path / "empty"})
    dump(), dump(folder="rollouts/again")
    assert "found the same step twice: " in refused({FLAG: tmp_path / "rollouts"})
    whole = dump_file(dump(folder="cut"), 1)
    whole.write_bytes(whole.read_bytes()[:-9])
    assert "is not a complete Parquet file" in refused({FLAG: tmp_path / "cut"})


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"--logger.dump_rollouts": 1}, "cannot be combined with --logger.dump_rollouts, which would write the same"),
        (
            {"--algo.advantage.estimator": "group_norm", "--data.max_images_per_prompt": 1},
            "--data.max_images_per_prompt 1 cannot be combined with rows that the run does not sample",
        ),
        ({"--rollout.top_p": 0.9}, "--rollout.top_p 0.9 cannot be combined with --algo.advantage.estimator gtpo"),
        (
            {"--algo.advantage.estimator": "group_norm", "--train.async_enable": True}
            | {"--algo.advantage.is_correction_level": "token"},
            "cannot be combined with --train.async_enable",
        ),
        ({"--rollout.entropy": "sampler"}, "has no entropies from the sampler; give --rollout.entropy actor."),
        ({"--algo.advantage.is_correction_level": "token"}, "has no log-probs from the sampler, which .*; give off."),
    ],
)
def test_flags_that_a_replay_does_not_go_with(
    refused: Callable[..., str], dump: Callable[..., Path], changes: dict[str, Any], sentence: str
) -> None:
    assert re.search(sentence, refused(changes | {FLAG: dump()}))


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (
            {"--algo.kl.unbiased_gradient": True, "--algo.kl.use_loss": True, "--algo.kl.init_coef": 0.1},
            "which --algo.kl.unbiased_gradient would treat as the old",
        ),
        ({"--algo.advantage.estimator": "gae"}, "has rows of a guide, from which the critic of gae must not learn;"),
    ],
)
def test_a_guides_rows_are_not_replayed_with_what_a_guide_does_not_go_with(
    command: dict[str, Any],
    refused: Callable[..., str],
    dump: Callable[..., Path],
    changes: dict[str, Any],
    sentence: str,
) -> None:
    of_guide = {"guided": [False] * 3 + [True], "rollout_log_probs": [[2.0, 3.0]] * 4}
    assert sentence in refused(changes | {FLAG: dump(table=of_guide)})
    run.check(run.parse(argv_of(command | changes | {FLAG: dump(table=of_guide | {"guided": [False] * 4})})))
