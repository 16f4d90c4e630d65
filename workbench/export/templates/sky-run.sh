set -eu
export PATH="$PWD/.venv/bin:$PATH"
first=$(echo "$SKYPILOT_NODE_IPS" | head -n 1)
@{?torch}exec torchrun --nnodes="$SKYPILOT_NUM_NODES" --node-rank="$SKYPILOT_NODE_RANK" \
@{?torch}  --nproc-per-node=@{per_node} --master-addr="$first" --master-port=@{port} train.py
@{?tensorflow}exec python start_tf.py "$SKYPILOT_NODE_RANK" "$(echo "$SKYPILOT_NODE_IPS" | paste -s -d,)" @{port}
