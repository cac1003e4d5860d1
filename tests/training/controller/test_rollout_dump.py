"""The controller's rollout dumps: the rows that were trained on, written alongside training and never in its way."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openrlhf.trainer.ppo_utils.experience import split_experience_batch
from rollouts import Rollout, arguments, in_sampling_order, maker, rollout

from openrlhf_gtpo.algorithms import GTPOConfig, gtpo_advantages
from openrlhf_gtpo.errors import TrainingStopped
from openrlhf_gtpo.report import names
from openrlhf_gtpo.report.rollouts import Tokens, find_dumps, read_dump
from openrlhf_gtpo.token_values import TokenValues
from openrlhf_gtpo.training.controller import rollout_dump
from openrlhf_gtpo.training.controller.rollout_dump import RolloutDumper, pieces
from openrlhf_gtpo.training.credit.experience_maker import EntropyExperienceMaker
from openrlhf_gtpo.training.rollout.replay import ReplayedSamples, read_samples


class Tokenizer:
    """Its tokens are the bytes of UTF-8; a first token loses its blank, as SentencePiece's does."""

    def get_vocab(self) -> dict[str, int]:
        return {chr(byte): byte for byte in range(256)}

    def decode(self, tokens: tuple[int, ...], **options: Any) -> str:
        assert options == {"skip_special_tokens": False, "clean_up_tokenization_spaces": False}
        return bytes(tokens).decode(errors="replace").removeprefix(" ")


def dumped(
    batch: Rollout, folder: Path, monkeypatch: pytest.MonkeyPatch, *flags: str, steps: tuple[int, ...] = (1,)
) -> tuple[RolloutDumper, list[Any]]:
    """The dumper, and the experiences of the last of ``steps``."""
    args = arguments("--logger.dump_rollouts", "1", "--ckpt.path", str(folder), *flags)
    made = maker(EntropyExperienceMaker, args, batch, monkeypatch)
    made.on_batch = dumper = RolloutDumper(args, Tokenizer(), made.credit, max_steps=7)
    for step in steps:
        dumper.step = step
        experiences = made.make_experience_batch(batch.samples())
    dumper.close()
    return dumper, experiences


def read_rows(column: Tokens) -> list[np.ndarray]:
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
    advantages = in_sampling_order(experiences, "advantages", batch.mask.shape[1])
    for name, expected in (
        ("mask", batch.mask),
        ("entropy", batch.entropy),
        ("log_probs", batch.log_probs),
        ("rollout_log_probs", batch.log_probs),
        ("advantages", advantages),
    ):
        for row, values in enumerate(read_rows(columns[name])):
            first, last = (int(batch.mask[row].nonzero()[at]) for at in (0, -1))
            assert torch.equal(torch.from_numpy(values.copy()), expected[row, first : last + 1]), (name, row)
    tokens, prompts = read_rows(columns["tokens"]), read_rows(columns["prompt_tokens"])
    for row, sample in enumerate(batch.samples()):
        assert [*prompts[row], *tokens[row]] == sample.sequences[0].tolist()
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
    args = arguments("--logger.dump_rollouts", "1", "--ckpt.path", str(tmp_path), *flags)
    sampled = batch.samples()
    for i, sample in enumerate(sampled):
        width = sample.action_mask.shape[1]
        if source == "sampler":
            sample.sampler_values = TokenValues(batch.log_probs[i : i + 1, :width], batch.entropy[i : i + 1, :width])
        sample.info[names.GUIDE_ROWS] = torch.tensor([float(i % 4 == 3)])
    made = maker(EntropyExperienceMaker, args, batch, monkeypatch)
    made.on_batch = dumper = RolloutDumper(args, Tokenizer(), made.credit, max_steps=7)
    dumper.step = 1
    trained = made.make_experience_batch(sampled)
    dumper.close()
    settings = read_dump(find_dumps(tmp_path)[0]).settings
    assert settings["max_steps"] == 7

    replayed = read_samples(read_dump(find_dumps(tmp_path)[0]), args)
    for i, (got, had) in enumerate(zip(replayed, batch.samples(), strict=True)):
        for name in ("sequences", "attention_mask", "action_mask", "rewards", "response_length", "truncated",
                     "total_length"):  # fmt: skip
            ours, theirs = getattr(got, name), getattr(had, name)
            assert torch.equal(ours, theirs) and ours.dtype == theirs.dtype, name
        action = had.action_mask.bool()
        assert torch.equal(got.rollout_log_probs[action], had.rollout_log_probs[action])
        assert got.prompts == had.prompts and torch.equal(got.info["reward"], had.info["reward"])
        assert got.info[names.GUIDE_ROWS].tolist() == [float(i % 4 == 3)]
    made.on_batch = None
    for again, once in zip(made.make_experience_batch(replayed), trained, strict=True):
        for name in ("sequences", "advantages", "returns", "action_log_probs"):
            ours, theirs = getattr(again, name), getattr(once, name)
            assert ours is theirs is None or torch.equal(ours, theirs), name


def test_dumps_are_replayed_in_the_order_of_steps_after_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for step in (9, 10, 20):
        dumped(rollout(seed=step), tmp_path, monkeypatch, "--algo.advantage.estimator", "gtpo", steps=(step,))
    args = arguments("--train.replay_rollouts", str(tmp_path))
    replay = ReplayedSamples(args)
    replay.begin_after(9)
    left = []
    for step in (10, 20):
        rows, passed, consumed, exhausted = replay.generate_samples(temperature=1.0)
        assert (replay.step, passed, consumed) == (step, None, 1)
        assert torch.equal(torch.cat([row.rewards for row in rows]), rollout(seed=step).outcome)
        left.append(exhausted)
    assert left == [False, True] and replay.max_steps == 7
    assert replay.generate_samples() == ([], None, 0, True)  # in a second episode
    replay = ReplayedSamples(args)
    replay.begin_after(20)  # stopped, or without room for its model, after its last step: it writes the model
    assert replay.generate_samples() == ([], None, 0, True)
    with pytest.raises(TrainingStopped, match="has no dump after step 21, .* its last dump is of step 20"):
        ReplayedSamples(args).begin_after(21)


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
    args, split = arguments("--logger.dump_rollouts", "1", "--ckpt.path", str(tmp_path)), threading.Event()
    batch, rows = rollout(seed=3), RolloutDumper._rows
    made = maker(EntropyExperienceMaker, args, batch, monkeypatch)
    monkeypatch.setattr(RolloutDumper, "_rows", lambda *a: split.wait(60) and rows(*a))
    made.on_batch = dumper = RolloutDumper(args, Tokenizer(), made.credit, max_steps=7)
    dumper.step = 1
    for experience in made.make_experience_batch(batch.samples()):
        split_experience_batch(experience)
    split.set()
    dumper.close()
    assert read_dump(find_dumps(tmp_path)[0]).columns["row"].tolist() == list(range(20))


def test_a_dump_has_the_ratios_of_its_rows_once_the_step_is_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training gets the numbers of the rows that are dumped, in place of labels. A step in which training fails has no
    ratios, and a step that is not dumped asks for none."""
    args = arguments("--logger.dump_rollouts", "2", "--logger.dump_rows", "9", "--ckpt.path", str(tmp_path))
    batch = rollout(seed=3)
    made = maker(EntropyExperienceMaker, args, batch, monkeypatch)
    made.on_batch = dumper = RolloutDumper(args, Tokenizer(), made.credit, max_steps=7)
    for dumper.step in (1, 2, 3, 4):
        rows = [row for experience in made.make_experience_batch(batch.samples()) for row in experience.labels]
        wanted = [row for row in rows if row is not None]
        assert len(rows) == 20 and len(wanted) == (0 if dumper.step % 2 else 8)
        ratios = {row: (row + torch.arange(99) / 100).numpy() for row in wanted}
        ranks = [
            {row: (ratio, ratio % 1 > 0.04) for row, ratio in ratios.items() if row % 2 == rank} for rank in (0, 1)
        ]
        if dumper.step < 4:
            dumper.trained(lambda: ranks if dumper.step == 2 else pytest.fail("nothing is dumped"))  # noqa: B023
        dumper.close()  # while a dump is being written, the next one is left out
    columns, failed = (read_dump(path).columns for path in find_dumps(tmp_path))
    assert failed["ratio"] is failed["clipped"] is None and len(failed["row"]) == 8
    for row, ratio, clipped in zip(columns["row"], read_rows(columns["ratio"]), read_rows(columns["clipped"])):
        actions = batch.mask[row].nonzero()
        expected = torch.arange(int(actions[0]), int(actions[-1]) + 1) / 100
        np.testing.assert_allclose(ratio, row + expected, rtol=1e-6)
        np.testing.assert_array_equal(clipped, ratio % 1 > 0.04)


def test_rows_that_wait_for_the_critic_take_no_ratios_of_another_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The actor trains on the first two rollouts with the third, in which rows have the same numbers again."""
    args = arguments("--logger.dump_rollouts", "1", "--ckpt.path", str(tmp_path), "--critic.freezing_steps", "1")
    batch = rollout()
    made = maker(EntropyExperienceMaker, args, batch, monkeypatch)
    made.on_batch = dumper = RolloutDumper(args, Tokenizer(), made.credit, max_steps=7)
    numbers = []
    for dumper.step in (1, 2, 3):
        rows = [row for experience in made.make_experience_batch(batch.samples()) for row in experience.labels]
        numbers.append(rows)
        seen = {row: (np.ones(99), np.zeros(99, dtype=bool)) for row in rows if row is not None}
        dumper.trained(lambda: [seen])  # noqa: B023
        dumper.close()
    assert numbers == [[None] * 20, [None] * 20, list(range(20))]
    assert [read_dump(path).columns["ratio"] is None for path in find_dumps(tmp_path)] == [True, True, False]


def test_an_estimator_of_upstream_has_a_dump_without_entropies(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dumped(rollout(), tmp_path, monkeypatch, "--algo.advantage.estimator", "group_norm")
    dump = read_dump(find_dumps(tmp_path)[0])
    assert dump.columns["entropy"] is None and dump.settings["config"] is None
    assert dump.columns["advantages"].values.any()


def test_every_nth_step_is_dumped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for step in range(1, 7):
        dumped(rollout(), tmp_path, monkeypatch, "--logger.dump_rollouts", "3", steps=(step,))
    assert [path.name for path in find_dumps(tmp_path)] == ["step_000003.parquet", "step_000006.parquet"]


def test_a_dump_that_fails_is_a_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "rollouts").write_text("a file where the folder would be")
    _, experiences = dumped(rollout(), tmp_path, monkeypatch)
    assert experiences[0].advantages is not None
    assert "Warning: rollouts of step 1 were not dumped to" in capsys.readouterr().out


def test_training_does_not_wait_for_a_dump(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A disk that hangs costs dumps but no steps: one dump is held, and those that would follow are left out."""
    disk = threading.Event()
    write = rollout_dump.write_dump
    monkeypatch.setattr(rollout_dump, "write_dump", lambda *what: (disk.wait(60), write(*what)))
    join = RolloutDumper.close
    monkeypatch.setattr(RolloutDumper, "close", lambda self: None)
    dumper, experiences = dumped(rollout(), tmp_path, monkeypatch, steps=(1, 2))
    assert experiences and not list(tmp_path.rglob("*.parquet"))
    assert "still being written; step 2's is left out" in capsys.readouterr().out
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
