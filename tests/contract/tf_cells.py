"""Cells that the TensorFlow suite runs, as a user would write them."""

DATA = """
import keras, numpy as np, tensorflow as tf
rng = np.random.default_rng(0)
SIZE, BATCH = SIZES
x = rng.normal(size=(SIZE, 8)).astype(DTYPE)
y = rng.integers(0, 3, SIZE)
keras.config.set_floatx(DTYPE)
if DTYPE == "float64":
    keras.config.set_dtype_policy("float64")
model = keras.Sequential([keras.layers.Dense(16, "tanh"), keras.layers.Dense(3)])
cross_entropy = keras.losses.SparseCategoricalCrossentropy(from_logits=True)
def make_optimizer(*variables):
    if OPTIMIZER == "SGD":
        return keras.optimizers.SGD(0.2, momentum=0.9)
    return keras.optimizers.Adam(0.01)
"""

RESTORE = """
keras.config.set_floatx("float32"); keras.config.set_dtype_policy("float32")
"""

WB_FIT = (
    DATA
    + """
result = wb.fit(
    model, (x, y), loss=cross_entropy, optimizer=make_optimizer, batch_size=BATCH, steps=20,
    eval_data=(x[:31], y[:31]),
    metrics={"right": lambda out, y: tf.cast(tf.argmax(out, 1) == y, tf.float64)}, **EXTRA,
)
evals = result.evals
"""
    + RESTORE
)

KERAS_FIT = (
    DATA
    + """
model.compile(optimizer=make_optimizer(), loss=cross_entropy, metrics=["accuracy"], **EXTRA)
history = model.fit(x, y, batch_size=BATCH, epochs=20 // (SIZE // BATCH))
"""
    + RESTORE
)

OWN_LOOP = (
    DATA
    + """
optimizer = make_optimizer()
losses = keras.losses.SparseCategoricalCrossentropy(from_logits=True, reduction="none")

def step(batch):
    inputs, targets = batch
    with tf.GradientTape() as tape:
        each = losses(targets, model(inputs, training=True))
        if tf.reduce_sum(each) >= 0.0:  # autograph still works
            loss = tf.nn.compute_average_loss(each, global_batch_size=BATCH)
        else:
            loss = tf.constant(float("nan"), each.dtype)
    gradients = tape.gradient(loss, model.trainable_variables)
    optimizer.apply_gradients(zip(gradients, model.trainable_variables))
    return loss

if GRAPH:
    @tf.function
    def train_step(batch):
        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)
else:
    def train_step(batch):
        return strategy.reduce("SUM", strategy.run(step, args=(batch,)), axis=None)

data = tf.data.Dataset.from_tensor_slices((x, y)).batch(BATCH, drop_remainder=True)
data = strategy.experimental_distribute_dataset(data)
shown = []
for epoch in range(STEPS // (SIZE // BATCH)):
    for batch in data:
        shown.append(float(train_step(batch)))
"""
    + RESTORE
)

WAYS = {"fit": WB_FIT, "keras": KERAS_FIT, "loop": OWN_LOOP}

SLEEPY = """
import time
import keras, numpy as np, tensorflow as tf

def doze(value):
    time.sleep(MILLIS / 1e3)
    return np.float32(0.0)

class Sleepy(keras.Model):
    '''Steps that are asleep most of the time, so that cores do not matter.'''

    def __init__(self):
        super().__init__()
        self.inner = keras.layers.Dense(1)

    def call(self, inputs):
        nothing = tf.numpy_function(doze, [inputs[0, 0]], tf.float32, stateful=False)
        return self.inner(inputs + tf.ensure_shape(nothing, ()))

x = np.random.default_rng(0).normal(size=(STEPS * 12, 8)).astype("float32")
y = x.sum(1, keepdims=True)
model = Sleepy()
"""

SLEEPY_WAYS = {
    "fit": SLEEPY
    + """
wb.fit(model, (x, y), loss=keras.losses.MeanSquaredError(), batch_size=12, steps=STEPS,
       optimizer=keras.optimizers.SGD(0.01))
""",
    "keras": SLEEPY
    + """
model.compile(optimizer="sgd", loss="mse")
model.fit(x, y, batch_size=12)
""",
    "loop": SLEEPY
    + """
optimizer = keras.optimizers.SGD(0.01)

def step(inputs, targets):
    with tf.GradientTape() as tape:
        each = tf.reduce_sum((model(inputs) - targets) ** 2, 1)
        loss = tf.nn.compute_average_loss(each, global_batch_size=12)
    variables = model.trainable_variables
    optimizer.apply_gradients(zip(tape.gradient(loss, variables), variables))
    return loss

@tf.function
def train_step(batch):
    return strategy.run(step, args=batch)

data = tf.data.Dataset.from_tensor_slices((x, y)).batch(12)
for batch in strategy.experimental_distribute_dataset(data):
    train_step(batch)
""",
}

KERAS_MODEL = """
import keras, numpy as np, tensorflow as tf
x = np.random.default_rng(0).normal(size=(96, 28, 28)).astype("float32")
y = np.random.default_rng(1).integers(0, 10, 96)
model = keras.Sequential([
    keras.layers.Flatten(input_shape=(28, 28)), keras.layers.Dense(128, activation="relu"),
    keras.layers.BatchNormalization(), keras.layers.Dropout(0.2), keras.layers.Dense(10),
])
seen = []
class Mine(keras.callbacks.Callback):
    def on_train_batch_end(self, batch, logs=None):
        seen.append((batch, sorted(logs)))
model.compile(optimizer="adam", metrics=["accuracy"], steps_per_execution=EVERY,
    loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True))
"""
FIT_CALLS = {
    "arrays": "h = model.fit(x, y, epochs=2, batch_size=24, callbacks=[Mine()])",
    "validation_data": "h = model.fit(x, y, 24, 2, validation_data=(x, y), callbacks=Mine())",
    "validation_split": "h = model.fit(x, y, 18, 2, validation_split=0.25, callbacks=[Mine()])",
    "tf.data": "h = model.fit(tf.data.Dataset.from_tensor_slices((x, y)).batch(24), epochs=2, "
    "callbacks=[Mine()], validation_data=tf.data.Dataset.from_tensor_slices((x, y)).batch(24))",
    "weights": "h = model.fit(x, y, epochs=2, batch_size=24, callbacks=[Mine()], "
    "sample_weight=np.ones(96))",
}
