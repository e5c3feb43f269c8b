"""Write `tests/parity/goldens/xlnet_tensorflow`: tiny checkpoints of the XLNet authors' code, and what it computes from them.

To write them again (Python 3.11, Linux; a second run writes the same, up to the last digits of `expected`)::

    git clone https://github.com/zihangdai/xlnet checkout    # as of bbaa3a6fa0b3a2ee694e8cf66167434f9eca9660
    python -m venv tf-venv
    tf-venv/bin/pip install --no-deps -r tests/parity/requirements-tensorflow.txt
    tf-venv/bin/python tests/parity/make_goldens_xlnet_tensorflow.py --checkout checkout

Their `xlnet.py` and `modeling.py` run unchanged under `tf.compat.v1`, in float64; the script asserts that float32 gives about
the same. What TensorFlow 2 lacks is put back: `tf.contrib.layers.layer_norm` (see make_goldens_tensorflow.py). Shapes are known
when the graph is built, because a tensor never passes their `assert bsz%2 == 0`.

Every directory holds one variant, as `xlnet_cased_L-12_H-768_A-12` does: `xlnet_config.json` and `xlnet_model.ckpt.*`, what
`tf.train.Saver` saves in training (float32), slots of the optimizer included. `expected.safetensors` is that of peer_xlnet.py;
where there is no language model's head, its bias is a constant.
"""

import argparse
import json
import shutil
import sys
import warnings
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import make_goldens_tensorflow as ours  # sets the environment of TensorFlow
import numpy as np
import tensorflow.compat.v1 as tf  # pyright: ignore[reportMissingImports]
from safetensors.numpy import save_file

GOLDENS = Path(__file__).parent / "goldens" / "xlnet_tensorflow"
STEP = 123
BATCH, LENGTH = 4, 6
NOT_SCORED = -100

CONFIG: dict[str, Any] = {
    "n_token": 13, "n_layer": 2, "d_model": 6, "n_head": 2, "d_head": 3, "d_inner": 7, "ff_activation": "gelu", "untie_r": True,
}  # fmt: skip
RUN: dict[str, Any] = {"mem_len": 5, "reuse_len": 4, "clamp_len": -1, "bi_data": False}
# name -> (settings that differ from CONFIG, and from RUN; targets, segments)
VARIANTS: dict[str, tuple[dict[str, Any], dict[str, Any], int, int]] = {
    "pretraining": ({}, {}, 2, 3),
    "both_directions": ({"untie_r": False, "d_head": 4, "ff_activation": "relu"}, {"bi_data": True, "clamp_len": 3}, 2, 3),
    "finetuned": ({}, {"mem_len": None, "reuse_len": None}, 0, 1),
}


def layer_norm(inputs: Any, begin_norm_axis: int, scope: str) -> Any:
    """`tf.contrib.layers.layer_norm` over the last axis; the second stream uses the first one's variables."""
    assert begin_norm_axis == -1
    with tf.variable_scope(scope):
        shape = inputs.shape[-1:]
        beta = tf.get_variable("beta", shape, inputs.dtype, tf.zeros_initializer())
        gamma = tf.get_variable("gamma", shape, inputs.dtype, tf.ones_initializer())
        mean, variance = tf.nn.moments(inputs, [-1], keepdims=True)
        return tf.nn.batch_normalization(inputs, mean, variance, beta, gamma, 1e-12)


def tensorflow1(dtype: Any) -> ModuleType:
    """Return `tensorflow` as the authors knew it, with shapes that are numbers."""
    module: Any = ours.TensorFlow1(dtype)
    module.contrib = SimpleNamespace(layers=SimpleNamespace(layer_norm=layer_norm))
    module.shape = lambda tensor: tensor.shape.as_list()
    return module


def import_authors(checkout: Path) -> SimpleNamespace:
    """Import their modules; only meanwhile is `tensorflow` what they knew."""
    now = sys.modules["tensorflow"]
    sys.modules["tensorflow"] = tensorflow1(tf.float32)
    sys.path.insert(0, str(checkout))
    try:
        import modeling  # type: ignore
        import xlnet  # type: ignore
    finally:
        sys.modules["tensorflow"] = now
    return SimpleNamespace(modeling=modeling, xlnet=xlnet)


class Graph:
    """The graph of a segment, with the nats of each target.

    Args:
        authors: their modules.
        directory: holds `xlnet_config.json`.
        run: settings of a call.
        n_target: number of targets; 0: fine-tuning, with one stream, padding and a head of classes.
        dtype: tf.float32, as theirs, or tf.float64.
    """

    def __init__(self, authors: SimpleNamespace, directory: Path, run: dict[str, Any], n_target: int, dtype: Any):
        self.graph, self.n_target = tf.Graph(), n_target
        module = tensorflow1(dtype)
        with (
            self.graph.as_default(),
            ours.replaced(authors.modeling, tf=module),
            ours.replaced(authors.xlnet, tf=module, modeling=authors.modeling),
        ):
            config = authors.xlnet.XLNetConfig(json_path=str(directory / "xlnet_config.json"))
            fixed = {"is_training": False, "use_tpu": False, "use_bfloat16": False, "dropout": 0.0, "dropatt": 0.0}
            self.ids, self.texts = (tf.placeholder(tf.int32, [LENGTH, BATCH]) for _ in range(2))
            self.labels = tf.placeholder(tf.int32, [n_target or LENGTH, BATCH])
            self.mems: list[Any] = []
            self.mask, given = None, {}
            if n_target:
                shape = [run["mem_len"], BATCH, config.d_model]
                self.mems = [tf.placeholder(dtype, shape) for _ in range(config.n_layer)]
                self.mask = tf.placeholder(dtype, [LENGTH, LENGTH, BATCH])
                self.mapping = tf.placeholder(dtype, [n_target, LENGTH, BATCH])
                given = {"mems": self.mems, "perm_mask": self.mask, "target_mapping": self.mapping}
                given |= {"input_mask": None, "inp_q": tf.zeros([LENGTH, BATCH], dtype)}  # only that there is one matters
            else:
                self.mask = tf.placeholder(dtype, [LENGTH, BATCH])
                given = {"input_mask": self.mask}
            model = authors.xlnet.XLNetModel(
                config, authors.xlnet.RunConfig(**fixed, **run), input_ids=self.ids, seg_ids=self.texts, **given
            )
            hidden, table = model.get_sequence_output(), model.get_embedding_table()
            self.others: list[Any] = []
            if n_target:
                with tf.variable_scope("model", reuse=tf.AUTO_REUSE):
                    sizes = {"n_token": config.n_token, "d_model": config.d_model}
                    self.nats = authors.modeling.lm_loss(
                        hidden, tf.maximum(self.labels, 0), **sizes, initializer=None, lookup_table=table, tie_weight=True
                    )
                bias = self.graph.get_tensor_by_name("model/lm_loss/bias/read:0")
            else:
                model.get_pooled_out("last")
                with tf.variable_scope("model", reuse=tf.AUTO_REUSE):
                    tf.get_variable("classification_sst/logit/kernel", [config.d_model, 2], dtype)
                bias = tf.zeros([config.n_token], dtype)
            self.logits = tf.einsum("ibd,nd->ibn", hidden, table) + bias
            scored = tf.cast(self.labels >= 0, dtype)
            targets = tf.maximum(self.labels, 0)
            nats = tf.nn.sparse_softmax_cross_entropy_with_logits(labels=targets, logits=self.logits) * scored
            self.nats = self.nats * scored if n_target else nats
            self.new_mems = [mem for mem in model.get_new_memory() if mem is not None]
            self.variables = [v for v in tf.trainable_variables() if "summary" not in v.name and "classification" not in v.name]
            total = tf.reduce_sum(self.nats)
            self.gradients = ours.as_dense(tf.gradients(total, self.variables))
            self.names = [variable.op.name for variable in self.variables]
            if not n_target:
                self.names += ["model/lm_loss/bias", "model/transformer/mask_emb/mask_emb"]
                self.gradients += [tf.gradients(total, bias)[0], tf.zeros([1, 1, config.d_model], dtype)]

    def session(self) -> Any:
        """Open a session that adds in one order."""
        options = {"intra_op_parallelism_threads": 1, "inter_op_parallelism_threads": 1}
        return tf.Session(graph=self.graph, config=tf.ConfigProto(**options))


def make_checkpoint(graph: Graph, directory: Path, rng: np.random.Generator) -> None:
    """Save random variables, and with them what their training saves."""
    with graph.graph.as_default(), graph.session() as session:
        step = tf.train.get_or_create_global_step()
        gradients = list(zip(graph.gradients, graph.variables, strict=False))
        tf.train.AdamOptimizer(1e-3).apply_gradients(gradients, step)
        for variable in graph.variables:  # slots of their own optimizer
            for slot in ("adam_m", "adam_v"):
                tf.get_variable(
                    f"{variable.op.name}/{slot}", variable.shape, initializer=tf.zeros_initializer(), trainable=False
                )
        session.run(tf.global_variables_initializer())
        step.load(STEP, session)
        for variable in tf.global_variables():
            if variable in tf.trainable_variables():
                noise = 0.4 * rng.standard_normal(variable.shape.as_list())
                variable.load(noise + variable.op.name.endswith("gamma"), session)
        tf.train.Saver().save(session, str(directory / "xlnet_model.ckpt"), write_meta_graph=False)
    (directory / "checkpoint").unlink()  # their archives have none


def draw(config: dict[str, Any], n_target: int, n_segment: int, rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Draw what is read, batch first: see peer_xlnet.py."""
    shape = (n_segment, BATCH, LENGTH)
    ids, texts = rng.integers(config["n_token"], size=shape), rng.integers(3, size=shape)
    rank, sees = np.full(shape, -1), np.zeros(shape, dtype=np.int64)
    targets = np.zeros((n_segment, BATCH, n_target), dtype=np.int64)
    for s, b in np.ndindex(n_segment, BATCH):
        places = rng.permutation(LENGTH)
        targets[s, b] = places[:n_target]
        rank[s, b, places[:n_target]] = sees[s, b, places[:n_target]] = rng.permutation(n_target)
    labels = np.take_along_axis(ids, targets, 2) if n_target else ids.copy()
    drawn = {"ids": ids, "segments": texts, "rank": rank, "sees": sees, "targets": targets}
    if not n_target:
        drawn["n_pad"] = np.array([0, 3, 1, 0])
        labels[:, np.arange(LENGTH) < drawn["n_pad"][:, None]] = NOT_SCORED
    labels[:, 1, -1] = NOT_SCORED
    return drawn | {"labels": labels}


def run(graph: Graph, saved: dict[str, np.ndarray], drawn: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Read the segments in order with zeros as first memory; return what `expected.safetensors` promises."""
    found: dict[str, list[np.ndarray]] = {"logits": [], "nats": []}
    with graph.graph.as_default(), graph.session() as session:
        for variable in graph.variables:
            variable.load(saved[variable.op.name], session)
        mems, gradients = [np.zeros(mem.shape) for mem in graph.mems], []
        for s in range(len(drawn["ids"])):
            feed = {graph.ids: drawn["ids"][s].T, graph.texts: drawn["segments"][s].T, graph.labels: drawn["labels"][s].T}
            feed |= dict(zip(graph.mems, mems, strict=True))
            if graph.n_target:
                hidden = drawn["rank"][s][:, None] >= drawn["sees"][s][:, :, None]
                feed[graph.mask] = hidden.transpose(1, 2, 0)
                feed[graph.mapping] = np.eye(LENGTH)[drawn["targets"][s]].transpose(1, 2, 0)
            else:
                feed[graph.mask] = (np.arange(LENGTH) < drawn["n_pad"][:, None]).T
            logits, nats, mems, gradients = session.run([graph.logits, graph.nats, graph.new_mems, graph.gradients], feed)
            found["logits"].append(logits.swapaxes(0, 1))
            found["nats"].append(nats.T)
    expected = drawn | {name: np.stack(parts) for name, parts in found.items()}
    expected |= {f"mems.{layer}": mem.swapaxes(0, 1) for layer, mem in enumerate(mems)}
    return expected | {f"grads.{name}": gradient for name, gradient in zip(graph.names, gradients, strict=True)}


def make_variant(authors: SimpleNamespace, name: str) -> None:
    changes, call, n_target, n_segment = VARIANTS[name]
    config, settings = CONFIG | changes, RUN | call
    directory = GOLDENS / name
    shutil.rmtree(directory, ignore_errors=True)
    (directory / "checkpoint").mkdir(parents=True)
    source = directory / "checkpoint"
    (source / "xlnet_config.json").write_text(json.dumps(config, indent=4, sort_keys=True))
    rng = np.random.default_rng(list(name.encode()))
    single = Graph(authors, source, settings, n_target, tf.float32)
    make_checkpoint(single, source, rng)
    saved = ours.read_checkpoint(source / "xlnet_model.ckpt")
    drawn = draw(config, n_target, n_segment, rng)
    expected = run(Graph(authors, source, settings, n_target, tf.float64), saved, drawn)
    for key, array in run(single, saved, drawn).items():
        ours.assert_close(f"{name}: {key} in float32", array, expected[key]) if array.size else None
    for key, array in expected.items():
        assert not key.startswith("grads.") or array.any() or (key.endswith("mask_emb") and not n_target), key
    about = {
        "peer": "zihangdai/xlnet at bbaa3a6",
        "hyperparameters": config | settings,
        "first_memory": "zeros",
        "reading": {"zeros": settings["mem_len"] or 0},
        "aliases": {},
    }
    arrays = {key: np.ascontiguousarray(array) for key, array in expected.items()}
    save_file(arrays, directory / "expected.safetensors", {"about": json.dumps(about)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkout", type=Path, required=True, help="a clone of the authors' repository")
    arguments = parser.parse_args()
    warnings.filterwarnings("ignore", message="`tf.layers")
    tf.disable_v2_behavior()
    tf.logging.set_verbosity(tf.logging.ERROR)
    authors = import_authors(arguments.checkout.resolve())
    for name in VARIANTS:
        make_variant(authors, name)
        files = [path for path in (GOLDENS / name).rglob("*") if path.is_file()]
        print(f"{name}: {sum(path.stat().st_size for path in files)} bytes")


if __name__ == "__main__":
    main()
