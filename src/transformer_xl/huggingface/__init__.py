"""Transformer-XL in Hugging Face transformers 5: importing this makes its `Auto…` classes, pipelines and `Trainer` work.

    import transformer_xl.huggingface
    from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

    model = AutoModelForCausalLM.from_pretrained("runs/exported")       # or a hub id, or an old `transfo-xl` directory
    pipeline("text-generation", "runs/exported")("The ")

Needs the extra `hf`. This package only translates: weights, arithmetic and files are those of `transformer_xl`.
"""

try:
    from transformers import (
        AutoConfig,
        AutoModel,
        AutoModelForCausalLM,
        AutoModelForMultipleChoice,
        AutoModelForQuestionAnswering,
        AutoModelForSequenceClassification,
        AutoModelForTokenClassification,
        AutoTokenizer,
    )
except ImportError as error:
    raise ImportError(
        f"transformer_xl.huggingface needs transformers 5 ({error}); in a clone: pip install -e '.[hf]'"
    ) from None

from transformer_xl.huggingface.cache import MemoryCache
from transformer_xl.huggingface.config import AnyXLNetConfig, TransformerXLPretrainedConfig, XLNetPretrainedConfig
from transformer_xl.huggingface.legacy import TransfoXLConfig
from transformer_xl.huggingface.model import (
    TransformerXLCausalLMOutput,
    TransformerXLForCausalLM,
    TransformerXLModel,
    TransformerXLModelOutput,
)
from transformer_xl.huggingface.tasks import (
    TransformerXLForMultipleChoice,
    TransformerXLForQuestionAnswering,
    TransformerXLForSequenceClassification,
    TransformerXLForTokenClassification,
    TransformerXLQuestionAnsweringOutput,
    XLNetForMultipleChoice,
    XLNetForQuestionAnswering,
    XLNetForSequenceClassification,
    XLNetForTokenClassification,
)
from transformer_xl.huggingface.tokenizer import TransformerXLTokenizer, TransfoXLTokenizer
from transformer_xl.huggingface.xlnet import XLNetModel

__all__ = [
    "MemoryCache",
    "TransfoXLConfig",
    "TransfoXLTokenizer",
    "TransformerXLCausalLMOutput",
    "TransformerXLForCausalLM",
    "TransformerXLForMultipleChoice",
    "TransformerXLForQuestionAnswering",
    "TransformerXLForSequenceClassification",
    "TransformerXLForTokenClassification",
    "TransformerXLModel",
    "TransformerXLModelOutput",
    "TransformerXLPretrainedConfig",
    "TransformerXLQuestionAnsweringOutput",
    "TransformerXLTokenizer",
    "XLNetForMultipleChoice",
    "XLNetForQuestionAnswering",
    "XLNetForSequenceClassification",
    "XLNetForTokenClassification",
    "XLNetModel",
    "XLNetPretrainedConfig",
]

for _config in (TransformerXLPretrainedConfig, TransfoXLConfig, AnyXLNetConfig):
    AutoConfig.register(_config.model_type, _config, exist_ok=True)
AutoModelForCausalLM.register(TransformerXLPretrainedConfig, TransformerXLForCausalLM, exist_ok=True)
for _auto, _models in {
    AutoModel: (TransformerXLModel, XLNetModel),
    AutoModelForSequenceClassification: (TransformerXLForSequenceClassification, XLNetForSequenceClassification),
    AutoModelForMultipleChoice: (TransformerXLForMultipleChoice, XLNetForMultipleChoice),
    AutoModelForQuestionAnswering: (TransformerXLForQuestionAnswering, XLNetForQuestionAnswering),
    AutoModelForTokenClassification: (TransformerXLForTokenClassification, XLNetForTokenClassification),
}.items():
    for _model in _models:
        _auto.register(_model.config_class, _model, exist_ok=True)
for _config in (TransformerXLPretrainedConfig, XLNetPretrainedConfig):
    AutoTokenizer.register(_config, tokenizer_class=TransformerXLTokenizer, exist_ok=True)
AutoTokenizer.register(TransfoXLConfig, tokenizer_class=TransfoXLTokenizer, exist_ok=True)
