"""From every kind of foreign checkpoint to a native directory, whole or not at all."""

import errno
import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import transformer_xl as txl
from tests.conversion.examples import GOLDENS, HEADS_OF_THE_AUTHORS, D, copy, fine_tuned_by_the_authors, names
from tests.helpers import assert_close, random_weights
from transformer_xl.config.model import HeadConfig
from transformer_xl.conversion.convert import convert
from transformer_xl.conversion.destination import check_free, new_directory
from transformer_xl.conversion.export import load_model
from transformer_xl.conversion.key_maps import huggingface
from transformer_xl.conversion.readers.tensor_bundle import read_bundle
from transformer_xl.conversion.readers.tensors import SafeTensor, TensorRef
from transformer_xl.conversion.readers.unpickle import unpickle
from transformer_xl.errors import CheckpointError, ConfigError
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model.xlnet import XLNet

FILES = ["config.json", "manifest.json", "model.safetensors"]
SMALL = {"d_model": 8, "d_embed": 16, "d_inner": 6, "n_head": 2, "d_head": 3, "div_val": 2}


def foreign(folder: Path) -> dict[str, torch.Tensor]:
    """Return the tensors of a checkpoint of Hugging Face's, as memory of their own."""
    return {name: tensor.clone() for name, tensor in torch.load(folder / "pytorch_model.bin", weights_only=True).items()}


EXAMPLES = [
    ("huggingface", "huggingface/plain", {}),
    ("huggingface", "huggingface/narrow_embedding", {}),  # vocab.bin, of torch.save
    ("huggingface", "huggingface/untied_weight", {}),  # vocab.txt
    ("authors", "authors/trained", {}),
    ("authors", "authors/div_val_2_two_tails", {}),  # cache.pt of words
    ("nvidia", "nvidia/plain", {}),
    ("tensorflow", "tensorflow/base", {"mem_len": 6}),
    ("tensorflow", "tensorflow/projected", {"mem_len": 6}),  # in two shards
]


@pytest.mark.parametrize(("kind", "golden", "settings"), EXAMPLES, ids=[golden for _, golden, _ in EXAMPLES])
def test_converted_models_are_loaded_written_with_and_scored(kind, golden, settings, tmp_path):
    source = copy(golden, tmp_path)
    before = {path: path.read_bytes() for path in source.iterdir()}
    progress: list[tuple[int, int]] = []
    done = convert(source, tmp_path / "native", settings=settings, on_progress=lambda *step: progress.append(step))
    assert names(tmp_path) == ["native", "source"]
    assert names(tmp_path / "native") == [*FILES, "tokenizer.json"]
    assert {path: path.read_bytes() for path in source.iterdir()} == before

    assert done.kind == kind
    assert done.weights in (source, *before)
    assert done.n_bytes == (tmp_path / "native" / "model.safetensors").stat().st_size
    assert progress[-1] == (4 * done.n_parameters, 4 * done.n_parameters)
    assert progress == sorted(progress)
    weights = load_file(tmp_path / "native" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    assert sum(tensor.numel() for tensor in weights.values()) == done.n_parameters

    model, tokenizer = txl.load(tmp_path / "native")
    assert model.config == done.config
    assert done.tokenizer is not None
    assert tokenizer.to_dict() == done.tokenizer.to_dict()
    ids = torch.arange(20) % tokenizer.vocab_size
    written = list(txl.generate(model, [3, 4], sampling=txl.Sampling(temperature=0), max_new_tokens=5))
    assert len(written) == 5
    assert tokenizer.decode(written)
    nll = model(ids[None, :-1], labels=ids[None, 1:]).nll
    assert nll is not None
    assert torch.isfinite(nll).all()


@pytest.mark.parametrize(("dtype", "stored"), [(torch.bfloat16, torch.float32), (torch.float64, torch.float64)])
def test_other_precisions(dtype, stored, tmp_path):
    source = copy("huggingface/plain", tmp_path)
    tensors = foreign(source)
    frequencies = "transformer.pos_emb.inv_freq"
    cast = {name: tensor.double() if name == frequencies else tensor.to(dtype) for name, tensor in tensors.items()}
    torch.save(cast, source / "pytorch_model.bin")  # frequencies are not weights, whatever their precision
    convert(source, tmp_path / "native")
    weights = load_file(tmp_path / "native" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {stored}
    assert torch.equal(weights["embedding.weight"], cast["transformer.word_emb.emb_layers.0.weight"].to(stored))


@pytest.mark.parametrize("name", ["bf16", "shards", "slots"])
def test_what_tensorflow_2_saves(name, tmp_path):
    """In several files, with what an optimizer keeps, and in bfloat16 (see make_goldens_bundles.py)."""
    source = GOLDENS / "bundles" / name
    convert(source, tmp_path / "native", settings={"mem_len": 5})
    weights = load_file(tmp_path / "native" / "model.safetensors")
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    variables = read_bundle(source)
    for native, variable in (("embedding.weight", "adaptive_embed/lookup_table"), ("softmax.bias", "adaptive_softmax/bias")):
        assert torch.equal(weights[native], variables[f"transformer/{variable}"].load().float())
    model = TransformerXL.from_pretrained(tmp_path / "native")
    assert torch.isfinite(model(torch.tensor([[1, 2, 3]])).logits).all()


def test_tensors_tied_by_the_settings_must_be_equal(tmp_path):
    source = copy("huggingface/plain", tmp_path)
    tensors = foreign(source)
    torch.save(tensors, source / "pytorch_model.bin")  # two copies of equal numbers are fine
    convert(source, tmp_path / "native")
    tensors["crit.out_layers.0.weight"][2, 3] += 1
    torch.save(tensors, source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"tensors 'transformer.word_emb.\S+' and 'crit.out_layers.0.weight' of"):
        convert(source, tmp_path / "other")
    tensors["crit.out_layers.0.weight"] = tensors["transformer.word_emb.emb_layers.0.weight"].double() + 1e-12
    torch.save(tensors, source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin' are tied by its settings, but differ"):
        convert(source, tmp_path / "other")
    assert names(tmp_path) == ["native", "source"]


# XLNet


IDS = torch.arange(10).view(2, 5) % 13
LACKS = ["there is no tensor 'lm_loss.bias', so '{}softmax.bias' is zeros"]
HEADS = {
    "XLNetLMHeadModel": (0, [], None),
    "XLNetModel": (0, LACKS, None),
    "XLNetForSequenceClassification": (0, LACKS, "classification"),
    "XLNetForTokenClassification": (0, LACKS, "tokens"),
    "XLNetForMultipleChoice": (0, LACKS, "choice"),
    "XLNetForQuestionAnsweringSimple": (2, LACKS, None),
    "XLNetForQuestionAnswering": (0, LACKS, "span"),
}
"""For each class of Hugging Face's: how many tensors of its head are left out, what it lacks, and the kind of its head here."""


@pytest.mark.parametrize("name", HEADS)
def test_every_xlnet_of_hugging_face_is_converted(name, tmp_path):
    """Those of transformers 5; the goldens are of version 4. What is left out is named, each tensor."""
    transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    settings = {"vocab_size": 13, "d_model": 6, "n_layer": 2, "n_head": 2, "d_inner": 7, "mem_len": 7, "reuse_len": 3}
    config = transformers.XLNetConfig(**settings, ff_activation="gelu_new", dropout=0.0, id2label={0: "no", 1: "yes"})
    theirs = random_weights(getattr(transformers, name)(config).eval())
    theirs.save_pretrained(tmp_path / "source")
    done = convert(tmp_path / "source", tmp_path / "native")
    n_left_out, lacking, kind = HEADS[name]
    assert sum(note.count("'") // 2 for note in done.notes if note.startswith("left out")) == n_left_out
    assert [note for note in done.notes if not note.startswith("left out")] == [
        note.format("backbone." if kind else "") for note in lacking
    ]
    assert done.tokenizer is None
    assert (done.config.head and done.config.head.kind) == kind
    model, _ = load_model(tmp_path / "native", kinds=("xlnet",))
    model = model.backbone if kind else model
    assert (model.config.mem_len, model.config.reuse_len, model.config.activation) == (7, 3, "gelu_tanh")
    h_BTD = (theirs if name == "XLNetModel" else theirs.transformer)(IDS)[0]
    assert_close("last states", model.read(IDS)[0], h_BTD, 5e-6)
    assert model.softmax.bias.any() == (not lacking)


SOURCE = "xlnet_heads/classification"


def converted_head(source: Path, destination: Path, **settings: Any) -> tuple[HeadConfig, str]:
    """Convert a fine-tuned checkpoint; return the settings of its head, and the notes."""
    done = convert(source, destination, settings=settings)
    assert done.config.head is not None
    return done.config.head, "\n".join(done.notes)


def with_config(source: Path, **changes: Any) -> Path:
    """Change the `config.json` of a checkpoint; None takes a key away."""
    values = json.loads((source / "config.json").read_text()) | changes
    gone = {name for name, value in changes.items() if value is None}
    (source / "config.json").write_text(json.dumps({name: values[name] for name in values.keys() - gone}))
    return source


def test_what_a_head_is_for_is_found_in_the_settings(tmp_path):
    names_of = {"0": "no", "1": "yes", "2": "so so"}
    source = with_config(copy(SOURCE, tmp_path), id2label=names_of, summary_last_dropout=0.25)
    head, notes = converted_head(source, tmp_path / "named")
    assert head == HeadConfig(kind="classification", labels=("no", "yes", "so so"), dropout=0.25, max_len=512)
    assert "label" not in notes
    with_config(source, problem_type="multi_label_classification")
    assert converted_head(source, tmp_path / "multilabel")[0] == head.model_copy(update={"kind": "multilabel"})
    alone = convert(source, tmp_path / "alone", settings={"head": None})
    assert alone.config.head is None
    assert [note for note in alone.notes if note.startswith("left out") and "'logits_proj.bias'" in note]
    assert XLNet.from_pretrained(tmp_path / "alone").config == alone.config


def test_labels_without_names_are_numbered_and_can_be_named(tmp_path):
    source = with_config(copy(SOURCE, tmp_path), id2label=None, num_labels=3, problem_type=None)
    head, notes = converted_head(source, tmp_path / "numbered")
    assert head.labels == ("LABEL_0", "LABEL_1", "LABEL_2")
    assert "labels have no names, so they are LABEL_0 to LABEL_2; --set 'head.labels=[" in notes
    named, notes = converted_head(source, tmp_path / "named", head={"labels": ["a", "b", "c"]})
    assert named == head.model_copy(update={"labels": ("a", "b", "c")})
    assert "label" not in notes


def test_one_score_is_a_number_unless_the_settings_say_a_choice(tmp_path):
    source = copy("xlnet_heads/choice", tmp_path)
    assert converted_head(source, tmp_path / "choice")[0].kind == "choice"
    with_config(source, architectures=None, num_labels=1)
    head, notes = converted_head(source, tmp_path / "number")
    assert head.kind == "regression"
    assert "--set head.kind=choice if it was taught multiple choice" in notes
    assert converted_head(source, tmp_path / "said", head={"kind": "choice"})[0].kind == "choice"


@pytest.mark.parametrize(
    "changes",
    [
        {"summary_type": "first"},
        {"summary_type": ["last"]},
        {"summary_activation": "relu"},
        {"summary_use_proj": False},  # and tanh: they squash the state itself
        {"problem_type": "regression"},
        {"problem_type": ["regression"]},
    ],
)
def test_a_head_that_ours_cannot_be_is_left_out_by_name(changes, tmp_path):
    done = convert(with_config(copy(SOURCE, tmp_path), **changes), tmp_path / "native")
    assert done.config.head is None
    (note,) = [note for note in done.notes if note.startswith("left out")]
    assert all(f"'{name}'" in note for name in ("logits_proj.weight", "sequence_summary.summary.bias"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"id2label": {"0": "a", "1": "b", "2": "a"}}, "each of its 3 labels"),
        ({"id2label": {"0": "a", "1": "b", "2": 7}}, r"id2label.2 \(7\)"),
        ({"id2label": {"0": "a", "1": "b"}}, r"'logits_proj.weight' of '\S+' has shape \(3, 6\), .* call for \(2, 6\)"),
        ({"id2label": None, "num_labels": 10**9}, r"the number of labels \(1,000,000,000\)"),
        ({"summary_last_dropout": 2}, r"dropout \(2.0\)"),
    ],
)
def test_settings_of_a_head_that_cannot_be(changes, message, tmp_path):
    with pytest.raises(CheckpointError, match=message):
        convert(with_config(copy(SOURCE, tmp_path), **changes), tmp_path / "native")
    assert names(tmp_path) == ["source"]


def test_a_head_of_tokens_has_the_labels_that_its_settings_name(tmp_path):
    source = copy("xlnet_heads/tokens", tmp_path)
    with_config(source, id2label={"0": "B-PER", "1": "I-PER", "2": "O"})
    head, _ = converted_head(source, tmp_path / "named")
    assert head == HeadConfig(kind="tokens", labels=("B-PER", "I-PER", "O"), dropout=0.0, max_len=512)
    with_config(source, id2label={"0": "O"})
    assert convert(source, tmp_path / "bare").config.head is None


def test_an_old_bare_xlnet_of_hugging_face_has_no_prefix(tmp_path):
    source = copy("xlnet/content_memory", tmp_path)
    convert(source, tmp_path / "whole")
    bare = {name.removeprefix("transformer."): tensor for name, tensor in foreign(source).items() if "lm_loss" not in name}
    torch.save(bare, source / "pytorch_model.bin")
    done = convert(source, tmp_path / "bare")
    assert done.notes == ("there is no tensor 'lm_loss.bias', so 'softmax.bias' is zeros",)
    whole, again = (load_file(tmp_path / name / "model.safetensors") for name in ("whole", "bare"))
    whole["softmax.bias"].zero_()
    assert all(torch.equal(tensor, whole[name]) for name, tensor in again.items())
    torch.save(bare | {"transformer.mask_emb": bare["mask_emb"]}, source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"lacks tensor 'transformer.word_embedding.weight'"):
        convert(source, tmp_path / "other")


def test_a_fine_tuned_xlnet_of_the_authors_lacks_what_its_task_did_not_need(tmp_path):
    """Slots of optimizers and the step are nobody's concern."""
    done = convert(copy("xlnet_tensorflow/finetuned", tmp_path), tmp_path / "native", settings={"head": None})
    memory, heads, mask, bias = done.notes
    assert "mem_len" in memory and "'mask_emb' is zeros" in mask and "'softmax.bias' is zeros" in bias
    for name in ("classification_sst/logit/kernel", "sequnece_summary/summary/bias", "sequnece_summary/summary/kernel"):
        assert f"'model/{name}'" in heads
    assert (done.config.activation, done.config.layer_norm_epsilon, done.config.mem_len) == ("gelu_tanh", 1e-12, 0)


def dense(x: torch.Tensor, head: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Compute `tf.layers.dense`."""
    return x @ head[f"{name}/kernel"] + head.get(f"{name}/bias", torch.zeros(()))


@pytest.mark.parametrize("kind", HEADS_OF_THE_AUTHORS)
def test_heads_of_the_authors_score_as_theirs(kind, tmp_path):
    """Written out as their `modeling.py` and `function_builder.py` do it."""
    source = fine_tuned_by_the_authors(kind, tmp_path)
    tensors = {name: tensor.load() for name, tensor in read_bundle(source / "xlnet_model.ckpt").items()}
    head = {name: tensors[name] for name in HEADS_OF_THE_AUTHORS[kind]}
    settings, notes = converted_head(source, tmp_path / "native")
    assert (settings.kind, settings.projection) == (kind, kind != "regression")
    assert "left out" not in notes
    assert ("labels have no names" in notes) == (kind == "classification")
    assert settings.labels == (("label_0", "label_1", "label_2") if kind == "classification" else ())
    model, _ = load_model(tmp_path / "native", kinds=("xlnet",))
    assert (model.config.mem_len, model.config.zero_first_memory) == (0, False)
    ids = torch.arange(12).view(2, 1, 6) % 13 if kind == "choice" else torch.arange(12).view(2, 6) % 13
    h_BTD = model.backbone.read(ids.view(2, 6))[0]
    if kind == "span":
        found = model.span_scores(ids, n_start=6, n_end=6)
        start_BT = dense(h_BTD, head, "start_logits/dense").squeeze(-1).log_softmax(-1)
        assert_close("starts", found.start_log_probs, start_BT.sort(descending=True).values, 5e-6)
        for k in range(6):
            of_start = h_BTD[torch.arange(2), found.starts[:, k]].unsqueeze(1).expand_as(h_BTD)
            inner = dense(torch.cat([h_BTD, of_start], -1), head, "end_logits/dense_0").tanh()
            norm = (head["end_logits/LayerNorm/gamma"], head["end_logits/LayerNorm/beta"])
            inner = torch.nn.functional.layer_norm(inner, (D,), *norm, eps=1e-12)
            end_BT = dense(inner, head, "end_logits/dense_1").squeeze(-1).log_softmax(-1)
            assert_close("ends", found.end_log_probs[:, k], end_BT.sort(descending=True).values, 5e-6)
        mean = torch.einsum("btd,bt->bd", h_BTD, start_BT.exp())
        inner = dense(torch.cat([mean, h_BTD[:, -1]], -1), head, "answer_class/dense_0").tanh()
        assert_close("no answer", found.no_answer, dense(inner, head, "answer_class/dense_1").squeeze(-1), 5e-6)
        return
    scores = {"classification": "model/classification_mnli/logit", "regression": "model/regression_sts-b/logit"}
    summary = h_BTD[:, -1] if kind == "regression" else dense(h_BTD[:, -1], head, "model/sequnece_summary/summary").tanh()
    assert_close("logits", model(ids).logits, dense(summary, head, scores.get(kind, "logits/dense")), 5e-6)


def test_whole_numbers_are_no_weights(tmp_path):
    source = copy("huggingface/plain", tmp_path)
    torch.save(foreign(source) | {"crit.out_layers.0.bias": torch.zeros(31, dtype=torch.int64)}, source / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"has type torch\.int64"):
        convert(source, tmp_path / "native")
    assert names(tmp_path) == ["source"]


def test_a_vocabulary_without_words_is_none(tmp_path, monkeypatch):
    """NVIDIA's copy of GPT-2's has no words; the model is converted all the same."""
    source = copy("nvidia/plain", tmp_path)
    (file,) = source.glob("checkpoint_*.pt")
    tree = unpickle(file)
    tree["vocab"].state = {"EOT": 50256, "tokenizer": None}
    monkeypatch.setattr("transformer_xl.conversion.programs.unpickle", lambda path: tree)
    assert convert(source, tmp_path / "native").tokenizer is None


def test_options_reach_the_source(tmp_path):
    source = copy("huggingface/cutoffs", tmp_path)
    (tmp_path / "words.txt").write_text("".join(f"w{i}\n" for i in range(31)))
    options: dict[str, Any] = {"vocabulary": str(tmp_path / "words.txt"), "moses": "en", "settings": {"mem_len": 3}}
    done = convert(str(source), str(tmp_path / "native"), kind="huggingface", **options)
    assert done.config.mem_len == 3
    assert done.tokenizer is not None
    assert done.tokenizer.to_dict()["moses"] == "en"
    with pytest.raises(CheckpointError, match="holds no checkpoint of kind 'nvidia'"):
        convert(source, tmp_path / "other", kind="nvidia")
    with pytest.raises(ConfigError, match="unknown setting 'n_layers'"):
        convert(source, tmp_path / "other", settings={"n_layers": 3})
    assert names(tmp_path) == ["native", "source", "words.txt"]


# The destination


def test_a_relative_destination_and_no_vocabulary(tmp_path, monkeypatch):
    source = copy("authors/plain", tmp_path)
    monkeypatch.chdir(tmp_path)
    done = convert(source, "models/new/native")
    assert done.tokenizer is None
    assert names(tmp_path / "models" / "new" / "native") == FILES
    assert txl.TransformerXL.from_pretrained("models/new/native").config == done.config


@pytest.mark.parametrize(
    ("place", "message"),
    [
        *((place, f"{place}' exists already") for place in ("full", "file", "link", "nowhere")),
        (".", "'.' is the current directory"),
    ],
)
def test_destinations_that_cannot_be_written_are_refused_first(place, message, tmp_path, monkeypatch):
    here = tmp_path / "here"
    (here / "empty").mkdir(parents=True)
    (here / "full").mkdir()
    (here / "full" / "own.txt").write_text("mine")
    (here / "file").write_text("mine")
    (here / "link").symlink_to("empty")
    (here / "nowhere").symlink_to("gone")
    monkeypatch.chdir(here / "empty" if place == "." else here)
    with pytest.raises(CheckpointError, match=message):
        convert(tmp_path / "no source", place)  # what it is made of does not even matter
    assert names(here) == ["empty", "file", "full", "link", "nowhere"]
    assert names(here / "full") == ["own.txt"]


def fail_at(monkeypatch: pytest.MonkeyPatch, error: BaseException, *, call: int) -> list[int]:
    """Let the nth tensor that is made raise; returns a list that grows with each."""
    made: list[int] = []
    load = TensorRef.load

    def fail(self: TensorRef) -> torch.Tensor:
        made.append(1)
        if len(made) == call:
            raise error
        return load(self)

    monkeypatch.setattr(TensorRef, "load", fail)
    return made


def test_ctrl_c_leaves_nothing_behind(tmp_path, monkeypatch):
    source = copy("authors/plain", tmp_path)
    made = fail_at(monkeypatch, KeyboardInterrupt(), call=5)
    (tmp_path / "native").mkdir()
    with pytest.raises(KeyboardInterrupt):
        convert(source, tmp_path / "native")
    assert len(made) == 5
    assert names(tmp_path) == ["native", "source"]
    assert names(tmp_path / "native") == []


class FullDisk(io.RawIOBase):
    """A file on a disk without space."""

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("file", [*FILES, "tokenizer.json"])
def test_a_full_disk_leaves_nothing_behind(file, tmp_path, monkeypatch):
    source = copy("authors/trained", tmp_path)
    open_path = Path.open

    def open_full(self: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        if self.name.startswith(file) and "r" not in mode:
            full = io.BufferedWriter(FullDisk(), buffer_size=1)
            return full if "b" in mode else io.TextIOWrapper(full, write_through=True)
        return open_path(self, mode, *args, **kwargs)

    monkeypatch.setattr(Path, "open", open_full)
    with pytest.raises(OSError, match="No space left on device"):
        convert(source, tmp_path / "native")
    monkeypatch.undo()
    assert names(tmp_path) == ["source"]


def test_what_another_process_writes_is_left_alone(tmp_path):
    source = copy("authors/plain", tmp_path)
    (tmp_path / "native.tmp").mkdir()
    (tmp_path / "native.tmp" / "own.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"native.tmp"):
        convert(source, tmp_path / "native")
    assert names(tmp_path / "native.tmp") == ["own.txt"]
    assert names(tmp_path) == ["native.tmp", "source"]


def test_a_destination_that_appears_meanwhile_is_not_replaced(tmp_path):
    def write() -> None:
        with new_directory(tmp_path / "new") as folder:
            (folder / "a").touch()
            (tmp_path / "new").mkdir()
            (tmp_path / "new" / "own.txt").touch()

    with pytest.raises(OSError, match="Directory not empty"):
        write()
    assert names(tmp_path) == ["new"]
    assert names(tmp_path / "new") == ["own.txt"]
    check_free(tmp_path / "free")


def test_damage_that_shows_only_while_writing_leaves_nothing_behind(tmp_path):
    source = copy("huggingface/plain", tmp_path)
    data = bytearray((source / "pytorch_model.bin").read_bytes())
    weights = foreign(source)["transformer.layers.1.pos_ff.CoreNet.0.weight"].numpy().tobytes()
    data[data.index(weights) + 5] ^= 1
    (source / "pytorch_model.bin").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"pytorch_model.bin' is damaged: the checksum of a tensor"):
        convert(source, tmp_path / "native")
    assert names(tmp_path) == ["source"]


def test_each_tensor_is_written_before_the_next_is_read(tmp_path, monkeypatch):
    """So that memory does not grow with the file."""
    config = huggingface.config_of({"vocab_size": 30, "cutoffs": [9, 20], "n_layer": 3} | SMALL)
    tensors = {part.name: torch.randn(part.shape) for part in huggingface.key_map(config).parts()}
    source = tmp_path / "source"
    source.mkdir()
    save_file(tensors, source / "model.safetensors")
    (source / "config.json").write_text(json.dumps(huggingface.values_of(config)))
    events: list[str] = []
    load = SafeTensor.load

    def noted(self: SafeTensor) -> torch.Tensor:
        events.append("read")
        return load(self)

    monkeypatch.setattr(SafeTensor, "load", noted)
    convert(source, tmp_path / "native", on_progress=lambda *_: events.append("written"))
    n_joined = 2 * config.n_layer  # u and v of all layers are one tensor each, made of that many
    assert events.count("read") == len(tensors)
    assert events.count("written") == len(tensors) - n_joined + 2 + 1  # the header, too
    runs = "".join("r" if event == "read" else "w" for event in events).split("w")
    assert sorted(map(len, runs))[-3:] == [1, config.n_layer, config.n_layer]
