"""``benchmark train``: every configuration is checked before the first run, all do the same work, the GPUs are those
that a run holds, and a trainer ends with its last step or leaves its log.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks.suite import train as train_benchmark
from benchmarks.suite.step_phases import PHASES
from benchmarks.suite.train import measured_rate, run_trainer
from benchmarks.suite.train_configurations import configurations, setup_of, split_compare
from openrlhf_gtpo.cli import benchmark
from openrlhf_gtpo.errors import TrainingStopped, UsageError
from openrlhf_gtpo.report import names
from openrlhf_gtpo.training.run import parse
from tests.e2e.conftest import REWARD
from tests.support import phases
from tests.support.command_lines import argv_of

pytestmark = pytest.mark.usefixtures("no_engine")

MEGATRON = "megatron=--actor.backend megatron --train.max_tokens_per_gpu 64"


@pytest.fixture
def command(actor_model: str, tmp_path: Path) -> dict[str, Any]:
    """Flags of a trainer that could run; 4 steps of 2 prompts."""
    (tmp_path / "data.jsonl").write_text("".join(json.dumps({"input": str(i)}) + "\n" for i in range(8)))
    return {
        "--actor.model_name_or_path": actor_model,
        "--actor.num_gpus_per_node": 1,
        "--algo.advantage.estimator": "group_norm",
        "--algo.kl.init_coef": 0,
        "--vllm.num_engines": 1,
        "--reward.remote_url": REWARD,
        "--data.prompt_dataset": tmp_path / "data.jsonl",
        "--data.max_len": 64,
        "--rollout.batch_size": 2,
        "--rollout.n_samples_per_prompt": 2,
        "--train.batch_size": 4,
    }


def rows(steps: int, times: float) -> list[dict[str, Any]]:
    seconds = {timing: times for timing, _ in PHASES.values()}
    work = {names.TOKENS_PROMPT: 30, names.TOKENS_RESPONSE: 10, names.FLOPS_FORWARD: 1e6}
    step = {"kind": "train", **seconds, **work, names.TIMING_STEP_WALL: 6 * times}
    return [step | {"step": index + 1} for index in range(steps)]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the runs that were started; their metrics are made up: Megatron is twice as fast."""
    found: list[str] = []

    def run(name: str, argv: list[str], folder: Path, steps: int) -> list[dict[str, Any]]:
        found.append(folder.name)
        return rows(steps, 1.0 if "megatron" in argv else 2.0)

    monkeypatch.setattr(train_benchmark, "run_trainer", run)
    monkeypatch.setattr(train_benchmark, "measured_rate", lambda gpus, side, dtype: 1e9 * gpus)
    return found


Refuse = Callable[..., str]


@pytest.fixture
def refuse(command: dict[str, Any], started: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Refuse:
    """Return the one sentence with which a command line is refused before anything is run."""

    def run(*words: str, changes: dict[str, Any] | None = None) -> str:
        asked = ["train", "--runs", str(tmp_path / "runs"), *words, "--", *argv_of(command | (changes or {}))]
        assert benchmark.main(asked) == 2
        assert not started and not (tmp_path / "runs").exists()
        (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("benchmark train: "))
        return line.removeprefix("benchmark train: ")

    return run


def test_configurations_take_turns_and_are_put_side_by_side(
    command: dict[str, Any], started: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--steps", "2", "--repeat", "2", "--compare", "deepspeed=", "--compare", MEGATRON]
    words += ["--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "r.json"), "--png", str(tmp_path / "r.png")]
    assert benchmark.main(["train", *words, "--", *argv_of(command)]) == 0
    assert started == ["deepspeed-1", "megatron-1", "megatron-2", "deepspeed-2"]
    written = json.loads((tmp_path / "r.json").read_text())
    assert written["ratios"] == {"megatron": {phase: [2, 2, 2] for phase in (*PHASES, "step")}}
    deepspeed = written["configurations"]["deepspeed"]
    assert [[row["step"] for row in run["rows"]] for run in deepspeed["runs"]] == [[2, 3], [2, 3]]
    assert deepspeed["setup"]["gpus"] == 2 and written["matrix"]["flops_per_second"] == {"2": [2e9, 2e9]}
    assert written["summary"]["megatron"]["phases"]["train"]["mfu"] == pytest.approx(3e6 / 2e9)
    assert written["machine"]["versions"]["torch"]
    assert "2.00 (2.00 to 2.00)" in capsys.readouterr().out and (tmp_path / "r.png").exists()


def test_rounds_before_one_that_fails_are_written(
    command: dict[str, Any], started: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, output = train_benchmark.run_trainer, tmp_path / "r.json"

    def dies(name: str, argv: list[str], folder: Path, steps: int) -> list[dict[str, Any]]:
        if len(started) == 3:
            raise TrainingStopped("the engine died")
        return run(name, argv, folder, steps)

    monkeypatch.setattr(train_benchmark, "run_trainer", dies)
    words = ["--steps", "2", "--repeat", "2", "--compare", "deepspeed=", "--compare", MEGATRON]
    words += ["--runs", str(tmp_path / "runs"), "--output", str(output)]
    assert benchmark.main(["train", *words, "--", *argv_of(command)]) == 1
    written = json.loads(output.read_text())
    assert {name: len(runs) for name, runs in written["runs"].items()} == {"deepspeed": 1, "megatron": 1}
    assert written["flops_per_second"] == {"2": [2e9]}


def test_one_configuration_needs_no_name(command: dict[str, Any], started: list[str], tmp_path: Path) -> None:
    words = ["--runs", str(tmp_path / "runs"), "--output", str(tmp_path / "r.json")]
    assert benchmark.main(["train", *words, "--", *argv_of(command)]) == 0
    assert started == ["this-1"] and json.loads((tmp_path / "r.json").read_text())["ratios"] == {}


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["--steps", "0"], "Expected --steps >= 1, got 0."),
        (["--warmup", "-1"], "Expected --warmup >= 0, got -1."),
        (["--repeat", "0"], "Expected --repeat >= 1, got 0."),
        (["--compare", "a="], "--compare 'a=' is alone; give a second one, or put its flags behind --."),
        (
            ["--compare", "a=", "--compare", "a="],
            "--compare names a twice; give each configuration a name of its own.",
        ),
        (["--compare", "a=", "--compare", "b"], "--compare 'b' is not NAME=\"FLAGS\""),
        (["--compare", "a=", "--compare", "../b="], "--compare '../b=' is not NAME=\"FLAGS\""),
        (["--compare", "a=", "--compare", "b='"], '--compare b: its flags "\'" cannot be split into words'),
        (
            ["--compare", "a=", "--compare", "b=--train.seed one"],
            "configuration b: argument --train.seed: invalid int value: 'one'",
        ),
        (
            ["--compare", "a=", "--compare", "b=--actor.backen megatron --x 1"],
            "configuration b: unrecognized arguments: --x 1",
        ),
        (
            ["--compare", "a=", "--compare", f"{MEGATRON} --megatron.tensor_model_parallel_size 5"],
            "configuration megatron: ",
        ),
        (
            ["--compare", "a=", "--compare", "b=--vllm.num_engines 0"],
            "configuration b: Expected --vllm.num_engines >= 1",
        ),
        (
            ["--compare", "a=", "--compare", "b=--train.seed 7"],
            "--train.seed is 7 in configuration b and 42 in a; both have to be given the same work",
        ),
        (["--compare", "a=", "--compare", "b=--ds.param_dtype fp16"], "--ds.param_dtype differs"),
        (["--steps", "4"], "gives 8 prompts, but 5 steps of --rollout.batch_size 2 take 10; give more data"),
    ],
)
def test_a_mistake_is_one_sentence_before_the_first_run(words: list[str], sentence: str, refuse: Refuse) -> None:
    assert sentence in refuse(*words)


def test_every_episode_gives_its_prompts_again(command: dict[str, Any]) -> None:
    argv = argv_of(command | {"--train.num_episodes": 2})
    assert len(configurations(argv, {"this": []}, steps=8)) == 1
    with pytest.raises(UsageError, match="gives 16 prompts, but 9 steps of --rollout.batch_size 2 take 18"):
        configurations(argv, {"this": []}, steps=9)


def test_a_missing_model_or_data_set_is_one_sentence(refuse: Refuse) -> None:
    assert "/nowhere is not a folder" in refuse(changes={"--actor.model_name_or_path": "/nowhere"})
    assert "--data.prompt_dataset is missing" in refuse(changes={"--data.prompt_dataset": None})


def test_earlier_runs_are_not_written_over(
    command: dict[str, Any], started: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert benchmark.main(["train", "--runs", str(tmp_path), "--", *argv_of(command)]) == 2
    assert not started and f"--runs {tmp_path} holds files already" in capsys.readouterr().err


def test_flags_of_a_configuration_are_split_as_a_shell_does() -> None:
    assert split_compare(["a=", "b.2=--x 'two words' --y=1"]) == {"a": [], "b.2": ["--x", "two words", "--y=1"]}
    with pytest.raises(UsageError):
        split_compare(["=--x"])


SPLIT = {"rollout": 2, "old_log_probs": 4, "shaping": 0, "train": 4, "weight_sync": 6}
COLOCATED = {"rollout": 4, "old_log_probs": 4, "shaping": 0, "train": 4, "weight_sync": 4}
REFERENCE = {"--algo.kl.init_coef": 0.1, "--algo.kl.use_loss": True, "--ref.num_gpus_per_node": 4}
GUIDE = {"--algo.guide.model_name_or_path": "x", "--algo.guide.fraction": 0.25, "--algo.guide.num_engines": 3}
GUIDE |= {"--algo.advantage.estimator": "gtpo"}
# One optimizer step per rollout.
SAMPLER = {"--rollout.entropy": "sampler", "--logger.entropy_enable": True, "--train.batch_size": 4096}


@pytest.mark.parametrize(
    ("changes", "gpus", "busy"),
    [
        ({}, 6, SPLIT),
        ({"--train.colocate_all": True, "--vllm.num_engines": 2}, 4, COLOCATED),
        (REFERENCE, 10, SPLIT | {"old_log_probs": 8}),
        (REFERENCE | {"--train.colocate_actor_ref": True}, 6, SPLIT),
        (REFERENCE | {"--train.colocate_all": True, "--vllm.num_engines": 2}, 4, COLOCATED),
        ({"--reward.remote_url": None, "--reward.model_name_or_path": "x"}, 9, SPLIT | {"old_log_probs": 7}),
        (SAMPLER, 6, SPLIT | {"old_log_probs": 0}),
        (GUIDE, 9, SPLIT | {"rollout": 5}),
        (REFERENCE | SAMPLER, 10, SPLIT | {"old_log_probs": 4}),
        (REFERENCE | SAMPLER | {"--train.colocate_actor_ref": True}, 6, SPLIT),
    ],
)
def test_gpus_are_those_that_a_run_holds(
    command: dict[str, Any], changes: dict[str, Any], gpus: int, busy: dict[str, int]
) -> None:
    sizes = {"--actor.num_gpus_per_node": 4, "--vllm.tensor_parallel_size": 2, "--reward.num_gpus_per_node": 3}
    setup = setup_of(parse(argv_of(command | sizes | changes)))
    assert (setup.gpus, dict(setup.busy)) == (gpus, busy)


def test_operations_and_precisions_of_the_phases(command: dict[str, Any]) -> None:
    assert setup_of(parse(argv_of(command))) == phases.SPLIT
    plain = setup_of(parse(argv_of(command | {"--train.max_epochs": 2})))
    assert plain.passes == {"rollout": 1, "old_log_probs": 1, "train": 6} and plain.epochs == 2
    assert plain.precision == {"rollout": "bf16", "old_log_probs": "bf16", "train": "bf16"}
    reference = setup_of(parse(argv_of(command | REFERENCE)))
    assert reference.passes == {"rollout": 1, "old_log_probs": 2, "train": 3}
    assert setup_of(parse(argv_of(command | REFERENCE | SAMPLER))).passes["old_log_probs"] == 1
    assert setup_of(parse(argv_of(command | SAMPLER))).passes["old_log_probs"] == 0
    two = command | SAMPLER | {"--train.batch_size": 2}
    assert setup_of(parse(argv_of(two))).passes["old_log_probs"] == 1
    assert setup_of(parse(argv_of(two | {"--rollout.vllm_generate_batch_size": 1}))).passes["old_log_probs"] == 0
    fp8 = {"--actor.backend": "megatron", "--megatron.fp8": "emulated", "--train.max_tokens_per_gpu": 64}
    assert setup_of(parse(argv_of(command | fp8))).precision["train"] == "fp8 (emulated, blockwise)"


TRAINER = """
import json, signal, sys, time
from pathlib import Path

folder, steps = Path(sys.argv[sys.argv.index("--logger.metrics_path") + 1]).parent, int(sys.argv[1])


def end(number, frame):
    (folder / "ended").write_text("")
    sys.exit(143)


signal.signal(signal.SIGTERM, end)
print("train_ppo_ray stopped: all is lost" if steps < 2 else "fine", flush=True)
(folder / "argv").write_text(" ".join(sys.argv[1:]))
(folder / "metrics.jsonl.phase").write_text("ppo_train")
with open(folder / "metrics.jsonl", "w") as file:
    for step in range(steps):
        file.write(json.dumps({"kind": "train", "step": step + 1}) + chr(10))
        file.flush()
(folder / "model").mkdir()
(folder / "model" / "weights").write_text("")
while steps > 2:
    time.sleep(0.1)
sys.exit(9)
"""


@pytest.fixture
def fake_trainer(monkeypatch: pytest.MonkeyPatch, brief_waits: None, tmp_path: Path) -> None:
    """A trainer that makes as many steps as it is told and, if they are more than two, never ends by itself."""
    (tmp_path / "trainer.py").write_text(TRAINER)
    monkeypatch.setattr(train_benchmark, "COMMAND", (sys.executable, str(tmp_path / "trainer.py")))


def test_a_trainer_is_ended_after_its_last_step(fake_trainer: None, tmp_path: Path) -> None:
    given = ["5", "--eval.before_training", "--eval.steps", "2", "--ckpt.path", "elsewhere"]
    found = run_trainer("one", given, tmp_path / "run", steps=4)
    assert len(found) >= 4 and (tmp_path / "run" / "ended").exists()
    assert not (tmp_path / "run" / "metrics.jsonl.phase").exists()
    argv = (tmp_path / "run" / "argv").read_text()
    assert "before_training" not in argv and argv.rindex("--eval.steps -1") > argv.index("--eval.steps 2")
    assert argv.rindex(f"--ckpt.path {tmp_path}") > argv.index("--ckpt.path elsewhere")


def test_a_trainer_that_ended_by_itself_after_enough_steps_is_good(fake_trainer: None, tmp_path: Path) -> None:
    assert len(run_trainer("one", ["2"], tmp_path / "run", steps=2)) == 2
    assert not (tmp_path / "run" / "model").exists()


def test_a_trainer_that_fails_leaves_its_last_words_and_the_log(fake_trainer: None, tmp_path: Path) -> None:
    with pytest.raises(TrainingStopped) as caught:
        run_trainer("one, run 2 of 3", ["1"], tmp_path / "run", steps=2)
    first, last = str(caught.value).splitlines()
    assert first.startswith("one, run 2 of 3 ended with exit code 9 after 1 of 2 steps")
    assert str(tmp_path / "run" / "train.log") in first and last == "  train_ppo_ray stopped: all is lost"


def test_a_failed_run_ends_the_benchmark(
    command: dict[str, Any], fake_trainer: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["train", "--runs", str(tmp_path / "runs"), "--", *argv_of(command)]
    trainer = tmp_path / "trainer.py"
    trainer.write_text("raise RuntimeError('no such luck')")
    started = time.monotonic()
    assert benchmark.main(words) == 1 and time.monotonic() - started < 60
    message = capsys.readouterr().err
    assert "benchmark train: this, run 1 of 1 ended with exit code 1 after 0 of 4 steps" in message
    assert "no such luck" in message and str(tmp_path / "runs" / "this-1" / "train.log") in message


@pytest.mark.slow
def test_the_real_trainer_is_what_is_started(
    command: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has read every flag, the model and the data when it asks for Ray."""
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(TrainingStopped, match="exit code 2 (?s:.*)train_ppo_ray: .*RAY_ADDRESS=127.0.0.1:1"):
        run_trainer("one", argv_of(command), tmp_path / "run", steps=1)


@pytest.mark.slow
def test_a_rate_is_of_all_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if torch.cuda.is_available():
        pytest.skip("one GPU is measured for all there")
    assert 1e6 < measured_rate(2, 64, "bf16") < 1e14
