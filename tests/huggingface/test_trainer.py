"""transformers' `Trainer`: our losses, and checkpoints that both sides read."""

from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
import torch
from torch import nn

from tests.helpers import assert_close
from tests.huggingface.conftest import Saved
from transformer_xl.checkpoint.run_directory import load

transformers = pytest.importorskip("transformers", reason="the extra 'hf' is not installed")
pytest.importorskip("accelerate", reason="the extra 'hf' is not installed")

from transformers import (  # noqa: E402
    AutoModelForCausalLM,
    AutoTokenizer,
    DataCollatorForLanguageModeling,
    PreTrainedTokenizerBase,
    Trainer,
    TrainingArguments,
)

import transformer_xl.huggingface  # noqa: E402, F401

TEXTS = ["hello, wörld", "this is a te", "xt of severa", "l words\nhell"]


def trainer(saved: Saved, out: Path, texts: list[str] = TEXTS, **options: Any) -> Trainer:
    tokenizer = AutoTokenizer.from_pretrained(saved.path)
    data = [tokenizer(text) for text in texts]
    return Trainer(
        model=AutoModelForCausalLM.from_pretrained(saved.path),
        args=TrainingArguments(
            str(out), per_device_train_batch_size=2, use_cpu=True, report_to=[], disable_tqdm=True, logging_steps=1, **options
        ),
        train_dataset=data,
        eval_dataset=data,
        processing_class=tokenizer,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
    )


def model_of(run: Trainer) -> nn.Module:
    assert run.model is not None
    return run.model


def mean_nll(saved: Saved, texts: list[str]) -> torch.Tensor:
    """Return our nats per token, each text scored alone."""
    nll = []
    for text in texts:
        ids = torch.tensor(saved.tokenizer.encode(text)[None])
        out = saved.model(ids[:, :-1], labels=ids[:, 1:])
        assert out.nll is not None
        nll.append(out.nll[0].detach())
    return torch.cat(nll).mean()


def test_the_loss_is_ours(saved: Saved, tmp_path: Path) -> None:
    run = trainer(saved, tmp_path, max_steps=1, learning_rate=0.0, gradient_accumulation_steps=2, save_strategy="no")
    expected = mean_nll(saved, TEXTS)
    assert_close("evaluation", torch.tensor(run.evaluate()["eval_loss"]), expected, 1e-5)
    assert_close("training", torch.tensor(run.train().training_loss), expected, 1e-5)


def test_texts_of_different_length_are_scored_and_train(saved: Saved, tmp_path: Path) -> None:
    texts = ["hello, wörld", "this", "is a text", "of"]
    run = trainer(saved, tmp_path, texts, max_steps=2, save_strategy="no", per_device_eval_batch_size=4)
    assert isinstance(run.processing_class, PreTrainedTokenizerBase)
    run.processing_class.padding_side = "right"  # the first token of a row stands first, and so `Trainer` does not count it
    assert_close("evaluation", torch.tensor(run.evaluate()["eval_loss"]), mean_nll(saved, texts), 1e-5)
    run.processing_class.padding_side = "left"
    run.train()
    assert all(p.isfinite().all() for p in model_of(run).parameters())
    predictions = run.predict(cast("Any", run.eval_dataset)).predictions
    assert isinstance(predictions, np.ndarray)
    assert predictions.shape == (4, 12, saved.tokenizer.vocab_size)


def test_checkpoints_are_read_by_both_sides_and_gone_on_from(saved: Saved, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 2, "learning_rate": 0.1, "lr_scheduler_type": "constant"}
    run = trainer(saved, tmp_path / "out", save_steps=1, **options)
    run.train()
    run.save_model()
    trained = model_of(run).eval()
    ids = torch.arange(12).view(2, 6)
    assert not torch.allclose(trained(ids).logits, saved.model(ids).logits)
    for path in (tmp_path / "out", tmp_path / "out" / "checkpoint-2"):
        native, tokenizer = load(path)
        assert tokenizer.fingerprint == saved.tokenizer.fingerprint
        assert torch.equal(native(ids).logits, trained(ids).logits)
        assert torch.equal(AutoModelForCausalLM.from_pretrained(path)(ids).logits, trained(ids).logits)
        assert AutoTokenizer.from_pretrained(path)("hello")["input_ids"] == tokenizer.encode("hello").tolist()
    resumed = trainer(saved, tmp_path / "resumed", save_strategy="no", **options)
    with torch.no_grad():  # what the checkpoint does not overwrite would show
        for parameter in model_of(resumed).parameters():
            parameter.fill_(0.5)
    resumed.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-1"))
    for name, tensor in trained.state_dict().items():
        assert_close(name, model_of(resumed).state_dict()[name], tensor, 1e-6)
