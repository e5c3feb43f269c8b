import csv
import gzip
import io
import json

import pytest

from transformer_xl.config.run import TaskConfig
from transformer_xl.data.examples import read_choices, read_examples
from transformer_xl.errors import CorpusError

RACE = {
    "id": "high1.txt",
    "article": "Tom went to bed.\nHe was ill.",
    "questions": ["Tom is _ .", "Where is Tom?"],
    "options": [["ill", "well", "old", "tall"], ["Here", "In bed", "Away", "Out"]],
    "answers": ["A", "B"],
}


def _task(kind="classification", **told) -> TaskConfig:
    return TaskConfig.model_validate({"kind": kind, **told})


def _read(tmp_path, name: str, content: str | bytes, kind="classification", *, labelled=True, **told):
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(read_examples(path, _task(kind, **told), labelled=labelled))


def _parts(examples):
    return [(each.text, each.pair, each.label) for each in examples]


def _json_lines(*values) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


class TestTables:
    @pytest.mark.parametrize(
        ("header", "row", "expected"),
        [
            ("sentence\tlabel", "a\t1", ("a", None, "1")),  # SST-2
            ("index\tsentence1\tsentence2\tlabel", "0\ta\tb\tnot_entailment", ("a", "b", "not_entailment")),  # RTE
            ("index\tquestion\tsentence\tlabel", "0\ta\tb\tentailment", ("a", "b", "entailment")),  # QNLI
            ("id\tqid1\tqid2\tquestion1\tquestion2\tis_duplicate", "1\t2\t3\ta\tb\t0", ("a", "b", "0")),  # QQP
            ("\ufeffQuality\t#1 ID\t#2 ID\t#1 String\t#2 String", "1\t7\t8\ta\tb", ("a", "b", "1")),  # MRPC
            ("index\tgenre\tsentence1\tsentence2\tlabel1\tgold_label", "0\tx\ta\tb\tno\tyes", ("a", "b", "yes")),  # MNLI
            ("premise\thypothesis\tlabel", "a\tb\t2", ("a", "b", "2")),
            ("Text\tLabel", "a\t5", ("a", None, "5")),
        ],
    )
    def test_usual_names_are_found(self, tmp_path, header, row, expected):
        assert _parts(_read(tmp_path, "train.tsv", f"{header}\r\n{row}\r\n")) == [expected]
        cells = io.StringIO()
        csv.writer(cells).writerows([header.split("\t"), row.split("\t")])
        assert _parts(_read(tmp_path, "train.csv", cells.getvalue())) == [expected]
        fields = dict(zip(header.removeprefix("\ufeff").split("\t"), row.split("\t"), strict=True))
        assert _parts(_read(tmp_path, "train.jsonl", _json_lines(fields))) == [expected]

    def test_regression_reads_scores_as_numbers(self, tmp_path):
        content = "index\tgenre\tsentence1\tsentence2\tscore\n0\tx\ta\tb\t3.25\n"  # STS-B
        assert _parts(_read(tmp_path, "t.tsv", content, "regression")) == [("a", "b", 3.25)]
        with pytest.raises(CorpusError, match="line 2: label 'good' is not a number"):
            _read(tmp_path, "t.tsv", content.replace("3.25", "good"), "regression")

    def test_tables_without_names_are_those_of_tasks_or_told_by_number(self, tmp_path):
        cola = "gj04\t1\t\tThe sailors rode.\ngj04\t0\t*\tThem rode.\n"
        assert _parts(_read(tmp_path, "t.tsv", cola)) == [("The sailors rode.", None, "1"), ("Them rode.", None, "0")]
        yelp = '"5","dr. goldberg offers, everything"\n"2","no ""way"""\n'
        assert _parts(_read(tmp_path, "t.csv", yelp)) == [
            ("dr. goldberg offers, everything", None, "5"),
            ('no "way"', None, "2"),
        ]
        news = "3,Wall St.,Stocks fell\n4,Chips,Faster\n"
        told = _read(tmp_path, "t.csv", news, text="3", label=("1",))
        assert _parts(told) == [("Stocks fell", None, "3"), ("Faster", None, "4")]
        assert _parts(_read(tmp_path, "t.csv", "٣,٢\na,b\n", text="٣", label=("٢",))) == [("a", None, "b")]  # names

    def test_columns_that_are_told(self, tmp_path):
        content = "nr,body,title,topic,mood\n1,b,t,sport,good\n"
        assert _parts(_read(tmp_path, "t.csv", content, text="title", pair="body", label=("mood",))) == [("t", "b", "good")]
        with pytest.raises(CorpusError, match=r"has no column 'titel', as task.text says; did you mean 'title'\?"):
            _read(tmp_path, "t.csv", content, text="titel", label=("mood",))

    def test_csv_has_commas_quotation_marks_and_line_ends_in_texts_and_tsv_tabs_alone(self, tmp_path):
        long = "x" * 3_000_000  # more than a block, and than csv takes by itself
        found = _read(tmp_path, "t.csv.gz", gzip.compress(f'text,label\n"a, ""b""\nc",1\n{long},0\n'.encode()))
        assert _parts(found) == [('a, "b"\nc', None, "1"), (long, None, "0")]
        assert [each.place.rpartition("'")[2] for each in found] == [" line 2", " line 4"]
        found = _read(tmp_path, "t.tsv", 'text\tlabel\nhe said "no\t1\n"yes", he said\t0\n')
        assert _parts(found) == [('he said "no', None, "1"), ('"yes", he said', None, "0")]

    def test_empty_lines_before_a_csv_file_count(self, tmp_path):
        (tmp_path / "t.csv").write_text('\n\ntext\na\n"b\nc"\nd\n')
        found = read_examples(tmp_path / "t.csv", _task(), labelled=False, reads_labels=False, keeps_empty=True)
        assert [each.place.rpartition(" ")[2] for each in found] == ["1", "2", "4", "5", "7"]

    @pytest.mark.parametrize(
        ("name", "content", "message"),
        [
            ("t.tsv", "text\tlabel\na\t1\nb\n", "line 3: it has 1 column, but line 1 has 2"),
            ("t.tsv", "text\tlabel\nb\tc\t1\n", "line 2: it has 3 columns, but line 1 has 2"),
            ("t.tsv", "text\tlabel\n\t0\n", "line 2: 'text' is an empty text"),
            ("t.tsv", "text\tlabel\na\t1\nb\t\n", "line 3: it has no label"),
            ("t.tsv", "text\tlabel\n\nb\t0\n", "line 2: it is empty"),
            ("t.tsv", b"text\tlabel\nb\xff\t0\n", r"line 2: byte 1 \(0xff\) is not UTF-8"),
            ("t.tsv", b"PAR1\0\0\1\2\n", "line 1: it is binary"),
            ("t.tsv", "", "is empty"),
            ("t.tsv", "a\t1\nb\t0\n", "which column holds the text. its columns are '1', '2'"),
            ("t.tsv", "remark\tlabel\na\t1\n", "which column holds the text. its columns are 'remark', 'label'"),
            ("t.tsv", "text\n" + "a\n" * 3, "which column holds the label. its columns are 'text'"),
            ("t.csv", 'text,label\na,1\n"b,0\nc,1\n', "line 3: the row that begins here is not CSV"),
            ("t.jsonl", json.dumps({"text": "a", "label": "b\udc80"}), r"line 1: 'b\\udc80' ends in half of a character"),
            (
                "t.jsonl",
                _json_lines({"text": "a", "label": 0}, {"text": "b \ud800 c", "label": 1}),
                r"line 2: 'b \\ud800' ends",
            ),
            ("t.json", json.dumps([{"text": "a", "pair": "\ud83d\ude00 \ude00"}]), r"t.json': '.* \\ude00' ends in half"),
            ("t.parquet", "x", "cannot tell what '.*' holds by its name"),
            ("t.jsonl", '{"text": "b", "label": 0}\n{"text": "b"}', "line 2: it has no label"),
            ("t.jsonl", '{"text": "b", "label": 0}\n{"label": 1}', "line 2: it has no 'text'"),
            ("t.jsonl", '{"text": 5, "label": 1}', "line 1: 'text' is 5, not a text"),
            ("t.jsonl", '{"text": "b", "label": [1]}', r"line 1: label \[1\] is neither a name nor a number"),
            ("t.jsonl", '{"text": "b", "label": 0}\n[1]', r"line 2: \[1\] is not a JSON object"),
            ("t.jsonl", '{"text": "b", "label": 0}\n{"text": ', "line 2: it is not JSON"),
        ],
    )
    def test_what_is_wrong_is_named_with_its_line(self, tmp_path, name, content, message):
        with pytest.raises(CorpusError, match=message):
            _read(tmp_path, name, content)


class TestJson:
    def test_a_list_of_objects_is_read(self, tmp_path):
        objects = [{"id": 7, "text": "a", "label": 1}, {"label": True, "note": None, "id": 8, "text": "b"}]
        found = _read(tmp_path, "t.json", json.dumps(objects, indent=2))
        assert _parts(found) == [("a", None, "1"), ("b", None, "true")]
        assert found[1].place.endswith("t.json' item 2")
        assert [each.id for each in found] == ["7", "8"]
        assert _parts(_read(tmp_path, "t.json", _json_lines(*objects))) == _parts(found)

    def test_numbers_of_equal_value_are_one_class(self, tmp_path):
        values = (1, 1.0, "1", "1.0", -0.0, 2.5, 1e3)
        content = _json_lines(*({"text": "a", "label": value} for value in values))
        assert [each.label for each in _read(tmp_path, "t.jsonl", content)] == ["1", "1", "1", "1.0", "0", "2.5", "1000"]
        lists = _json_lines({"tokens": ["a"] * len(values), "labels": values})
        assert _read(tmp_path, "t.jsonl", lists, "tokens")[0].label == ("1", "1", "1", "1.0", "0", "2.5", "1000")
        (tmp_path / "t.jsonl").write_text(content)
        known = read_examples(tmp_path / "t.jsonl", _task(), known_labels=("0.0", "1.0"))  # as a table had them
        assert [each.label for each in known] == ["1.0", "1.0", "1.0", "1.0", "0.0", "2.5", "1000"]
        (tmp_path / "t.csv").write_text("text,label\na,1\na,1.0\na,-2.0\na,v3.0\na,4.0\n")
        for labels in (("1", "-2", "v3"), ("1.0", "-2", "v3"), ("1", "1.0", "-2", "v3")):
            one = ["1", "1.0"] if len(labels) == 4 else [labels[0]] * 2  # a class that is called just so goes first
            known = read_examples(tmp_path / "t.csv", _task(), known_labels=labels)
            assert [each.label for each in known] == [*one, "-2", "v3.0", "4.0"]  # only numbers are equal
            known = read_examples(tmp_path / "t.jsonl", _task(), known_labels=labels)
            assert [each.label for each in known][:4] == one * 2


class TestMultilabel:
    def test_columns_of_zeros_and_ones(self, tmp_path):
        content = "id,comment_text,toxic,rude\n1,a,0,1\n2,b,0,0\n3,c,1,1\n"
        found = _read(tmp_path, "t.csv", content, "multilabel", text="comment_text", label=("rude", "toxic"))
        assert [each.label for each in found] == [("rude",), (), ("rude", "toxic")]
        (unlabelled,) = _read(tmp_path, "t.csv", "text,toxic\na,1\n", "multilabel", labelled=False, label=("rude", "toxic"))
        assert unlabelled.label is None
        with pytest.raises(CorpusError, match="line 2: label 'toxic' is '2'; a column of one label holds 0 or 1"):
            _read(tmp_path, "t.csv", "text,toxic,rude\na,2,0\n", "multilabel", label=("toxic", "rude"))

    def test_lists_of_names(self, tmp_path):
        content = _json_lines({"text": "a", "labels": ["x", "y"]}, {"text": "b", "labels": []})
        assert [each.label for each in _read(tmp_path, "t.jsonl", content, "multilabel")] == [("x", "y"), ()]
        assert [each.label for each in _read(tmp_path, "t.tsv", "text\tlabels\na\tx, y\nb\t\n", "multilabel")] == [
            ("x", "y"),
            (),
        ]


class TestChoice:
    @pytest.mark.parametrize(
        ("text", "choices", "wholes"),
        [
            ("小明住在", "北京\tLondon", ("小明住在北京", "小明住在London")),
            ("小明在_住", "北京\t上海", ("小明在北京住", "小明在上海住")),
            ("my_file is _ .", "new\told", ("my_file is new .", "my_file is old .")),
            ("open my__file", "now\tthen", ("open my__file now", "open my__file then")),
            ("because____.", " it\t he", ("because it.", "because he.")),
        ],
    )
    def test_what_a_gap_is(self, tmp_path, text, choices, wholes):
        (tmp_path / "gaps.tsv").write_text(f"{text}\t{choices}\n", encoding="utf-8")
        assert next(read_choices(tmp_path / "gaps.tsv")).choices == wholes

    def _check_race(self, found):
        assert [each.text for each in found] == [RACE["article"]] * 2
        assert found[0].choices == ("Tom is ill .", "Tom is well .", "Tom is old .", "Tom is tall .")
        assert found[1].choices == ("Where is Tom? Here", "Where is Tom? In bed", "Where is Tom? Away", "Where is Tom? Out")
        assert [each.label for each in found] == [0, 1]

    def test_directories_of_race(self, tmp_path):
        for level in ("middle", "high"):
            (tmp_path / level).mkdir()
            (tmp_path / level / "1.txt").write_text(json.dumps(RACE))
        found = list(read_examples(tmp_path, _task("choice")))
        self._check_race(found[:2])
        self._check_race(found[2:])
        assert [each.id for each in found[:2]] == ["high1.txt/1", "high1.txt/2"]
        assert found[3].place == f"'{tmp_path}/middle/1.txt' question 2"
        self._check_race(list(read_examples(tmp_path / "high", _task("choice"))))

    def test_lines_of_race(self, tmp_path):
        self._check_race(_read(tmp_path, "t.jsonl", _json_lines(RACE), "choice"))
        lines = [
            {"example_id": "1", "article": RACE["article"], "question": question, "options": options, "answer": answer}
            for question, options, answer in zip(RACE["questions"], RACE["options"], RACE["answers"], strict=True)
        ]
        self._check_race(_read(tmp_path, "t.jsonl", _json_lines(*lines), "choice"))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"options": ["a"]}, "line 2: it has 1 choice; those before have 2"),
            ({"options": ["a", ""]}, "line 2: choice 2 is empty; give it some text"),
            ({"options": ["a", 1]}, "line 2: 'options' is not a list of texts"),
            ({"answer": "C"}, "line 2: label 'C' is none of its 2 choices; they are 0 to 1, or A to B"),
            ({"answer": None}, "line 2: it has no label"),
            ({"question": None}, "line 2: it has no 'question'"),
        ],
    )
    def test_what_is_wrong_is_named_with_its_line(self, tmp_path, change, message):
        good = {"article": "x", "question": "y", "options": ["a", "b"], "answer": "B"}
        with pytest.raises(CorpusError, match=message):
            _read(tmp_path, "t.jsonl", _json_lines(good, good | change), "choice")

    def test_a_passage_needs_as_many_answers_as_questions(self, tmp_path):
        with pytest.raises(CorpusError, match="line 1: it has 2 questions, but not as many lists of options, and answers"):
            _read(tmp_path, "t.jsonl", _json_lines(RACE | {"answers": ["A"]}), "choice")
        with pytest.raises(CorpusError, match="has no choices: it has 'text', 'label'; give a list named options"):
            _read(tmp_path, "t.jsonl", _json_lines({"text": "a", "label": 0}), "choice")


class TestDirectories:
    def test_each_directory_is_a_class(self, tmp_path):
        for name, file, text in [
            ("pos", "1_9.txt", "good"),
            ("neg", "0_1.txt", "bad"),
            ("neg", "1_2.txt", "worse"),
            ("unsup", "0.txt", "?"),
        ]:
            (tmp_path / name).mkdir(exist_ok=True)
            (tmp_path / name / file).write_text(text)
        (tmp_path / "neg" / ".DS_Store").write_bytes(b"\0")
        (tmp_path / "labeledBow.feat").write_text("1:2")
        found = list(read_examples(tmp_path, _task()))
        assert [(each.text, each.label, each.id) for each in found] == [
            ("bad", "neg", "0_1"),
            ("worse", "neg", "1_2"),
            ("good", "pos", "1_9"),
        ]
        assert found[0].place == f"'{tmp_path}/neg/0_1.txt'"
        (tmp_path / "pos" / "2_9.txt").write_text(" \n")
        with pytest.raises(CorpusError, match=r"pos/2_9.txt': the text is empty"):
            list(read_examples(tmp_path, _task()))
        with pytest.raises(CorpusError, match="has 0 directories of classes"):
            list(read_examples(tmp_path / "pos", _task()))


class TestUnlabelled:
    """As for predictions: labels may be missing, and lines come one by one."""

    @pytest.mark.parametrize(
        ("content", "expected"),
        [
            ("a\nb\n", [("a", None, None), ("b", None, None)]),
            ("a\tb\n", [("a", "b", None)]),
            ("sentence\na\n", [("sentence", None, None), ("a", None, None)]),  # lines of text, whatever they are
            ("sentence\tlabel\na\tpos\n", [("a", None, "pos")]),
            ("index\tsentence1\tsentence2\n0\ta\tb\n", [("a", "b", None)]),
            ('{"sentence": "a"}\n{"sentence": "b", "label": "pos"}\n', [("a", None, None), ("b", None, None)]),
            ("", []),
        ],
    )
    def test_files_and_standard_input_are_read_alike(self, tmp_path, content, expected):
        assert _parts(_read(tmp_path, "t.txt", content, labelled=False)) == expected
        found = read_examples(io.BytesIO(content.encode()), _task(), labelled=False)
        assert _parts(found) == expected

    def test_a_file_of_texts_needs_no_names_that_are_told(self, tmp_path):
        (tmp_path / "t.tsv").write_text("text\tlabel\na\tx,y\n")
        (found,) = read_examples(tmp_path / "t.tsv", _task("regression"), labelled=False, reads_labels=False)
        assert (found.text, found.label) == ("a", None)
        assert _parts(_read(tmp_path, "t.txt", "a\n", labelled=False, text="review", label=("stars",))) == [("a", None, None)]
        with pytest.raises(CorpusError, match="has no column 'review'"):
            _read(tmp_path, "t.txt", "a\tb\n", labelled=False, text="review", label=("stars",))

    def test_standard_input_is_answered_line_by_line(self):
        class Slow(io.BytesIO):
            n_read = 0

            def readline(self, size: int | None = -1, /) -> bytes:
                self.n_read += 1
                return super().readline(-1 if size is None else size)

        source = Slow(b"a\nb\nc\n")
        found = read_examples(source, _task(), labelled=False)
        assert next(found).text == "a"
        assert source.n_read == 1
        assert next(found).place == "standard input line 2"
        assert source.n_read == 2


def _rows(examples):
    return [(each.document, each.text, each.label) for each in examples]


class TestDocuments:
    def test_a_column_names_the_document_of_a_row(self, tmp_path):
        expected = [("a", "one", "x"), ("a", "two", "y"), ("7", "three", "x")]
        table = "document\ttext\tlabel\na\tone\tx\na\ttwo\ty\n7\tthree\tx\n"
        assert _rows(_read(tmp_path, "t.tsv", table, document="document")) == expected
        assert _rows(_read(tmp_path, "t.csv", table.replace("\t", ","), document="1")) == expected
        unnamed = {"text": "2", "label": ("3",), "document": "1"}
        assert _rows(_read(tmp_path, "t.csv", table.replace("\t", ",").partition("\n")[2], **unnamed)) == expected
        objects = [{"dialogue": 7 if name == "7" else name, "text": text, "label": label} for name, text, label in expected]
        assert _rows(_read(tmp_path, "t.jsonl", _json_lines(*objects), document="dialogue")) == expected
        assert [each.document for each in _read(tmp_path, "t.tsv", table)] == [None] * 3

    def test_each_file_of_a_directory_may_be_a_document(self, tmp_path):
        (tmp_path / "old").mkdir()
        (tmp_path / ".hidden.tsv").write_text("text\tlabel\nno\tx\n")
        (tmp_path / "notes.md").write_text("no table")
        _read(tmp_path, "b.tsv", "text\tlabel\ntwo\tx\nthree\ty\n")
        _read(tmp_path, "a.jsonl", _json_lines({"text": "one", "label": "x"}))
        found = list(read_examples(tmp_path, _task(document="files")))
        assert _rows(found) == [("a.jsonl", "one", "x"), ("b.tsv", "two", "x"), ("b.tsv", "three", "y")]
        assert found[2].place == f"'{tmp_path / 'b.tsv'}' line 3"
        (tmp_path / "talks").mkdir()
        (tmp_path / "talks" / "t.txt").write_text("a\n\nb\n")
        found = read_examples(tmp_path / "talks", _task(document="files"), labelled=False, keeps_empty=True)
        assert [(each.document, each.text) for each in found] == [("t.txt", "a"), (None, ""), ("t.txt", "b")]

    @pytest.mark.parametrize(
        ("name", "content", "told", "message"),
        [
            ("t.tsv", "d\ttext\tlabel\na\t1\tx\nb\t2\tx\na\t3\tx\n", "d", "line 4: document 'a' goes on here"),
            ("t.tsv", "dia\ttext\tlabel\na\t1\tx\n", "dai", "has no column 'dai', .*; did you mean 'dia'"),
            ("t.txt", "a text\n", "d", "has no column 'd' of documents"),
            ("t.csv", '"5","a review"\n', "d", "has no column 'd'"),
            ("t.tsv", "d\ttext\tlabel\n \t1\tx\n", "d", "line 2: 'd' is ' ', and names no document"),
            ("t.jsonl", '{"text": "a", "label": "x", "d": "a"}\n{"text": "a", "label": "x"}', "d", "line 2: 'd' is None"),
            ("t.jsonl", '{"text": "a", "label": "x", "d": true}', "d", "line 1: 'd' is True"),
        ],
    )
    def test_mistakes_are_named(self, tmp_path, name, content, told, message):
        with pytest.raises(CorpusError, match=message):
            _read(tmp_path, name, content, labelled=name != "t.txt", document=told)

    def test_directories_without_rows_of_documents_are_refused(self, tmp_path):
        with pytest.raises(CorpusError, match=r"has no documents; give files that end in \.tsv"):
            list(read_examples(tmp_path, _task(document="files")))
        (tmp_path / "a.tsv").write_text("text\tlabel\n")
        with pytest.raises(CorpusError, match=r"a.tsv' is a document without rows"):
            list(read_examples(tmp_path, _task(document="files")))
        for label in ("good", "bad"):
            (tmp_path / "classes" / label).mkdir(parents=True)
            (tmp_path / "classes" / label / "1.txt").write_text("a")
        with pytest.raises(CorpusError, match=r"1.txt': it belongs to no document; .* --document files if each file is one$"):
            list(read_examples(tmp_path / "classes", _task(document="d")))
