"""Files of words and their labels: CoNLL's columns, and lists in JSON; what is wrong with one is said with its line."""

import json

import pytest

from transformer_xl.config.run import TaskConfig
from transformer_xl.data.examples import read_examples
from transformer_xl.data.task_texts import find_files, read_task
from transformer_xl.errors import CorpusError

CONLL_2003 = """-DOCSTART- -X- -X- O

EU NNP B-NP B-ORG
rejects VBZ B-VP O

# NN B-NP O
Blackburn NNP B-NP B-PER


-DOCSTART- -X- -X- O
"""
CONLLU = """# newdoc
# sent_id = 1
# text = vámonos
1-2\tvámonos\t_\t_\t_\t_\t_\t_\t_\t_
1\tvamos\tir\tVERB\tV\t_\t0\troot\t_\t_
2\tnos\tnosotros\tPRON\tP\t_\t1\tobj\t_\t_
2.1\tx\tx\tX\tX\t_\t_\t_\t_\t_

# sent_id = 2
1\tà peu près\t_\tADV\t_\t_\t0\troot\t_\t_
"""


def _read(tmp_path, content, name="train.txt", *, labelled=True, known_labels=(), **told):
    path = tmp_path / name
    path.write_text(content)
    task = TaskConfig.model_validate({"kind": "tokens", **told})
    return list(read_examples(path, task, labelled=labelled, reads_labels=labelled, known_labels=known_labels))


def _pairs(examples):
    return [list(zip(each.words, each.label or ["-"] * len(each.words), strict=True)) for each in examples]


class TestColumns:
    def test_those_of_conll_2003(self, tmp_path):
        first, second = _read(tmp_path, CONLL_2003)
        assert _pairs([first, second]) == [[("EU", "B-ORG"), ("rejects", "O")], [("#", "O"), ("Blackburn", "B-PER")]]
        assert (first.text, first.place, first.lines) == ("EU rejects", f"'{tmp_path}/train.txt' line 3", (3, 4))
        assert _pairs(_read(tmp_path, CONLL_2003.replace("\n", "\r\n")))[0] == _pairs([first])[0]
        assert _pairs(_read(tmp_path, CONLL_2003, text="1", label=["2"]))[0] == [("EU", "NNP"), ("rejects", "VBZ")]

    def test_those_of_universal_dependencies(self, tmp_path):
        """Tabs divide, so a word may have spaces; comments, and rows that are no words, are left out."""
        first, second = _read(tmp_path, CONLLU, "train.conllu")
        assert _pairs([first, second]) == [[("vamos", "VERB"), ("nos", "PRON")], [("à peu près", "ADV")]]
        assert first.lines == (5, 6)
        assert _pairs(_read(tmp_path, CONLLU, label=["5"]))[0] == [("vamos", "V"), ("nos", "P")]

    def test_words_alone_are_read_where_labels_are_not_needed(self, tmp_path):
        assert _pairs(_read(tmp_path, "a\nb\n\nc\n", "x.conll", labelled=False)) == [[("a", "-"), ("b", "-")], [("c", "-")]]

    @pytest.mark.parametrize(("content", "is_columns"), [("a O\nb O\n", True), ("a X\nb X\n", False), ("O\nb O\n", False)])
    def test_a_file_is_text_unless_its_first_line_ends_in_a_label(self, tmp_path, content, is_columns):
        found = _read(tmp_path, content, labelled=False, known_labels=("O", "B-A"))
        assert [each.words for each in found] == ([("a", "b")] if is_columns else [(), ()])

    @pytest.mark.parametrize(
        ("content", "why"),
        [
            ("a b O\nc O\n", "line 2: it has 2 columns, but line 1 has 3"),
            ("a O\n\nc O d O\n", "line 3: it has 4 columns, but line 1 has 2"),
            ("# just a comment\n\n# and one more\n", "has no sentence"),
            ("a\nb\n", "line 1: it has 1 column"),
            ("a\tO\nb\t \n", "line 2: its label is empty"),
            ("a\tO\n\tO\n", "line 2: its word is empty"),
        ],
    )
    def test_bad_lines(self, tmp_path, content, why):
        with pytest.raises(CorpusError, match=f"train.txt' {why}"):
            _read(tmp_path, content)

    def test_comments_of_universal_dependencies_are_no_words(self, tmp_path):
        """Not even where a file has as many columns as they do."""
        assert _pairs(_read(tmp_path, "# newdoc\na O\n# 1\n\n# newpar\nb O\n")) == [[("a", "O"), ("#", "1")], [("b", "O")]]
        assert _pairs(_read(tmp_path, "# text = a\na x x O\n")) == [[("a", "O")]]

    def test_columns_name_no_documents(self, tmp_path):
        with pytest.raises(CorpusError, match="name no documents; give JSON lines with a 'talk'"):
            _read(tmp_path, "a O\n", document="talk")
        (found,) = _read(tmp_path, '{"talk": 1, "tokens": ["a"], "labels": ["O"]}', "a.jsonl", document="talk")
        assert (found.document, found.label) == ("1", ("O",))


class TestLists:
    def test_words_and_labels(self, tmp_path):
        lines = [{"id": 7, "tokens": ["EU", "re jects"], "ner_tags": ["B-ORG", "O"]}, {"tokens": ["a"], "ner_tags": [0]}]
        first, second = _read(tmp_path, "\n".join(map(json.dumps, lines)), "a.jsonl")
        assert _pairs([first, second]) == [[("EU", "B-ORG"), ("re jects", "O")], [("a", "0")]]
        assert (first.id, first.word_starts) == ("7", [0, 3])
        assert first.place_of_word(1) == f"'{tmp_path}/a.jsonl' line 1 word 2"

    @pytest.mark.parametrize(
        ("fields", "why"),
        [
            ({"tokens": ["a", "b"], "labels": ["O"]}, "it has 2 words, but 1 label"),
            ({"tokens": ["a"], "labels": "O"}, "it has 1 word, but no list of labels"),
            ({"tokens": ["a"], "labels": None}, "it has no label"),
            ({"tokens": ["a", " "], "labels": ["O", "O"]}, r"'tokens' is \['a', ' '\], not a list of words"),
            ({"tokens": [], "labels": []}, r"'tokens' is \[\], not a list of words"),
            ({"tokens": ["a"], "labels": [" "]}, "the label of a word is empty"),
        ],
    )
    def test_bad_lines(self, tmp_path, fields, why):
        with pytest.raises(CorpusError, match=f"line 1: {why}"):
            _read(tmp_path, json.dumps(fields), "a.jsonl")


def _task(tmp_path, train, **files) -> TaskConfig:
    for name, content in {"train": train, **files}.items():
        (tmp_path / f"{name}.conll").write_text(content)
    return TaskConfig(kind="tokens", data=str(tmp_path))


class TestTask:
    def test_files_of_a_treebank_are_found(self, tmp_path):
        for purpose in ("train", "dev", "test"):
            (tmp_path / f"tr_x-ud-{purpose}.conllu").write_text(CONLLU)
        files = find_files(TaskConfig(kind="tokens", data=str(tmp_path)))
        assert [path and path.name for path in (files.train, files.valid, files.test)] == [
            f"tr_x-ud-{purpose}.conllu" for purpose in ("train", "dev", "test")
        ]

    def test_text_files_hold_columns(self, tmp_path):
        """The last word of a test's text may be no label, and then its lines are texts without any."""
        for name, content in (("train", "a B-X\nb O\n\nc O\n"), ("dev", "c O\n"), ("test", "d O\n\ne B-X\n")):
            (tmp_path / f"{name}.txt").write_text(content)
        task = TaskConfig(kind="tokens", data=str(tmp_path))
        assert _pairs(read_task(task, seed=0).test) == [[("d", "O")], [("e", "B-X")]]
        (tmp_path / "test.txt").write_text("d e\n")
        assert read_task(task, seed=0).test is None

    def test_labels_are_those_of_the_training_words(self, tmp_path):
        texts = read_task(_task(tmp_path, "a B-X\nb O\n", dev="c O\n", test="d\n"), seed=0)
        assert (texts.labels, texts.test) == (("B-X", "O"), None)
        assert texts.notes == (f"'{tmp_path}/test.conll' is not scored: its texts have no labels",)

    def test_files_of_iob1_are_read_as_they_are(self, tmp_path):
        texts = read_task(_task(tmp_path, "a I-X\nb B-X\n", dev="c I-X\n"), seed=0)
        assert texts.notes == ("labels are IOB1: an entity begins with I-, or with B- right after another of its type",)

    @pytest.mark.parametrize(
        ("train", "dev", "why"),
        [
            ("a B-X\nb O\nc I-X\n", "a O\n", "train.conll' line 3: I-X follows O, but only B-X begins an entity (BIO)"),
            ("a B-X\nb I-X\nc O\n", "a O\n\nb I-X\n", "dev.conll' line 3: I-X is the first label"),
            ("a I-X\nb O\n", "a O\nb B-X\n", "dev.conll' line 2: label 'B-X' is unknown; did you mean 'I-X'?"),
            ("a B-X\nb E-X\n", "a B-X\n", "dev.conll' line 1: the entity of B-X is not ended by E-X (BIOES)"),
            ("a B-X\nb O\nc b-X\n", "a O\n", "train.conll' line 1: label 'b-X' is neither O nor begins with B-, I-"),
            ("a N\nb N\n", "a N\n", "train.conll': all words have the label 'N'"),
            ("", "a N\n", "train.conll' is empty"),
        ],
    )
    def test_bad_labels(self, tmp_path, train, dev, why):
        with pytest.raises(CorpusError) as error:
            read_task(_task(tmp_path, train, dev=dev), seed=0)
        assert why in str(error.value)

    def test_each_file_of_a_directory_may_be_a_document(self, tmp_path):
        for part in ("train", "dev"):
            (tmp_path / part).mkdir()
            for name in ("a", "b"):
                (tmp_path / part / f"{name}.conll").write_text("x B-X\n\ny O\n")
        texts = read_task(TaskConfig(kind="tokens", data=str(tmp_path), document="files"), seed=0)
        assert [each.document for each in texts.train] == ["a.conll", "a.conll", "b.conll", "b.conll"]
