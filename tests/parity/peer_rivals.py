"""The rivals of benchmarks/race.py against their libraries' own models; pytest runs it in .venv-rivals, see test_rivals.py."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))

import rivals  # noqa: F401
import x_transformers
from rivals.lstm_ngrams import LstmNgrams
from rivals.rival import Rival
from rivals.settings import LstmNgramsConfig, MistralConfig, XlstmConfig, XTransformersConfig
from transformers import MistralConfig as TheirMistralConfig
from transformers import MistralForCausalLM
from xlstm.xlstm_large.model import xLSTMLarge, xLSTMLargeConfig

import transformer_xl as txl
from transformer_xl.batch import Rows
from transformer_xl.config.run import OptimConfig
from transformer_xl.errors import ConfigError
from transformer_xl.model.build import make_model
from transformer_xl.training.optim import Optimizers

V, B, T = 13, 3, 8
SIZES: dict[str, Any] = {"vocab_size": V, "n_layer": 2, "d_model": 24, "n_head": 3, "d_inner": 40, "dropout": 0.0}
CONFIGS = {
    "x-transformers": XTransformersConfig(**SIZES, d_head=8, mem_len=8),
    "x-transformers-shift": XTransformersConfig(**SIZES, d_head=8, mem_len=8, shift_tokens=1),
    "xlstm": XlstmConfig(**SIZES, chunk_size=4),
    "mistral": MistralConfig(**SIZES, d_head=8, mem_len=7),
}
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


@pytest.fixture(params=CONFIGS)
def rival(request: pytest.FixtureRequest) -> Rival:
    torch.manual_seed(0)
    model = make_model(CONFIGS[request.param])
    assert isinstance(model, Rival)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
        model.softmax.get_parameter("bias").zero_()  # the libraries' models have none
    return model.eval()


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(V, (B, 3 * T), generator=torch.Generator().manual_seed(1))


Peer = Callable[[list[Tensor]], list[Tensor]]
"""The library's own model: logits of segments that follow each other, with its own state between them."""


def peer_of(rival: Rival) -> tuple[nn.Module, Peer]:
    """Make the library's model with the weights of the rival."""
    embedding, config = rival.embedding.get_parameter("weight").detach(), rival.config
    sizes = {"dim": 24, "depth": 2, "heads": 3, "attn_dim_head": 8}
    if isinstance(config, XTransformersConfig):
        layers = x_transformers.Decoder(
            **sizes, ff_mult=40.5 / 24, rotary_pos_emb=True, ff_relu_squared=True, shift_tokens=config.shift_tokens
        )
        theirs: Any = x_transformers.TransformerWrapper(
            num_tokens=V, max_seq_len=T, max_mem_len=8, tie_embedding=True, use_abs_pos_emb=False, attn_layers=layers
        ).eval()
        theirs.attn_layers.load_state_dict(rival.body.state_dict())
        theirs.token_emb.emb.weight.data = embedding * 24**0.5

        def read(segments: list[Tensor]) -> list[Tensor]:
            mems, found = None, []
            for segment in segments:
                logits, mems = theirs(segment, mems=mems, return_mems=True)
                found.append(logits)
            return found

    elif isinstance(config, XlstmConfig):
        theirs = xLSTMLarge(
            xLSTMLargeConfig(
                embedding_dim=24,
                num_heads=3,
                num_blocks=2,
                vocab_size=V,
                ffn_proj_factor=40 / 24,
                ffn_round_up_to_multiple_of=1,
                chunkwise_kernel="chunkwise--native_custbw",
                sequence_kernel="native_sequence__native",
                step_kernel="native",
                mode="train",
                chunk_size=4,
                return_last_states=True,
                autocast_kernel_dtype="float32",
                output_logit_soft_cap=None,  # pyright: ignore[reportArgumentType]  # which its code allows
            )
        ).eval()
        theirs.backbone.load_state_dict(rival.body.state_dict())
        theirs.embedding.weight.data = theirs.lm_head.weight.data = embedding

        def read(segments: list[Tensor]) -> list[Tensor]:
            state, found = None, []
            for segment in segments:
                logits, state = theirs(segment, state)
                found.append(logits)
            return found

    else:
        theirs = MistralForCausalLM(
            TheirMistralConfig(
                vocab_size=V,
                hidden_size=24,
                num_hidden_layers=2,
                intermediate_size=40,
                num_attention_heads=3,
                num_key_value_heads=3,
                head_dim=8,
                sliding_window=8,
                tie_word_embeddings=True,
                pad_token_id=None,
            )
        ).eval()
        own = {name: x for name, x in rival.body.state_dict().items() if not name.startswith("embed_tokens")}
        assert theirs.model.load_state_dict(own, strict=False).missing_keys == ["embed_tokens.weight"]
        theirs.model.embed_tokens.weight.data.copy_(embedding)

        def read(segments: list[Tensor]) -> list[Tensor]:
            cache, found = None, []
            for segment in segments:
                out = theirs(segment, cache=cache, use_cache=True)
                cache = out.cache
                found.append(out.logits)
            return found

    return theirs, read


def logits_of(rival: Rival, segments: list[Tensor], mems: Any = None) -> tuple[list[Tensor], Any]:
    found, mems = [], rival.init_mems(len(segments[0])) if mems is None else mems
    for segment in segments:
        out = rival(segment, mems=mems)
        assert out.logits is not None
        mems = out.mems
        found.append(out.logits)
    return found, mems


@torch.no_grad()
def test_logits_are_the_librarys_over_segments_with_its_state(rival: Rival, ids: Tensor) -> None:
    _, read = peer_of(rival)
    segments = list(ids.split(T, dim=1))
    expected = read(segments)
    found, _ = logits_of(rival, segments)
    for own, its in zip(found, expected, strict=True):
        torch.testing.assert_close(own, its, **CLOSE)
    alone = read(segments[1:2])[0]
    assert not torch.allclose(expected[1], alone, atol=1e-3), "a state that makes no difference proves nothing"
    assert found[0].std() > 0.1


def test_gradients_are_the_librarys(rival: Rival, ids: Tensor) -> None:
    """Of a segment after another, as in training: Mistral trains without what it remembers."""
    theirs, read = peer_of(rival)
    first, second = ids[:, :T], ids[:, T : 2 * T]
    with torch.no_grad():
        _, mems = logits_of(rival, [first])
    rival.train()
    out = rival(second, mems=mems, labels=second)
    assert out.nll is not None
    out.nll.mean().backward()
    if isinstance(rival.config, MistralConfig):
        logits = read([second])[0]
    elif isinstance(rival.config, XTransformersConfig):
        with torch.no_grad():
            _, their_mems = theirs(first, return_mems=True)
        logits = theirs(second, mems=their_mems)
    else:
        with torch.no_grad():
            _, state = theirs(first)
        # its loop writes into the state that it is given, which gradients then miss: so block by block
        x = theirs.embedding(second)
        for i, block in enumerate(theirs.backbone.blocks):
            x, _ = block(x, state[i])
        logits = theirs.lm_head(theirs.backbone.out_norm(x))
    torch.nn.functional.cross_entropy(logits.flatten(0, 1), second.flatten()).backward()
    body = dict(rival.body.named_parameters())
    bodies = {"x_transformers": "attn_layers", "xlstm": "backbone", "mistral": "model"}
    its = dict(theirs.get_submodule(bodies[rival.config.kind]).named_parameters())
    compared = 0
    for name, parameter in body.items():
        if name.startswith("embed_tokens"):
            continue
        assert parameter.grad is not None and parameter.grad.abs().sum() > 0, name
        assert its[name].grad is not None
        torch.testing.assert_close(parameter.grad, its[name].grad, rtol=1e-3, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")
        compared += 1
    assert compared == len(its) - (rival.config.kind == "mistral")


def test_all_that_learns_is_registered_and_has_its_optimizer(rival: Rival) -> None:
    assert not rival.body.training and rival.train().body.training and not rival.eval().body.training
    own = {id(p) for p in rival.parameters()}
    assert [n for n, p in rival.body.named_parameters() if id(p) not in own] in ([], ["embed_tokens.weight"])
    by_muon, by_adamw = (
        {id(p) for group in part.param_groups for p in group["params"]}
        for part in Optimizers(rival, OptimConfig(optimizer="muon")).parts
    )
    assert by_muon | by_adamw == own
    for name, parameter in rival.named_parameters():
        is_matrix = parameter.dim() == 2 and name.startswith("layers.")
        assert (id(parameter) in by_muon) == is_matrix, name
    matrices = {name.split(".")[-2] for name, p in rival.named_parameters() if id(p) in by_muon}
    assert len(matrices) >= 6 and not any("igate" in name or "fgate" in name or "norm" in name for name in matrices)


@torch.no_grad()
def test_rows_are_reset_padded_and_chosen(rival: Rival, ids: Tensor) -> None:
    """A row does not know of the others; nor of what it read before it was emptied; nor of padding."""
    first, second = ids[:, :T], ids[:, T : 2 * T]
    _, mems = logits_of(rival, [first])
    (plain,), _ = logits_of(rival, [second], mems)
    (fresh,), _ = logits_of(rival, [second])
    row = torch.tensor([False, True, False])
    (found,), after = logits_of(rival, [second], mems.reset(row))
    torch.testing.assert_close(found[1], fresh[1], **CLOSE)
    torch.testing.assert_close(found[[0, 2]], plain[[0, 2]], **CLOSE)
    assert not torch.allclose(plain[1], fresh[1], atol=1e-3)
    emptied = mems.reset(row).state_dict().values()
    assert not any(x[1].any() for x in emptied)
    third = ids[:, 2 * T :]
    (later,), _ = logits_of(rival, [third], after)  # rows of two ages, for one more segment
    (alone,), _ = logits_of(rival, [third[1:2]], logits_of(rival, [second[1:2]])[1])
    torch.testing.assert_close(later[1:2], alone, **CLOSE)
    (one,), _ = logits_of(rival, [second[2:]], mems.select(slice(2, 3)))
    torch.testing.assert_close(one, plain[2:], **CLOSE)

    n_pad = torch.tensor([3, T, 0])
    out = rival(second, mems=mems, rows=Rows(n_pad=n_pad))
    (short,), short_mems = logits_of(rival, [second[:1, 3:]], mems.select(slice(0, 1)))
    torch.testing.assert_close(out.logits[:1, 3:], short, **CLOSE)
    torch.testing.assert_close(out.logits[2], plain[2], **CLOSE)
    for name, x in out.mems.state_dict().items():
        torch.testing.assert_close(x[:1], short_mems.state_dict()[name], **CLOSE)
        torch.testing.assert_close(x[1:2], mems.state_dict()[name][1:2])


@torch.no_grad()
def test_a_state_is_read_the_same_however_the_text_is_cut(rival: Rival, ids: Tensor) -> None:
    if isinstance(rival.config, XTransformersConfig):
        pytest.skip("what a token sees depends on its place in the segment, as in a Transformer-XL")
    (whole,), _ = logits_of(rival, [ids])
    pieces, _ = logits_of(rival, [*ids[:, :13].split(1, dim=1), ids[:, 13:15], ids[:, 15:]])
    torch.testing.assert_close(torch.cat(pieces, dim=1), whole, **CLOSE)


@torch.no_grad()
def test_without_memory_segments_are_separate(rival: Rival, ids: Tensor) -> None:
    segments = list(ids.split(T, dim=1))
    found, _ = logits_of(rival.with_context(mem_len=0), segments)
    for own, segment in zip(found, segments, strict=True):
        torch.testing.assert_close(own, logits_of(rival, [segment])[0][0], **CLOSE)


def test_a_model_is_saved_and_loaded(rival: Rival, ids: Tensor, tmp_path: Path) -> None:
    rival.save_pretrained(tmp_path)
    again = type(rival).from_pretrained(tmp_path)
    text = ids.flatten().numpy()
    score = txl.evaluate(rival, text, tgt_len=T, batch_size=2)
    assert txl.evaluate(again, text, tgt_len=T, batch_size=2).nats == score.nats
    assert len(list(txl.generate(rival, ids[0, :5], max_new_tokens=4, seed=1))) == 4


def test_training_goes_on_exactly(rival: Rival, tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 200)
    settings = {name: value for name, value in rival.config.model_dump().items() if name != "vocab_size" and value is not None}
    lines = [f"{name} = {str(value).lower() if isinstance(value, bool) else repr(value)}" for name, value in settings.items()]
    lines = [line.replace("()", "[]") for line in lines]
    training = '[tokenizer]\nkind = "char"\n[optim]\noptimizer = "muon"\nlr = 0.02\nadamw_lr = 0.01\n'
    training += "[train]\nbatch_size = 4\ntgt_len = 8\nmax_steps = 12\nprecision = 'fp32'\nsample_tokens = 0\n"
    recipe = tmp_path / "tiny.toml"
    recipe.write_text("\n".join(["[model]", f'kind = "{rival.config.kind}"', *lines, training]))
    quiet = {"corpus": str(tmp_path / "text.txt"), "display": _quiet()}
    whole = txl.train(str(recipe), out=tmp_path / "whole", **quiet)
    txl.train(str(recipe), out=tmp_path / "parts", overrides=["train.max_steps=5", "optim.schedule=constant"], **quiet)
    assert whole.score is not None and whole.score.loss < 2.5
    ended = txl.train(out=tmp_path / "whole2", recipe=str(recipe), overrides=["optim.schedule=constant"], **quiet)
    resumed = txl.train(None, out=tmp_path / "parts", overrides=["train.max_steps=12"], resume=True, display=_quiet())
    assert ended.score is not None and resumed.score is not None and resumed.score.nats == ended.score.nats


def _quiet() -> Any:
    from transformer_xl.training.display import Display

    return Display(quiet=True)


def test_what_a_rival_cannot_do_is_one_line(rival: Rival, ids: Tensor) -> None:
    starts = torch.zeros_like(ids, dtype=torch.bool)
    with pytest.raises(ConfigError, match=r"cannot begin a document inside a segment; use train.reset_at_documents=false"):
        rival(ids, rows=Rows(document_starts=starts))
    with pytest.raises(ConfigError, match=r"ext_len \(2\) must be 0 with a memory"):
        rival.with_context(ext_len=2)
    if isinstance(rival.config, XlstmConfig):
        with pytest.raises(ConfigError, match="must be 1 or 0"):
            rival.with_context(mem_len=5)
        with pytest.raises(ValueError, match=r"train.tgt_len \(6\) must be a multiple of model.chunk_size \(4\)"):
            rival.config.completed(vocab_size=V, tgt_len=6)


@torch.no_grad()
@pytest.mark.parametrize("name", ["lstm-ngrams"])
def test_an_lstm_adds_the_vectors_of_pairs_and_triples_over_segments(name: str, ids: Tensor) -> None:
    """Against torch.nn.LSTM over a sum of three vectors a token; every n-gram has a row of its own."""
    torch.manual_seed(0)
    config = LstmNgramsConfig(vocab_size=V, n_layer=2, d_model=24, ngram_rows=[(V + 1) ** 2, (V + 1) ** 3])
    model = LstmNgrams(config).eval()
    pairs, triples = model.ngrams.tables
    x_BLD, code = torch.zeros(*ids.shape, 24), (ids + 1).tolist()
    for b, row in enumerate(code):
        for t, one in enumerate(row):
            before, first = row[t - 1] if t else 0, row[t - 2] if t > 1 else 0
            x_BLD[b, t] = model.embedding.get_parameter("weight")[one - 1] + pairs[one + before * (V + 1)]
            x_BLD[b, t] += triples[one + before * (V + 1) + first * (V + 1) ** 2]
    h_BLD = x_BLD * 24**0.5
    for layer in model.layers:
        h_BLD, _ = layer.get_submodule("lstm")(h_BLD)
    mems, found = None, []
    for segment in ids.split(T, dim=1):
        h_BTD, mems = model.read(segment, mems=mems)
        found.append(h_BTD)
    torch.testing.assert_close(torch.cat(found, dim=1), h_BLD, **CLOSE)
