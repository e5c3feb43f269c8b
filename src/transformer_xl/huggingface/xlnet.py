"""`XLNetModel`: an XLNet behind the methods that transformers calls, for those who read its states."""

from typing import Any

from torch import Tensor

from transformer_xl.huggingface.config import XLNetPretrainedConfig
from transformer_xl.huggingface.model import Padding, TransformerXLModelOutput, TransformerXLPreTrainedModel, real_tokens
from transformer_xl.model.memory import Mems


class XLNetModel(TransformerXLPreTrainedModel):
    """An XLNet that reads texts with both sides in sight; `AutoModel` finds it.

    Args:
        config: `vocab_size` must be set.
    """

    config_class = XLNetPretrainedConfig
    gives = (None,)

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        token_type_ids: Tensor | None = None,
        mems: Mems | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
    ) -> TransformerXLModelOutput | tuple[Any, ...]:
        """Read one segment after the memory of those before it.

        Args:
            input_ids: int64 (B, T); the id `vocab_size`, our tokenizer's `<pad>`, is padding wherever it stands.
            attention_mask: (B, T), 0 at padding, at the left or right of a row's text.
            token_type_ids: int64 (B, T), the text that each token belongs to; None: all to the same.
            mems: what the last call returned; None: nothing was read.
            use_cache: False: return no memory.
            output_hidden_states: return what the layers read; None: as the config says.
            return_dict: False: return a tuple, without what is None.

        Returns:
            states and memory. A padded row gets the same as alone; the output at padding means nothing.

        Raises:
            ValueError: shapes that do not fit, or padding between tokens.
        """
        padding = Padding.of(real_tokens(input_ids, attention_mask, self.config.vocab_size, continued=mems is not None))
        segments = None if token_type_ids is None else padding.turn(token_type_ids)
        shown = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states: list[Tensor] = []
        with self.transformer.watched(states=states.append if shown else None):
            last, new_mems = self.transformer.read(padding.turn(input_ids), mems=mems, segments=segments, n_pad=padding.n_pad)
        states = [padding.turn_back(h) for h in (*states, last)]
        result = TransformerXLModelOutput(
            last_hidden_state=states[-1],
            mems=None if use_cache is False else new_mems,
            hidden_states=tuple(states) if shown else None,
        )
        return result.to_tuple() if return_dict is False else result
