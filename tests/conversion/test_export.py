"""Models under the names of Hugging Face and of the authors, and back again."""

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.conversion.examples import names
from tests.helpers import assert_close, random_weights, tiny_model, tiny_xlnet
from tests.parity.reading import goldens, read_golden
from tests.training.helpers import entries, write_recipe, write_text
from transformer_xl.checkpoint.run_directory import load
from transformer_xl.config.model import HeadConfig
from transformer_xl.config.recipes import load_recipe
from transformer_xl.conversion.convert import convert
from transformer_xl.conversion.export import Target, export, load_model
from transformer_xl.conversion.key_maps import authors
from transformer_xl.conversion.sources import open_source
from transformer_xl.errors import CheckpointError
from transformer_xl.model.task_model import TaskModel
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.model.xlnet import XLNet
from transformer_xl.tokenizers.kinds import (
    SymbolTokenizer,
    Tokenizer,
    WordTokenizer,
    load_tokenizer,
)
from transformer_xl.training.run import train

WORDS = ["<eos>", "<unk>", *"abcdefghijk"]
VOCABULARY = WordTokenizer(WORDS, line_end="<eos>", unknown="<unk>")
ZEROS = {"zero_first_memory": True}

BOTH: list[dict[str, Any]] = [
    {},
    {"tie_weight": False, "d_embed": 6},
    {"cutoffs": (4, 9), "d_embed": 6, "tie_projs": (False, True, True)},
    {"cutoffs": (4, 9), "d_embed": 6},
    {"cutoffs": (4, 7, 9), "div_val": 2, "tie_projs": (True, True, False, True)},
    {"cutoffs": (4, 9), "div_val": 2, "tie_weight": False},
    {"pre_lnorm": True, "clamp_len": 3, "same_length": True, "dropout": 0.25, "dropatt": 0.125},
    {"mem_len": 0},
]
CASES = [
    *(
        ("huggingface", ZEROS | changes)
        for changes in (*BOTH, {"untie_r": True}, {"layer_norm_epsilon": 1e-3, "init": "uniform"})
    ),
    *(("authors", changes) for changes in BOTH),
    ("authors", {"attention": "shaw", "max_klen": 11}),
    ("authors", {"attention": "vaswani"}),
    ("authors", {"attention": "al_rfou", "max_klen": 9, "n_head": 2, "d_head": 5}),
    ("authors", {"proj_same_dim": False}),  # has no effect without clusters of other widths
]


def write(model: TransformerXL | XLNet | TaskModel, folder: Path, tokenizer: Tokenizer | None = None) -> Path:
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save(folder / "tokenizer.json")
    return folder


@pytest.mark.parametrize(("kind", "changes"), CASES)
def test_there_and_back_again(kind, changes, tmp_path):
    """The same weights, bit by bit, and the same settings but for those that say nothing there."""
    model = tiny_model(**changes)
    done = export(write(model, tmp_path / "native"), tmp_path / "foreign", kind=kind)
    assert done.kind == kind
    assert done.n_parameters == sum(parameter.numel() for parameter in model.parameters())
    config = model.config
    said: dict[str, Any] = {"d_embed": config.d_embed or config.d_model, "tie_projs": config.tied_projections}
    if kind == "huggingface":
        convert(tmp_path / "foreign", tmp_path / "again")
        again = TransformerXL.from_pretrained(tmp_path / "again")
        assert again.config == config.model_copy(update=said)
        weights = again.state_dict()
    else:
        flags = json.loads((tmp_path / "foreign" / "arguments.json").read_text())
        assert authors.config_of(flags) == config.model_copy(update=said | {"proj_same_dim": True})
        state = load_file(tmp_path / "foreign" / "model.safetensors")
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        key_map = authors.key_map(config)
        found = key_map.locate({name: tuple(tensor.shape) for name, tensor in state.items()}, "state")
        for part in key_map.parts():
            assert set(found[part.name]) == {part.name, *part.aliases}  # load_state_dict asks for every name
            assert all(torch.equal(state[name], state[part.name]) for name in found[part.name])
        weights = {name: key_map.native(name, shapes, lambda part: state[part.name]) for name in shapes}
    for name, tensor in model.state_dict().items():
        assert torch.equal(weights[name], tensor), name


XLNETS: list[dict[str, Any]] = [
    {},
    {"tie_weight": False, "activation": "relu", "layer_norm_epsilon": 1e-5},
    {"activation": "gelu", "clamp_len": 3, "reuse_len": 2, "dropout": 0.25, "dropatt": 0.25},
    {"mem_len": 0, "activation": "relu2"},
    {"untie_r": False},
]
FITTING = {"n_head": 2, "d_head": 5}


@pytest.mark.parametrize("changes", XLNETS)
def test_an_xlnet_goes_to_hugging_face_and_back_again(changes, tmp_path):
    """What all layers share has, there, a copy for each."""
    model = tiny_xlnet(**FITTING, **changes)
    done = export(write(model, tmp_path / "native"), tmp_path / "foreign", kind="huggingface")
    assert (done.kind, done.notes) == ("huggingface", ("no vocabulary was written: the model has no tokenizer",))
    assert names(tmp_path / "foreign") == ["README.md", "config.json", "model.safetensors"]
    convert(tmp_path / "foreign", tmp_path / "again")
    again = XLNet.from_pretrained(tmp_path / "again")
    assert again.config == model.config.model_copy(update={"untie_r": True})
    weights = again.state_dict()
    for name, tensor in model.state_dict().items():
        assert torch.equal(weights[name], tensor.expand_as(weights[name])), name


@pytest.mark.parametrize("changes", XLNETS)
def test_an_exported_xlnet_computes_the_same_at_hugging_face(changes, tmp_path):
    """In transformers 5, with memory; every tensor is there, under a name that it looks up."""
    transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    model = tiny_xlnet(**FITTING, **changes)
    export(write(model, tmp_path / "native"), tmp_path / "foreign", kind="huggingface")
    theirs, found = transformers.XLNetLMHeadModel.from_pretrained(tmp_path / "foreign", output_loading_info=True)
    assert not any(found.values())
    mems, their_mems = model.init_mems(2, length=0), None
    model = model.with_context(ext_len=6 - (model.config.reuse_len or 6))  # theirs keeps to it in reading, too
    for segment in range(3):
        ids = torch.randint(13, (2, 6))
        texts = torch.randint(3, (2, 6))
        h_BTD, mems = model.read(ids, mems=mems, segments=texts)
        output = theirs.eval()(ids, mems=their_mems, token_type_ids=texts)
        their_mems = output.mems
        assert_close(f"logits of segment {segment}", output.logits, model.softmax.logits(h_BTD, model.embedding), 5e-6)
    assert (their_mems is None) == (model.mem_len == 0)


LABELS = ("bad", "good")
TASKS: list[dict[str, Any]] = [
    {"kind": "classification", "labels": LABELS, "dropout": 0.25},
    {"kind": "classification", "labels": (*LABELS, "so so"), "projection": False, "summary": "mean"},
    {"kind": "multilabel", "labels": ("spam",)},
    {"kind": "regression"},
    {"kind": "choice"},
    {"kind": "span"},
    {"kind": "tokens", "labels": ("B-PER", "I-PER", "O"), "dropout": 0.0},
]


def tiny_task(head: dict[str, Any], **changes: Any) -> TaskModel:
    return random_weights(
        TaskModel(tiny_xlnet(**FITTING, **changes).config.model_copy(update={"head": HeadConfig(**head)})).eval()
    )


@pytest.mark.parametrize("untie_r", [True, False])
@pytest.mark.parametrize("head", TASKS, ids=lambda head: head["kind"])
def test_a_fine_tuned_xlnet_goes_to_hugging_face_and_back_again(head, untie_r, tmp_path):
    """All but what predicts tokens, which it has no use for."""
    model = tiny_task(head, tie_weight=untie_r, untie_r=untie_r)
    done = export(write(model, tmp_path / "native"), tmp_path / "foreign", kind="huggingface")
    assert [note for note in done.notes if note.startswith("what predicts tokens (lm_loss) was left out")]
    convert(tmp_path / "foreign", tmp_path / "again")
    again, _ = load_model(tmp_path / "again", kinds=("xlnet",))
    assert again.config == model.config.model_copy(update={"untie_r": True})
    weights = again.state_dict()
    for name, tensor in model.state_dict().items():
        expected = torch.zeros_like(tensor) if name.startswith("backbone.softmax") else tensor.expand_as(weights[name])
        assert torch.equal(weights[name], expected), name


@pytest.mark.parametrize("head", TASKS, ids=lambda head: head["kind"])
def test_an_exported_fine_tuned_xlnet_computes_the_same_at_hugging_face(head, tmp_path):
    """In transformers 5; `from_pretrained` finds every tensor, and the labels."""
    transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
    model = tiny_task(head, activation="gelu_tanh")
    export(write(model, tmp_path / "native"), tmp_path / "foreign", kind="huggingface")
    values = json.loads((tmp_path / "foreign" / "config.json").read_text())
    assert values["ff_activation"] == "gelu_new"
    (name,) = values["architectures"]
    theirs, found = getattr(transformers, name).from_pretrained(tmp_path / "foreign", output_loading_info=True)
    assert not any(found.values())
    ids, texts = torch.randint(13, (2, 3, 6)), torch.randint(3, (2, 3, 6))
    if head["kind"] != "choice":
        ids, texts = ids[:, 0], texts[:, 0]
    output = theirs.eval()(ids, token_type_ids=texts)
    if head["kind"] == "span":
        spans = model.span_scores(ids, segments=texts)
        assert_close("starts", output.start_top_log_probs.log(), spans.start_log_probs, 5e-6)  # they are probabilities
        assert_close("no answer", output.cls_logits, spans.no_answer, 5e-6)
        return
    assert_close("logits", output.logits, model(ids, segments=texts).logits, 5e-6)
    if "labels" in head:
        assert tuple(theirs.config.id2label.values()) == head["labels"]
        assert theirs.config.label2id == {label: i for i, label in enumerate(head["labels"])}


@pytest.mark.parametrize("backward_half", [False, True])
def test_what_is_read_backward_in_every_batch_goes_both_ways(backward_half, tmp_path):
    """Not what was read backward in training: there, it would turn the half of every batch around."""
    model = tiny_xlnet(**FITTING, bi_data=True, backward_half=backward_half)
    export(write(model, tmp_path / "native"), tmp_path / "foreign", kind="huggingface")
    assert json.loads((tmp_path / "foreign" / "config.json").read_text())["bi_data"] is backward_half
    again = convert(tmp_path / "foreign", tmp_path / "again")
    assert again.config == model.config
    assert any("--set backward_half=false" in note for note in again.notes) == backward_half


@pytest.mark.parametrize(
    ("kind", "prefix", "changes", "has"),
    [
        ("huggingface", "transformer.", ZEROS, True),
        ("authors", "", {}, True),
        ("authors", "", {"attention": "vaswani"}, True),
        ("authors", "", {"attention": "shaw", "max_klen": 7}, False),
    ],
)
def test_the_frequencies_of_sinusoids_are_written_where_they_are_kept(kind, prefix, changes, has, tmp_path):
    export(write(tiny_model(**changes), tmp_path / "native"), tmp_path / "foreign", kind=kind)
    state = load_file(tmp_path / "foreign" / "model.safetensors")
    assert (f"{prefix}pos_emb.inv_freq" in state) == has
    if has:
        expected = torch.tensor([10000 ** (-i / 10) for i in range(0, 10, 2)])
        torch.testing.assert_close(state[f"{prefix}pos_emb.inv_freq"], expected)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_precision_is_kept_and_mixed_precision_becomes_one(is_mixed, tmp_path):
    model = tiny_model(**ZEROS) if is_mixed else tiny_model(**ZEROS).bfloat16()
    if is_mixed:
        model.layers[1].double()
    export(write(model, tmp_path / "native"), tmp_path / "foreign", kind="huggingface")
    state = load_file(tmp_path / "foreign" / "model.safetensors")
    assert state.pop("transformer.pos_emb.inv_freq").dtype == torch.float32
    assert {tensor.dtype for tensor in state.values()} == {torch.float64 if is_mixed else torch.bfloat16}
    weight = model.layers[1].get_parameter("feed_forward.inner.weight")
    assert torch.equal(state["transformer.layers.1.pos_ff.CoreNet.0.weight"], weight)


CLASSES = HeadConfig(**TASKS[0])
OBSTACLES = ["attention=vaswani (only transformer_xl)", "activation=relu2 (only relu)", "final_norm=True (only False)"]


@pytest.mark.parametrize(
    ("make", "kind", "obstacles"),
    [
        (
            partial(tiny_model, attention="vaswani", activation="relu2", final_norm=True, untie_r=True),
            "huggingface",
            [f"model.{obstacle}" for obstacle in OBSTACLES],
        ),
        (partial(tiny_model, proj_same_dim=False, div_val=2, cutoffs=(4,)), "huggingface", ["proj_same_dim=False"]),
        (partial(tiny_model, same_length=True, same_length_besides_self=True), "authors", ["same_length_besides_self=True"]),
        (partial(tiny_model, untie_r=True, zero_first_memory=True), "authors", ["untie_r=True", "zero_first_memory=True"]),
        (partial(tiny_model, attention="rotary"), "authors", ["attention=rotary"]),
        (tiny_xlnet, "huggingface", ["model.d_head=4 (only d_model / n_head, 3.33333)"]),
        (partial(tiny_xlnet, **FITTING, pre_lnorm=True, final_norm=True), "huggingface", ["pre_lnorm=True", "final_norm=True"]),
        (partial(tiny_xlnet, **FITTING), "authors", ["Hugging Face only"]),
        (lambda: TaskModel(tiny_model().config.model_copy(update={"head": CLASSES})), "huggingface", ["only an xlnet"]),
    ],
)
def test_all_that_the_other_program_cannot_express_is_told_at_once(make, kind, obstacles, tmp_path):
    write(make(), tmp_path / "native")
    with pytest.raises(CheckpointError) as caught:
        export(tmp_path / "native", tmp_path / "foreign", kind=kind)
    assert all(obstacle in str(caught.value) for obstacle in obstacles)
    assert names(tmp_path) == ["native"]


@pytest.mark.parametrize(
    ("make", "kind", "notes"),
    [
        (partial(tiny_model, **ZEROS), "huggingface", []),
        (tiny_model, "huggingface", ["begins every stream after mem_len zero vectors"]),
        (tiny_model, "authors", []),
        (partial(tiny_model, **ZEROS, same_length_besides_self=True), "huggingface", ["same_length"]),
        (partial(tiny_model, attention="vaswani"), "authors", ["'vaswani'"]),
        (partial(tiny_model, attention="vaswani", mem_len=0), "authors", []),
        (partial(tiny_xlnet, **FITTING, **ZEROS, dropatt=0.3), "huggingface", ["zero vectors", "dropatt (0.3)"]),
        (lambda: tiny_task(TASKS[1]), "huggingface", ["lm_loss", "head.tgt_len (512 tokens)", "mean of all states"]),
        (
            lambda: tiny_task({**TASKS[1], "in_documents": True}),
            "huggingface",
            ["lm_loss", "head.tgt_len", "row of a document", "mean of all states"],
        ),
    ],
)
def test_what_will_differ_is_said(make, kind, notes, tmp_path):
    *differs, vocabulary = export(write(make(), tmp_path / "native"), tmp_path / "foreign", kind=kind).notes
    assert vocabulary.startswith("no vocabulary was written")
    assert all(part in note for part, note in zip(notes, differs, strict=True)), differs


PLAIN = WordTokenizer(WORDS, line_end="<eos>", unknown="<unk>", lower_case=True)
MOSES = WordTokenizer(WORDS, line_end="<eos>", unknown="<unk>", moses="en", never_split=["<eos>"])
BYTES = SymbolTokenizer([str(i) for i in range(40, 53)], unit="byte")


@pytest.mark.parametrize("tokenizer", [PLAIN, MOSES, BYTES], ids=["words", "moses", "bytes"])
def test_vocabularies_come_back(tokenizer, tmp_path):
    write(tiny_model(**ZEROS), tmp_path / "native", tokenizer)
    export(tmp_path / "native", tmp_path / "foreign", kind="huggingface")
    assert names(tmp_path / "foreign") == [
        *("README.md", "config.json", "model.safetensors", "tokenizer_config.json", "vocab.txt")
    ]
    if tokenizer is MOSES:
        values = json.loads((tmp_path / "foreign" / "tokenizer_config.json").read_text())
        assert values.pop("never_split") == ["<eos>"]
        assert values == {"tokenizer_class": "TransfoXLTokenizer", "lower_case": False, "delimiter": None, "language": "en"}
        assert (tmp_path / "foreign" / "vocab.txt").read_text() == "\n".join(WORDS) + "\n"
    moses = tokenizer.moses if isinstance(tokenizer, WordTokenizer) else None
    convert(tmp_path / "foreign", tmp_path / "again", moses=moses)
    again = load_tokenizer(tmp_path / "again" / "tokenizer.json")
    text = "*+,-./0123" if tokenizer is BYTES else "A b <eos> c\nk zz\n"
    assert again.encode(text).tolist() == tokenizer.encode(text).tolist()


@pytest.mark.parametrize(
    ("kind", "tokenizer", "note", "files"),
    [
        ("huggingface", MOSES, None, ["tokenizer_config.json", "vocab.txt"]),
        ("huggingface", PLAIN, "Moses rules", ["tokenizer_config.json", "vocab.txt"]),
        ("huggingface", BYTES, "no word '<unk>'", ["tokenizer_config.json", "vocab.txt"]),
        ("authors", VOCABULARY, None, ["vocab.txt"]),
        ("authors", PLAIN, "lower_case=True", ["vocab.txt"]),
        ("authors", SymbolTokenizer([*" abcdefghijkl"], unit="char"), "contain spaces", []),
    ],
)
def test_what_text_will_need_is_said(kind, tokenizer, note, files, tmp_path):
    changes = ZEROS if kind == "huggingface" else {}
    done = export(write(tiny_model(**changes), tmp_path / "native", tokenizer), tmp_path / "foreign", kind=kind)
    assert [name for name in names(tmp_path / "foreign") if name.endswith(("vocab.txt", "tokenizer_config.json"))] == files
    assert len(done.notes) == (note is not None)
    assert all(str(note) in text for text in done.notes)


def theirs(golden: Path) -> dict[str, torch.Tensor]:
    """Return all tensors of a golden's checkpoint by their own names."""
    return {name: tensor.load() for name, tensor in open_source(golden / "checkpoint").tensors.items()}


def exported(golden: Path, folder: Path, kind: Target) -> dict[str, torch.Tensor]:
    convert(golden / "checkpoint", folder / "native")
    export(folder / "native", folder / "back", kind=kind, tgt_len=5 if kind == "authors" else None)
    return load_file(folder / "back" / "model.safetensors")


WITH_ALL_NAMES = [golden for golden in goldens("huggingface") if (golden / "checkpoint" / "pytorch_model.bin").exists()]


@pytest.mark.parametrize("golden", WITH_ALL_NAMES, ids=lambda golden: golden.name)
def test_what_came_from_hugging_face_goes_back_as_it_was(golden, tmp_path):
    """By the names and settings that their own program wrote; what is tied goes under one of its names."""
    back, before = exported(golden, tmp_path, "huggingface"), theirs(golden)
    for name, tensor in back.items():
        assert torch.equal(tensor, before[name]), name
    for name in before.keys() - back.keys():
        assert any(torch.equal(before[name], tensor) for tensor in back.values()), name
    values, old = (json.loads((path / "config.json").read_text()) for path in (tmp_path / "back", golden / "checkpoint"))
    assert values.keys() - old.keys() <= {"tie_word_embeddings"}  # which they leave out where it is true
    assert {name: old.get(name, True) for name in values} == values


OF_AUTHORS = [golden for golden in goldens("authors") if golden.name != "half_data_parallel"]  # which is widened


@pytest.mark.parametrize("golden", OF_AUTHORS, ids=lambda golden: golden.name)
def test_what_came_from_the_authors_goes_back_as_it_was(golden, tmp_path):
    """With every name that their `load_state_dict` asks for, and the arguments that their model was made with."""
    back, before = exported(golden, tmp_path, "authors"), theirs(golden)
    assert back.keys() == before.keys()
    for name, tensor in back.items():
        assert torch.equal(tensor, before[name]), name
    flags = json.loads((tmp_path / "back" / "arguments.json").read_text())
    made_with = read_golden(golden / "expected.safetensors").hyperparameters
    lengths = ("tgt_len", "ext_len")
    if flags["attn_type"] in (1, 3):  # only there do they shape anything, and only their sum
        assert sum(flags[name] for name in lengths) == sum(made_with[name] for name in lengths)
    without_effect = {*lengths} | ({"tie_projs"} if not any("_projs" in name for name in before) else set())
    for name in flags.keys() - without_effect:
        assert flags[name] == made_with[name], name


def test_a_run_becomes_a_directory_with_a_card_of_its_own_figures(tmp_path: Path) -> None:
    recipe, text = write_recipe(tmp_path / "tiny.toml"), write_text(tmp_path / "text.txt")
    train(str(recipe), corpus=str(text), out=tmp_path / "run")
    done = export(tmp_path / "run", tmp_path / "mine", kind="native")
    assert names(tmp_path / "mine") == ["README.md", "config.json", "manifest.json", "model.safetensors", "tokenizer.json"]
    (model, tokenizer), (same, its) = load(tmp_path / "run"), load(tmp_path / "mine")
    assert its.fingerprint == tokenizer.fingerprint and done.notes == ()
    assert all(torch.equal(tensor, same.state_dict()[name]) for name, tensor in model.state_dict().items())
    tgt_len = load_recipe(str(recipe)).train.tgt_len
    best = min((each for each in entries(tmp_path / "run") if each["kind"] == "valid"), key=lambda each: each["loss"])
    card = (tmp_path / "mine" / "README.md").read_text()
    assert card.startswith("---\nlibrary_name: transformer_xl\npipeline_tag: text-generation\n")
    assert "text: `text.txt`, read as byte tokens" in card and str(tmp_path) not in card
    assert f"- training: {best['step']:,} steps, {best['tokens']:,} tokens in all, in segments of {tgt_len}\n" in card
    assert f"{best['loss']:.4f} nats per token\n" in card and "license:" in card.partition("---\n#")[2]
    assert 'model, tokenizer = txl.load("mine")' in card


@pytest.mark.parametrize(
    ("kind", "load_line"),
    [("huggingface", 'TransfoXLLMHeadModel.from_pretrained("foreign")'), ("authors", 'load_file("foreign/model.safetensors")')],
)
def test_a_card_for_others_says_how_they_load_it_and_invents_no_training(kind: Target, load_line: str, tmp_path: Path) -> None:
    export(write(tiny_model(), tmp_path / "native"), tmp_path / "foreign", kind=kind)
    card = (tmp_path / "foreign" / "README.md").read_text()
    assert load_line in card and "2 layers of width 10" in card and "Training" not in card
    for code in re.findall(r"```python\n(.*?)```", card, re.DOTALL):
        compile(code, "card", "exec")
