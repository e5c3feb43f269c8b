import json

import pytest

from transformer_xl.config.run import TaskConfig
from transformer_xl.data.labels import Example
from transformer_xl.data.task_texts import TaskFiles, cut_off, find_files, read_task
from transformer_xl.errors import CorpusError


def _task(data, kind="classification", **told) -> TaskConfig:
    return TaskConfig.model_validate({"kind": kind, "data": str(data), **{name: str(value) for name, value in told.items()}})


def _write(folder, **files):
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_tsv", ".tsv").replace("_jsonl", ".jsonl").replace("_txt", ".txt")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


def _names(files: TaskFiles) -> list[str]:
    return [path.name if path else "none" for path in (files.train, files.valid, files.test)]


HEAD = "text\tlabel\n"
ROWS = HEAD + "a\t1\nb\t0\nc\t1\nd\t0\n"


class TestFindFiles:
    def test_files_with_the_names_of_their_purposes(self, tmp_path):
        _write(tmp_path, train_tsv=ROWS, dev_tsv=ROWS, test_jsonl="{}", README_txt="x")
        files = find_files(_task(tmp_path))
        assert _names(files) == ["train.tsv", "dev.tsv", "test.jsonl"]
        assert find_files(_task(tmp_path / "train.tsv")).valid is None
        given = find_files(_task(tmp_path, valid=tmp_path / "test.jsonl"))
        assert given.valid == given.test == tmp_path / "test.jsonl"

    def test_mnli_has_two_of_each(self, tmp_path):
        _write(tmp_path, train_tsv=ROWS, dev_matched_tsv=ROWS, dev_mismatched_tsv=ROWS, test_matched_tsv=ROWS)
        files = find_files(_task(tmp_path))
        assert _names(files) == ["train.tsv", "dev_matched.tsv", "test_matched.tsv"]
        assert files.notes == (f"'{tmp_path}/dev_mismatched.tsv' is not read; give it as task.valid or task.test",)

    def test_directories_of_classes(self, tmp_path):
        _write(
            tmp_path,
            train__pos__1_txt="a",
            train__neg__1_txt="b",
            train__unsup__1_txt="c",
            test__pos__1_txt="d",
            test__neg__1_txt="e",
        )
        files = find_files(_task(tmp_path))
        assert _names(files) == ["train", "none", "test"]
        assert files.notes == (f"'{tmp_path}/train/unsup' is not read: its texts have no labels",)
        assert find_files(_task(tmp_path / "train")).train == tmp_path / "train"

    def test_directories_of_race(self, tmp_path):
        text = json.dumps({"article": "x", "questions": ["a"], "options": [["b", "c"]], "answers": ["A"]})
        _write(tmp_path, train__high__1_txt=text, dev__middle__1_txt=text, test__high__2_txt=text)
        files = find_files(_task(tmp_path, "choice"))
        assert _names(files) == ["train", "dev", "test"]
        assert find_files(_task(tmp_path / "train" / "high", "choice")).train.name == "high"
        texts = read_task(_task(tmp_path, "choice"), seed=0)
        assert [len(each or ()) for each in (texts.train, texts.valid, texts.test)] == [1, 1, 1]

    def test_squad(self, tmp_path):
        def squad(*titles):
            articles = []
            for title in titles:
                answer = {"text": "dog" if title == "lost" else "cat", "answer_start": 2}
                question = {"id": title, "question": "What?", "answers": [answer]}
                articles.append({"title": title, "paragraphs": [{"context": "a cat", "qas": [question]}]})
            return json.dumps({"data": articles})

        (tmp_path / "train-v1.1.json").write_text(squad("A", "B"))
        texts = read_task(_task(tmp_path, "span"), seed=0)
        assert [len(each or ()) for each in (texts.train, texts.valid, texts.test)] == [1, 1, 0]
        (tmp_path / "dev-v1.1.json").write_text(squad("C"))
        texts = read_task(_task(tmp_path, "span"), seed=0)
        assert [len(each or ()) for each in (texts.train, texts.valid, texts.test)] == [2, 1, 0]
        assert texts.labels == () == texts.notes
        (tmp_path / "train-v1.1.json").write_text(squad("A", "lost"))
        texts = read_task(_task(tmp_path, "span"), seed=0)
        assert [each.id for each in texts.train] == ["A"]
        assert [note[-38:] for note in texts.notes] == ["1 questions without others are skipped"]

    @pytest.mark.parametrize(
        ("files", "message"),
        [
            ({"trian_tsv": ROWS}, r"has no file to train on: it needs train.tsv \(or .*\), or one directory per class"),
            ({"train_tsv": ROWS, "train_jsonl": "{}"}, "has more than one 'train': 'train.jsonl' and 'train.tsv'"),
            ({"test__pos__1_txt": "a", "test__neg__1_txt": "b", "dev__pos__1_txt": "a"}, "has no file to train on"),
        ],
    )
    def test_what_is_missing_or_twice_is_named(self, tmp_path, files, message):
        _write(tmp_path, **files)
        with pytest.raises(CorpusError, match=message):
            find_files(_task(tmp_path))


class TestReadTask:
    def test_labels_are_those_of_the_training_file(self, tmp_path):
        _write(tmp_path, train_tsv=HEAD + "a\t10\nb\t9\nc\t9\n", dev_tsv=HEAD + "d\t9\n")
        texts = read_task(_task(tmp_path), seed=0)
        assert texts.labels == ("9", "10")
        assert texts.test is None
        _write(tmp_path, dev_tsv=HEAD + "d\t9\ne\t11\n")
        with pytest.raises(CorpusError, match=r"dev.tsv' line 3: label '11' is unknown; known: 10, 9"):
            read_task(_task(tmp_path), seed=0)

    @pytest.mark.parametrize("is_table", [True, False])
    def test_numbers_as_labels_are_those_of_the_training_file(self, tmp_path, is_table):
        table = HEAD + "a\t0.0\nb\t1.0\n"
        lines = "".join(json.dumps({"text": "a", "label": label}) + "\n" for label in (0.0, 1))
        train, dev = ("train_tsv", "dev_jsonl") if is_table else ("train_jsonl", "dev_tsv")
        _write(tmp_path, **{train: table if is_table else lines, dev: lines if is_table else table})
        texts = read_task(_task(tmp_path), seed=0)
        assert texts.labels == tuple(each.label for each in texts.valid) == (("0.0", "1.0") if is_table else ("0", "1"))
        known = read_task(_task(tmp_path), seed=0, known_labels=("0.0", "1.0"))  # of a run that goes on
        assert known.labels == tuple(each.label for each in known.valid) == ("0.0", "1.0")

    def test_a_share_is_cut_off_where_no_file_is_for_it(self, tmp_path):
        _write(tmp_path, train_tsv=HEAD + "".join(f"text {i}\t{i % 2}\n" for i in range(50)))
        one, same, other = (read_task(_task(tmp_path), seed=seed) for seed in (0, 0, 1))
        assert len(one.valid) == 5
        assert one.valid == same.valid != other.valid
        assert sorted(each.text for each in (*one.train, *one.valid)) == sorted(f"text {i}" for i in range(50))
        assert one.notes == (f"5 of 50 texts of '{tmp_path}/train.tsv' are kept to validate on",)

    @pytest.mark.parametrize("rare", ["a", "z"])
    def test_a_rare_class_is_on_both_sides(self, tmp_path, rare):
        with pytest.raises(CorpusError, match="line 1 is the only text"):
            cut_off([Example("a", place="line 1")], 0.1, seed=0)
        _write(tmp_path, train_tsv=HEAD + "".join(f"text {i}\t{rare if i % 15 == 3 else 'common'}\n" for i in range(60)))
        for seed in range(5):
            texts = read_task(_task(tmp_path), seed=seed)
            labels = [each.label for each in texts.valid]
            assert (labels.count(rare), labels.count("common"), len(texts.train), len(texts.notes)) == (1, 5, 54, 1)

    def test_classes_without_a_text_to_validate_on_are_named(self, tmp_path):
        """The tenth is of those with two texts; one alone is learned from."""
        classes = ["once", *[f"pair {i}" for i in range(14) for _ in range(2)]]
        _write(tmp_path, train_tsv=HEAD + "".join(f"text\t{name}\n" for name in classes))
        for seed in range(5):
            texts = read_task(_task(tmp_path), seed=seed)
            assert {each.label for each in texts.train} == set(classes) and len({each.label for each in texts.valid}) == 3
            assert texts.notes[1].startswith("none of these is of class 'once', 'pair ")
            assert texts.notes[1].endswith("; give more texts, or task.valid") and "more; give" not in texts.notes[1]

    def test_questions_about_a_text_stay_on_one_side(self, tmp_path):
        rows = [{"article": f"passage {i // 4}", "question": f"q{i}", "options": ["x", "y"], "answer": "A"} for i in range(80)]
        _write(tmp_path, train_jsonl="\n".join(map(json.dumps, rows)))
        texts = read_task(_task(tmp_path / "train.jsonl", kind="choice"), seed=0)
        assert len(texts.valid) == 8 and len(texts.train) == 72
        assert not {each.text for each in texts.train} & {each.text for each in texts.valid}

    def test_a_number_of_minus_one_in_all_rows_is_none(self, tmp_path):
        rows = "".join(json.dumps({"sentence1": "a", "sentence2": "b", "label": i / 2}) + "\n" for i in range(4))
        _write(
            tmp_path,
            train_jsonl=rows,
            dev_jsonl=rows,
            test_jsonl=json.dumps({"sentence1": "a", "sentence2": "b", "label": -1.0}),
        )
        assert read_task(_task(tmp_path, kind="regression"), seed=0).test is None

    def test_a_test_file_has_all_labels_or_none(self, tmp_path):
        _write(tmp_path, train_tsv=ROWS, dev_tsv=ROWS, test_tsv="sentence\tlabel\na\t1\nb\t\n")
        with pytest.raises(CorpusError, match=r"test.tsv' line 3: it has no label, unlike others"):
            read_task(_task(tmp_path), seed=0)

    @pytest.mark.parametrize("test", ["index\tsentence\n0\ta\n", "sentence\tlabel\na\t-1\nb\t-1\n"])
    def test_a_test_file_may_have_no_labels(self, tmp_path, test):
        _write(tmp_path, train_tsv=ROWS, dev_tsv=ROWS, test_tsv=test)
        texts = read_task(_task(tmp_path), seed=0)
        assert texts.test is None
        assert texts.notes == (f"'{tmp_path}/test.tsv' is not scored: its texts have no labels",)
