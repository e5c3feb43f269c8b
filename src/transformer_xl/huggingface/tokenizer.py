"""`TransformerXLTokenizer`: any of our tokenizers as a tokenizer of transformers."""

import os
from itertools import groupby
from pathlib import Path
from typing import Any, Self

import numpy as np
from transformers import BatchEncoding, PreTrainedTokenizer
from transformers.utils.hub import cached_file

from transformer_xl.config.model import ModelConfig, is_native, read_config
from transformer_xl.data.layout import Layout, Row
from transformer_xl.errors import TokenizerError
from transformer_xl.huggingface.legacy import download_arguments, native_source
from transformer_xl.model.pretrained import CONFIG_FILE, TOKENIZER_FILE, manifest_of
from transformer_xl.tokenizers.kinds import Tokenizer, load_tokenizer
from transformer_xl.untrusted import read_json_object


class TransformerXLTokenizer(PreTrainedTokenizer):
    """Has the ids, text and files of the wrapped tokenizer, and adds only padding: `<pad>`, the id after its vocabulary.

    The model skips that id, so batches need nothing else. Text never becomes `<pad>` (`split_special_tokens`), and no other
    token is special, so `skip_special_tokens` drops only padding.

    With the `config.json` of a fine-tuned model beside it, texts and pairs of texts become rows as that model was taught them,
    `A <sep> B <sep> <cls>` for an XLNet.

    Args:
        vocab_file: the `tokenizer.json` that our tokenizers save.
        tokenizer: a tokenizer of ours, instead of a file.
        layout: how texts become rows; None: a text is its own tokens.
        **kwargs: see `PreTrainedTokenizer`; `padding_side` is "left".

    Raises:
        TokenizerError: a file that cannot be read, or neither file nor tokenizer.

    Example:
        >>> from transformer_xl.tokenizers.kinds import CharTokenizer
        >>> tokenizer = TransformerXLTokenizer(tokenizer=CharTokenizer("banana"))
        >>> tokenizer(["nab", "a"], padding=True)["input_ids"]
        [[2, 0, 1], [3, 3, 0]]
        >>> tokenizer.decode([3, 0, 2], skip_special_tokens=True)
        'an'
    """

    vocab_files_names = {"vocab_file": TOKENIZER_FILE}  # noqa: RUF012
    model_input_names = ["input_ids", "attention_mask"]  # noqa: RUF012
    padding_side: str = "left"

    def __init__(
        self,
        vocab_file: str | os.PathLike[str] | None = None,
        *,
        tokenizer: Tokenizer | None = None,
        layout: Layout | None = None,
        **kwargs: Any,
    ) -> None:
        if tokenizer is None:
            if vocab_file is None:
                raise TokenizerError(f"'{kwargs.get('name_or_path', '')}' has no {TOKENIZER_FILE}; give a saved tokenizer")
            tokenizer = load_tokenizer(Path(vocab_file), manifest=manifest_of(Path(vocab_file).parent))
        self.native = tokenizer
        self._names = _token_names(tokenizer)
        self._ids = {name: i for i, name in enumerate(self._names)}
        super().__init__(**{"pad_token": "<pad>", "split_special_tokens": True, **kwargs})
        self._lay_out(layout)

    def _lay_out(self, layout: Layout | None) -> None:
        self._layout = layout
        if layout is not None and layout.is_xlnet:
            self.model_input_names = ["input_ids", "token_type_ids", "attention_mask"]
        if layout is not None and layout.max_len is not None:
            self.model_max_length = min(self.model_max_length, layout.max_len)

    @classmethod
    def from_pretrained(cls, source: str | os.PathLike[str], *args: Any, **kwargs: Any) -> Any:
        """Load a tokenizer as `PreTrainedTokenizer.from_pretrained` does, also that of an old `transfo-xl` model."""
        local = native_source(source, kwargs)
        loaded: Any = super().from_pretrained(local, *args, **kwargs)
        config = _config_beside(local, kwargs)
        if config is not None and config.head is not None:
            loaded._lay_out(Layout.of(config, loaded.native))
        return loaded

    @classmethod
    def _from_pretrained(cls, resolved_vocab_files: dict[str, Any], *args: Any, **kwargs: Any) -> Self:
        # transformers assumes that every tokenizer.json is the tokenizers library's, and looks for added tokens in it
        resolved_vocab_files.pop("tokenizer_file", None)
        return super()._from_pretrained(resolved_vocab_files, *args, **kwargs)

    @property
    def vocab_size(self) -> int:
        return len(self._names)

    def get_vocab(self) -> dict[str, int]:
        return {**self._ids, **self._added_tokens_encoder}

    def _tokenize(self, text: str, **_: Any) -> list[str]:
        ids = self.native.encode(text) if self._layout is None else self._layout.encode(text)
        return [self._names[i] for i in ids.tolist()]

    def _encode_plus(
        self,
        text: Any,
        text_pair: Any = None,
        *others: Any,
        return_offsets_mapping: bool = False,
        return_tensors: Any = None,
        **options: Any,
    ) -> BatchEncoding:
        """Encode as transformers does, with the place of each token in its text if asked; (0, 0) where a token has none."""
        if not return_offsets_mapping:
            return super()._encode_plus(text, text_pair, *others, return_tensors=return_tensors, **options)
        if not isinstance(text, str):  # of a batch, each text comes back here
            options |= {"return_offsets_mapping": True, "return_tensors": return_tensors}
            batch = super()._encode_plus(text, text_pair, *others, **options)
            if "offset_mapping" not in batch:
                raise TokenizerError("return_offsets_mapping gives places in texts; give texts, not ids or words")
            return batch
        # numbers above all ids stand for tokens until what truncates, adds and pads is done
        places = self._places(text)
        first, n_first = len(self), len(places)
        places += [] if text_pair is None else self._places(text_pair)
        marks = list(range(first, first + len(places)))
        pair = None if text_pair is None else marks[n_first:] or ""
        encoded = super()._encode_plus(marks[:n_first] or "", pair, *others, **options)
        rows = [places[mark - first] if mark >= first else (mark, 0, 0) for mark in encoded["input_ids"]]
        encoded["input_ids"] = [token_id for token_id, _, _ in rows]
        encoded["offset_mapping"] = [(start, end) for _, start, end in rows]
        if "overflowing_tokens" in encoded:
            encoded["overflowing_tokens"] = [places[mark - first][0] for mark in encoded["overflowing_tokens"]]
        return BatchEncoding(encoded.data, tensor_type=return_tensors, prepend_batch_axis=True)

    def _places(self, text: str) -> list[tuple[int, int, int]]:
        """Return the id of each token of a text, and where it begins and ends."""
        begin = 0
        if self._layout is not None:  # as its `encode` reads texts
            begin, text = len(text) - len(text.lstrip()), text.strip()
            text = text.replace("\n", " ") if self._layout.is_xlnet else text
        ids, starts, ends = self.native.encode_with_offsets(text)
        return list(zip(ids.tolist(), (starts + begin).tolist(), (ends + begin).tolist(), strict=True))

    def _pad(self, encoded_inputs: Any, *args: Any, padding_side: str | None = None, **options: Any) -> dict[str, Any]:
        padded = super()._pad(encoded_inputs, *args, padding_side=padding_side, **options)
        if (places := padded.get("offset_mapping")) is not None:
            none = [(0, 0)] * (len(padded["input_ids"]) - len(places))
            padded["offset_mapping"] = none + places if (padding_side or self.padding_side) == "left" else places + none
        return padded

    def build_inputs_with_special_tokens(self, token_ids_0: list[int], token_ids_1: list[int] | None = None) -> list[int]:
        row = self._row(token_ids_0, token_ids_1)
        return super().build_inputs_with_special_tokens(token_ids_0, token_ids_1) if row is None else row.ids.tolist()

    def create_token_type_ids_from_sequences(self, token_ids_0: list[int], token_ids_1: list[int] | None = None) -> list[int]:
        row = self._row(token_ids_0, token_ids_1)
        return super().create_token_type_ids_from_sequences(token_ids_0, token_ids_1) if row is None else row.segments.tolist()

    def get_special_tokens_mask(
        self, token_ids_0: list[int], token_ids_1: list[int] | None = None, already_has_special_tokens: bool = False
    ) -> list[int]:
        # -1 stands for the tokens of texts, because a text may hold what separates texts
        texts = [None if ids is None else [-1] * len(ids) for ids in (token_ids_0, token_ids_1)]
        row = None if already_has_special_tokens else self._row(texts[0] or [], texts[1])
        if row is None:
            return super().get_special_tokens_mask(token_ids_0, token_ids_1, already_has_special_tokens)
        return (row.ids >= 0).astype(int).tolist()

    def _row(self, first: list[int], second: list[int] | None) -> Row | None:
        if self._layout is None:
            return None
        return self._layout.row(np.array(first, np.int32), None if second is None else np.array(second, np.int32))

    def _convert_token_to_id(self, token: str) -> int:
        if token not in self._ids:
            raise TokenizerError(f"{token!r} is not one token of this tokenizer; give it as text, to be split")
        return self._ids[token]

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        # libraries ask for the token of a special id that is None, because our texts have none
        return None if ids is None else super().convert_ids_to_tokens(ids, skip_special_tokens)

    def _convert_id_to_token(self, index: int) -> str:
        if not 0 <= index < len(self._names):
            raise TokenizerError(f"token id {index} is outside the vocabulary (0 … {len(self._names) - 1})")
        return self._names[index]

    def convert_tokens_to_string(self, tokens: list[str]) -> str:
        return self._decode(self.convert_tokens_to_ids(tokens))

    def _decode(
        self,
        token_ids: int | list[int],
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        **_: Any,
    ) -> str:
        # spaces are never cleaned up, so that text comes back as it was written
        ids = [token_ids] if isinstance(token_ids, int) else [int(i) for i in token_ids]
        if skip_special_tokens:
            ids = [i for i in ids if i != self.pad_token_id]
        added = self._added_tokens_decoder
        return "".join(
            "".join(added[i].content for i in group) if is_added else self.native.decode(list(group))
            for is_added, group in groupby(ids, key=lambda i: i in added)
        )

    def save_vocabulary(self, save_directory: str, filename_prefix: str | None = None) -> tuple[str, ...]:
        path = Path(save_directory) / f"{filename_prefix + '-' if filename_prefix else ''}{TOKENIZER_FILE}"
        self.native.save(path)
        return (str(path),)


class TransfoXLTokenizer(TransformerXLTokenizer):
    """The same, under the name in the `tokenizer_config.json` of old models."""


def _config_beside(source: str, arguments: dict[str, Any]) -> ModelConfig | None:
    """Return the settings in the `config.json` beside a tokenizer, if there is one of ours."""
    path = cached_file(source, CONFIG_FILE, _raise_exceptions_for_missing_entries=False, **download_arguments(arguments))
    return read_config(Path(path)) if path is not None and is_native(read_json_object(Path(path))) else None


def _token_names(tokenizer: Tokenizer) -> list[str]:
    """Return a unique name for each id: its text, or its number if the text is empty, incomplete or that of another id."""
    texts = [tokenizer.decode([i]) for i in range(tokenizer.vocab_size)]
    taken = set(texts)
    names: dict[str, None] = {}  # ordered
    for i, text in enumerate(texts):
        name = text
        if not text or "\ufffd" in text or text in names:
            name = f"<{i}>"
            while name in taken:
                name = f"<{name}>"
        names[name] = None
    return list(names)
