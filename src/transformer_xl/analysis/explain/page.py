"""An explanation as one page of HTML that needs no network: a template with style, script and data inside.

The text is never markup: it is compressed in base64, and the script puts it on the page as text. The page's policy allows
only this style and this script, by their hashes.

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
from typing import Any

import numpy as np

from transformer_xl.analysis.explain.explanation import Explanation
from transformer_xl.analysis.explain.shown import labels, shown_text, without_surrogates

NATS_STEP = 1 / 1024
_LARGEST = 65535


def page(explanation: Explanation) -> str:
    """Return the page."""
    arrays, manifest = _arrays(explanation), _manifest(explanation)
    manifest["arrays"] = {name: {"type": str(array.dtype), "length": array.size} for name, array in arrays.items()}
    style, script = _part("page.css"), _part("page.js")
    blocks = [_block("manifest", "application/json", escaped_json(manifest))]
    blocks += [_block(name, "application/octet-stream", packed(array)) for name, array in arrays.items()]
    policy = (
        f"default-src 'none'; style-src '{_hash(style)}'; script-src '{_hash(script)}'; base-uri 'none'; form-action 'none'"
    )
    parts = {
        "policy": policy,
        "title": html.escape(f"{without_surrogates(explanation.name)} explained"),
        "style": style,
        "data": "\n".join(blocks),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], _part("page.html"))


def packed(array: np.ndarray) -> str:
    """Return an array as base64 of its compressed little-endian bytes."""
    data = np.ascontiguousarray(array, array.dtype.newbyteorder("<")).tobytes()
    return base64.b64encode(zlib.compress(data, 6)).decode("ascii")


def escaped_json(value: Any) -> str:
    r"""Return JSON for a script element: nothing in it begins a tag or ends a line.

    Example:
        >>> escaped_json("</script>\u2028")
        '"\\u003c/script\\u003e\\u2028"'
    """
    text = json.dumps(value, ensure_ascii=True, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def stored_nats(nats: np.ndarray) -> np.ndarray:
    """Return nats as uint16 in steps of `NATS_STEP`."""
    return np.clip(np.rint(nats / NATS_STEP), 0, _LARGEST).astype(np.uint16)


def stored_roots(shares: np.ndarray) -> np.ndarray:
    """Return numbers from 0 to 1 as uint8: their roots, in steps of 1/255."""
    return np.rint(np.sqrt(np.clip(shares, 0, 1)) * 255).astype(np.uint8)


def _arrays(explanation: Explanation) -> dict[str, np.ndarray]:
    facts = explanation.facts
    shown = shown_text(explanation.tokenizer, explanation.ids)
    names, (tokens, top) = labels(explanation.tokenizer, explanation.ids, facts.top_ids)
    arrays = {
        "text": np.frombuffer(shown.text.encode("utf-8"), np.uint8),
        "lengths": _narrow(shown.lengths),
        "labels": np.frombuffer(json.dumps(names).encode("ascii"), np.uint8),
        "tokens": _narrow(tokens),
        "nats": stored_nats(facts.nats),
        "rank": np.minimum(facts.rank, _LARGEST).astype(np.uint16),
        "top": _narrow(top.ravel()),
        "chance": stored_roots(facts.top_probabilities).ravel(),
    }
    if facts.without is not None:
        arrays["without"] = stored_nats(facts.without)
    if facts.details is not None:
        arrays |= {
            "places": facts.details.places.astype(np.uint32),
            "distances": _narrow(facts.details.distances.ravel()),
            "weights": stored_roots(facts.details.weights).ravel(),
            "memory": stored_roots(facts.details.memory).ravel(),
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
        "loses": explanation.tokenizer.loses,
        "left_out": explanation.n_left_out,
        "totals": explanation.totals,
        "top": facts.top_ids.shape[1],
        "keys": facts.details.distances.shape[2] if facts.details else 0,
        "detailed": len(facts.details.places) if facts.details else 0,
        "queries": facts.distances.queries if facts.distances else 0,
        "nats_step": NATS_STEP,
        "passages": [[p.begin, p.end, round(p.score, 4), p.best] for p in explanation.passages],
    }


def _narrow(values: np.ndarray) -> np.ndarray:
    """Return whole numbers in the fewest bytes."""
    largest = int(values.max(initial=0))
    return values.astype(np.uint8 if largest < 1 << 8 else np.uint16 if largest < 1 << 16 else np.uint32)


def _block(name: str, kind: str, content: str) -> str:
    return f'<script type="{kind}" id="data-{name}">{content}</script>'


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _part(name: str) -> str:
    return (resources.files("transformer_xl") / "analysis" / "explain" / name).read_text(encoding="utf-8")
