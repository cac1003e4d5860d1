"""Every preset of train.sh passes the trainer's real parser, with the paper's settings in what comes out."""

import functools
import json
import os
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from openrlhf_gtpo.algorithms import SURROGATES
from openrlhf_gtpo.cli import plan
from openrlhf_gtpo.tools.planner.assumptions import Assumptions
from openrlhf_gtpo.training import run
from openrlhf_gtpo.training.settings.megatron_flags import fp8_of, layout_of
from tests.support.launcher_runs import PRESETS, ROOT, resolved, run_script

PAPER = {"gtpo": ("gtpo", {"alpha1": 1.0, "alpha2": 0.1}), "grpo_s": ("grpo_s", {"beta1": 1.0, "beta2": 0.1})}


def _arguments(preset: str, *flags: str, **environment: str) -> SimpleNamespace:
    command = resolved("train.sh", preset, *flags, **environment)
    return run.parse(command[command.index("openrlhf_gtpo.cli.train_ppo_ray") + 1 :])


_parsed = functools.cache(_arguments)  # for tests that only read them


@pytest.mark.parametrize("preset", PRESETS)
def test_every_preset_parses_to_the_papers_settings(preset: str) -> None:
    args = _parsed(preset)
    learning_rate = 1e-6 if args.actor.lora is None else 1e-5
    assert (args.rollout.n_samples_per_prompt, args.train.batch_size) == (16, 128)
    assert args.actor.adam.lr == learning_rate
    assert (args.data.max_len, args.rollout.max_new_tokens, args.rollout.temperature) == (6144, 4096, 1.0)
    assert args.actor.eps_clip_low_high == (0.2, 0.28)
    assert args.algo.kl.init_coef == 0 and args.ckpt.load_enable and args.ckpt.save_steps > 0
    algorithm = next(name for name in ("grpo_s", "gtpo", "dapo", "grpo") if preset.startswith(f"{name}_"))
    estimator, weights = PAPER.get(algorithm, ("group_norm", {}))
    assert args.algo.advantage.estimator == estimator
    assert weights.items() <= (vars(vars(args.algo)[estimator]).items() if weights else {}.items())
    assert args.actor.loss_agg_mode == ("token-mean" if algorithm in ("gtpo", "dapo") else "seq-mean-token-mean")
    assert args.algo.dynamic_filtering_enable == (algorithm == "dapo" or "guided" in preset)


@pytest.mark.parametrize("preset", PRESETS)
@pytest.mark.parametrize("flags", [(), ("--cpu",)], ids=["gpu", "cpu"])
def test_every_layout_fits_the_gpus_that_it_asks_for(preset: str, flags: tuple[str, ...]) -> None:
    args = _parsed(preset, *flags)
    gpus = args.actor.num_nodes * args.actor.num_gpus_per_node
    assert gpus % layout_of(args).model_parallel_size == 0
    engines, guide = args.vllm.num_engines * args.vllm.tensor_parallel_size, args.algo.guide
    if "guided" in preset:
        engines += guide.num_engines * guide.tensor_parallel_size
    if args.train.colocate_all:
        assert engines == gpus and args.megatron.offload
    else:
        assert "split" in preset or args.train.async_enable
        assert flags or gpus + engines == (64 if "32b" in preset else 8)
    assert args.train.batch_size % (gpus // layout_of(args).model_parallel_size) == 0
    assert (args.rollout.batch_size * args.rollout.n_samples_per_prompt) % args.train.batch_size == 0


@pytest.mark.parametrize(
    "algorithm", ["gtpo", "grpo_s", "grpo", "dapo", "gspo", "dr_grpo", "rloo", "forking_tokens", "entropy_bonus"]
)
def test_a_comparison_is_one_word(algorithm: str) -> None:
    place = {"OUTPUT": "/tmp/run"}
    ours = resolved("train.sh", "gtpo_colocated", **place)
    theirs = resolved("train.sh", "gtpo_colocated", ALGORITHM=algorithm, **place)
    assert (ours == theirs) == (algorithm == "gtpo")
    others = [words[words.index("--actor.model_name_or_path") :] for words in (ours, theirs)]
    assert others[0] == others[1]  # the algorithm's flags come first
    assert _arguments("gtpo_colocated", ALGORITHM=algorithm).algo.kl.init_coef == 0


@pytest.mark.parametrize("algorithm", ["gtpo", "grpo"])
def test_so_is_a_surrogate_with_its_own_clip_range(algorithm: str) -> None:
    for name, kind in SURROGATES.items():
        if (algorithm, kind.level) == ("gtpo", "sequence"):
            continue
        actor = _arguments("gtpo_colocated", ALGORITHM=algorithm, SURROGATE=name).actor
        assert actor.policy_loss_type == name
        if hasattr(kind.config, "clip_low"):
            assert actor.eps_clip_low_high == (kind.config.clip_low, kind.config.clip_high)


@pytest.mark.parametrize(
    ("settings", "folder"),
    [({}, ""), ({"ALGORITHM": "dapo"}, "-dapo"), ({"ALGORITHM": "grpo", "SURROGATE": "cispo"}, "-grpo-cispo")],
)
def test_another_algorithm_goes_on_with_no_run_of_the_preset(settings: dict[str, str], folder: str) -> None:
    command = resolved("train.sh", "gtpo_colocated", **settings)
    assert command[command.index("--ckpt.path") + 1].endswith(f"runs/train_gtpo_colocated{folder}/checkpoints")


def test_colocated_engines_fill_the_gpus_of_all_nodes() -> None:
    for preset, settings, engines in (
        ("grpo_s_colocated", {}, 4),
        ("grpo_s_colocated", {"NODES": "2"}, 8),
        ("gtpo_32b", {"NODES": "2"}, 2),
        ("gtpo_colocated", {"GPUS_PER_NODE": "1"}, 1),
        ("gtpo_split", {"NODES": "2"}, 4),
    ):
        assert _arguments(preset, **settings).vllm.num_engines == engines


@pytest.mark.parametrize("preset", ["gtpo_async", "gtpo_32b_async"])
def test_an_asynchronous_preset_is_the_split_one_with_the_entropies_of_the_policy_that_sampled(preset: str) -> None:
    args, in_turn = _parsed(preset), _arguments(preset, ASYNC="")
    assert (args.train.async_enable, args.rollout.entropy) == (True, "sampler") and not args.train.colocate_all
    assert (in_turn.train.async_enable, in_turn.rollout.entropy) == (False, "actor")
    for name in ("gtpo", "grpo_s"):  # each token's weight is min(ratio, 5), and a response's their mean
        found = vars(_arguments(preset, ALGORITHM=name).algo.advantage)
        correction = [found[f"is_correction_{part}"] for part in ("level", "mode", "gating", "threshold")]
        assert correction == ["token", "clip", "ratio", (0.0, 5.0)]


def test_the_environment_and_flags_of_the_trainer_win() -> None:
    args = _arguments("gtpo_colocated", "--", "--train.seed", "7", MODEL="my/model", STEPS="5", EVAL_DATA="")
    assert (args.train.seed, args.actor.model_name_or_path, args.data.max_samples) == (7, "my/model", 5 * 128)
    assert not args.eval.dataset and not _arguments("gtpo_colocated", DATA="my/data").eval.dataset
    assert _parsed("gtpo_colocated").eval.dataset == "data/dapo_math/eval.jsonl"
    assert _arguments("gtpo_colocated", DATA="my/data", EVAL_DATA="my/eval").eval.dataset == "my/eval"
    assert fp8_of(_arguments("gtpo_32b", FP8="")) is None and fp8_of(_parsed("gtpo_32b")) is not None


def test_what_a_cluster_runs_has_absolute_paths(tmp_path: Path) -> None:
    data = tmp_path / "train data.jsonl"
    for file in (data, data.with_name("eval.jsonl")):
        file.touch()
    command = resolved("train.sh", "gtpo_32b", "--submit", "http://127.0.0.1:8265", DATA=str(data), OUTPUT="runs/x")
    assert command[3:9] == ["ray", "job", "submit", "--address", "http://127.0.0.1:8265", "--"]
    assert command[command.index("--data.prompt_dataset") + 1] == str(data)
    assert command[command.index("--ckpt.path") + 1] == "/runs/x/checkpoints"
    assert Path(command[command.index("--reward.remote_url") + 1]).is_file()


@pytest.mark.parametrize("placement", ["colocated", "split"])
def test_the_planners_script_is_one_of_them(placement: str, tmp_path: Path) -> None:
    path = tmp_path / "planned.sh"
    words = f"--model 7b --gpus 8 --fp8 off --placement {placement} --emit {path}"
    assert plan.main(words.split()) == 0
    done = subprocess.run(["bash", str(path), "--dry-run"], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    command = shlex.split(done.stdout.replace("\\\n", " "))
    args = run.parse(command[command.index("openrlhf_gtpo.cli.train_ppo_ray") + 1 :])
    actor = args.actor.num_nodes * args.actor.num_gpus_per_node
    engines = args.vllm.num_engines * args.vllm.tensor_parallel_size
    assert (actor, engines) == (8, 8) if placement == "colocated" else actor + engines == 8
    assert (args.rollout.batch_size, args.train.batch_size) == (128, 128)
    assert f'export VLLM_MAX_NUM_SEQS="${{VLLM_MAX_NUM_SEQS-{Assumptions().vllm_rows}}}"\n' in path.read_text()
    assert (args.vllm.max_num_seqs, args.vllm.max_num_batched_tokens) == (1024, Assumptions().vllm_tokens)


# Ray's command, as far as the words of a job go, and a Python that prints its own.
PROGRAMS = {
    "ray": """import os, subprocess, sys
print(sys.argv[1:5], os.environ["RAY_API_SERVER_ADDRESS"], os.environ["no_proxy"], flush=True)
sys.exit(subprocess.call(subprocess.list2cmdline(sys.argv[6:]), shell=True))""",
    "python3": "import json, sys; print(json.dumps(sys.argv[1:]))",
}


def test_a_job_gets_its_words_as_they_were_given(tmp_path: Path) -> None:
    for name, text in PROGRAMS.items():
        (tmp_path / name).write_text(f"#!{sys.executable}\n{text}\n")
        (tmp_path / name).chmod(0o755)
    words = [
        "<|user|>{}<|end|>",
        "it's $HOME, `x` and \\",
        'a \\"b"',
        '{"a":1,"b":2}',
        "*",
        "x?y&z;",
        " a\nb\n",
        "",
        "#",
    ]
    settings = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "DATA": "a/name", "OUTPUT": str(tmp_path / "a run")}
    done = run_script("train.sh", "gtpo_split", "--submit", "http://n1:1", "--", *words, **settings)
    assert done.returncode == 0, done.stderr
    told, given = done.stdout.splitlines()
    assert told == "['job', 'submit', '--address', 'http://n1:1'] http://n1:1 *"
    given = json.loads(given)
    assert given[:2] == ["-m", "openrlhf_gtpo.cli.train_ppo_ray"] and given[-len(words) :] == words
    assert given[given.index("--ckpt.path") + 1] == f"{tmp_path}/a run/checkpoints"


# Bash functions in the environment: nothing is installed, and each Python command only prints its arguments.
ONLY_PRINTED = {
    "BASH_FUNC_source%%": '() { [[ "$1" == *setup_env.sh ]] || builtin source "$@"; }',
    "BASH_FUNC_setsid%%": '() { "$@"; }',
    "BASH_FUNC_python3%%": '() { printf "%s\\n" "$*"; }',
}


@pytest.mark.parametrize(
    ("flags", "label_key", "reward"),
    [([], "scorer_label", "reasoning_gym_reward.py"), (["--smoke", "--reward", "mine.py"], "label", "/mine.py")],
)
def test_the_quickstart_gives_a_reward_of_ones_own_the_answers(
    tmp_path: Path, flags: list[str], label_key: str, reward: str
) -> None:
    (tmp_path / "mine.py").touch()  # its path is given relative to /, where the script is called
    flags = [os.path.relpath(tmp_path / word, "/") if word == "mine.py" else word for word in flags]
    done = run_script("quickstart.sh", *flags, "--output", str(tmp_path), **ONLY_PRINTED)
    assert done.returncode == 0, done.stderr
    command = shlex.split((tmp_path / "train.log").read_text())
    assert command[command.index("--data.label_key") + 1] == label_key
    given = command[command.index("--reward.remote_url") + 1]
    assert given.endswith(reward) and ("--reward" not in flags or given == str(tmp_path / "mine.py"))
    assert ("to show learning" in done.stdout) == ("--smoke" in flags)
