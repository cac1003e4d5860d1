import json

import pytest

from openrlhf_gtpo.tasks.reasoning_gym_data import PRESETS, write_task_files


def _rows(directory, name):
    return [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("task", ["products", "gcd", "chain_sum"])
def test_no_question_is_in_both_files_or_twice_in_one(tmp_path, task):
    out = write_task_files(task, tmp_path / "out", train_size=60, eval_size=20)
    train, held_out = _rows(out, "train"), _rows(out, "eval")
    assert (len(train), len(held_out)) == (60, 20)
    questions = [row["input"] for row in train + held_out]
    assert len(set(questions)) == 80
    assert {row["datasource"] for row in train + held_out} == {task}


def test_a_small_space_can_be_split_to_its_last_question(tmp_path):
    out = write_task_files("products", tmp_path / "out", train_size=75, eval_size=25)
    assert len({row["input"] for row in _rows(out, "train") + _rows(out, "eval")}) == 100


def test_same_seed_same_bytes_and_eval_does_not_depend_on_train_size(tmp_path):
    def write(name, **settings):
        return write_task_files("gcd", tmp_path / name, **{"train_size": 30, "eval_size": 10, "seed": 7, **settings})

    a, b, longer, other = write("a"), write("b"), write("longer", train_size=40), write("other", seed=8)
    for name in ("train.jsonl", "eval.jsonl"):
        assert (a / name).read_bytes() == (b / name).read_bytes()
        assert (a / name).read_bytes() != (other / name).read_bytes()
    assert (a / "eval.jsonl").read_bytes() == (longer / "eval.jsonl").read_bytes()


def test_a_chat_has_its_turns_in_order_and_its_example_in_no_row(tmp_path):
    example = ("2 * 3 =", "6")
    out = write_task_files(
        "products", tmp_path / "out", 79, 20, system="Count.", question_form="{expression} =", examples=[example]
    )
    rows = _rows(out, "train") + _rows(out, "eval")
    for row in rows:
        assert [turn["role"] for turn in row["input"]] == ["system", "user", "assistant", "user"]
        assert [turn["content"] for turn in row["input"]][:3] == ["Count.", *example]
        assert row["input"][3]["content"] != example[0]
    assert rows[0]["input"][3]["content"].endswith(" =")
    with pytest.raises(ValueError, match="only 99 different questions"):
        write_task_files("products", tmp_path / "o", 80, 20, question_form="{expression} =", examples=[example])


def test_questions_that_a_form_makes_equal_count_once(tmp_path):
    with pytest.raises(ValueError, match="only 1 different questions"):
        write_task_files("products", tmp_path / "out", 1, 1, question_form="{num_terms} numbers")


@pytest.mark.parametrize("preset", PRESETS)
def test_presets_have_room_for_the_default_sizes_and_load_as_openrlhf_loads_them(tmp_path, preset):
    datasets = pytest.importorskip("datasets")
    out = write_task_files(output_dir=tmp_path / "out", train_size=75, eval_size=24, **PRESETS[preset])
    loaded = datasets.load_dataset("json", data_files=str(out / "train.jsonl"), cache_dir=str(tmp_path))["train"]
    assert len(loaded) == 75
    assert loaded[0]["input"] == _rows(out, "train")[0]["input"]
    assert set(loaded.column_names) == {"input", "label", "scorer_label", "datasource"}


def test_task_config_reaches_the_task(tmp_path):
    out = write_task_files("products", tmp_path / "out", 5, 5, task_config={"min_digits": 3, "max_digits": 3})
    for row in _rows(out, "train"):
        factors = json.loads(row["scorer_label"])["entry"]["metadata"]["expression"].split(" * ")
        assert all(len(factor) == 3 for factor in factors)


def test_a_task_that_is_not_about_numbers(tmp_path):
    out = write_task_files("leg_counting", tmp_path / "legs", 3, 2)
    assert len(_rows(out, "train")) == 3
    out = write_task_files("spell_backward", tmp_path / "spell", 3, 2)
    assert json.loads(_rows(out, "train")[0]["scorer_label"])["task"] == "spell_backward"
    out = write_task_files("graph_color", tmp_path / "colors", 1, 1)  # its scorer accepts any of many right ones
    assert _rows(out, "train")[0]["label"] is None
