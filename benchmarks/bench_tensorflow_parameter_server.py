"""Closures per second under TensorFlow's parameter server, and in TensorFlow's tutorial loop.

All ways train the same model with the same batch on the same cluster: one coordinator, the workers
and one server, each a separate engine. The tutorial loop runs TensorFlow's own code: meanwhile our
records and controls are removed from the coordinator.

    for _ in range(steps):
        coordinator.schedule(step, args=(per_worker_iterator,))
    coordinator.join()

It is compared with the same loop, recorded; with `wb.fit`; and with `model.fit`, which Keras 3
alone does not support here. They alternate within one cell, so other work disturbs all of them
equally. The table shows medians of the ratios of neighbouring turns. "again", the tutorial's second
turn, shows how much equal turns differ.

A turn of `wb.fit` or `model.fit` includes sending the data to the workers. A turn of `wb.fit` makes
a new optimizer, so it traces its step each time. Therefore it is also compared with `anew`: the
tutorial loop with a new optimizer and `tf.function` in each turn.

    python benchmarks/bench_tensorflow_parameter_server.py --workers 2 --steps 768 --turns 9
"""

from __future__ import annotations

import argparse
import json
import os
import statistics

import workbench as wb

CELL = """
import time
import keras, numpy as np, tensorflow as tf, workbench as wb

x = np.random.default_rng(0).random((4096, 28, 28), np.float32)
y = np.random.default_rng(1).integers(0, 10, 4096)
batch, steps, workers = {batch}, {steps}, world_size

def make():
    model = keras.Sequential([
        keras.Input((28, 28)), keras.layers.Flatten(),
        keras.layers.Dense(128, activation="relu"), keras.layers.Dense(10),
    ])
    return model, keras.optimizers.SGD(0.01)

loss_fn = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
model, optimizer = make()

def make_step(optimizer):
    optimizer.build(model.trainable_variables)

    @tf.function
    def step(iterator):
        def replica(pair):
            a, b = pair
            with tf.GradientTape() as tape:
                loss = loss_fn(b, model(a, training=True))
            gradients = tape.gradient(loss, model.trainable_variables)
            optimizer.apply_gradients(zip(gradients, model.trainable_variables))
            return loss
        return strategy.run(replica, args=(next(iterator),))

    return step

step = make_step(optimizer)

data = lambda: tf.data.Dataset.from_tensor_slices((x, y)).shuffle(4096).repeat().batch(batch)
iterator = iter(coordinator.create_per_worker_dataset(data))
cluster = coordinator._cluster

def loop(number, step):
    for _ in range(number):
        coordinator.schedule(step, args=(iterator,))
    coordinator.join()

def recorded(number):
    loop(number, step)

def bare(number, step):
    ours = {{name: vars(cluster).pop(name) for name in ("schedule", "join")}}
    loop(number, step)
    vars(cluster).update(ours)

def tutorial(number):
    bare(number, step)

def anew(number):
    bare(number, make_step(keras.optimizers.SGD(0.01)))

fitted, _ = make()
compiled, opt = make()
compiled.compile(optimizer=opt, loss=loss_fn)

def wb_fit(number):
    wb.fit(fitted, (x, y), loss=loss_fn, optimizer=lambda p: keras.optimizers.SGD(0.01),
           batch_size=batch * workers, steps=number // workers)

def model_fit(number):
    closures = workers * -(-4096 // (batch * workers))  # of an epoch
    compiled.fit(x, y, batch_size=batch * workers, epochs=max(1, round(number / closures)))
    return closures * max(1, round(number / closures))

WAYS = dict(
    recorded=recorded, tutorial=tutorial, again=tutorial, model_fit=model_fit, anew=anew,
    wb_fit=wb_fit,
)
seconds = {{name: [] for name in WAYS}}
for way in WAYS.values():
    way(20)
for turn in range({turns}):
    for name, way in WAYS.items():
        began = time.perf_counter()
        done = way(steps) or steps
        seconds[name].append((time.perf_counter() - began) * steps / done)
seconds
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--batch", type=int, default=32, help="samples per closure")
    parser.add_argument("--steps", type=int, default=768, help="closures per turn")
    parser.add_argument("--turns", type=int, default=9)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    cell = CELL.format(batch=args.batch, steps=args.steps, turns=args.turns)
    with wb.Cluster(1, devices="cpu", framework="tensorflow") as cluster:
        cluster.run(cell, strategy="parameter_server", workers=args.workers).wait()
        seconds = cluster.pull(["seconds"], ids=cluster.worker_ids)[0]["seconds"]
    print(f"{args.workers} workers, batches of {args.batch}, {args.turns} turns of {args.steps}")
    print(f"{'':12}{'closures/s':>12}{'x tutorial':>12}")
    ratios = {}
    for name, taken in seconds.items():
        ratios[name] = statistics.median(
            base / own for base, own in zip(seconds["tutorial"], taken, strict=True)
        )
        rate = args.steps / statistics.median(taken)
        print(f"{name:12}{rate:12.0f}{ratios[name]:12.2f}")
    paired = zip(seconds["anew"], seconds["wb_fit"], strict=True)
    fresh = statistics.median(base / own for base, own in paired)
    print(f"wb_fit: {fresh:.2f} x a tutorial loop that is traced anew")
    noise = abs(1 - ratios["again"])
    reached = ratios["recorded"] >= 1 - noise
    print(
        f"{'reached' if reached else 'MISSED '}  recorded >= 1 x tutorial, within {noise:.2f} noise"
    )
    result = {"what": f"closures of TensorFlow's parameter server, {args.workers} workers"}
    result |= {f"{name}_ratio": ratio for name, ratio in ratios.items()}
    per_s = args.steps / statistics.median(seconds["tutorial"])
    result |= {"wb_fit_anew_ratio": fresh, "tutorial_closures_per_s": per_s, "seconds": seconds}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
