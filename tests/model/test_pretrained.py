"""Saving and loading a model: whole files, nothing executed, and every misfit named in one line."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.helpers import tiny_model
from transformer_xl.checkpoint.run_directory import load
from transformer_xl.config.model import read_config
from transformer_xl.config.run import TokenizerConfig
from transformer_xl.errors import CheckpointError
from transformer_xl.model.pretrained import fitting_blueprint
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.tensor_file import TensorFile
from transformer_xl.tokenizers.kinds import train_tokenizer

SIZES: dict[str, Any] = {"vocab_size": 13, "n_layer": 2, "d_model": 10}
IDS = torch.arange(12).view(2, 6)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    tiny_model(d_embed=6, tie_weight=False, clamp_len=9).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_saved_model_loads_back_bit_for_bit(dtype: torch.dtype, tmp_path: Path) -> None:
    model = tiny_model(d_embed=6, untie_r=True, same_length=True).to(dtype).train()
    model.save_pretrained(str(tmp_path / "a" / "b"))
    loaded = TransformerXL.from_pretrained(tmp_path / "a" / "b")
    assert loaded.config == model.config
    assert not loaded.training
    assert all(parameter.requires_grad for parameter in loaded.parameters())
    names = ["config.json", "manifest.json", "model.safetensors"]
    assert sorted(path.name for path in (tmp_path / "a" / "b").iterdir()) == names
    for name, tensor in model.state_dict().items():
        assert loaded.state_dict()[name].dtype == dtype and torch.equal(loaded.state_dict()[name], tensor), name
    assert torch.equal(loaded(IDS).logits, model.eval()(IDS).logits)
    out = loaded(IDS, labels=IDS)
    assert out.nll is not None
    out.nll.sum().backward()


def test_a_tokenizer_of_another_model_is_refused(saved: Path) -> None:
    train_tokenizer(TokenizerConfig(kind="char"), ["ab"]).save(saved / "tokenizer.json")
    with pytest.raises(CheckpointError, match=r"has 2 tokens, its config.json 13; they do not belong together, restore those"):
        load(saved)


def test_a_model_without_its_tokenizer_is_not_loaded_by_name(saved: Path) -> None:
    remedy = "save the tokenizer there, convert again with --vocabulary FILE, or load the model alone, with from_pretrained"
    with pytest.raises(CheckpointError, match=f"has no tokenizer.json; {remedy} of its class$"):
        load(saved)


def edit(path: Path, **changes: Any) -> None:
    values = json.loads(path.read_text())
    values.update(changes)
    path.write_text(json.dumps({name: value for name, value in values.items() if value != "drop"}))


def change_weights(path: Path, change: Any) -> None:
    weights = load_file(path)
    change(weights)
    save_file(weights, path)
    (path.parent / "manifest.json").unlink(missing_ok=True)


def change_type(folder: Path, name: str, dtype: torch.dtype) -> None:
    change_weights(folder / "model.safetensors", lambda weights: weights.update({name: weights[name].to(dtype)}))


@pytest.mark.parametrize(
    ("damage", "match"),
    [
        (lambda d: (d / "config.json").write_text("{"), "config.json' is not valid JSON"),
        (lambda d: edit(d / "config.json", model_type="gpt2"), r"of a kind that is not registered \('gpt2'\)"),
        (lambda d: edit(d / "config.json", d_inner="14"), r"d_inner \('14'\) must be a valid integer"),
        (lambda d: edit(d / "config.json", d_head=10**18), r"model.safetensors': a model of these sizes cannot be built"),
        (lambda d: edit(d / "config.json", auto_map="evil.py"), "config.json': unknown key 'auto_map'"),
        (lambda d: edit(d / "config.json", d_inner=15), r"has shape \(.*14.*\), its config asks for \(.*15.*\)"),
        (lambda d: edit(d / "config.json", n_layer=3), r"'layers.2.*' has shape None, its config asks for"),
        (lambda d: edit(d / "config.json", n_layer=10**9), "tensors, its config asks for 1,000,000,000 layers"),
        (lambda d: edit(d / "config.json", n_layer=1), r"'layers.1.*' has shape .*, its config asks for None"),
        (lambda d: (d / "model.safetensors").write_bytes(b"\x80\x04pickle" * 9), "is no sound safetensors file"),
        (lambda d: change_type(d, "r_w_bias", torch.int32), "'r_w_bias' is torch.int32, where torch.float32 is expected"),
        (lambda d: change_weights(d / "model.safetensors", lambda w: w.pop("r_w_bias")), "'r_w_bias' has shape None"),
    ],
)
def test_misfits_are_named_in_one_line(saved: Path, damage: Any, match: str) -> None:
    damage(saved)
    with pytest.raises(CheckpointError, match=match) as caught:
        TransformerXL.from_pretrained(saved)
    assert "\n" not in str(caught.value)


def test_mixed_types_become_the_widest(saved: Path) -> None:
    change_type(saved, "r_w_bias", torch.float64)
    model = TransformerXL.from_pretrained(saved)
    assert model(IDS).logits.dtype == torch.float64


def test_nothing_is_allotted_before_all_tensors_are_known_to_fit(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TensorFile, "load", lambda _: pytest.fail("it was read"))
    with pytest.raises(CheckpointError, match=r"'layers.2.*' has shape None"):
        edit(saved / "config.json", n_layer=3)
        TransformerXL.from_pretrained(saved)


def test_a_blueprint_takes_no_memory(saved: Path) -> None:
    file, config = TensorFile(saved / "model.safetensors"), read_config(saved / "config.json")
    assert all(parameter.is_meta for parameter in fitting_blueprint(TransformerXL, config, file.tensors, "x").parameters())


@pytest.mark.parametrize("source", ["/nowhere/at/all", "./gone", "~/gone", "gone"])
def test_a_path_that_is_not_there_is_not_looked_for_on_the_hub(source: str) -> None:
    with pytest.raises(CheckpointError, match=f"'{source}' is not a directory of a model; give a run, an exported directory"):
        TransformerXL.from_pretrained(source)


def test_a_hub_id_without_network_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def unreachable(*_: Any, **__: Any) -> str:
        raise ConnectionError("no route\nto host")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unreachable)
    with pytest.raises(
        CheckpointError, match=r"'me/mine' is neither a directory nor a hub id that can be read \(no route; for a hub id"
    ):
        TransformerXL.from_pretrained("me/mine")


@pytest.mark.parametrize("folder", ["runs", "models", "/runs"])
def test_a_directory_with_nearly_that_name_is_proposed(
    folder: str, saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def unknown(repo_id: str, **_: Any) -> str:
        asked.append(repo_id)
        raise LookupError("no such repository")

    monkeypatch.setattr("huggingface_hub.snapshot_download", unknown)
    monkeypatch.chdir(tmp_path)
    place = tmp_path / "runs" if folder.startswith("/") else Path(folder)
    (place / "quickstrat2").mkdir(parents=True)  # nearer, but no model
    saved.rename(place / "quickstart")
    with pytest.raises(CheckpointError, match=rf"; did you mean '{place}/quickstart'\?$"):
        TransformerXL.from_pretrained(place / "quickstrat")
    assert asked == (["models/quickstrat"] if folder == "models" else [])  # runs are no user of the hub
    if folder == "runs":
        with pytest.raises(CheckpointError, match=r"'quickstart' is not a .*; did you mean 'runs/quickstart'\?$"):
            TransformerXL.from_pretrained("quickstart")
    for number in range(8):
        shutil.copytree(place / "quickstart", place / str(number))
    with pytest.raises(CheckpointError, match=rf"; known: {place}/0, {place}/1, .*, {place}/7, {place}/quickstart$"):
        TransformerXL.from_pretrained(place / "unlike")


def test_a_hub_id_is_downloaded_without_anything_executable(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def snapshot_download(repo: str, *, allow_patterns: list[str], **options: Any) -> str:
        asked.update(repo=repo, patterns=allow_patterns, **options)
        return str(saved)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    assert TransformerXL.from_pretrained("me/mine", revision="v1").config.d_model == 10
    patterns = ["config.json", "model.safetensors", "tokenizer.json", "manifest.json"]
    assert asked == {"repo": "me/mine", "patterns": patterns, "revision": "v1", "token": None}


def test_a_write_that_fails_leaves_the_old_model(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path.name: path.read_bytes() for path in saved.iterdir()}

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*model.safetensors"):
        tiny_model().save_pretrained(saved)
    assert {path.name: path.read_bytes() for path in saved.iterdir()} == before


def test_a_saved_model_has_its_tokenizer_and_a_manifest_of_both(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TokenizerConfig(kind="char"), ["hello"])
    model = tiny_model(vocab_size=tokenizer.vocab_size)
    model.save_pretrained(tmp_path, tokenizer=tokenizer)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("config.json", "manifest.json", "model.safetensors", "tokenizer.json")
    ]
    loaded, same = load(tmp_path)
    assert same.fingerprint == tokenizer.fingerprint
    assert torch.equal(loaded(IDS % 4).logits, model(IDS % 4).logits)
    for name in ("model.safetensors", "tokenizer.json"):
        path = tmp_path / name
        sound = path.read_bytes()
        path.write_bytes(sound.replace(b"hello", b"jello") if name == "tokenizer.json" else sound[:-1] + bytes([sound[-1] ^ 1]))
        path.write_bytes(path.read_bytes().replace(b'"char"', b'"char" '))
        remedy = r"\(manifest.json\); restore it from a copy, or delete manifest.json if it was changed on purpose$"
        with pytest.raises(CheckpointError, match=rf"{name}' is damaged: its sha256 is .* was written {remedy}"):
            load(tmp_path)
        path.write_bytes(sound)
    model.save_pretrained(tmp_path)  # without its tokenizer, which stays, but is another's for all that is known
    assert load(tmp_path)[1].fingerprint == tokenizer.fingerprint
    (tmp_path / "manifest.json").write_text('{"files": {}}')
    with pytest.raises(CheckpointError, match=r"manifest.json' is damaged: it does not list model.safetensors; restore"):
        load(tmp_path)
    (tmp_path / "manifest.json").write_text("[]")
    with pytest.raises(CheckpointError, match=r"manifest.json' is damaged: it is no manifest; restore it from a copy, or"):
        load(tmp_path)
    (tmp_path / "manifest.json").unlink()
    assert torch.equal(load(tmp_path)[0](IDS % 4).logits, model(IDS % 4).logits)


def test_a_save_that_is_killed_leaves_a_model_without_a_manifest_of_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class KilledError(BaseException):
        pass

    def kill(*_: Any) -> None:
        raise KilledError

    tiny_model().save_pretrained(tmp_path)
    new = tiny_model()
    with monkeypatch.context() as patch, pytest.raises(KilledError):
        patch.setattr("transformer_xl.model.pretrained.replace_file", kill)
        new.save_pretrained(tmp_path)
    assert not (tmp_path / "manifest.json").exists()
    assert torch.equal(TransformerXL.from_pretrained(tmp_path)(IDS).logits, new(IDS).logits)


class Hub:
    """Takes the place of `huggingface_hub.HfApi`; keeps what would have been uploaded in a directory."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.calls = folder, []

    def __call__(self, token: str | None) -> "Hub":
        self.calls.append(("token", token))
        return self

    def create_repo(self, repo_id: str, *, private: bool, exist_ok: bool) -> None:
        self.calls.append(("create", repo_id, private, exist_ok))

    def upload_folder(self, *, repo_id: str, folder_path: str, commit_message: str) -> str:
        self.calls.append(("upload", repo_id, commit_message))
        shutil.copytree(folder_path, self.folder)
        return f"https://hub/{repo_id}/commit/1"


def test_an_uploaded_model_loads_with_its_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.HfApi", hub)
    tokenizer = train_tokenizer(TokenizerConfig(kind="char"), ["hello"])
    model = tiny_model(vocab_size=tokenizer.vocab_size)
    address = model.push_to_hub("me/mine", tokenizer=tokenizer, private=True, token="secret", commit_message="First")
    assert address == "https://hub/me/mine/commit/1"
    assert hub.calls == [("token", "secret"), ("create", "me/mine", True, True), ("upload", "me/mine", "First")]
    names = {"README.md", "config.json", "manifest.json", "model.safetensors", "tokenizer.json"}
    assert {path.name for path in hub.folder.iterdir()} == names
    loaded, same = load(hub.folder)
    assert same.fingerprint == tokenizer.fingerprint
    assert torch.equal(loaded(IDS % 4).logits, model(IDS % 4).logits)
    card = (hub.folder / "README.md").read_text()
    assert 'model, tokenizer = txl.load("me/mine")' in card and "# mine" in card and "2 layers of width 10" in card


def test_a_model_without_tokenizer_says_how_to_load_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(tmp_path / "hub")
    monkeypatch.setattr("huggingface_hub.HfApi", hub)
    (model := tiny_model()).push_to_hub("me/mine")
    assert hub.calls[1] == ("create", "me/mine", False, True)
    assert not (hub.folder / "tokenizer.json").exists()
    card = (hub.folder / "README.md").read_text()
    n_parameter = sum(parameter.numel() for parameter in model.parameters())
    assert 'model = txl.TransformerXL.from_pretrained("me/mine")' in card and f"{n_parameter:,} parameters" in card


def test_a_hub_that_refuses_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any, **__: Any) -> Any:
        raise PermissionError("401 Unauthorized\nask the owner")

    monkeypatch.setattr("huggingface_hub.HfApi.create_repo", refuse)
    with pytest.raises(CheckpointError, match=r"cannot upload to 'me/mine' \(401 Unauthorized\); check the name"):
        tiny_model().push_to_hub("me/mine")


BLUEPRINT = """
import sys
import torch
from transformer_xl.config.model import read_config
from transformer_xl.model.pretrained import blueprint
from transformer_xl.model.transformer_xl import TransformerXL
from transformer_xl.config.model import TransformerXLConfig
before = set(sys.modules)
sizes = dict(vocab_size=50, n_layer=1, d_model=8, n_head=1, d_head=8, d_inner=8)
with torch.device("meta"):
    for kind in ({}, {"ngram_rows": (64,)}, {"cutoffs": (10, 20), "div_val": 2}):
        TransformerXL(TransformerXLConfig(**sizes, **kind))
print({"sympy", "torch._dynamo"} & (set(sys.modules) - before))
"""


def test_a_model_without_numbers_is_made_without_slow_libraries() -> None:
    """Each command that opens a run makes one, and nobody wants to wait for a library of algebra."""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", BLUEPRINT], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
