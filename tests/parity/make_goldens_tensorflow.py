"""Write `tests/parity/goldens/tensorflow`: tiny checkpoints of the authors' TensorFlow code, and what it computes from them.

To write them again (Python 3.11, Linux; a second run writes the same, up to the last digits of `expected`)::

    git clone https://github.com/kimiyoung/transformer-xl checkout    # as of 44781ed21dbaec88b280f74d9ae2877f52b492a5
    python -m venv tf-venv
    tf-venv/bin/pip install --no-deps -r tests/parity/requirements-tensorflow.txt
    tf-venv/bin/python tests/parity/make_goldens_tensorflow.py --checkout checkout

The authors' `tf/train_gpu.py`, `tf/model.py`, `tf/data_utils.py` and `tf/vocabulary.py` run unchanged under `tf.compat.v1`; the
arithmetic of their float32 graph is done in float64, and the script asserts that float32 gives the same within 1e-5, and their
code for TPUs too. What TensorFlow 2 lacks is put back: `tf.contrib.layers.layer_norm`, that is moments over the last axis, then
`tf.nn.batch_normalization` with epsilon 1e-12.

Every directory holds one variant:

- `model.ckpt-123.*`, `checkpoint`: what `tf.train.Saver` saves in training (float32), Adam's slots and `global_step` included.
- `variables.json`: dtype, shape and sha256 of every saved variable, as TensorFlow reads them back.
- `config.json`: the flags of `train_gpu.py`, under their names.
- `cache.pkl`, `corpus-info.json`: what `data_utils.py` writes; the vocabulary and the cutoffs are there.
- `expected.safetensors`: batch first, float64. For each segment s: `inputs.s`, `targets.s` (B, T); `nats.s` (B, T), the loss of
  each token; `hidden.s` (B, T, D), the input of the softmax; `memory.s.l` (B, M, D), the memory of layer l after the segment.
  Before segment 0 the memory is zeros. `gradient.NAME`: of the mean loss of the last segment, its memory fixed.
"""

import argparse
import contextlib
import hashlib
import json
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import cycle, pairwise
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

# TensorFlow reads these when it is imported.
os.environ.update(TF_USE_LEGACY_KERAS="1", CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3", TF_ENABLE_ONEDNN_OPTS="0")

import numpy as np
import tensorflow.compat.v1 as tf  # pyright: ignore[reportMissingImports]
from safetensors.numpy import save_file

GOLDENS = Path(__file__).parent / "goldens" / "tensorflow"
STEP = 123
BATCH = 2
SEGMENTS = (4, 4, 4, 3)
"""Lengths; the last is shorter, as the end of a corpus is."""
VOCABULARY = 19
CUTOFFS = [5, 11]
"""Two tails, so that the order of the cluster columns shows."""

FLAGS: dict[str, Any] = {
    "n_layer": 2,
    "d_model": 8,
    "d_embed": 8,
    "n_head": 2,
    "d_head": 3,
    "d_inner": 9,
    "dropout": 0.0,
    "dropatt": 0.0,
    "tgt_len": 4,
    "mem_len": 5,
    "same_length": False,
    "clamp_len": -1,
    "untie_r": False,
    "div_val": 1,
    "proj_share_all_but_first": False,
    "proj_same_dim": True,
}
# name -> (dataset whose way of writing `cache.pkl` is used, whether there are cutoffs, data files, flags that differ)
VARIANTS: dict[str, tuple[str, bool, int, dict[str, Any]]] = {
    "base": ("enwik8", False, 1, {}),
    "projected": ("wt2", False, 2, {"d_embed": 6, "untie_r": True}),
    "evaluation": ("wt2", False, 1, {"same_length": True, "clamp_len": 3, "untie_r": True, "mem_len": 6, "n_layer": 3}),
    "adaptive": ("wt103", True, 1, {"proj_share_all_but_first": True, "same_length": True, "mem_len": 3}),
    "adaptive_projected": ("wt103", True, 1, {"proj_share_all_but_first": True, "d_embed": 6, "untie_r": True}),
    "adaptive_untied": ("wt103", True, 1, {"d_embed": 6, "proj_same_dim": False}),
    "divided": ("wt103", True, 1, {"proj_share_all_but_first": True, "div_val": 2, "untie_r": True}),
    "divided_untied": ("lm1b", True, 1, {"div_val": 2, "proj_same_dim": False, "untie_r": True}),
    "divided_wide": ("wt103", True, 1, {"proj_share_all_but_first": True, "div_val": 2, "d_embed": 16, "proj_same_dim": False}),
}


# The authors' code


def layer_norm(inputs: Any, begin_norm_axis: int = 1) -> Any:
    """`tf.contrib.layers.layer_norm` over the last axis, the only one that the authors normalize."""
    assert begin_norm_axis == -1
    with tf.variable_scope(None, "LayerNorm", [inputs]):
        shape = inputs.shape[-1:]
        beta = tf.get_variable("beta", shape, inputs.dtype, tf.zeros_initializer())
        gamma = tf.get_variable("gamma", shape, inputs.dtype, tf.ones_initializer())
        mean, variance = tf.nn.moments(inputs, [-1], keepdims=True)
        return tf.nn.batch_normalization(inputs, mean, variance, beta, gamma, 1e-12)


class TensorFlow1(ModuleType):
    """`tensorflow` as the authors knew it; in double precision where asked, by what an omitted dtype means."""

    def __init__(self, dtype: Any):
        super().__init__("tensorflow")
        self.contrib = SimpleNamespace(layers=SimpleNamespace(layer_norm=layer_norm))
        if dtype == tf.float64:
            self.float32 = tf.float64
            self.ones = partial(tf.ones, dtype=tf.float64)
            self.zeros = partial(tf.zeros, dtype=tf.float64)
            self.get_variable = partial(tf.get_variable, dtype=tf.float64)
            self.range = lambda *args: tf.range(*args, dtype=tf.float64 if float in map(type, args) else None)

    def __getattr__(self, name: str) -> Any:
        return getattr(tf, name)


def import_authors(checkout: Path) -> SimpleNamespace:
    """Import their modules; only meanwhile is `tensorflow` what they knew."""
    now = sys.modules["tensorflow"]
    sys.modules["tensorflow"], sys.modules["tensorflow.gfile"] = TensorFlow1(tf.float32), tf.gfile
    sys.path.insert(0, str(checkout / "tf"))
    try:
        import data_utils  # type: ignore
        import train_gpu  # type: ignore

        import model  # type: ignore
    finally:
        sys.modules["tensorflow"] = now
    train_gpu.FLAGS(["train_gpu.py"])
    return SimpleNamespace(data_utils=data_utils, model=model, train_gpu=train_gpu)


@contextlib.contextmanager
def replaced(module: Any, **attributes: Any) -> Iterator[None]:
    """Replace attributes of a module for a while."""
    before = {name: getattr(module, name) for name in attributes}
    vars(module).update(attributes)
    try:
        yield
    finally:
        vars(module).update(before)


# Their graph


class Graph:
    """The graph of `train_gpu.py` for one core, with the loss of each token.

    Args:
        authors: their modules.
        flags: of `train_gpu.py`.
        cutoffs: of the vocabulary.
        dtype: tf.float32, as theirs, or tf.float64.
        n_shards: save that many data files; variables are dealt out to as many devices.
        use_tpu: the way of `train.py` on a TPU (one-hot lookups; the loss is a mean).
    """

    def __init__(
        self, authors: SimpleNamespace, flags: dict, cutoffs: list[int], dtype: Any, n_shards: int = 1, use_tpu: bool = False
    ):
        self.cutoffs = cutoffs
        self.hidden: Any = None
        self.graph = tf.Graph()
        for name, value in flags.items():
            setattr(authors.train_gpu.FLAGS, name, value)
        shards = cycle(f"/cpu:{i}" for i in range(n_shards))
        placement = (lambda op: next(shards) if op.type == "VariableV2" else "/cpu:0") if n_shards > 1 else None
        changes = {"tf": TensorFlow1(dtype), "mask_adaptive_logsoftmax": self._losses(authors.model)}
        if use_tpu:
            changes["transformer"] = partial(self._on_tpu, authors.model.transformer)
        with self.graph.as_default(), tf.device(placement), replaced(authors.model, **changes):
            self.inputs = tf.placeholder(tf.int32, [BATCH, None])
            self.targets = tf.placeholder(tf.int32, [BATCH, None])
            shape = [flags["mem_len"], BATCH, flags["d_model"]]
            self.mems = [tf.placeholder(dtype, shape) for _ in range(flags["n_layer"])]
            model_fn = authors.train_gpu.get_model_fn(VOCABULARY, cutoffs)
            self.nats, self.new_mems = model_fn(self.inputs, self.targets, self.mems, False)
            self.variables = tf.trainable_variables()
            self.mean = tf.reduce_mean(self.nats)
            self.gradients = tf.gradients(self.mean, self.variables)

    def session(self) -> Any:
        """Open a session that adds in one order."""
        options = {"device_count": {"CPU": 2}, "intra_op_parallelism_threads": 1, "inter_op_parallelism_threads": 1}
        return tf.Session(graph=self.graph, config=tf.ConfigProto(**options))

    def _losses(self, model: Any) -> Callable:
        original = model.mask_adaptive_logsoftmax

        def losses(hidden: Any, **kwargs: Any) -> Any:
            self.hidden = hidden
            return original(hidden=hidden, return_mean=False, **kwargs)

        return losses

    def _on_tpu(self, original: Callable, dec_inp: Any, target: Any, **kwargs: Any) -> Any:
        """Give their TPU code what `data_utils.py` would put into its records: a bin per tail, and the head's targets."""
        if self.cutoffs:
            edges = [*self.cutoffs, VOCABULARY]
            head_target = target
            perms: dict[str, list[Any]] = {}
            for kind, ids in (("input_perms", dec_inp), ("target_perms", target)):
                perms[kind] = [tf.to_float(ids < edges[0])]
                for left, right in pairwise(edges):
                    place = tf.reshape((ids >= left) & (ids < right), [-1])
                    order = tf.boolean_mask(tf.eye(tf.size(ids)), place, axis=1)
                    perms[kind].append(tf.reshape(order, tf.concat([tf.shape(ids), [-1]], 0)))
            for tail, (left, right) in enumerate(pairwise(edges)):
                head = tf.fill(tf.shape(target), edges[0] + tail)
                head_target = tf.where((target >= left) & (target < right), head, head_target)
            kwargs.update(perms, head_target=head_target)
        return original(dec_inp=dec_inp, target=target, **{**kwargs, "use_tpu": True})


# A variant


def make_checkpoint(graph: Graph, directory: Path, sharded: bool, rng: np.random.Generator) -> None:
    """Save random variables, and with them all that `train_gpu.py` saves while it trains."""
    with graph.graph.as_default(), graph.session() as session:
        with tf.device("/cpu:0"):
            step = tf.train.get_or_create_global_step()
        tf.train.AdamOptimizer(1e-3).apply_gradients(list(zip(graph.gradients, graph.variables, strict=True)), step)
        session.run(tf.global_variables_initializer())
        step.load(STEP, session)
        for variable in tf.global_variables():
            if variable.op.name.startswith("transformer/"):
                noise = 0.4 * rng.standard_normal(variable.shape.as_list())
                variable.load(noise + variable.op.name.endswith("gamma"), session)
        with contextlib.chdir(directory):  # a relative path, so that the file `checkpoint` names no directory
            saver = tf.train.Saver(sharded=sharded)
            saver.save(session, "./model.ckpt", step, write_meta_graph=False)


def read_checkpoint(directory: Path) -> dict[str, np.ndarray]:
    """Read all variables back with TensorFlow."""
    reader = tf.train.load_checkpoint(str(directory))
    return {name: np.asarray(reader.get_tensor(name)) for name in sorted(reader.get_variable_to_shape_map())}


def draw(length: int, rng: np.random.Generator) -> np.ndarray:
    """Draw ids as often from one cluster as from another, so that a short segment, too, meets all of them."""
    edges = np.array([0, *CUTOFFS, VOCABULARY])
    clusters = rng.permutation(np.arange(BATCH * length) % (len(edges) - 1))
    return rng.integers(edges[clusters], edges[clusters + 1]).reshape(BATCH, length)


def run(graph: Graph, saved: dict[str, np.ndarray], segments: list[tuple[np.ndarray, np.ndarray]]) -> dict[str, np.ndarray]:
    """Read the segments in order with zeros as first memory; return what `expected.safetensors` promises."""
    expected: dict[str, np.ndarray] = {}
    with graph.graph.as_default(), graph.session() as session:
        for variable in graph.variables:
            variable.load(saved[variable.op.name], session)
        mems, gradients = [np.zeros(mem.shape) for mem in graph.mems], []
        for s, (inputs, targets) in enumerate(segments):
            feed = {graph.inputs: inputs, graph.targets: targets, **dict(zip(graph.mems, mems, strict=True))}
            fetches = [graph.nats, graph.hidden, graph.new_mems, as_dense(graph.gradients)]
            nats, hidden, mems, gradients = session.run(fetches, feed)
            expected.update({f"inputs.{s}": inputs, f"targets.{s}": targets, f"nats.{s}": nats.T, f"hidden.{s}": hidden})
            expected.update({f"memory.{s}.{layer}": mem for layer, mem in enumerate(mems)})
        assert all(np.abs(gradient).max() > 0 for gradient in gradients), "a variable has no influence"
        expected.update({f"gradient.{v.op.name}": g for v, g in zip(graph.variables, gradients, strict=True)})
    time_major = ("hidden.", "memory.")
    return {name: array.swapaxes(0, 1) if name.startswith(time_major) else array for name, array in expected.items()}


def as_dense(gradients: list[Any]) -> list[Any]:
    return [tf.convert_to_tensor(gradient) for gradient in gradients]


def check_tpu(graph: Graph, saved: dict[str, np.ndarray], expected: dict[str, np.ndarray], n_layer: int) -> None:
    """Assert that the TPU code computes the same losses, memories and gradients."""
    last = len(SEGMENTS) - 1
    with graph.graph.as_default(), graph.session() as session:
        for variable in graph.variables:
            variable.load(saved[variable.op.name], session)
        feed = {graph.inputs: expected[f"inputs.{last}"], graph.targets: expected[f"targets.{last}"]}
        for layer, mem in enumerate(graph.mems):
            feed[mem] = expected[f"memory.{last - 1}.{layer}"].swapaxes(0, 1)
        mean, mems, gradients = session.run([graph.nats, graph.new_mems, as_dense(graph.gradients)], feed)
    assert_close("TPU loss", mean, expected[f"nats.{last}"].mean())
    for layer in range(n_layer):
        assert_close("TPU memory", mems[layer].swapaxes(0, 1), expected[f"memory.{last}.{layer}"])
    for variable, gradient in zip(graph.variables, gradients, strict=True):
        assert_close(f"TPU gradient of {variable.op.name}", gradient, expected[f"gradient.{variable.op.name}"])


def assert_close(name: str, actual: np.ndarray, expected: np.ndarray) -> None:
    """Compare float32 with float64."""
    difference = np.abs(actual - expected).max() / max(1.0, np.abs(expected).max())
    assert difference < 1e-5, f"{name} differs by {difference}"


def make_corpus(authors: SimpleNamespace, dataset: str, cutoffs: list[int], directory: Path, rng: np.random.Generator) -> None:
    """Let `data_utils.py` write its cache of a tiny corpus, with cutoffs that fit it."""
    with tempfile.TemporaryDirectory() as temporary, contextlib.chdir(temporary):
        if dataset == "enwik8":
            words = [str(code) for code in range(97, 97 + VOCABULARY)]
        else:
            words = ["the", "The", "@-@", "=", "naïve", "<unk>", "語", *(f"w{i}" for i in range(VOCABULARY - 8))]
        if dataset == "lm1b":
            words = ["<S>", "<UNK>", *words[: VOCABULARY - 2]]
            Path("1b_word_vocab.txt").write_text("".join(f"{word} 1\n" for word in words), encoding="utf-8")
        for split in ("train", "valid", "test"):
            text = " ".join(rng.permutation(words)) + " \n\n " + " ".join(rng.permutation(words)[:5]) + " \n"
            Path(f"{split}.txt").write_text(text, encoding="utf-8")
        original = authors.data_utils.Corpus.__init__

        def with_small_cutoffs(self: Any, *args: Any, **kwargs: Any) -> None:
            original(self, *args, **kwargs)
            assert len(self.vocab) == VOCABULARY, len(self.vocab)
            self.cutoffs = [0, *cutoffs, VOCABULARY] if cutoffs else self.cutoffs

        authors.data_utils.Corpus.__init__ = with_small_cutoffs
        try:
            authors.data_utils.get_lm_corpus("", dataset)
        finally:
            authors.data_utils.Corpus.__init__ = original
        for name in ("cache.pkl", "corpus-info.json"):
            shutil.copyfile(name, directory / name)


def make_variant(authors: SimpleNamespace, name: str) -> None:
    dataset, adaptive, n_shards, changes = VARIANTS[name]
    flags, cutoffs = {**FLAGS, **changes}, CUTOFFS if adaptive else []
    directory = GOLDENS / name
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    rng = np.random.default_rng(list(name.encode()))
    make_corpus(authors, dataset, cutoffs, directory, rng)
    single = Graph(authors, flags, cutoffs, tf.float32, n_shards)
    make_checkpoint(single, directory, n_shards > 1, rng)
    saved = read_checkpoint(directory)
    segments = [(draw(length, rng), draw(length, rng)) for length in SEGMENTS]
    expected = run(Graph(authors, flags, cutoffs, tf.float64), saved, segments)
    for key, array in run(single, saved, segments).items():
        assert_close(f"{name}: {key} in float32", array, expected[key])
    check_tpu(Graph(authors, flags, cutoffs, tf.float32, use_tpu=True), saved, expected, flags["n_layer"])
    save_file({key: np.ascontiguousarray(array) for key, array in expected.items()}, directory / "expected.safetensors")
    listed = {key: [str(a.dtype), list(a.shape), hashlib.sha256(a.tobytes()).hexdigest()] for key, a in saved.items()}
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(value)}" for key, value in listed.items())
    (directory / "variables.json").write_text(f"{{\n{lines}\n}}\n")
    (directory / "config.json").write_text(json.dumps(flags, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="a clone of the authors' repository")
    parser.add_argument("variants", nargs="*", default=[], metavar="VARIANT", help=f"all, or some of {', '.join(VARIANTS)}")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="`tf.layers")
    tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.ERROR)
    authors = import_authors(arguments.checkout.resolve())
    for name in arguments.variants or VARIANTS:
        make_variant(authors, name)
        print(f"{name}: {sum(path.stat().st_size for path in (GOLDENS / name).iterdir())} bytes")


if __name__ == "__main__":
    main()
