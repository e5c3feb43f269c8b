"""Train a model with the Trainer of transformers 5, generate text with it, and load it with txl again.

python examples/huggingface.py            a tiny random model, created first
python examples/huggingface.py MODEL      a directory, a hub id, or an old `transfo-xl` directory
"""

import sys
import tempfile
from pathlib import Path

try:
    import accelerate  # noqa: F401  # Trainer needs it
    from transformers import (
        AutoModelForCausalLM,
        AutoTokenizer,
        DataCollatorForLanguageModeling,
        Trainer,
        TrainingArguments,
        pipeline,
    )

    import transformer_xl.huggingface  # registers the model with transformers
except ImportError as error:
    sys.exit(f"this example needs transformers 5 and accelerate ({error}); in a clone: pip install -e '.[hf]'")

import transformer_xl as txl
from transformer_xl.config.run import TokenizerConfig
from transformer_xl.tokenizers.kinds import train_tokenizer

TEXT = "The memory of a stream has a fixed size, whatever was read before.\n" * 50


def tiny_model(folder: Path) -> str:
    """Save a random byte model as `txl` does, and return its directory."""
    config = txl.TransformerXLConfig(vocab_size=256, n_layer=2, d_model=64, n_head=2, d_head=32, d_inner=128, mem_len=64)
    txl.TransformerXL(config).save_pretrained(folder)
    train_tokenizer(TokenizerConfig(kind="byte"), [TEXT]).save(folder / "tokenizer.json")
    return str(folder)


def main(source: str, out: Path) -> None:
    model, tokenizer = AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source)

    pieces = [tokenizer(TEXT[at : at + 128]) for at in range(0, len(TEXT), 128)]
    trainer = Trainer(
        model=model,
        args=TrainingArguments(str(out), max_steps=200, learning_rate=1e-2, logging_steps=50, report_to=[], save_strategy="no"),
        train_dataset=pieces,
        data_collator=DataCollatorForLanguageModeling(tokenizer, mlm=False),
        processing_class=tokenizer,
    )
    trainer.train()
    trainer.save_model()

    write = pipeline("text-generation", model=str(out))
    print(write("The memory", max_new_tokens=60, do_sample=False)[0]["generated_text"])

    prompt = tokenizer("The memory", return_tensors="pt").to(model.device)
    # type checkers refuse this for every model of transformers: none has all attributes that `generate` asks for
    beams = model.generate(**prompt, max_new_tokens=60, num_beams=4)  # pyright: ignore[reportAttributeAccessIssue]
    print(tokenizer.decode(beams[0]))

    native, native_tokenizer = txl.load(out)
    ids = txl.generate(native, native_tokenizer.encode("The memory"), txl.Sampling(temperature=0), max_new_tokens=60)
    print("The memory" + native_tokenizer.decode(ids))


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        main(sys.argv[1] if len(sys.argv) > 1 else tiny_model(Path(folder)), Path(folder) / "trained")
