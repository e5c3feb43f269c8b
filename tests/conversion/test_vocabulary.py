"""Vocabularies of other programs are found, told by their content, and taken or refused."""

import io
import pickle
import re
import sys
from collections import OrderedDict
from types import ModuleType
from typing import Any

import pytest
import sentencepiece
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.conversion.examples import VALUES, copy
from tests.helpers import TINY, random_weights
from tests.tokenizers.test_unigram import GOLDENS
from transformer_xl.config.model import XLNetConfig
from transformer_xl.conversion import programs
from transformer_xl.conversion.convert import convert
from transformer_xl.conversion.export import export
from transformer_xl.conversion.readers.unpickle import unpickle
from transformer_xl.conversion.sources import open_source
from transformer_xl.conversion.vocabulary import read_vocabulary
from transformer_xl.errors import CheckpointError
from transformer_xl.model.xlnet import XLNet
from transformer_xl.tokenizers.kinds import WordTokenizer, load_tokenizer
from transformer_xl.tokenizers.unigram import SentencePieceTokenizer


@pytest.mark.parametrize("golden", ["nvidia/plain", "huggingface/plain", "authors/pre_lnorm"])
def test_a_given_vocabulary_comes_before_one_in_the_checkpoint_or_beside_it(golden, tmp_path):
    words = [f"w{i}" for i in range(31)]
    (tmp_path / "mine.txt").write_text("\n".join(words))
    folder = copy(golden, tmp_path)
    own = open_source(folder).tokenizer
    given = open_source(folder, vocabulary=tmp_path / "mine.txt").tokenizer
    assert own is not None and given is not None
    assert given.to_dict()["words"] == words != own.to_dict()["words"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("vocab.txt", b"a\n\nb\n", "line 2 of the vocabulary is empty"),
        ("vocab.txt", b"\xff\n", "'utf-8' codec can't decode"),
        ("vocab.txt", b"", "line 1"),
        ("vocab.pkl", pickle.dumps([1, 2]), r"a vocabulary is a mapping of its attributes, not \[1, 2\]"),
        ("vocab.pkl", pickle.dumps({"idx2sym": ["a", 1]}), r"idx2sym.1 \(1\) must be a valid string"),
        ("vocab.pkl", pickle.dumps({"sym2idx": {"a": None}}), r"sym2idx.a \(None\) must be a valid integer"),
        ("vocab.pkl", pickle.dumps({"idx2sym": ["a"], "unk_idx": 1}), r"unk_idx \(1\) is not one of the 1 ids"),
        ("vocab.pkl", pickle.dumps({}), "no words in the vocabulary"),
    ],
)
def test_what_is_no_vocabulary_is_refused(name, content, message, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match=f"{name}': {message}"):
        read_vocabulary(tmp_path / name)


def test_settings_beside_a_vocabulary_say_what_it_leaves_open(tmp_path):
    (tmp_path / "vocab.txt").write_text("<eos>\n<unk>\ncat\n")
    assert read_vocabulary(tmp_path / "vocab.txt").encode("CAT\n").tolist() == [1, 0]
    (tmp_path / "tokenizer_config.json").write_text('{"lower_case": true}')
    assert read_vocabulary(tmp_path / "vocab.txt").encode("CAT\n").tolist() == [2, 0]
    (tmp_path / "tokenizer_config.json").write_text('{"lower_case": "yes"}')  # believed as far as its type
    assert read_vocabulary(tmp_path / "vocab.txt").encode("CAT\n").tolist() == [1, 0]
    (tmp_path / "corpus-info.json").write_text('{"dataset": "text8"}')
    assert read_vocabulary(tmp_path / "vocab.txt").encode("cat\n").tolist() == [2]  # no line ends in text8
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"tokenizer_config.json' is not valid JSON"):
        read_vocabulary(tmp_path / "vocab.txt")


def test_the_corpus_of_nvidia_is_among_its_arguments(tmp_path, monkeypatch):
    (file,) = copy("nvidia/plain", tmp_path).glob("checkpoint_*.pt")
    tree = unpickle(file)
    monkeypatch.setattr(programs, "unpickle", lambda path: tree)
    line_ends = {}
    for dataset in ("wt103", "text8"):
        tree["args"].state["dataset"] = dataset
        tokenizer = open_source(file).tokenizer
        assert isinstance(tokenizer, WordTokenizer)
        line_ends[dataset] = tokenizer.line_end
    assert line_ends == {"wt103": "<eos>", "text8": None}


SOME_WORDS = st.lists(st.sampled_from(["a", "b", "<eos>", "<unk>", "<S>", "_", "33", "34", " ", ""]), max_size=6)


ATTRIBUTES: dict[str, st.SearchStrategy[Any]] = {
    "idx2sym": SOME_WORDS | VALUES,
    "sym2idx": SOME_WORDS.map(lambda words: {word: i for i, word in enumerate(words)}) | VALUES,
    "delimiter": st.sampled_from([None, "", ","]) | VALUES,
    "dataset": st.sampled_from(["wt103", "lm1b", "text8", "enwik8"]) | VALUES,
    **dict.fromkeys(["lower_case", "unk_idx", "never_split", "language", "EOT", "special"], VALUES),
}


@given(state=st.fixed_dictionaries({}, optional=ATTRIBUTES) | VALUES)
def test_whatever_a_vocabulary_holds_it_is_taken_or_refused(state, tmp_path_factory):
    folder = tmp_path_factory.mktemp("vocabulary")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("transformer_xl.conversion.vocabulary.unpickle", lambda path: state)
        (folder / "vocab.pkl").touch()
        try:
            tokenizer = read_vocabulary(folder / "vocab.pkl")
        except CheckpointError as error:
            assert str(error).isprintable()
            assert len(str(error)) < 1000
        else:
            tokenizer.save(folder / "tokenizer.json")
            assert load_tokenizer(folder / "tokenizer.json").to_dict() == tokenizer.to_dict()


def test_words_of_python_2_are_utf8(tmp_path):
    """Its texts are bytes: read as latin-1 and, if all of them are UTF-8, taken for that."""
    start, end = b"\x80\x02}(U\x07idx2sym](U\x05<eos>", b"U\nlower_caseI00\nu."
    path = tmp_path / "cache.pkl"
    path.write_bytes(start + b"U\x05caf\xc3\xa9e" + end)
    assert read_vocabulary(path).encode("café\n").tolist() == [1, 0]
    path.write_bytes(start + b"U\x04caf\xe9U\x02a\xc3e" + end)
    assert read_vocabulary(path).encode("café aÃ\n").tolist() == [1, 2, 0]


def test_pieces_of_sentencepiece_are_read_as_xlnet_reads_them(tmp_path):
    path = tmp_path / "spiece.model"
    path.write_bytes((GOLDENS / "xlnet.model").read_bytes())
    tokenizer = read_vocabulary(path)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert (tokenizer.normalization, tokenizer.lower_case, tokenizer.keep_accents) == ("xlnet", False, False)
    (tmp_path / "tokenizer_config.json").write_text('{"do_lower_case": true, "keep_accents": true}')
    tokenizer = read_vocabulary(path)
    assert isinstance(tokenizer, SentencePieceTokenizer)
    assert (tokenizer.lower_case, tokenizer.keep_accents) == (True, True)
    path.write_bytes(b"\x0a\xff")
    with pytest.raises(CheckpointError, match=r"spiece.model': unusable tokenizer: sentencepiece cannot read it"):
        read_vocabulary(path)


def write_vocab(path, **attributes: Any) -> None:
    """Write an object of the authors' class with torch.save, as they do."""
    module = ModuleType("vocabulary")
    vocab = type("Vocab", (), {"__module__": module.__name__})
    vars(module)["Vocab"] = vocab
    foreign = vocab()
    vars(foreign).update(attributes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, module.__name__, module)
        torch.save(foreign, path)


EVENTS = ["WT_1", "WT_2", "P1_NOTEOFF", *(f"P1_NOTEON_{i}" for i in range(33, 60))]


def test_a_directory_of_lakhnes_whose_vocabulary_lacks_its_first_word(tmp_path):
    """A model.pt of 31 words beside the 30 events that it was taught, one a line; id 0 is `<S>`, at both ends of a piece."""
    folder = copy("authors/plain", tmp_path)
    (folder / "cache.pt").unlink(missing_ok=True)
    (folder / "vocab.txt").write_text("\n".join(EVENTS) + "\n")
    convert(folder, tmp_path / "native")
    tokenizer = load_tokenizer(tmp_path / "native" / "tokenizer.json")
    assert tokenizer.vocab_size == 31
    piece = "<S>\nP1_NOTEON_59\nWT_2\nP1_NOTEOFF\n<S>\n"
    assert tokenizer.encode(piece).tolist() == [0, 30, 2, 3, 0]
    assert tokenizer.decode([0, 30, 2, 3]) == "<S> P1_NOTEON_59 WT_2 P1_NOTEOFF"
    write_vocab(tmp_path / "cache.pt", idx2sym=["<S>", *EVENTS], dataset="nesmdb")
    assert read_vocabulary(tmp_path / "cache.pt").to_dict() == tokenizer.to_dict()
    (folder / "vocab.txt").write_text("\n".join(["<eos>", *EVENTS[1:]]))
    with pytest.raises(CheckpointError, match=r"vocab.txt' has 30 tokens, the model 31"):
        open_source(folder)


def test_a_vocab_pkl_that_keeps_its_words_by_id(tmp_path):
    """transformers 4.35 writes `idx2sym` empty, beside rules of splitting that are objects."""
    words = ["<eos>", "<unk>", "the", "cat"]
    state = {"idx2sym": [], "sym2idx": OrderedDict(zip(words, range(4), strict=True)), "language": "en", "unk_idx": 1}
    state |= {"lower_case": False, "delimiter": None, "never_split": words[:2], "punctuation": re.compile("[,.]")}
    torch.save(state, tmp_path / "vocab.pkl")
    tokenizer = read_vocabulary(tmp_path / "vocab.pkl")
    assert tokenizer.encode("the dog\n").tolist() == [2, 1, 0]
    assert tokenizer.decode([2, 3]) == "the cat"


@pytest.mark.parametrize("kind", ["char", "bpe", "xlnet"])
def test_pieces_of_any_type_go_with_an_xlnet(kind, tmp_path):
    written = io.BytesIO((GOLDENS / "xlnet.model").read_bytes())
    if kind != "xlnet":
        written = io.BytesIO()
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(["the cat sat on the mat", "東京 the map"] * 9),
            model_writer=written,
            model_type=kind,
            vocab_size=26,
            hard_vocab_limit=False,
            control_symbols=["<cls>", "<sep>"],
            minloglevel=2,
        )
    library = sentencepiece.SentencePieceProcessor(model_proto=written.getvalue())
    config = XLNetConfig(**{**TINY, "vocab_size": library.vocab_size(), "n_head": 2, "d_head": 5, "dropatt": 0.0})
    random_weights(XLNet(config)).save_pretrained(tmp_path / "native")
    export(tmp_path / "native", tmp_path / "foreign", kind="huggingface")
    (tmp_path / "foreign" / "spiece.model").write_bytes(written.getvalue())
    convert(tmp_path / "foreign", tmp_path / "again")
    tokenizer = load_tokenizer(tmp_path / "again" / "tokenizer.json")
    assert tokenizer.encode("the cat 東京").tolist() == library.encode("the cat 東京")
