"""The page: what is stored decodes to what was found, and nothing of a text becomes markup."""

import base64
import hashlib
import json
import re
import zlib
from collections.abc import Iterator
from html.parser import HTMLParser
from importlib import resources
from typing import Any

import numpy as np
import pytest

from tests.explain.models import make, reading
from transformer_xl.explain.explanation import explain
from transformer_xl.explain.page import page, write_explanation
from transformer_xl.explain.pictures import pictures
from transformer_xl.tokenizers.ids import IdTokenizer
from transformer_xl.tokenizers.kinds import ByteTokenizer

HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(1)>&amp;\u2028\u2029\u202e}{{data}}{{policy}}'\"`${1}-->\0"
)


class Elements(HTMLParser):
    """All elements of a page: their tags, attributes and text."""

    def __init__(self, text):
        super().__init__()
        self.found, self._open = [], False
        self.feed(text)
        self.close()

    def handle_starttag(self, tag, attrs):
        self.found.append((tag, dict(attrs), []))
        self._open = True

    def handle_endtag(self, tag):
        self._open = False

    def handle_data(self, data):
        if self._open:
            self.found[-1][2].append(data)

    def texts(self, tag, **attributes):
        wanted = attributes.items()
        return ["".join(text) for name, attrs, text in self.found if name == tag and wanted <= attrs.items()]


def explained(text: str, kind: str = "paper", name: str = "a text", **how: Any) -> Any:
    model = make(kind, vocab_size=256)
    tokenizer = ByteTokenizer()
    asked = {name: how.pop(name) for name in ("attributed", "token") if name in how}
    return explain(model, tokenizer, tokenizer.encode(text), reading(model, **how), name=name, run="run", **asked)


def stored(text):
    """The manifest of a page, and its arrays by name."""
    elements = Elements(text)
    (manifest,) = elements.texts("script", id="data-manifest")
    about = json.loads(manifest)
    arrays = {}
    for name, array in about["arrays"].items():
        (data,) = elements.texts("script", id=f"data-{name}")
        arrays[name] = np.frombuffer(zlib.decompress(base64.b64decode(data)), np.dtype(array["type"]).newbyteorder("<"))
        assert len(arrays[name]) == array["length"]
    return about, arrays


def test_what_is_stored_is_what_was_found(tmp_path):
    text = "naïve text, twice: naïve text, twice\n" * 3
    found = explained(text, attributed=3)
    facts, (about, arrays) = found.facts, stored(page(found))
    n, k = facts.top_ids.shape
    labels = json.loads(arrays["labels"].tobytes())
    assert arrays["text"].tobytes().decode() == text
    assert int(arrays["lengths"].sum()) == len(text)
    assert "".join(labels[i] for i in arrays["tokens"]) == text.replace("ï", "\\xc3\\xaf")
    np.testing.assert_allclose(arrays["nats"] * about["nats_step"], facts.nats, atol=0.0005)
    np.testing.assert_allclose(arrays["without"] * about["nats_step"], facts.without, atol=0.0005)
    np.testing.assert_array_equal(arrays["rank"], facts.rank)
    chance = (arrays["chance"].reshape(n, k) / 255.0) ** 2
    np.testing.assert_allclose(chance, facts.top_probabilities, atol=0.004)
    assert [labels[i] for i in arrays["top"]] == [chr(i) if i < 128 else f"\\x{i:02x}" for i in facts.top_ids.ravel().tolist()]
    causes = facts.causes
    np.testing.assert_array_equal(arrays["explained"], causes.places)
    assert [labels[i] for i in arrays["rivals"]] == [chr(i) if i < 128 else f"\\x{i:02x}" for i in causes.rivals.tolist()]
    np.testing.assert_array_equal(arrays["causes"].reshape(causes.distances.shape), causes.distances)
    np.testing.assert_allclose(arrays["effects"].reshape(causes.nats.shape) * about["nats_step"], causes.nats, atol=0.0005)
    assert about["causes"] == causes.nats.shape[2] and about["trust"] == list(causes.trust)
    np.testing.assert_array_equal(arrays["places"], facts.details.places)
    shape = facts.details.weights.shape
    np.testing.assert_array_equal(arrays["distances"].reshape(shape), facts.details.distances)
    np.testing.assert_allclose((arrays["weights"].reshape(shape) / 255.0) ** 2, facts.details.weights, atol=0.004)
    np.testing.assert_allclose(arrays["mass"].reshape(facts.distances.mass.shape), facts.distances.mass, atol=1e-6)
    np.testing.assert_allclose(arrays["share"].reshape(2, 3), facts.distances.memory_share, atol=1e-6)
    of_text = [array for name, array in arrays.items() if name not in ("distances", "weights", "memory", "mass", "far")]
    of_causes = 36 * (1 + 2) + 4 + 1  # of each token that has them
    assert sum(array.nbytes for array in of_text) < 30 * n + of_causes * len(causes.places)  # attention has a room of its own
    written = write_explanation(found, tmp_path / "out")
    assert written.read_text(encoding="utf-8") == page(found)
    assert (about["keys"], about["top"], about["tgt_len"], about["mem_len"]) == (shape[2], k, 4, 5)
    assert about["totals"]["loss"] == pytest.approx(float(facts.nats.mean()), rel=1e-5)
    assert about["totals"]["n_characters"] == len(text) - 1
    begin, end, score, best = about["passages"][0]
    assert score == pytest.approx(float(facts.gain[begin - 1 : end - 1].sum()), abs=1e-3)
    assert best - 1 == begin - 1 + int(facts.gain[begin - 1 : end - 1].argmax())


def test_picture_and_page_measure_distance_alike():
    """Distance 1 is the token right before the predicted one in both, and bits are per what the tokenizer counts."""
    found = explained("some text" * 9)
    (name,) = [axes.get_xlabel() for axes in pictures(found)["attention.png"].axes if "distance" in axes.get_xlabel()]
    assert name == "distance in tokens (1: the token right before)"
    assert f"t`{name}`" in page(found)
    tokenizer = IdTokenizer(256)
    about, _ = stored(page(explain(make("paper", vocab_size=256), tokenizer, found.ids, found.reading)))
    assert about["unit"] == "id" and stored(page(found))[0]["unit"] == "character"


def test_nothing_of_a_text_becomes_markup():
    harmless, hostile = page(explained("plain text" * 9)), page(explained(HOSTILE * 3, name=HOSTILE))
    tags = [[tag for tag, *_ in Elements(text).found] for text in (harmless, hostile)]
    assert tags[0] == tags[1]
    about, arrays = stored(hostile)
    assert arrays["text"].tobytes().decode() == HOSTILE * 3
    assert about["name"] == HOSTILE
    assert Elements(hostile).texts("title") == [f"{HOSTILE} explained"]
    body = hostile.partition("</title>")[2]
    assert not [sign for sign in (*"\u2028\u2029\u202e\0", "<img", "</script><script>") if sign in body]


def test_a_files_name_may_be_no_text():
    text = page(explained("some text" * 3, name="b\udcff.txt"))
    assert "<title>b\ufffd.txt explained</title>" in text
    assert text.encode()


def test_the_policy_allows_the_pages_own_script_and_nothing_else():
    text = page(explained("some text" * 4))
    elements = Elements(text)
    ((_, attributes, _),) = [element for element in elements.found if "http-equiv" in element[1]]
    policy = dict(part.split(" ", 1) for part in attributes["content"].split("; "))
    (style,) = elements.texts("style")
    (script,) = ["".join(content) for tag, attrs, content in elements.found if tag == "script" and "type" not in attrs]
    assert policy.pop("default-src") == "'none'"
    for kind, content in (("style-src", style), ("script-src", script)):
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        assert policy.pop(kind) == f"'sha256-{digest}'"
    assert set(policy.values()) == {"'none'"}
    assert "innerHTML" not in re.sub("//.*", "", script) and "fetch(" not in script and "eval(" not in script
    for _, attrs, _ in elements.found:  # nothing is loaded from anywhere, and no attribute runs or styles anything
        assert not {"src", "style", "onclick", "onload", "onerror"} & attrs.keys()
        assert not attrs.get("href", "#").startswith(("http", "//"))


def test_kinds_without_memory_or_attention_say_so():
    about, arrays = stored(page(explained("text" * 9, "vanilla", mem_len=0)))
    assert not about["remembers"] and "without" not in arrays and about["keys"] == 8
    about, arrays = stored(page(explained("text" * 9, "lstm")))
    assert about["remembers"] and about["state"] and about["keys"] == 0 and "weights" not in arrays and "mass" not in arrays


def translated_words(script: str) -> Iterator[str]:
    """Yield what the script asks to be translated: templates after `t`, as `{0} of {1}`, those inside others too."""
    for start in re.finditer(r"(?<![\w$])t`", script):
        words, depth, n, inner = "", 0, 0, 0  # nesting in braces, values so far, whether in a template within a value
        for c, following in zip(script[start.end() :], script[start.end() + 1 :], strict=False):
            if depth == 0 and c == "`":
                break
            if depth == 0 and (c, following) == ("$", "{"):
                words, n = f"{words}{{{n}}}", n + 1
            depth += (c == "{") - (c == "}")
            words += c if depth == inner == 0 and c not in "$}" else ""
        yield words


def test_all_words_of_the_page_have_a_chinese_form():
    parts = resources.files("transformer_xl") / "explain"
    chinese = json.loads((parts / "zh.json").read_text(encoding="utf-8"))
    script, template = ((parts / name).read_text(encoding="utf-8") for name in ("page.js", "page.html"))
    fixed = Elements(template.replace("{{", "").replace("}}", "")).found
    texts = [text for tag, _, parts in fixed if tag not in ("title", "style", "script", "noscript", "option") for text in parts]
    texts += [attrs[name] for _, attrs, _ in fixed for name in ("aria-label", "placeholder") if name in attrs]
    in_template = {
        text.strip() for text in texts if re.search("[A-Za-z]{2}", text) and "正在" not in text and "脚本" not in text
    }
    assert len(in_template) > 15
    in_script = set(translated_words(script))
    in_script |= {f"{{0}} {noun}{s}" for noun in re.findall(r'plural\([^"]*"(\w+)"\)', script) for s in ("", "s")}
    assert len(in_script) > 80
    assert set(chinese) == in_template | in_script
    for english, words in chinese.items():
        assert sorted(re.findall(r"\{\d\}", words)) == sorted(re.findall(r"\{\d\}", english)), english
    shown = re.findall(r"textContent[:=] ?\"[^\"]*[a-z] [^\"]*\"", script)
    assert shown == [], "words that are shown are templates after t"
