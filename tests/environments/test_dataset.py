# Copyright The marin_rl Authors
# SPDX-License-Identifier: Apache-2.0

import gzip
import json
import os
import runpy
from pathlib import Path
from typing import Any

import pytest

from marin_rl.environments.base import AbstractEnvironment, Split
from marin_rl.environments.dataset import HuggingFaceConfig, JsonlConfig
from marin_rl.environments.row_format import RowFormat
from marin_rl.rewards.grading import ExactConfig, MathGraderConfig
from marin_rl.rewards.grading_process import GroundTruthError
from tests.one_reply import answer

SAMPLE = Path(__file__).parents[2] / "experiments" / "data" / "arithmetic_words.jsonl"


def sums(count: int, start: int = 0) -> list[dict[str, Any]]:
    return [
        {"prompt": f"{n}+1=", "answer": str(n + 1), "worked_answer": str(n + 1)} for n in range(start, start + count)
    ]


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def prompts(environment: AbstractEnvironment, split: Split) -> set[str]:
    return {task.messages[-1]["content"] for task in environment.tasks(split)}


def assert_sound(environment: AbstractEnvironment, count: int) -> None:
    """Check that splits are disjoint and complete, and only the worked answers are rewarded."""
    texts = [prompts(environment, split) for split in Split]
    assert sum(len(text) for text in texts) == len(set.union(*texts)) == count
    for split in Split:
        for task in environment.tasks(split):
            assert task.worked_answer is not None
            assert answer(environment, task, task.worked_answer).rewards == {"correct": 1.0}
            assert answer(environment, task, "no idea").rewards == {"correct": 0.0}


@pytest.mark.parametrize("grader", [ExactConfig(), MathGraderConfig()])
def test_sample_file(grader):
    environment = JsonlConfig(path=str(SAMPLE), grader=grader).build()
    assert environment.name == "arithmetic_words"
    assert_sound(environment, 200)
    made = runpy.run_path(str(SAMPLE.with_name("make_arithmetic_words.py")))["problems"]()
    assert [json.loads(line) for line in SAMPLE.read_text(encoding="utf-8").splitlines()] == list(made)


def test_a_problem_stays_in_its_split_when_the_file_grows(tmp_path: Path):
    small = JsonlConfig(path=write(tmp_path / "a.jsonl", sums(100))).build()
    large = JsonlConfig(path=write(tmp_path / "b.jsonl", sums(300)[::-1])).build()
    for split in Split:
        assert prompts(small, split) <= prompts(large, split)
    # Tasks keep the order of the file.
    numbers = [int(task.answer) for task in small.tasks(Split.TRAIN)]
    assert numbers == sorted(numbers)


def test_a_held_out_file_leaves_all_other_shares_to_validation(tmp_path: Path):
    train, held_out = write(tmp_path / "a.jsonl", sums(300)), write(tmp_path / "b.jsonl", sums(10, start=300))
    environment = JsonlConfig(path=train, held_out_path=held_out, validation=0.9).build()
    assert prompts(environment, Split.HELD_OUT) == {f"{n}+1=" for n in range(300, 310)}
    assert_sound(environment, 310)
    assert len(environment.tasks(Split.VALIDATION)) > 240
    assert len(environment.tasks(Split.TRAIN)) < 60
    with pytest.raises(ValueError, match=r"held_out 0\.1 and validation 0\.9 add up to 1\.0"):
        JsonlConfig(path=train, validation=0.9)


def test_overlap_with_the_held_out_file_is_an_error(tmp_path: Path):
    train, held_out = write(tmp_path / "a.jsonl", sums(50)), write(tmp_path / "b.jsonl", sums(10, start=47))
    with pytest.raises(
        ValueError, match=r"3 held-out problems are also training problems.*'47\+1='.*b\.jsonl:1 .*a\.jsonl:48"
    ):
        JsonlConfig(path=train, held_out_path=held_out).build()
    train = write(tmp_path / "a.jsonl", [{**row, "id": i} for i, row in enumerate(sums(50))])
    held_out = write(tmp_path / "b.jsonl", [{**row, "id": i} for i, row in enumerate(sums(10, start=50))])
    with pytest.raises(ValueError, match=r"b\.jsonl:1: id '0' is also the id of another problem at .*a\.jsonl:1"):
        JsonlConfig(path=train, held_out_path=held_out).build()


def as_messages(row: dict[str, Any], system: str | None = None, space: str = "") -> dict[str, Any]:
    messages = [{"role": "user", "content": space + row["prompt"] + space}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    return {"messages": messages, "answer": row["answer"]}


@pytest.mark.parametrize("form", [{}, {"space": " \n"}, {"system": "Be brief."}])
def test_a_prompt_and_equal_messages_are_one_problem(tmp_path: Path, form):
    rows = sums(300)
    copies = [as_messages(row, **form) for row in rows]
    plain = JsonlConfig(path=write(tmp_path / "plain.jsonl", rows), name="a").build()
    mixed = JsonlConfig(path=write(tmp_path / "mixed.jsonl", [*rows, *copies]), name="a").build()
    reverse = JsonlConfig(path=write(tmp_path / "reverse.jsonl", copies), name="a").build()
    for split in Split:
        assert mixed.tasks(split) == plain.tasks(split)
        assert [task.id for task in reverse.tasks(split)] == [task.id for task in plain.tasks(split)]
    config = JsonlConfig(path=str(tmp_path / "plain.jsonl"), held_out_path=str(tmp_path / "reverse.jsonl"))
    with pytest.raises(ValueError, match="300 held-out problems are also training problems"):
        config.build()


def test_blank_lines_and_a_byte_order_mark_are_ignored(tmp_path: Path):
    path = tmp_path / "a.jsonl"
    pair = '{"prompt": "\\ud83d\\ude00", "answer": "1", "worked_answer": "1"}\n'
    path.write_text("\ufeff\n" + "".join(json.dumps(row) + "\n\n" for row in sums(100)) + pair, encoding="utf-8")
    environment = JsonlConfig(path=str(path)).build()
    assert_sound(environment, 101)
    # Escaped surrogate pairs are characters.
    assert any("\N{GRINNING FACE}" in prompts(environment, split) for split in Split)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"prompt": "a", "answer": ', r"a\.jsonl:3: not JSON: Expecting value at column 26"),
        ("[1, 2]", r"a\.jsonl:3: not a JSON object; write each problem as one JSON object on a line"),
        ("prompt,answer", r"a\.jsonl:3: not JSON: .*; write each problem as one JSON object on a line of its own"),
        ('{"prompt": "a", "anwser": "1"}', r"a\.jsonl:3: there is no column 'answer'; did you mean 'anwser'"),
        ('{"prompt": "a", "answer": [1]}', r"a\.jsonl:3: column 'answer' holds \[1\] of type list"),
        ('{"prompt": "a", "answer": ' + "9" * 5000 + "}", r"a\.jsonl:3: .*4300 digits"),
        ('{"prompt": "a", "answer": ' + "[" * 100_000 + "]" * 100_000 + "}", r"a\.jsonl:3: nested too deeply"),
        (
            '{"prompt": "a", "prompt": "b", "answer": "1"}',
            r"a\.jsonl:3: .*a key is repeated, keep one of each: prompt, prompt",
        ),
        ('{"prompt": "a", "answer": "1", "id": "x\\ud800"}', r"a\.jsonl:3: \\ud800 is an unpaired surrogate"),
    ],
)
def test_broken_lines_name_file_and_line(tmp_path: Path, line: str, message: str):
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in sums(2)) + line + "\n", encoding="utf-8")
    with pytest.raises(ValueError, match=message):
        JsonlConfig(path=str(path)).build()


@pytest.mark.parametrize(
    ("data", "remedy"),
    [
        # The time in the header would give each test process another name of the test.
        (
            gzip.compress(b'{"prompt": "a", "answer": "1"}', mtime=0),
            "is not text with .*; decompress the file, which is gzip",
        ),
        (b"PAR1" + bytes(range(256)), "is not text with .*environment of type hf"),
        (b"version https://git-lfs.github.com/spec/v1\noid", "is not text with .*`git lfs pull`"),
        (
            '{"prompt": "a", "answer": "1"}'.encode("utf-16"),
            "1: not UTF-8 text at byte 1; save the file as UTF-8",
        ),
    ],
)
def test_errors_for_other_formats_have_their_remedy_and_not_their_bytes(tmp_path: Path, data: bytes, remedy: str):
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    with pytest.raises(ValueError, match=rf"a\.jsonl.{remedy}"):
        JsonlConfig(path=str(path)).build()


def test_empty_and_missing_files(tmp_path: Path):
    (tmp_path / "a.jsonl").write_text("\n")
    with pytest.raises(ValueError, match=r"a\.jsonl is empty: it has no problem"):
        JsonlConfig(path=str(tmp_path / "a.jsonl")).build()
    with pytest.raises(ValueError, match=r"^the file '.*b\.jsonl' .*does not exist; correct path or held_out"):
        JsonlConfig(path=str(tmp_path / "b.jsonl")).build()


def test_build_rejects_a_ground_truth_that_the_grader_cannot_parse(tmp_path: Path):
    rows = [*sums(30), {"prompt": "half of one third", "answer": r"\frac{1"}]
    path = write(tmp_path / "a.jsonl", rows)
    assert JsonlConfig(path=path).build()
    with pytest.raises(GroundTruthError, match=r"a\.jsonl:31: the grader math cannot parse the ground truth"):
        JsonlConfig(path=path, grader=MathGraderConfig()).build()
    train = write(tmp_path / "train.jsonl", sums(100, start=100))
    with pytest.raises(GroundTruthError, match=r"a\.jsonl:31: the grader math cannot parse the ground truth"):
        JsonlConfig(path=train, held_out_path=path, grader=MathGraderConfig()).build()


def test_errors_of_identical_problems_come_before_that_of_their_division(tmp_path: Path):
    path = write(tmp_path / "a.jsonl", [{"prompt": "half of one third", "answer": r"\frac{1"}] * 5)
    with pytest.raises(GroundTruthError, match=r"a\.jsonl:1: the grader math cannot parse the ground truth"):
        JsonlConfig(path=path, grader=MathGraderConfig()).build()
    path = write(tmp_path / "b.jsonl", [{"prompt": "1+1=", "answer": "2"}] * 5)
    with pytest.raises(ValueError, match=r"1 distinct problems \(4 of all 5 are duplicates\)"):
        JsonlConfig(path=path).build()


def test_unused_columns(tmp_path: Path):
    rows = [{**row, "source": "sums", "reward_model": {"truth": "3"}} for row in sums(30)]
    config = JsonlConfig(path=write(tmp_path / "a.jsonl", rows))
    assert config.unused_columns() == ["source", "reward_model"]
    named = JsonlConfig(path=config.path, rows=RowFormat(answer_column="reward_model.truth"))
    assert named.unused_columns() == ["answer", "source"]


def test_an_invalid_ground_truth_after_the_first_rows_raises_in_step(tmp_path: Path):
    rows = [*sums(150), *({"prompt": f"bad {n}", "answer": r"\frac{1"} for n in range(20))]
    environment = JsonlConfig(path=write(tmp_path / "a.jsonl", rows), grader=MathGraderConfig()).build()
    bad = next(task for task in environment.tasks(Split.TRAIN) if task.answer == r"\frac{1")
    with pytest.raises(GroundTruthError, match="cannot parse the ground truth"):
        answer(environment, bad, "1")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"held_out_path": "b.jsonl", "held_out": 0.2}, "held_out 0.2 and held_out_path 'b.jsonl' exclude each other"),
        ({"reply_regex": "a"}, "reply_regex: 'a' has 0 groups"),
    ],
)
def test_bad_settings(fields, message):
    with pytest.raises(ValueError, match=message):
        JsonlConfig(path="a.jsonl", **fields)
    with pytest.raises(ValueError, match=r"held_out 0\.2 and held_out_split 'test' exclude each other"):
        HuggingFaceConfig(path="a", held_out_split="test", held_out=0.2)


@pytest.fixture
def offline(tmp_path: Path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    datasets.disable_progress_bars()
    return datasets


GSM8K = RowFormat(prompt_column="question", answer_regex=r"#### (-?[0-9.,]+)", worked_answer_column="answer")


def word_problems(count: int, start: int = 0) -> list[dict[str, str]]:
    return [{"question": f"{n} plus 1?", "answer": f"{n}+1={n + 1}\n#### {n + 1}"} for n in range(start, start + count)]


def test_hf_saved_dataset_dict(tmp_path: Path, offline):
    splits = {"train": word_problems(100), "test": word_problems(20, start=100)}
    saved = offline.DatasetDict({split: offline.Dataset.from_list(rows) for split, rows in splits.items()})
    saved.save_to_disk(str(tmp_path / "words"))
    config = HuggingFaceConfig(
        path=str(tmp_path / "words"), held_out_split="test", rows=GSM8K, reply_regex="#### (.*)", validation=0.1
    )
    environment = config.build()
    assert environment.name == "words"
    assert prompts(environment, Split.HELD_OUT) == {f"{n} plus 1?" for n in range(100, 120)}
    assert_sound(environment, 120)


def test_hf_saved_dataset(tmp_path: Path, offline):
    offline.Dataset.from_list(sums(100)).save_to_disk(str(tmp_path / "sums"))
    for name in ("subset", "revision"):
        with pytest.raises(ValueError, match=f"{name} is 'main', but the folder .* was saved with save_to_disk"):
            HuggingFaceConfig(path=str(tmp_path / "sums"), **{name: "main"}).build()
    assert_sound(HuggingFaceConfig(path=str(tmp_path / "sums"), grader=MathGraderConfig()).build(), 100)
    with pytest.raises(ValueError, match="has no split 'test'; it has 'train'"):
        HuggingFaceConfig(path=str(tmp_path / "sums"), held_out_split="test").build()


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_hf_folder_of_files(tmp_path: Path, offline, kind: str):
    (tmp_path / "data").mkdir()
    for split, rows in (("train", sums(100)), ("test", sums(20, start=100))):
        data = offline.Dataset.from_list(rows)
        path = str(tmp_path / "data" / f"{split}.{kind}")
        data.to_parquet(path) if kind == "parquet" else data.to_json(path)
    assert_sound(HuggingFaceConfig(path=str(tmp_path / "data"), held_out_split="test").build(), 120)


def test_hf_missing_split_and_dataset(tmp_path: Path, offline):
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.jsonl", [*sums(10), {"question": "1+1"}])
    with pytest.raises(ValueError, match=r"cannot load dataset .* split 'tset'.*Should be one of \['train'\]"):
        HuggingFaceConfig(path=str(tmp_path / "data"), split="tset").build()
    rows = RowFormat(prompt_column="qestion")
    with pytest.raises(ValueError, match="split 'train', row 0: there is no column 'qestion'; did you mean 'question'"):
        HuggingFaceConfig(path=str(tmp_path / "data"), rows=rows).build()
    with pytest.raises(ValueError, match=r"environment.path is 'nobody/nothing-of-this-name': there is no such folder"):
        HuggingFaceConfig(path="nobody/nothing-of-this-name").build()


def test_a_line_that_fills_the_memory_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("marin_rl.environments.row_files.MAX_LINE_BYTES", 2**20)
    path = write(tmp_path / "a.jsonl", sums(3))
    with open(path, "r+b") as file:
        file.truncate(50 * 2**30)
    with pytest.raises(ValueError, match=r"a\.jsonl:4: the line has more than 1 MiB; write each problem"):
        JsonlConfig(path=path).build()


def test_a_folder_and_a_pipe_are_not_files(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/zero")):
        with pytest.raises(ValueError, match=rf"^the file '{path}' of a jsonl environment is not a file; correct path"):
            JsonlConfig(path=str(path)).build()


def test_paths_may_begin_with_the_home_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "sums.jsonl", sums(40))
    assert_sound(JsonlConfig(path="~/sums.jsonl").build(), 40)
    (tmp_path / "data").mkdir()
    write(tmp_path / "data" / "train.jsonl", sums(40))
    assert_sound(HuggingFaceConfig(path="~/data").build(), 40)
