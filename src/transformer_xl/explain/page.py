"""An explanation as files: one page of HTML that needs no network, pictures and totals.

The page is a template with style, script and data inside. The text is never markup: it is compressed in base64, and the script
puts it on the page as text. The page's policy allows only this style and this script, by their hashes.

A page has room for a million tokens, because numbers have few bits: nats come in steps of 1/1024 up to 64, probabilities and
attention weights as roots in steps of 1/255.
"""

import base64
import hashlib
import html
import json
import re
import zlib
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np

from transformer_xl.errors import ConfigError
from transformer_xl.explain.causes import FOLLOWED
from transformer_xl.explain.explanation import Explanation
from transformer_xl.explain.pictures import pictures
from transformer_xl.explain.token_text import labels, text_of, without_surrogates
from transformer_xl.files import make_directory, replace_file
from transformer_xl.pictures import require_matplotlib, save_picture

PAGE, TOTALS = "index.html", "explain.json"
_FORMAT = "txl explain 1"

_NATS_STEP = 1 / 1024
_LARGEST = 65535


def check_output(directory: Path) -> None:
    """Refuse, with a `ConfigError`, a directory that holds anything but an earlier explanation."""
    require_matplotlib()
    if directory.exists() and any(directory.iterdir()) and not (directory / TOTALS).is_file():
        raise ConfigError(f"--out '{directory}' holds something that txl explain has not written; choose another --out")


def write_explanation(explanation: Explanation, directory: Path) -> Path:
    """Write page, pictures and totals over those of an earlier explanation, each whole or not at all; return the page."""
    content, figures = page(explanation), pictures(explanation)
    totals = {"format": _FORMAT, "name": explanation.name, **explanation.totals}
    check_output(directory)
    make_directory(directory)
    replace_file(directory / TOTALS, (json.dumps(totals, indent=2) + "\n").encode())
    for name in ("along.png", "attention.png", "gain.png"):
        if name in figures:
            save_picture(figures[name], directory / name)
        else:
            (directory / name).unlink(missing_ok=True)
    replace_file(directory / PAGE, content.encode())
    return directory / PAGE


def page(explanation: Explanation) -> str:
    """Return the page as HTML."""
    arrays, manifest = _arrays(explanation), _manifest(explanation)
    manifest["arrays"] = {name: {"type": str(array.dtype), "length": array.size} for name, array in arrays.items()}
    style, script = _part("page.css"), _part("page.js")
    data = [("manifest", "application/json", _escaped_json(manifest))]
    data += [(name, "application/octet-stream", _packed(array)) for name, array in arrays.items()]
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "title": html.escape(f"{without_surrogates(explanation.name)} explained"),
        "style": style,
        "data": "\n".join(f'<script type="{kind}" id="data-{name}">{content}</script>' for name, kind, content in data),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _part("page.html"))


def _packed(array: np.ndarray) -> str:
    """Return an array as base64 of its compressed little-endian bytes."""
    data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


def _escaped_json(value: Any) -> str:
    r"""Return JSON for a script element: nothing in it begins a tag or ends a line.

    Example:
        >>> _escaped_json("</script>\u2028")
        '"\\u003c/script\\u003e\\u2028"'
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _stored_nats(nats: np.ndarray) -> np.ndarray:
    """Return nats as uint16 in steps of `_NATS_STEP`."""
    return np.clip(np.rint(nats / _NATS_STEP), 0, _LARGEST).astype(np.uint16)


def _stored_roots(shares: np.ndarray) -> np.ndarray:
    """Return numbers from 0 to 1 as uint8: their roots, in steps of 1/255."""
    return np.rint(np.sqrt(np.clip(shares, 0, 1)) * 255).astype(np.uint8)


def _arrays(explanation: Explanation) -> dict[str, np.ndarray]:
    facts = explanation.facts
    text, lengths = text_of(explanation.tokenizer, explanation.ids)
    causes = facts.causes
    rivals = facts.top_ids[:0] if causes is None else causes.rivals
    names, (tokens, top, rivals) = labels(explanation.tokenizer, explanation.ids, facts.top_ids, rivals)
    arrays = {
        "text": np.frombuffer(text.encode("utf-8"), np.uint8),
        "lengths": _narrow(lengths),
        "labels": np.frombuffer(json.dumps(names).encode("ascii"), np.uint8),
        "tokens": _narrow(tokens),
        "nats": _stored_nats(facts.nats),
        "rank": np.minimum(facts.rank, _LARGEST).astype(np.uint16),
        "top": _narrow(top.ravel()),
        "chance": _stored_roots(facts.top_probabilities).ravel(),
    }
    if facts.without is not None:
        arrays["without"] = _stored_nats(facts.without)
    if facts.details is not None:
        arrays |= {
            "places": facts.details.places.astype(np.uint32),
            "distances": _narrow(facts.details.distances.ravel()),
            "weights": _stored_roots(facts.details.weights).ravel(),
            "memory": _stored_roots(facts.details.memory).ravel(),
        }
    if causes is not None:
        steps = np.clip(np.rint(causes.nats / _NATS_STEP), -32767, 32767)
        arrays |= {
            "explained": causes.places.astype(np.uint32),
            "rivals": _narrow(rivals),
            "causes": _narrow(causes.distances.ravel()),
            "effects": steps.astype(np.int16).ravel(),
        }
    if facts.distances is not None:
        arrays |= {
            "edges": facts.distances.edges.astype(np.uint32),
            "mass": facts.distances.mass.astype(np.float32).ravel(),
            "far": facts.distances.in_memory.astype(np.float32).ravel(),
            "share": facts.distances.memory_share.astype(np.float32).ravel(),
        }
    return arrays


def _manifest(explanation: Explanation) -> dict[str, Any]:
    facts, reading, heads = explanation.facts, explanation.reading, explanation.heads
    remembers = facts.without is not None
    return {
        "name": explanation.name,
        "run": explanation.run,
        "kind": explanation.config.kind,
        "attention": getattr(explanation.config, "attention", None),
        "layers": explanation.config.n_layer,
        "heads": heads[1] if heads else 0,
        "tgt_len": reading.tgt_len,
        "mem_len": reading.mem_len,
        "ext_len": reading.ext_len,
        "precision": explanation.precision,
        "remembers": remembers,
        "state": remembers and heads is None,
        "vocabulary": explanation.tokenizer.vocab_size,
        "unit": explanation.tokenizer.counts,
        "loses": explanation.tokenizer.loses,
        "left_out": explanation.n_left_out,
        "totals": explanation.totals,
        "top": facts.top_ids.shape[1],
        "keys": facts.details.distances.shape[2] if facts.details else 0,
        "detailed": len(facts.details.places) if facts.details else 0,
        "queries": facts.distances.queries if facts.distances else 0,
        "causes": facts.causes.nats.shape[2] if facts.causes else 0,
        "trust": facts.causes and facts.causes.trust,
        "followed": FOLLOWED,
        "nats_step": _NATS_STEP,
        "chinese": json.loads(_part("zh.json")),
        "passages": [[p.begin, p.end, round(p.score, 4), p.best] for p in explanation.passages],
    }


def _narrow(values: np.ndarray) -> np.ndarray:
    """Return whole numbers in the fewest bytes."""
    largest = int(values.max(initial=0))
    return values.astype(np.uint8 if largest < 1 << 8 else np.uint16 if largest < 1 << 16 else np.uint32)


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _part(name: str) -> str:
    return (resources.files("transformer_xl") / "explain" / name).read_text(encoding="utf-8")
