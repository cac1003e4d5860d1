"""A run replaces nothing of an earlier one, and goes on only from what it can load."""

import shutil
from collections.abc import Callable
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Any

import pytest

from openrlhf_gtpo.checkpoints.folder import MANIFEST, write_manifest
from openrlhf_gtpo.errors import UsageError
from openrlhf_gtpo.report.metrics import MetricsWriter
from openrlhf_gtpo.training.checks.origin import ORIGIN, Origin
from openrlhf_gtpo.training.checks.results import check_checkpoints, check_metrics_file, check_results, resumes
from openrlhf_gtpo.training.run import parse
from openrlhf_gtpo.training.settings.frozen import changed
from tests.support.command_lines import argv_of

pytestmark = pytest.mark.usefixtures("no_engine")


def make_checkpoint(path: Path, tag: str = "global_step1", role: str = "_actor", **contents: Any) -> Path:
    """A whole checkpoint without any files, DeepSpeed's unless ``contents`` say otherwise."""
    folder = path / role / tag
    folder.mkdir(parents=True)
    write_manifest(folder, contents)
    return folder


def test_metrics_of_another_run_are_not_added_to(command: dict[str, Any], tmp_path: Path) -> None:
    metrics, checkpoints = tmp_path / "metrics.jsonl", tmp_path / "checkpoints"
    command |= {"--logger.metrics_path": metrics, "--ckpt.path": checkpoints}
    with closing(MetricsWriter(metrics)) as writer:
        writer.begin(0, {"seed": 42, "estimator": "gtpo"})
        check_metrics_file(parse(argv_of(command)))  # it died in its first step
        writer.write("train", 1, {})

        resumed = argv_of(command | {"--ckpt.load_enable": True})
        check_metrics_file(parse(resumed))  # it died before its first checkpoint
        with pytest.raises(
            UsageError, match="died before its first checkpoint; give --ckpt.load_enable to start over"
        ):
            check_metrics_file(parse(argv_of(command)))
        writer.end()
    with pytest.raises(UsageError, match=f"and --ckpt.path {checkpoints} has no checkpoint to resume it"):
        check_metrics_file(parse(resumed))
    make_checkpoint(checkpoints)
    check_metrics_file(parse(resumed))
    for changes, flag in (({"--algo.advantage.estimator": "grpo_s"}, "--algo.advantage.estimator gtpo"),
                          ({"--train.seed": 2}, "--train.seed 42")):  # fmt: skip
        other = {name: value for name, value in command.items() if not name.startswith("--algo.gtpo")}
        with pytest.raises(UsageError, match=f"holds a run with {flag}, but this run, which resumes"):
            check_metrics_file(parse(argv_of(other | changes | {"--ckpt.load_enable": True})))


def test_a_file_of_another_kind_gets_no_metrics(refused: Callable[..., str], tmp_path: Path) -> None:
    reward = tmp_path / "reward.py"
    before = reward.read_text()
    message = refused({"--logger.metrics_path": reward})
    assert message.endswith("reward.py has no metrics: line 1 is not a metrics line; name a new file.")
    assert reward.read_text() == before
    assert "cannot be written" in refused({"--logger.metrics_path": tmp_path})
    assert f"{reward} is not a writable folder" in refused({"--logger.tensorboard_dir": reward})


def test_the_trained_model_replaces_no_other(command: dict[str, Any], model: Path, tmp_path: Path) -> None:
    """Except the model of the run that is resumed."""
    with pytest.raises(UsageError, match="is the --actor.model_name_or_path, which the trained model would replace"):
        check_results(parse(argv_of(command | {"--ckpt.output_dir": model})))
    trained = shutil.copytree(model, tmp_path / "trained")
    command |= {"--ckpt.output_dir": trained, "--ckpt.path": tmp_path / "checkpoints"}
    resumed = command | {"--ckpt.load_enable": True}
    for given in (command, resumed):
        with pytest.raises(
            UsageError, match="trained holds a model, which the trained one would replace; name another"
        ):
            check_results(parse(argv_of(given)))
    make_checkpoint(tmp_path / "checkpoints")
    check_results(parse(argv_of(resumed)))
    gae = {"--algo.advantage.estimator": "gae", "--ckpt.output_dir": tmp_path / "other"}
    gae = {flag: value for flag, value in command.items() if not flag.startswith("--algo.gtpo")} | gae
    (tmp_path / "trained").rename(tmp_path / "other_critic")
    check_results(parse(argv_of(gae)))
    with pytest.raises(UsageError, match="other_critic holds a model, which the trained one would replace"):
        check_results(parse(argv_of(gae | {"--critic.save_value_network": True})))


def test_a_fresh_run_starts_in_no_folder_with_checkpoints(
    command: dict[str, Any], refused: Callable[..., str], tmp_path: Path
) -> None:
    command["--ckpt.path"] = tmp_path / "checkpoints"
    check_checkpoints(parse(argv_of(command)))
    make_checkpoint(tmp_path / "checkpoints").rename(tmp_path / "checkpoints" / "_actor" / "global_step1.corrupt")
    make_checkpoint(tmp_path / "checkpoints", "global_step2")  # and no `latest`
    message = refused({})
    assert message == (
        f"--ckpt.path {tmp_path}/checkpoints has checkpoints of an earlier run (global_step1.corrupt, global_step2), "
        "which this one would replace; give --ckpt.load_enable to resume from them, or another folder to start over."
    )
    check_checkpoints(parse(argv_of(command | {"--ckpt.load_enable": True})))
    check_checkpoints(parse(argv_of(command | {"--ckpt.path": tmp_path / "anew"})))


@pytest.mark.parametrize(
    ("file", "writes"),
    [
        ("rollouts/step_000030.parquet", {"--logger.dump_rollouts": 10}),
        ("global_step3_hf", {"--ckpt.save_hf": True, "--ckpt.disable_ds": True}),
    ],
)
def test_nor_does_it_write_among_the_rollouts_or_models_of_an_earlier_run(
    command: dict[str, Any], refused: Callable[..., str], tmp_path: Path, file: str, writes: dict[str, Any]
) -> None:
    (tmp_path / file).mkdir(parents=True)
    command["--ckpt.path"] = tmp_path
    check_checkpoints(parse(argv_of(command)))
    assert refused(writes) == (
        f"--ckpt.path {tmp_path} has {Path(file).name} of an earlier run, which this one could replace; give another "
        "folder."
    )
    check_checkpoints(parse(argv_of(command | writes | {"--ckpt.load_enable": True})))


def test_a_critics_checkpoints_count_as_much_as_the_actors(
    command: dict[str, Any], refused: Callable[..., str], tmp_path: Path
) -> None:
    gae = {"--algo.advantage.estimator": "gae", "--ckpt.path": tmp_path / "checkpoints"}
    command = {flag: value for flag, value in command.items() if not flag.startswith("--algo.gtpo")} | gae
    critic = make_checkpoint(tmp_path / "checkpoints", role="_critic")
    assert "has checkpoints of an earlier run (global_step1), which" in refused(gae)
    resumed = parse(argv_of(command | {"--ckpt.load_enable": True}))
    (tmp_path / "checkpoints" / "_actor").mkdir()
    check_checkpoints(resumed)  # the run died while it saved its first one
    assert not resumes(resumed)
    make_checkpoint(tmp_path / "checkpoints", "global_step2")
    assert "_actor has no checkpoint that is known to be whole and that" in refused(gae | {"--ckpt.load_enable": True})
    critic.rename(critic.with_name("global_step2"))
    check_checkpoints(resumed)
    assert resumes(resumed)


def test_deepspeeds_ranks_are_as_many_as_before(
    command: dict[str, Any], refused: Callable[..., str], tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path, world_size=3)
    resume = {"--ckpt.path": tmp_path, "--ckpt.load_enable": True}
    assert refused(resume).endswith(
        f"{folder} was written by 3 processes, and DeepSpeed's ZeRO cannot divide it among 1; give --actor.num_nodes "
        "× --actor.num_gpus_per_node 3 GPUs, as before."
    )
    check_checkpoints(parse(argv_of(command | resume | {"--ds.zero_stage": 0})))
    write_manifest(folder, {"world_size": 1})
    check_checkpoints(parse(argv_of(command | resume)))
    (folder / MANIFEST).rename(folder / "model_states.pt")  # as an earlier version left the actor's
    make_checkpoint(tmp_path, role="_critic", world_size=3)
    gae = {"--algo.advantage.estimator": "gae", "--ckpt.load_tag": "global_step1"}
    assert "/_critic/global_step1 was written by 3 processes" in refused(resume | gae)


def test_what_cannot_be_gone_on_from_is_refused(
    command: dict[str, Any], refused: Callable[..., str], tmp_path: Path
) -> None:
    folder = make_checkpoint(tmp_path)
    resume = {"--ckpt.path": tmp_path, "--ckpt.load_enable": True}
    check_checkpoints(parse(argv_of(command | resume | {"--ckpt.load_tag": "global_step1"})))
    message = refused(resume | {"--ckpt.load_tag": "global_step2"})
    assert message.startswith("--ckpt.load_tag: ")
    assert message.endswith("/_actor has no checkpoint 'global_step2'; it has global_step1.")
    make_checkpoint(tmp_path, "global_step3")
    (folder / "checkpoint.json").write_text("{")  # the training ranks set it aside
    check_checkpoints(parse(argv_of(command | resume)))
    (folder.with_name("global_step3") / "checkpoint.json").write_text("{")
    message = refused(resume | {"--logger.metrics_path": tmp_path / "metrics.jsonl"})
    assert (
        "none of the checkpoints in" in message and "is complete (global_step1, global_step3); give another" in message
    )
    shutil.rmtree(folder.with_name("global_step3"))
    assert "cannot be read" in refused(
        resume | {"--ckpt.load_tag": "global_step1"}
    )  # but they take no checkpoint other than the one asked for
    assert "File name too long" in refused({"--ckpt.path": "x" * 300})
    folder.rename(folder.with_name("global_step1.corrupt"))
    assert "no checkpoint that is known to be whole (global_step1.corrupt)" in refused(resume)
    make_checkpoint(tmp_path, "global_step3", model={}, dtype="bfloat16", optimizer=True)
    assert "global_step3 was written with --actor.backend megatron; give that, or" in refused(resume)


def test_rows_that_were_sampled_with_other_settings_are_not_gone_on_from(
    command: dict[str, Any], tmp_path: Path
) -> None:
    """Before anything starts; a checkpoint without rows ahead, or of an earlier version, does not refuse any."""
    args = parse(argv_of(command | {"--ckpt.path": tmp_path, "--ckpt.load_enable": True}))
    for step, ahead in ((1, 0), (2, None), (3, 4)):
        own = {} if ahead is None else {ORIGIN: Origin(args).state(0, ahead)}
        make_checkpoint(tmp_path, f"global_step{step}", world_size=None, **own)
        check_checkpoints(args)
        other = changed(args, {"rollout.n_samples_per_prompt": args.rollout.n_samples_per_prompt + 1})
        wrong = r"n_samples_per_prompt is now (\d+), was \d+: .*, and the checkpoint holds 4 prompts that were "
        wrong += "sampled ahead"
        with pytest.raises(UsageError, match=wrong) if ahead else nullcontext():
            check_checkpoints(other)
