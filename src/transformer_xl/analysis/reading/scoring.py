"""Score a run on a text, as `txl eval` does."""

from collections.abc import Callable

from transformer_xl.config import RunConfig
from transformer_xl.model.language_model import LanguageModel
from transformer_xl.model.precision import choose_device
from transformer_xl.model.precision_names import precision_of_segments
from transformer_xl.reading.evaluation import Score, evaluate
from transformer_xl.reading.how import Reading
from transformer_xl.texts import Text


def score(
    model: LanguageModel,
    text: Text,
    config: RunConfig,
    reading: Reading,
    *,
    per_token: bool = False,
    on_tokens: Callable[[int], object] | None = None,
) -> Score:
    """Score a text, in the precision that the run's device multiplies natively.

    Args:
        model: of the run; it is moved to the device.
        text: to score.
        config: of the run.
        reading: how.
        per_token: keep the nats of every token.
        on_tokens: called with the number of tokens just scored.
    """
    device = choose_device(config.train.device)
    return evaluate(
        model.to(device),
        text.ids,
        **vars(reading),
        n_characters=text.n_characters,
        n_bytes=text.n_bytes,
        precision=precision_of_segments("auto", device),
        per_token=per_token,
        on_tokens=on_tokens,
    )
