"""NVIDIA's Transformer-XL of DeepLearningExamples, for a comparison in one process; its code is not part of this project.

git clone --depth 1 https://github.com/NVIDIA/DeepLearningExamples
… --peer DeepLearningExamples/PyTorch/LanguageModeling/Transformer-XL/pytorch/mem_transformer.py
"""

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from common.learner import full_memory, gradient_of
from transformer_xl.conversion.key_maps.authors import flags_of
from transformer_xl.conversion.key_maps.nvidia import key_map
from transformer_xl.model.transformer_xl import TransformerXL


def load_peer(path: Path) -> type[nn.Module]:
    """Import the class of NVIDIA's model from a file, beside which its `utils` lie.

    Raises:
        ImportError: it cannot be imported.
    """
    spec = importlib.util.spec_from_file_location("nvidia_mem_transformer", path)
    if spec is None or spec.loader is None:
        raise ImportError(f"'{path}' is not a Python file")
    utils = ModuleType("utils")  # without its __init__, which imports what their training script needs and the model does not
    utils.__path__ = [str(path.resolve().parent / "utils")]
    sys.modules["utils"] = utils
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.MemTransformerLM


class PeerLearner:
    """NVIDIA's model with the weights of ours; (time, batch), memory as one tensor.

    Args:
        kind: class of the model.
        ours: whose weights it gets.
        rows: B.
        tgt_len: T.
    """

    def __init__(self, kind: type[nn.Module], ours: TransformerXL, rows: int, tgt_len: int) -> None:
        self.model = kind(**flags_of(ours.config, tgt_len=tgt_len), dtype=None).to(ours.device)
        self._key_map = key_map(ours.config)
        self._shapes = {name: tuple(parameter.shape) for name, parameter in ours.named_parameters()}
        self.begin(ours, rows)

    @torch.no_grad()
    def begin(self, ours: TransformerXL, rows: int) -> None:
        """Take the weights of ours, and the memory that it begins with for so many rows."""
        native, own = dict(ours.named_parameters()), dict(self.model.named_parameters())
        for part in self._key_map.parts():
            own[part.name].copy_(self._key_map.foreign(part.name, native.__getitem__))
        hidden = full_memory(ours.config, rows, ours.device).hidden
        self.mems: Tensor = torch.stack([h.transpose(0, 1) for h in hidden])

    def loss(self, segment: Tensor) -> Tensor:
        time_first = segment.T
        loss, self.mems = self.model(time_first[:-1].contiguous(), time_first[1:].contiguous(), self.mems)
        return loss.float().mean()

    def gradients(self) -> dict[str, Tensor]:
        own = {name: gradient_of(parameter) for name, parameter in self.model.named_parameters()}
        return {name: self._key_map.native(name, self._shapes, lambda part: own[part.name]) for name in self._shapes}
