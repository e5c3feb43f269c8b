"""The model card: what a repository of the hub says of the model in it."""

from transformer_xl.model_config import ModelConfig

_CARD = """---
library_name: transformer_xl
pipeline_tag: text-generation
tags:
- transformer-xl
---
# {name}

{title} with {n_parameter:,} parameters: {layers},
{past}, {vocab_size:,} tokens.

```python
import transformer_xl as txl

{load}
```
"""


def model_card(config: ModelConfig, *, name: str, n_parameter: int, load: str) -> str:
    """Return the README.md of a repository.

    Args:
        config: of the model.
        name: of the repository, without its owner.
        n_parameter: of the model.
        load: a line of Python that loads the model.
    """
    return _CARD.format(
        name=name,
        title=config.title,
        n_parameter=n_parameter,
        layers=config.layers_in_words,
        past=config.past_in_words,
        vocab_size=config.vocab_size,
        load=load,
    )
