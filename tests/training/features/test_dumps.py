"""Rollout dumps, written alongside training and never in its way, and replays of them."""

import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import Experience, split_experience_batch

from openrlhf_gtpo.algorithms import GTPOConfig, gtpo_advantages
from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.rollouts import Tokens, find_dumps, read_dump
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training.credit.experiences import ExperienceMaker
from openrlhf_gtpo.training.features.dumps import dumper as module
from openrlhf_gtpo.training.features.dumps.dumper import RolloutDumper, pieces
from openrlhf_gtpo.training.features.dumps.ratios import TokenRatios
from openrlhf_gtpo.training.features.dumps.replay import ReplayedSampler, read_rows
from openrlhf_gtpo.training.features.sampler_entropy.controller import SamplerEntropyInController
from openrlhf_gtpo.training.rows import Rollout as Rows
from openrlhf_gtpo.training.rows import Row
from tests.support.controllers import Group, controller, run_arguments
from tests.support.rollouts import Rollout, arguments, in_sampling_order, maker, rollout


class Tokenizer:
    """Its tokens are the bytes of UTF-8; a first token loses its blank, as SentencePiece's does."""

    def get_vocab(self) -> dict[str, int]:
        return {chr(byte): byte for byte in range(256)}

    def decode(self, tokens: tuple[int, ...], **options: Any) -> str:
        assert options == {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return bytes(tokens).decode(errors="replace").removeprefix(" ")


class Rank(TokenRatios):
    """A rank that trains, whose loss has seen ``ratios``."""

    def __init__(self) -> None:
        self.ratios: dict[int, Any] = {}
        self.trainer = SimpleNamespace(loss_features=[self])
        self.__ray_call__ = SimpleNamespace(remote=lambda function: function(self))

    def take(self) -> dict[int, Any]:
        return self.ratios


class Run:
    """What a dumper sees of a run whose steps have the rows of ``batch``.

    Attributes:
        step: the last that was trained.
        ranks: two, which train.
    """

    tokenizer, max_steps = Tokenizer(), 7

    def __init__(
        self, batch: Rollout, args: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, features: Sequence[Any] = ()
    ) -> None:
        self.step = 0
        self.dumper = RolloutDumper(args)
        self.maker = maker(ExperienceMaker, args, batch, monkeypatch, features=[*features, self.dumper])
        self.ranks = [Rank(), Rank()]
        self.rollout = Rows([], 0, False)
        self.models = SimpleNamespace(actor=SimpleNamespace(_actor_handlers=self.ranks))
        self._rows = batch.rows()
        monkeypatch.setattr(module, "ray", SimpleNamespace(get=lambda values: values))
        self.dumper.begin(self)

    def make(self, step: int, rows: Sequence[Row] | None = None) -> list[Experience]:
        """The experiences of ``step``."""
        self.step = self.rollout.version = step - 1
        return self.maker.make(rows or self._rows)


def dump_arguments(folder: Path, *flags: str) -> SimpleNamespace:
    return arguments("--logger.dump_rollouts", "1", "--ckpt.path", str(folder), *flags)


def dumped(
    batch: Rollout, folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str, steps: tuple[int, ...] = (1,)
) -> tuple[RolloutDumper, list[Experience]]:
    """The dumper, and the experiences of the last of ``steps``."""
    run = Run(batch, dump_arguments(folder, *flags), monkeypatch)
    for step in steps:
        experiences = run.make(step)
    run.dumper.end()
    return run.dumper, experiences


def pieces_of(column: Tokens) -> list[np.ndarray]:
    return [column.values[start:end] for start, end in zip(column.offsets, column.offsets[1:])]


DYNAMIC = ("--train.dynamic_batch_enable", "--rollout.max_tokens_per_gpu", "30")
PENALTY = ("--reward.overlong_buffer_len", "4", "--rollout.max_new_tokens", "9")


def test_a_dump_has_what_was_trained_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In sampling order, from each response's first action token to its last; the credit gives the same advantages."""
    batch = rollout(seed=3)
    flags = ("--algo.advantage.estimator", "gtpo", *PENALTY, *DYNAMIC)
    _, experiences = dumped(batch, tmp_path, monkeypatch, *flags)
    (path,) = find_dumps(tmp_path)
    dump = read_dump(path)
    columns, settings = dump.columns, dump.settings
    assert (dump.step, settings["policy_version"], settings["batch_rows"]) == (1, 0, 20)
    assert columns["row"].tolist() == list(range(20)) and columns["group"].tolist() == batch.group_ids.tolist()
    assert columns["outcome"].tolist() == batch.outcome.tolist() and min(columns["length_penalty"]) < 0
    assert columns["truncated"].tolist() == batch.truncated.tolist()
    assert columns["texts"] == ['{"label": "label"}'] * 20
    advantages = in_sampling_order(experiences, "advantages", batch.mask.shape[1])
    for name, expected in (
        ("mask", batch.mask),
        ("entropy", batch.entropy),
        ("log_probs", batch.log_probs),
        ("rollout_log_probs", batch.log_probs),
        ("advantages", advantages),
    ):
        for row, values in enumerate(pieces_of(columns[name])):
            first, last = (int(batch.mask[row].nonzero()[at]) for at in (0, -1))
            assert torch.equal(torch.from_numpy(values.copy()), expected[row, first : last + 1]), (name, row)
    tokens, prompts = pieces_of(columns["tokens"]), pieces_of(columns["prompt_tokens"])
    for number, row in enumerate(batch.rows()):
        assert [*prompts[number], *tokens[number]] == row.tokens.tolist()
    again = gtpo_advantages(
        batch.entropy,
        batch.mask,
        torch.tensor(columns["outcome"], dtype=getattr(torch, settings["outcome_dtype"])),
        torch.tensor(columns["group"]),
        GTPOConfig(**settings["config"]),
        torch.tensor(columns["length_penalty"]),
    )
    torch.testing.assert_close(again, advantages)


@pytest.mark.parametrize("source", ["actor", "sampler"])
def test_a_replay_gets_what_was_sampled(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All that training reads is equal bit for bit, holes and truncation included, and makes the same experiences."""
    batch = rollout(seed=3, binary=False)
    flags = ("--algo.advantage.estimator", "gtpo", "--rollout.entropy", source, "--rollout.entropy_audit_steps", "0")
    args = dump_arguments(tmp_path, *flags)
    sampled = batch.rows()
    for i, row in enumerate(sampled):
        row.off_policy = i % 4 == 3
        row.metrics = {names.GUIDE_ROWS: float(row.off_policy), names.OFF_POLICY_ROWS: float(row.off_policy)}
        if source == "sampler":
            tables = torch.zeros(2, len(row.tokens))
            tables[:, 1:] = torch.stack([batch.log_probs, batch.entropy])[:, i, : len(row.tokens) - 1]
            row.values = TokenValues(*tables)
    features = [SamplerEntropyInController(args)] if source == "sampler" else []
    run = Run(batch, args, monkeypatch, features)
    trained = run.make(1, sampled)
    run.dumper.end()
    [path] = find_dumps(tmp_path)
    assert read_dump(path).settings["max_steps"] == 7

    replayed = read_rows(read_dump(path), args)
    for got, had in zip(replayed, sampled, strict=True):
        for name in ("tokens", "mask"):
            assert np.array_equal(getattr(got, name), getattr(had, name))
            assert getattr(got, name).dtype == getattr(had, name).dtype, name
        assert np.array_equal(got.log_probs[got.mask], had.log_probs[had.mask])
        for name in ("prompt", "number", "reward", "truncated", "off_policy", "metrics"):
            assert getattr(got, name) == getattr(had, name), name
    made = maker(ExperienceMaker, args, batch, monkeypatch, features=features)
    for again, once in zip(made.make(replayed), trained, strict=True):
        for name in ("sequences", "attention_mask", "action_mask", "rewards", "response_length", "truncated",
                     "total_length", "advantages", "returns", "action_log_probs"):  # fmt: skip
            ours, theirs = getattr(again, name), getattr(once, name)
            assert ours is theirs is None or (torch.equal(ours, theirs) and ours.dtype == theirs.dtype), name


def test_dumps_are_replayed_in_the_order_of_steps_after_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (9, 10, 20):
        dumped(rollout(seed=step), tmp_path, monkeypatch, "--algo.advantage.estimator", "gtpo", steps=(step,))
    args = arguments("--train.replay_rollouts", str(tmp_path))
    replay = ReplayedSampler(args)
    replay.begin_after(9)
    left = []
    for step in (10, 20):
        seen = replay.sample()
        assert (seen.step, seen.passed, seen.prompts) == (step, None, 1)
        assert [row.reward for row in seen.rows] == rollout(seed=step).outcome.tolist()
        left.append(seen.exhausted)
    assert left == [False, True] and replay.max_steps == 7
    assert replay.sample() == Rows([], 0, True)  # in a second episode
    replay = ReplayedSampler(args)
    replay.begin_after(20)  # stopped, or without room for its model, after its last step: it writes the model
    assert replay.sample() == Rows([], 0, True)
    with pytest.raises(
        TrainingStopped, match="has no dump after the checkpoint's step 21; its last dump is of step 20"
    ):
        ReplayedSampler(args).begin_after(21)


def test_a_replayed_step_has_the_number_of_its_dump(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy of the dumped run waited for its critic before step 12."""
    batch = rollout(seed=3)
    for step in (9, 12):
        dumped(batch, tmp_path / "dumps", monkeypatch, "--algo.advantage.estimator", "gtpo", steps=(step,))
    replays = ("--train.replay_rollouts", str(tmp_path / "dumps"), "--critic.freezing_steps", "10")
    args = run_arguments(tmp_path, *replays, "--ckpt.save_steps", "3", samples=4)
    run = controller(monkeypatch, args, actors := Group(), engines=[])
    run.fit()
    assert run.step == 12 and len(actors.trained) == 1 and list(actors.saved) == ["global_step9", "global_step12"]
    assert [sum(len(each.sequences) for each in step) for step in actors.dealt] == [40, 0]
    assert not any(name == "broadcast_to_vllm" for name, _ in actors.called)


def test_a_replay_goes_on_from_a_checkpoint_of_the_sampled_runs_last_episode(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (9, 12):
        dumped(rollout(seed=3), tmp_path / "dumps", monkeypatch, "--algo.advantage.estimator", "gtpo", steps=(step,))
    replays = ("--train.replay_rollouts", str(tmp_path / "dumps"), "--ckpt.load_enable", "--train.num_episodes", "1")
    args = run_arguments(tmp_path, *replays, samples=4)
    run = controller(monkeypatch, args, actors := Group({"episode": 1, "global_step": 9}), engines=[])
    run.fit()
    assert run.step == 12 and len(actors.trained) == 1


def test_a_dump_is_of_its_own_rollout_however_late_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In an asynchronous run the next rollout is there at once."""
    run = Run(rollout(), dump_arguments(tmp_path), monkeypatch)
    run.make(1)
    run.rollout.version, run.rollout.notes["routing"] = 7, {"flips": [0.25]}
    run.rollout = Rows([], 0, False, version=8)
    run.dumper.end()
    settings = read_dump(find_dumps(tmp_path)[0]).settings
    assert (settings["policy_version"], settings["routing"]) == (7, {"flips": [0.25]})


def test_whole_groups_are_sampled_anew_each_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator of its own samples them: the run's generators stay where they were."""
    torch.manual_seed(1)
    drawn = torch.get_rng_state()
    dumped(rollout(), tmp_path, monkeypatch, "--logger.dump_rows", "9", steps=(1,))
    dumped(rollout(), tmp_path, monkeypatch, "--logger.dump_rows", "9", steps=(2,))
    dumped(rollout(), tmp_path / "again", monkeypatch, "--logger.dump_rows", "9", steps=(2,))
    first, second, again = (read_dump(path).columns["row"].tolist() for path in
                            [*find_dumps(tmp_path / "rollouts"), *find_dumps(tmp_path / "again")])  # fmt: skip
    assert len(first) == len(second) == 8 and first != second == again
    assert all(row - row % 4 + i in first for row in first for i in range(4))
    assert torch.equal(torch.get_rng_state(), drawn)


def test_training_may_take_experiences_apart_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Upstream's ``split_experience_batch``, which deals rows to replicas, leaves experiences without an index."""
    split, run = threading.Event(), Run(rollout(seed=3), dump_arguments(tmp_path), monkeypatch)

    def decode(tokens: tuple[int, ...], **options: Any) -> str:  # of the first row, when the others are unread
        assert split.wait(600)
        return Tokenizer().decode(tokens, **options)

    monkeypatch.setattr(run.tokenizer, "decode", decode)
    for experience in run.make(1):
        split_experience_batch(experience)
    split.set()
    run.dumper.end()
    assert read_dump(find_dumps(tmp_path)[0]).columns["row"].tolist() == list(range(20))


def test_a_dump_has_the_ratios_of_its_rows_once_the_step_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training gets the numbers of the rows that are dumped, in place of labels. A step in which training fails has no
    ratios."""
    batch = rollout(seed=3)
    args = dump_arguments(tmp_path, "--logger.dump_rollouts", "2", "--logger.dump_rows", "9")
    run = Run(batch, args, monkeypatch)
    for step in (1, 2, 3, 4):
        rows = [row for experience in run.make(step) for row in experience.labels]
        wanted = [row for row in rows if row is not None]
        assert len(rows) == 20 and len(wanted) == (0 if step % 2 else 8)
        ratios = {row: (row + torch.arange(99) / 100).numpy() for row in wanted}
        for place, rank in enumerate(run.ranks):
            rank.ratios = {row: (ratio, ratio % 1 > 0.04) for row, ratio in ratios.items() if row % 2 == place}
        if step < 4:
            run.dumper.on_step(step, {})
        run.dumper.end()  # while a dump is being written, the next one is left out
    columns, failed = (read_dump(path).columns for path in find_dumps(tmp_path))
    assert failed["ratio"] is failed["clipped"] is None and len(failed["row"]) == 8
    for row, ratio, clipped in zip(columns["row"], pieces_of(columns["ratio"]), pieces_of(columns["clipped"])):
        actions = batch.mask[row].nonzero()
        expected = torch.arange(int(actions[0]), int(actions[-1]) + 1) / 100
        np.testing.assert_allclose(ratio, row + expected, rtol=1e-6)
        np.testing.assert_array_equal(clipped, ratio % 1 > 0.04)


def test_rows_that_join_a_step_do_not_pass_for_its_dumped_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their labels: these are the numbers of rows that the dump has."""
    run = Run(rollout(seed=3), dump_arguments(tmp_path), monkeypatch)
    run.make(1)
    others = [replace(row, label=number) for number, row in enumerate(rollout(seed=3).rows())]
    made = run.maker.make(others, own=False)
    assert [label for experience in made for label in experience.labels] == [None] * 20
    run.dumper.end()


def test_rows_that_wait_for_the_critic_take_no_ratios_of_another_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor trains on the first two rollouts with the third, in which rows have the same numbers again."""
    run = Run(rollout(), dump_arguments(tmp_path, "--critic.freezing_steps", "1"), monkeypatch)
    numbers = []
    for step in (1, 2, 3):
        rows = [row for experience in run.make(step) for row in experience.labels]
        numbers.append(rows)
        seen = {row: (np.ones(99), np.zeros(99, dtype=bool)) for row in rows if row is not None}
        run.ranks[0].ratios = seen
        run.dumper.on_step(step, {})
        run.dumper.end()
    assert numbers == [[None] * 20, [None] * 20, list(range(20))]
    assert [read_dump(path).columns["ratio"] is None for path in find_dumps(tmp_path)] == [True, True, False]


def test_a_dump_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rollouts").write_text("a file where the folder would be")
    _, experiences = dumped(rollout(), tmp_path, monkeypatch)
    assert experiences[0].advantages is not None
    assert "Warning: could not dump the rollouts of step 1 to" in capsys.readouterr().out


def test_training_does_not_wait_for_a_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that hangs costs dumps but no steps: one dump is held, and those that would follow are left out."""
    disk = threading.Event()
    write = module.write_dump
    monkeypatch.setattr(module, "write_dump", lambda *what: (disk.wait(600), write(*what)))
    join = RolloutDumper.end
    monkeypatch.setattr(RolloutDumper, "end", lambda self: None)
    dumper, experiences = dumped(rollout(), tmp_path, monkeypatch, steps=(1, 2))
    assert experiences and not list(tmp_path.rglob("*.parquet"))
    assert "skipped the rollout dump of step 2, because the last one is still being written" in capsys.readouterr().out
    disk.set()
    join(dumper)
    assert [path.name for path in find_dumps(tmp_path)] == ["step_000001.parquet"]


def test_pieces_are_the_text_that_each_token_adds() -> None:
    text = "a 数 مرحبا 🙂"
    decode = Tokenizer().decode

    def decode_bytes(tokens: tuple[int, ...]) -> str:
        return decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)

    found = list(pieces(list(text.encode()), decode_bytes))
    assert "".join(found) == text and found[:5] == ["a", " ", "", "", "数"] and found[-4:] == ["", "", "", "🙂"]
    cut = list(pieces(list("é".encode())[:1], decode_bytes))
    assert cut == ["\ufffd"]  # a response that was cut off within a character
