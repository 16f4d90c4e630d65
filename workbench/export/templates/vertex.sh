set -eu
cd "$(mktemp -d)"
cp -r @{remote_folder}/* .
python3 -m pip install --quiet -r requirements.txt
# CLUSTER_SPEC of Vertex lists the nodes: the first pool has one node, the second all other nodes.
eval "$(python3 - <<'END'
import json, os
spec = json.loads(os.environ.get("CLUSTER_SPEC") or '{"task": {"type": "workerpool0", "index": 0}}')
task, pools = spec["task"], spec.get("cluster", {})
host = pools.get("workerpool0", ["127.0.0.1:2222"])[0].rpartition(":")[0]
print(f"node={int(task['index']) + (task['type'] != 'workerpool0')} first='{host}'")
END
)"
exec python3 -m torch.distributed.run @{!launch} train.py
