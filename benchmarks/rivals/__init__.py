"""Models of other libraries as kinds of model, so that our trainer, scorer and commands treat them as our own.

Importing this registers them (`txl train mine.toml --import benchmarks/rivals`). Their libraries are imported when a model is
built; `make rivals` installs them in an environment of their own. A rival is its library's layers, unchanged, between an
embedding and a tied softmax that are the same for all; tests/parity/peer_rivals.py compares it with the library's own model.
"""

from rivals.lstm_ngrams import LstmNgrams
from rivals.mistral import Mistral
from rivals.settings import LstmNgramsConfig, MistralConfig, XlstmConfig, XTransformersConfig
from rivals.xlstm_large import Xlstm
from rivals.xtransformers import XTransformers
from transformer_xl.model.kinds import register_model

register_model(LstmNgramsConfig, LstmNgrams)
register_model(XTransformersConfig, XTransformers)
register_model(XlstmConfig, Xlstm)
register_model(MistralConfig, Mistral)
