"""Models of other libraries as kinds of model, so that our trainer, scorer and commands treat them as our own.

    txl ablate shakespeare-small benchmarks/rivals/recipes/shakespeare-xlstm.toml --import benchmarks/rivals --minutes 4

Importing this registers their settings. Their libraries are imported when a model is built; `make rivals` installs them in an
environment of their own. A rival is its library's layers, unchanged, between an embedding and a tied softmax that are the same
for all; tests/parity/peer_rivals.py compares it with the library's own model.
"""

from rivals.settings import LstmNgramsConfig, MistralConfig, XlstmConfig, XTransformersConfig
from transformer_xl.config.model import register_model

for _kind in (LstmNgramsConfig, XTransformersConfig, XlstmConfig, MistralConfig):
    register_model(_kind)
