"""`python3 -m openrlhf_gtpo.cli.evaluate --model MODEL --eval.dataset A,B --reward.remote_url FILE --output DIR`.

Asks a model each question of some data sets several times, through vLLM. Prints mean@k, pass@k (unbiased), best@k,
majority@k, lengths and the share of truncated answers, each with its standard error over questions. Flags shared with
training mean the same here, including --train.agent_func_path instead of a reward. DIR gets a file of answers for each
data set, each question's scores as scores.json, and the table as table.md and summary.json. After an interruption, the
same command resumes. A model trained by this package gets the prompt format of its run, unless prompt flags say
otherwise. majority@k needs a second function in the reward file: `answer_of` takes the arguments of `reward_func` and
returns an answer as text or None. The rewards of `openrlhf_gtpo.tasks` have it.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psutil

from openrlhf_gtpo import platform
from openrlhf_gtpo.cli import Parser, exit_status
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.platform.files import check_output, model_folder, replace_text
from openrlhf_gtpo.report.answers import per_question, summarize, table
from openrlhf_gtpo.training.settings import prompts

_INTERRUPTED = "interrupted; the same command resumes it."
_MAX_LEN = 4096


def main(argv: Sequence[str] | None = None) -> int:
    """Evaluate models. Return 0, 2 after a sentence on stderr for a user error, 1 if a process or reward failed."""
    args = build_parser().parse_args(argv)
    return exit_status("evaluate", lambda: _evaluate(args), ValueError, OSError, interrupted=_INTERRUPTED)


def build_parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python3 -m openrlhf_gtpo.cli.evaluate", description=__doc__)
    add = parser.add_argument
    folders = (
        "Hugging Face folders, names on the Hub, or Megatron checkpoints; with several, the others are compared with "
        "the first"
    )
    add("--model", required=True, nargs="+", metavar="MODEL", help=folders)
    add("--output", required=True, type=Path, metavar="DIR", help="folder for answers, scores and table")
    add("--eval.dataset", required=True, metavar="A,B", help="files, folders or names on the Hub")
    add("--eval.split", default="test", help="split of the data sets")
    add("--eval.n_samples_per_prompt", type=int, default=32, metavar="K", help="answers to each question")
    add("--eval.temperature", type=float, default=1.0, help="sampling temperature; 0 makes every answer the same")
    add("--reward.remote_url", metavar="FILE", help="Python file with OpenRLHF's reward_func")
    agent = "Python file with an AgentExecutor, instead of a reward (default: the trained model's own)"
    add("--train.agent_func_path", metavar="FILE", help=agent)
    add("--success_threshold", type=float, default=1.0, help="minimum reward of a correct answer")
    add("--data.input_key", default="input", help="column with the questions")
    add("--data.label_key", help="column with the labels for the reward")
    add("--data.input_template", help="text with {} where the question goes, used without a chat template")
    turn = "pass the question as the user's turn through the chat template"
    add("--data.apply_chat_template", action=argparse.BooleanOptionalAction, help=turn)
    longest = f"maximum tokens of a question and an answer together (default: {_MAX_LEN}, or the model's positions)"
    add("--data.max_len", type=int, help=longest)
    add("--data.max_samples", type=int, default=10**8, help="maximum questions per data set, from its start")
    add("--rollout.max_new_tokens", type=int, default=1024, help="maximum tokens of an answer")
    add("--rollout.top_p", type=float, default=1.0, help="top-p of sampling")
    add("--vllm.tensor_parallel_size", type=int, default=1, metavar="TP", help="GPUs of the engine")
    add("--vllm.gpu_memory_utilization", type=float, default=0.9, help="fraction of each GPU's memory")
    add("--train.seed", type=int, default=1, help="seed of the answers")
    prompts.PROMPTS.add_to(parser)
    return parser


def _evaluate(args: argparse.Namespace) -> None:
    if len(args.model) > 1:
        _evaluate_each(args)
        return
    [args.model] = args.model
    platform.choose()
    from openrlhf_gtpo.training.settings.guard import check_openrlhf

    check_openrlhf()
    flags = checked_flags(args)
    check_output("--output", args.output / "scores.json")
    with TemporaryDirectory() as folder:
        model = args.model
        if not Path(model).is_dir():
            model = str(model_of_hub(model))
        elif not Path(model, "config.json").is_file():
            model = str(Path(folder) / "model")
            command = [sys.executable, "-m", "openrlhf_gtpo.cli.convert", "megatron-to-hf", args.model, model]
            # In a process of its own, because conversion restricts its process to the CPU.
            done = subprocess.run(command, stderr=subprocess.PIPE, text=True)
            if done.returncode:
                why = (done.stderr.strip().splitlines() or [""])[-1].removeprefix("convert megatron-to-hf: ")
                raise UsageError(f"--model {args.model} is not a Hugging Face folder (no config.json): {why}")
        with _ended_by_ctrl_c(Path(folder)):
            _answer_all(args, flags, model)


def _evaluate_each(args: argparse.Namespace) -> None:
    """Evaluate each model in its own process, and compare the others with the first, question by question."""
    import numpy as np

    from openrlhf_gtpo.tools.experiment.comparison import paired_difference

    # Name each model by its folder, or by its whole path if names repeat.
    labels = [Path(model).name for model in args.model]
    if len({*labels}) < len(labels):
        labels = [str(Path(model)).strip("/").replace("/", "_") for model in args.model]
    # Rebuild the command line from the arguments, without the models and the output folder.
    words = []
    for action in build_parser()._actions:
        value = getattr(args, action.dest, None)
        if action.dest not in ("model", "output") and value is not None and value != action.default:
            flag = action.option_strings[0] if value is not False else action.option_strings[-1]
            words += [flag] if isinstance(value, bool) else [flag, str(value)]
    # Evaluate: vLLM frees its memory only when its process ends.
    results = []
    for model, label in zip(args.model, labels, strict=True):
        print(f"{label}: {model}", file=sys.stderr, flush=True)
        command = [sys.executable, "-m", "openrlhf_gtpo.cli.evaluate", "--model", model, *words]
        status = subprocess.run([*command, "--output", str(args.output / label)], stdout=subprocess.DEVNULL).returncode
        if status:
            raise SystemExit(status)  # the process has printed the reason
        results.append(json.loads((args.output / label / "scores.json").read_bytes()))
    # Print and write one table, and each model's paired difference from the first.
    rows = {
        f"{label}, {data}": summarize(scores)
        for label, result in zip(labels, results, strict=True)
        for data, scores in result["scores"].items()
    }
    lines = [table(rows)]
    for data, scores in results[0]["scores"].items():
        for label, result in zip(labels[1:], results[1:], strict=True):
            [mean] = [measure for measure in scores if measure.startswith("mean@")]
            gained = np.array(result["scores"][data][mean]) - np.array(scores[mean])
            sentence = paired_difference(gained[:, None]).sentence(label, labels[0], of="questions")
            lines.append(f"{data}, {mean}: {sentence}\n")
            if result["questions"][data] != results[0]["questions"][data]:
                lines.append(f"{data}: {label} and {labels[0]} got different prompts; prompt flags can align them.\n")
    (args.output / "table.md").write_text("".join(lines))
    print("".join(lines), end="")


@contextmanager
def _ended_by_ctrl_c(folder: Path) -> Iterator[None]:
    """End this process and vLLM's at once, and remove ``folder``. While vLLM 0.29 starts an engine, it survives a
    KeyboardInterrupt and then waits for the engine that the same Ctrl-C has killed (v1/engine/core_client.py)."""

    def end(number: int, frame: Any) -> None:
        for process in psutil.Process().children(recursive=True):
            with suppress(psutil.NoSuchProcess):
                process.kill()
        shutil.rmtree(folder, ignore_errors=True)
        print(f"evaluate: {_INTERRUPTED}", file=sys.stderr, flush=True)
        os._exit(128 + number)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def model_of_hub(name: str) -> Path:
    """Return the folder of a Hub model, weights included; UsageError if it cannot be found or fetched."""
    try:
        return model_folder(name)
    except UsageError as error:
        raise UsageError(f"--model {error}") from error


def checked_flags(args: argparse.Namespace) -> dict[str, Any]:
    """Return the flags of ``args`` that training shares; UsageError if one is out of range."""
    from openrlhf_gtpo.training.settings.values import check_ranges, check_template

    flags = {name: value for name, value in vars(args).items() if "." in name}
    check_ranges(flags)
    stems = _stems(flags["eval.dataset"].split(","))
    if twice := [stem for stem in stems if stems.count(stem) > 1]:
        raise UsageError(f"--eval.dataset {flags['eval.dataset']}: two of them would be written to {twice[0]}.jsonl.")
    check_template(flags["data.input_template"])
    if not flags["eval.temperature"] and flags["eval.n_samples_per_prompt"] > 1:  # vLLM rejects this
        raise UsageError("With --eval.temperature 0 every answer is the same; give --eval.n_samples_per_prompt 1.")
    return flags


def checked_inputs(flags: dict[str, Any], model: str, named: str | None = None) -> tuple[Any, Any, Callable[..., Any]]:
    """Return ``flags`` as OpenRLHF's nested arguments, the tokenizer of ``model``, and the reward function or agent,
    whose file is then among the arguments; UsageError if questions, reward or agent cannot be used.

    Args:
        named: the model as the user gave it, if ``model`` was fetched or converted.
    """
    from openrlhf.utils.config import hierarchize

    from openrlhf_gtpo.training.checks.data import check_dataset, first_prompt
    from openrlhf_gtpo.training.checks.model import Model
    from openrlhf_gtpo.training.checks.reward import import_reward, load_agent
    from openrlhf_gtpo.training.rollout.rewards import try_reward
    from openrlhf_gtpo.training.rollout.turns import check_turns

    # The model, and how many tokens it can read.
    checkpoint = Model(model, "--model")
    checkpoint.check_weights()
    if flags["data.max_len"] is None:
        positions = getattr(checkpoint.config.get_text_config(), "max_position_embeddings", _MAX_LEN)
        flags = flags | {"data.max_len": min(_MAX_LEN, positions)}
    checkpoint.check_length(flags["data.max_len"])
    # Fill in the prompt settings that the model was trained with.
    kept = prompts.kept_prompts(Path(model))
    before, flags = flags, prompts.filled(flags, kept)
    # Choose what grades the answers: a reward, an agent, or the agent of the training.
    file, trained_with = flags["reward.remote_url"], kept.get(prompts.AGENT)
    if trained_with and not (file or flags[prompts.AGENT] or _is_own(trained_with, model, named or model)):
        raise UsageError(
            f"The model was trained with the agent {trained_with}, whose code does not run unasked; give "
            f"--{prompts.AGENT} {trained_with} to run it, or a --reward.remote_url to ask each question once."
        )
    agent = flags[prompts.AGENT] = flags[prompts.AGENT] or (None if file else trained_with)
    if file and agent:
        raise UsageError(f"--{prompts.AGENT} replaces --reward.remote_url; leave one of them out.")
    if not (file or agent):
        raise UsageError("Answers need a grader; give a --reward.remote_url, or an agent's --train.agent_func_path.")
    # Print which settings are taken from training, and which differ from it and so change the scores.
    if trained_with and (not agent or os.path.abspath(agent) != os.path.abspath(trained_with)):
        how = f"with {agent}" if agent else f"once, without it; --{prompts.AGENT} {trained_with} runs it"
        print(f"The model was trained with the agent {trained_with}, and is asked {how}.", file=sys.stderr)
    if taken := [f"--{name} {value}" for name, value in flags.items() if value and not before[name]]:
        print(f"As in the model's training: {', '.join(taken)}.", file=sys.stderr)
    trained_at = prompts.kept_prompts(Path(model)).get("rollout.temperature", flags["eval.temperature"])
    if trained_at != flags["eval.temperature"]:
        print(
            f"--eval.temperature {flags['eval.temperature']:g} differs from training's, {trained_at:g}.",
            file=sys.stderr,
        )
    if flags["data.apply_chat_template"] and flags["data.input_template"]:
        raise UsageError("--data.apply_chat_template replaces --data.input_template; leave one of them out.")
    # Check the questions, and try the reward or the agent on them.
    run = hierarchize(argparse.Namespace(**flags, **{"actor.model_name_or_path": model}))
    run.use_ms = False  # ModelScope
    given = [flag for flag, value in before.items() if value is not None]  # data may lack training's columns
    check_dataset(run, checkpoint.tokenizer, flags["eval.dataset"], flags["eval.split"], "--eval.dataset", needs=given)
    if not agent:
        reward_func, first = import_reward(file), first_prompt(run, checkpoint.tokenizer, "--eval.dataset")
        if first is not None:
            try_reward(reward_func, file, *first)
        return run, checkpoint.tokenizer, reward_func
    executor = load_agent(agent)
    check_turns(type(executor), checkpoint.tokenizer, prompts.template_variables(run.data.chat_template_kwargs))
    return run, checkpoint.tokenizer, executor


def _is_own(agent: str, model: str, named: str) -> bool:
    """Tell whether the agent that a model's folder names is a file of this host. A folder from elsewhere must not
    choose which code runs, be it its own file, one in the working folder or, for a Hub model, any file."""
    folders = [Path(folder).resolve() for folder in (model, named)]
    place = Path(agent).resolve()
    return Path(named).is_dir() and os.path.isabs(agent) and not any(place.is_relative_to(each) for each in folders)


def _answer_all(args: argparse.Namespace, flags: dict[str, Any], model: str) -> None:
    import torch

    from openrlhf_gtpo.algorithms import success
    from openrlhf_gtpo.scoring.answers import answer, load_engine, questions_of, read_answers
    from openrlhf_gtpo.scoring.conversations import Conversations

    # One file of answers for each data set. Refuse to drop scores of data sets from an earlier call.
    run, tokenizer, reward = checked_inputs(flags, model, args.model)
    flags |= {"data.max_len": run.data.max_len}
    agent = run.train.agent_func_path
    source = agent or flags["reward.remote_url"]
    variables: dict[str | None, Any] = {None: prompts.template_variables(run.data.chat_template_kwargs)}
    converse = Conversations(reward, agent, tokenizer, variables) if agent else None
    sets = [name.strip() for name in flags["eval.dataset"].split(",")]
    paths = [args.output / f"{stem}.jsonl" for stem in _stems(sets)]
    answer_of = getattr(reward, "__globals__", {}).get("answer_of")
    before = args.output / "scores.json"
    try:
        earlier = json.loads(before.read_bytes())["scores"].keys() if before.exists() else set()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(f"{before} was not written by cli.evaluate; name another folder, or remove it.") from error
    for name in sorted(earlier - {path.stem for path in paths}):
        raise UsageError(
            f"{before} also has the scores of {name}, which this evaluation would drop; name another folder, or add "
            f"{name} to --eval.dataset."
        )
    # For each data set: its questions, the settings that its answers depend on, and the answers so far.
    work = {}
    for name, path in zip(sets, paths, strict=True):
        questions = questions_of(run, tokenizer, name, flags["eval.split"], variables)
        settings = {
            "model": args.model,
            "weights": _digest(*_weights(Path(args.model if Path(args.model).is_dir() else model))),
            "questions": _digest(*(text for question in questions for text in question)),
            "n": flags["eval.n_samples_per_prompt"],
            "temperature": flags["eval.temperature"],
            "top_p": flags["rollout.top_p"],
            "max_tokens": flags["rollout.max_new_tokens"],
            "max_len": flags["data.max_len"],
            "seed": flags["train.seed"],
            "reward": _digest(Path(source).read_text("utf-8")),
        }
        work[path] = questions, settings, read_answers(path, settings)
    # Answer the remaining questions, and score everything.
    args.output.mkdir(parents=True, exist_ok=True)
    engine = None
    if any(len(rows) < len(questions) for questions, _, rows in work.values()):
        engine = load_engine(model, flags)
    scores = {}
    for path, (questions, settings, rows) in work.items():
        answered = answer(engine, questions, rows, reward, answer_of, source, path, settings, converse)
        correct = [success(torch.tensor(row["scores"]), args.success_threshold).tolist() for row in answered]
        scores[path.stem] = per_question(answered, correct)
    used = {
        path.stem: settings | {"success_threshold": args.success_threshold} for path, (_, settings, _) in work.items()
    }
    digests = {name: settings["questions"] for name, settings in used.items()}
    results = {"questions": digests, "settings": used, "scores": scores}
    replace_text(args.output / "scores.json", json.dumps(results) + "\n")
    summaries = {name: summarize(by_measure) for name, by_measure in scores.items()}
    replace_text(args.output / "summary.json", json.dumps(summaries, indent=1) + "\n")
    text = table(summaries)
    (args.output / "table.md").write_text(text)
    print(text, end="")


def _stems(sets: Sequence[str]) -> list[str]:
    """The names of the answer files, one for each data set."""
    places = [Path(name.strip().partition("@")[0]) for name in sets]
    return [place.stem if place.is_file() else place.name for place in places]


def _weights(folder: Path) -> list[str]:
    """Names, sizes and times of a folder's weight files, which show whether the weights have changed."""
    files = sorted(path for path in folder.rglob("*") if path.suffix in (".safetensors", ".bin", ".distcp"))
    return [f"{path.name} {path.stat().st_size} {path.stat().st_mtime_ns}" for path in files]


def _digest(*texts: str) -> str:
    return sha256(json.dumps(texts).encode()).hexdigest()[:16]


if __name__ == "__main__":
    sys.exit(main())
