#!/usr/bin/env bash
@{!header}
# The code is copied to each host with tar over ssh. ssh logs in with its own configuration and
# agent, and nothing of this shell's environment is sent.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")"
hosts=(@{*hosts})
there=@{there}
quoted=$(printf '%q' "$there")
ssh=(ssh -o BatchMode=yes -o ConnectTimeout=15 -o ServerAliveInterval=15)
first=${hosts[0]#*@}
names=$(IFS=,; echo "${hosts[*]#*@}")
key=$(od -An -N16 -tx1 /dev/urandom | tr -d ' \n') # the processes of this job know each other by it

@{?copied}for host in "${hosts[@]}"; do
@{?copied}  tar -cf - --exclude=./runs --exclude=./.venv --exclude=./.venv.lock . |
@{?copied}    "${ssh[@]}" -- "$host" "mkdir -p $quoted && tar -xf - -C $quoted"
@{?copied}done

stop() {
  for node in "${!hosts[@]}"; do
    "${ssh[@]}" -- "${hosts[$node]}" \
      "cd $quoted && [ -f .start-$node.pid ] && kill \$(cat .start-$node.pid)" < /dev/null 2> /dev/null || true
  done
}
trap 'stop; exit 130' INT TERM

for node in "${!hosts[@]}"; do
  "${ssh[@]}" -- "${hosts[$node]}" "cd $quoted && read -r WORKBENCH_JOB_KEY &&
    export WORKBENCH_JOB_KEY HOSTS=$(printf '%q' "$names") && echo \$\$ > .start-$node.pid &&
    exec bash start.sh --node $node --first $(printf '%q' "$first")" <<< "$key" &
done
status=0
for _ in "${hosts[@]}"; do
  code=0
  wait -n || code=$?
  if [ "$code" -ne 0 ] && [ "$status" -eq 0 ]; then # the first failure has the cause
    status=$code
    stop
  fi
done
exit "$status"
