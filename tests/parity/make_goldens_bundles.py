"""Write `tests/parity/goldens/bundles`: tiny checkpoints of TensorFlow 2, of kinds that `goldens/tensorflow` lacks.

In the environment of make_goldens_tensorflow.py:

    tf-venv/bin/python tests/parity/make_goldens_bundles.py

Each holds a Transformer-XL of one layer under the names of the authors' `tf/model.py`, with random numbers:

- `shards`: in three data files, as a saver with one device for each third of the variables writes it.
- `slots`: with what Adam keeps for each variable, averages, and a step counter.
- `bf16`: in bfloat16, as a TPU computes.
- `first_format`: what TensorFlow wrote before it had bundles, one file (and a `.meta`, left out), which is only refused.

`variables.json` gives dtype, shape and sha256 of every variable, as TensorFlow reads it back.
"""

import hashlib
import json
import os
import shutil
from pathlib import Path
from typing import Any

# TensorFlow reads these when it is imported.
os.environ.update(CUDA_VISIBLE_DEVICES="", TF_CPP_MIN_LOG_LEVEL="3", TF_ENABLE_ONEDNN_OPTS="0")

import numpy as np
import tensorflow.compat.v1 as tf  # pyright: ignore[reportMissingImports]

GOLDENS = Path(__file__).parent / "goldens" / "bundles"
STEP = 7
D, H, F, V = 4, 4, 5, 11  # width, that of all heads, inner width, words
SHAPES = {
    "adaptive_embed/lookup_table": (V, D),
    "adaptive_softmax/bias": (V,),
    "r_w_bias": (2, 2),
    "r_r_bias": (2, 2),
    "layer_0/rel_attn/qkv/kernel": (D, 3 * H),
    "layer_0/rel_attn/r/kernel": (D, H),
    "layer_0/rel_attn/o/kernel": (H, D),
    "layer_0/rel_attn/LayerNorm/gamma": (D,),
    "layer_0/rel_attn/LayerNorm/beta": (D,),
    "layer_0/ff/layer_1/kernel": (D, F),
    "layer_0/ff/layer_1/bias": (F,),
    "layer_0/ff/layer_2/kernel": (F, D),
    "layer_0/ff/layer_2/bias": (D,),
    "layer_0/ff/LayerNorm/gamma": (D,),
    "layer_0/ff/LayerNorm/beta": (D,),
}


def main() -> None:
    """Write all goldens anew."""
    shutil.rmtree(GOLDENS, ignore_errors=True)
    write("shards", n_device=3, sharded=True)
    write("slots", slots=True)
    write("bf16", dtype=tf.bfloat16)
    write("first_format", write_version=tf.train.SaverDef.V1)


def write(name: str, *, dtype: Any = tf.float32, slots: bool = False, n_device: int = 1, **saving: Any) -> None:
    """Save the variables of one kind, and what TensorFlow reads back."""
    folder, rng = GOLDENS / name, np.random.default_rng(len(name))
    folder.mkdir(parents=True)
    with tf.Graph().as_default(), tf.Session(config=tf.ConfigProto(device_count={"CPU": n_device})) as session:
        for i, (variable, shape) in enumerate(SHAPES.items()):
            with tf.device(f"/cpu:{i % n_device}"):
                numbers = tf.constant(rng.normal(size=shape), dtype)
                tf.get_variable(f"transformer/{variable}", initializer=numbers, use_resource=True)
        step = add_slots() if slots else tf.no_op()
        session.run(tf.global_variables_initializer())
        session.run(step)
        saver = tf.train.Saver(save_relative_paths=True, **saving)
        path = saver.save(session, str(folder / "model.ckpt"), global_step=STEP, write_meta_graph=False)
        shown = session.run({variable.op.name: variable for variable in tf.global_variables()})
    if name == "first_format":
        return
    reader = tf.train.load_checkpoint(path)
    assert set(reader.get_variable_to_shape_map()) == set(shown)
    digests = {}
    for variable, value in sorted(shown.items()):
        again = reader.get_tensor(variable)
        assert again.tobytes() == value.tobytes(), variable
        digests[variable] = [again.dtype.name, list(again.shape), hashlib.sha256(again.tobytes()).hexdigest()]
    (folder / "variables.json").write_text(json.dumps(digests, indent=1) + "\n")


def add_slots() -> Any:
    """Let Adam and an average keep something of every variable; return a step of training."""
    variables, counter = tf.trainable_variables(), tf.train.get_or_create_global_step()
    loss = tf.add_n([tf.reduce_sum(tf.square(variable)) for variable in variables])
    step = tf.train.AdamOptimizer(0.1).minimize(loss, global_step=counter)
    with tf.control_dependencies([step]):
        return tf.train.ExponentialMovingAverage(0.5).apply(variables)


if __name__ == "__main__":
    main()
