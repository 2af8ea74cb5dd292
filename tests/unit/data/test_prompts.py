"""Prompt files are read with every row checked, and refused with the place of the fault."""

import json

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from verl_omni_core.data.prompts import check_lengths, read_prompts
from verl_omni_core.errors import DataError

CHAT = [{"role": "system", "content": "Draw."}, {"role": "user", "content": "a red cat"}]
ROWS = [
    {"prompt": "the word A", "ground_truth": "A", "data_source": "ocr", "extra_info": {"index": 0, "split": "train"}},
    {
        "prompt": CHAT,
        "ground_truth": None,
        "data_source": "ocr",
        "reward_model": {"style": "rule", "ground_truth": "R"},
    },
    {"prompt": [{"role": "user", "content": [{"type": "text", "text": "see <image>"}, {"type": "image"}]}]},
]


def write(path, rows: list):
    if path.suffix == ".jsonl":
        path.write_text("\n".join(row if isinstance(row, str) else json.dumps(row) for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        names = list(dict.fromkeys(name for row in rows for name in row))
        pq.write_table(pa.table({name: [row.get(name) for row in rows] for name in names}), path)
    return path


@pytest.fixture(params=[".parquet", ".json", ".jsonl"])
def path(request, tmp_path):
    return tmp_path / f"prompts{request.param}"


def plain(count: int) -> list:
    return [{"prompt": f"word {i}", "ground_truth": str(i)} for i in range(count)]


def test_texts_are_read_from_every_format(path):
    table = read_prompts(write(path, plain(3)))
    assert table["dataset_row"].to_pylist() == [0, 1, 2]
    assert table["prompt"].to_pylist() == ["word 0", "word 1", "word 2"]
    assert table["ground_truth"].to_pylist() == ["0", "1", "2"]
    assert table["data_source"].to_pylist() == ["", "", ""]
    assert json.loads(table["messages_json"][0].as_py()) == [{"role": "user", "content": "word 0"}]
    assert read_prompts(path, max_rows=2).num_rows == 2


@pytest.mark.parametrize("suffix", [".json", ".jsonl"])
def test_texts_chats_and_content_parts_may_stand_in_one_column(tmp_path, suffix):
    table = read_prompts(write(tmp_path / f"x{suffix}", ROWS))
    assert table["prompt"].to_pylist() == ["the word A", "a red cat", "see <image>"]
    assert json.loads(table["messages_json"][1].as_py()) == CHAT
    assert table["ground_truth"].to_pylist() == ["A", "R", None]
    assert table["data_source"].to_pylist() == ["ocr", "ocr", ""]
    assert json.loads(table["extra_info_json"][0].as_py()) == {"index": 0, "split": "train"}
    assert table["extra_info_json"][1].as_py() is None


def test_chats_in_parquet_are_read_with_their_reward_model(tmp_path):
    rows = [
        {"prompt": CHAT, "reward_model": {"style": "rule", "ground_truth": "R"}, "extra_info": {"split": "test"}}
    ] * 2
    table = read_prompts(write(tmp_path / "x.parquet", rows))
    assert table["prompt"].to_pylist() == ["a red cat"] * 2
    assert json.loads(table["messages_json"][0].as_py()) == CHAT
    assert table["ground_truth"].to_pylist() == ["R"] * 2
    assert json.loads(table["reward_model_json"][0].as_py()) == {"style": "rule", "ground_truth": "R"}


def test_negative_prompts_may_miss_in_a_row(path):
    rows = [{"prompt": "a", "negative_prompt": " "}, {"prompt": "b", "negative_prompt": None}]
    table = read_prompts(write(path, rows), negative_prompt_column="negative_prompt")
    assert table["negative_prompt"].to_pylist() == [" ", None]


def test_media_and_unknown_columns_are_carried_untouched(tmp_path):
    images = [[{"bytes": b"\x00\xff", "path": None}], []]
    source = pa.table({"prompt": ["a", "b"], "images": images, "level": pa.array([1, 2], pa.int8())})
    pq.write_table(source, tmp_path / "x.parquet")
    table = read_prompts(tmp_path / "x.parquet")
    assert table["images"].equals(source["images"])
    assert table["level"].equals(source["level"])


def test_other_columns_can_be_the_prompt_and_the_ground_truth(path):
    rows = [{"caption": "a", "answer": 7}, {"caption": "b", "answer": 8}]
    table = read_prompts(write(path, rows), prompt_column="caption", ground_truth_column="answer")
    assert table["prompt"].to_pylist() == ["a", "b"]
    assert table["ground_truth"].to_pylist() == ["7", "8"]


def test_a_file_that_does_not_exist_is_refused_with_the_nearest_one(tmp_path):
    write(tmp_path / "train.jsonl", plain(1))
    with pytest.raises(DataError, match=r"trian.jsonl does not exist; did you mean 'train.jsonl'"):
        read_prompts(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match=r"has no prompt file"):
        read_prompts(tmp_path / "none" / "x.jsonl")
    with pytest.raises(DataError, match=r"expected \.parquet, \.json, \.jsonl"):
        read_prompts(tmp_path / "train.csv")


def test_a_file_without_the_prompt_column_is_refused_with_the_nearest_column(path):
    write(path, [{"promt": "a", "x": 1}])
    with pytest.raises(DataError, match=r"no column 'prompt', which data.prompt_column names; did you mean 'promt'\?"):
        read_prompts(path)
    with pytest.raises(DataError, match=r"no column 'neg'.*data.negative_prompt_column"):
        read_prompts(path, prompt_column="promt", negative_prompt_column="neg")


def test_a_ground_truth_column_is_refused_if_missing_unless_it_is_the_default(path):
    write(path, [{"prompt": "a", "anser": 1, "reward_model": {"ground_truth": "x"}}])
    with pytest.raises(DataError, match=r"'answer', which data.ground_truth_column names; did you mean 'anser'\?"):
        read_prompts(path, ground_truth_column="answer")
    assert read_prompts(path)["ground_truth"].to_pylist() == ["x"]
    assert read_prompts(path, ground_truth_column=None)["ground_truth"].to_pylist() == ["x"]


def test_an_empty_data_set_is_refused(tmp_path):
    (tmp_path / "a.jsonl").write_text("\n \n")
    (tmp_path / "b.json").write_text("[]")
    pq.write_table(pa.table({"prompt": pa.array([], pa.string())}), tmp_path / "c.parquet")
    for name in ("a.jsonl", "b.json", "c.parquet"):
        with pytest.raises(DataError, match=r"has no rows"):
            read_prompts(tmp_path / name)


@pytest.mark.parametrize("empty", ["", "  \n", None])
def test_an_empty_prompt_is_refused_with_its_row(path, empty):
    rows = plain(5)
    rows[3]["prompt"] = empty
    with pytest.raises(DataError, match=r"row 3: the prompt in column 'prompt' is empty"):
        read_prompts(write(path, rows))


@pytest.mark.parametrize(
    ("line", "says"),
    [('{"prompt": "cut', "cannot be read as JSON"), ("7", "got a JSON int"), ('{"prompt": 7}', "holds '7'"),
     ('{"prompt": [{"role": "user"}]}', "expected a text or a list")],
)  # fmt: skip
def test_an_unreadable_line_in_the_middle_is_refused_with_its_row(tmp_path, line, says):
    rows = [*map(json.dumps, plain(7)), "", line, *map(json.dumps, plain(2))]
    with pytest.raises(DataError, match=r"row 7") as caught:
        read_prompts(write(tmp_path / "x.jsonl", rows))
    assert says in str(caught.value)


def test_an_unreadable_line_names_its_line_too_and_is_not_met_by_a_shorter_read(tmp_path):
    path = write(tmp_path / "x.jsonl", [json.dumps(plain(1)[0]), "", "{"])
    with pytest.raises(DataError, match=r"row 1 \(line 3\)"):
        read_prompts(path)
    assert read_prompts(path, max_rows=1).num_rows == 1


def test_a_json_file_of_another_form_is_refused(tmp_path):
    for text, says in (
        ("{", "not JSON"),
        ('{"a": 1}', "JSON dict; expected a list"),
        ('[{"prompt": "a"}, 3]', "row 1"),
    ):
        (tmp_path / "x.json").write_text(text)
        with pytest.raises(DataError, match=says):
            read_prompts(tmp_path / "x.json")


def test_a_column_of_objects_that_holds_something_else_is_refused_with_its_row(tmp_path):
    for value, says in (("{", "is not JSON"), ("[1]", "expected an object")):
        rows = [{"prompt": "a", "extra_info": "{}"}, {"prompt": "b", "extra_info": value}]
        with pytest.raises(DataError, match=rf"row 1: column 'extra_info'.*{says}"):
            read_prompts(write(tmp_path / "x.jsonl", rows))


def test_damage_in_the_middle_of_a_parquet_file_is_refused_with_the_row_where_it_begins(tmp_path):
    path = tmp_path / "x.parquet"
    prompts = [f"{i} " + np.random.default_rng(i).bytes(40).hex() for i in range(400)]
    pq.write_table(pa.table({"prompt": prompts}), path, row_group_size=100, compression="zstd", use_dictionary=False)
    group = pq.ParquetFile(path).metadata.row_group(2).column(0)
    data = bytearray(path.read_bytes())
    start = group.data_page_offset + 60
    data[start : start + 400] = bytes(400)
    path.write_bytes(bytes(data))
    with pytest.raises(DataError, match=r"row 200: cannot be read"):
        read_prompts(path)
    assert read_prompts(path, max_rows=150).num_rows == 150


def test_a_file_that_is_no_parquet_is_refused(tmp_path):
    (tmp_path / "x.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(DataError, match=r"not a readable parquet file"):
        read_prompts(tmp_path / "x.parquet")


def words(text: str) -> dict[str, tuple[int, int]]:
    return {"clip": (len(text.split()), 4), "t5": (len(text), 30)}


def lengths_table(path, *prompts: str, **columns):
    rows = [{"prompt": prompt, **{k: v[i] for k, v in columns.items()}} for i, prompt in enumerate(prompts)]
    return read_prompts(write(path, rows), negative_prompt_column="negative" if columns else None)


def test_a_prompt_that_is_too_long_is_refused_with_row_tokenizer_seen_and_allowed(path):
    table = lengths_table(path, "one two", "one two three four five")
    with pytest.raises(
        DataError, match=r"row 1: the prompt has 5 tokens for 'clip', which takes 4; shorten it, or set data"
    ):
        check_lengths(table, words, "error")


def test_prompts_that_will_be_cut_are_counted_once_each(path):
    table = lengths_table(path, "a b c d e", "a", "a b c d e", "x" * 31 + " b c d e", "a b c d")
    assert check_lengths(table, words, "truncate") == 3
    assert check_lengths(table.slice(4), words, "error") == 0


def test_a_negative_prompt_counts_too_and_a_missing_one_does_not(path):
    table = lengths_table(path, "a", "b", negative=[None, "a b c d e"])
    assert check_lengths(table, words, "truncate") == 1
    with pytest.raises(DataError, match=r"row 1: the negative prompt has 5 tokens"):
        check_lengths(table, words, "error")


def test_each_text_is_counted_once(path):
    seen = []
    table = lengths_table(path, *["same"] * 5)
    check_lengths(table, lambda text: seen.append(text) or words(text), "error")
    assert seen == ["same"]
