#!/usr/bin/env bash
@{!header}
# For several nodes, run this on each node, in a copy of this folder:
#   bash start.sh --node NUMBER --first HOST
# NUMBER is 0 on HOST itself; HOST is the name by which the other nodes reach it.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
node=0 first=127.0.0.1 port=${MASTER_PORT:-@{port}}
while [ $# -gt 0 ]; do
  case $1 in
    --venv) WORKBENCH_VENV=$2; shift 2 ;;
    --node) node=$2; shift 2 ;;
    --first) first=$2; shift 2 ;;
    *) echo "usage: bash start.sh [--venv DIR] [--node NUMBER --first HOST]" >&2; exit 2 ;;
  esac
done
@{!environment}
@{?torch_alone}exec torchrun --standalone --nproc-per-node=@{per_node} train.py
@{?torch_nodes}exec torchrun --nnodes=@{nodes} --node-rank="$node" --nproc-per-node=@{per_node} \
@{?torch_nodes}  --master-addr="$first" --master-port="$port" train.py
@{?tensorflow}exec python start_tf.py "$node" "${HOSTS:-$first}" "$port"
