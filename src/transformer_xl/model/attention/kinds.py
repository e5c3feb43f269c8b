"""The kinds of attention by their names; `register_attention` adds your own."""

from transformer_xl.errors import ConfigError, did_you_mean, shown
from transformer_xl.model.attention.absolute import AlRfouAttention, VaswaniAttention
from transformer_xl.model.attention.alibi import AlibiAttention
from transformer_xl.model.attention.block import AttentionKind
from transformer_xl.model.attention.relative import RelativeAttention
from transformer_xl.model.attention.rotary import RotaryAttention
from transformer_xl.model.attention.shaw import ShawAttention

_OURS = (RelativeAttention, ShawAttention, VaswaniAttention, AlRfouAttention, RotaryAttention, AlibiAttention)

ATTENTION: dict[str, type[AttentionKind]] = {kind.name: kind for kind in _OURS}


def register_attention(kind: type[AttentionKind]) -> None:
    """Add a kind of attention, so that settings may name it.

    Args:
        kind: its class, with a `name`.

    Raises:
        ConfigError: another kind has that name.
    """
    if ATTENTION.setdefault(kind.name, kind) is not kind:
        raise ConfigError(f"there is another kind of attention '{kind.name}' already; choose another name")


def attention_kind(name: str) -> type[AttentionKind]:
    """Return the kind of a name.

    Raises:
        ConfigError: there is none.
    """
    if name not in ATTENTION:
        raise ConfigError(
            f"attention {shown(name)} is not registered ({did_you_mean(name, ATTENTION)}); if it is your own, import its "
            "module first (--import)"
        )
    return ATTENTION[name]
