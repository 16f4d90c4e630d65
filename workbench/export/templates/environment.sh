# The environment is the folder in --venv DIR or WORKBENCH_VENV. Without them, the job makes its own
# environment once, from requirements.txt. The lock is for nodes that share this folder.
venv=${WORKBENCH_VENV:-}
if [ -z "$venv" ]; then
  venv=$PWD/.venv
  (
    flock 9
    if ! cmp -s requirements.txt "$venv/made-from.txt"; then
      "$(command -v @{python} || command -v python3)" -m venv --clear "$venv"
      "$venv/bin/python" -m pip install --quiet --disable-pip-version-check -r requirements.txt
      cp requirements.txt "$venv/made-from.txt"
    fi
  ) 9> .venv.lock
elif [ ! -d "$venv/bin" ]; then # what else is in PATH would be taken
  echo "There is no Python environment in $venv (current folder: $PWD)." >&2
  exit 2
fi
export PATH="$venv/bin:$PATH"
