import pytest
import torch

from transformer_xl.config.model import HeadConfig
from transformer_xl.config.run import TaskConfig
from transformer_xl.data.labels import NOT_SCORED, Example, label_names, labels_of
from transformer_xl.errors import CorpusError

NAMED = HeadConfig(kind="classification", labels=("bad", "good"))
NUMBER = HeadConfig(kind="regression")
CHOICE = HeadConfig(kind="choice")


class TestLabels:
    @staticmethod
    def _names(labels, kind="classification", **task):
        return label_names(
            TaskConfig.model_validate({"kind": kind, **task}),
            [Example("x", label=label, place="'t' line 1") for label in labels],
        )

    def test_classes_are_sorted_numbers_as_numbers(self):
        assert self._names(["b", "a", "10", "b"]) == ("10", "a", "b")
        assert self._names(["10", "9", "-1", "9"]) == ("-1", "9", "10")
        assert self._names([("b", "a"), (), ("c",)], "multilabel") == ("a", "b", "c")
        assert self._names([()], "multilabel", label=("z", "a")) == ("z", "a")
        assert self._names([0.5], "regression") == ()
        assert len(self._names([f"{i / 2}" for i in range(10)] * 2)) == 10  # half stars

    @pytest.mark.parametrize(
        ("labels", "kind", "message"),
        [
            (["a"] * 3, "classification", r"^'t': all 3 texts have the label 'a'"),
            ([f"text {i}" for i in range(30)], "classification", "are no classes; .* --task regression"),
            ([f"class {i}" for i in range(5000)] * 3, "classification", "5,000 different labels are too many"),
            ([(f"class {i}",) for i in range(5000)], "multilabel", "5,000 different labels are too many"),
        ],
    )
    def test_what_are_no_classes_is_refused(self, labels, kind, message):
        with pytest.raises(CorpusError, match=message):
            self._names(labels, kind)

    @pytest.mark.parametrize(
        ("head", "label", "message"),
        [
            (NAMED, "goood", "label 'goood' is unknown; did you mean 'good'"),
            (NAMED, "1", "label '1' is a number, but the classes have names; known: bad, good"),
            (NUMBER, "good", "label 'good' is not a number, as regression needs"),
            *((NUMBER, no, "label '.*' is not a number") for no in ("nan", "inf", "1e999", "1_0", "0x1", "٣", "１", ".", "1e")),
            (NUMBER, 1e20, r"label 1e\+20 is above 1e\+09; divide all numbers by the same one"),
            (CHOICE, 2, "label 2 is none of the 2 choices; they count from 0"),
        ],
    )
    def test_a_wrong_label_is_named_with_its_place(self, head, label, message):
        with pytest.raises(CorpusError, match=rf"^'v.tsv' line 3: {message}"):
            labels_of(head, [Example("x", choices=("a", "b"), label=label, place="'v.tsv' line 3")])

    def test_labels_become_numbers(self):
        assert labels_of(NAMED, [Example("x", label="good"), Example("x")]).tolist() == [1, NOT_SCORED]
        many = labels_of(
            HeadConfig(kind="multilabel", labels=("a", "b")), [Example("x", label=("b",)), Example("x"), Example("x", label=())]
        )
        assert many[[0, 2]].tolist() == [[0, 1], [0, 0]]
        assert many[1].isnan().all()
        assert labels_of(NUMBER, [Example("x", label="2.5"), Example("x")]).nan_to_num(-1).tolist() == [2.5, -1]
        texts = [Example("x", label=number) for number in (" -3", "+.5", "2.", "1e-2", "1E3")]
        torch.testing.assert_close(labels_of(NUMBER, texts), torch.tensor([-3, 0.5, 2, 0.01, 1000]))
