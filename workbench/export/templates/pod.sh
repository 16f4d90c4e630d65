set -eu
@{?shipped}cd "$(mktemp -d)"
@{?shipped}cp -L "${WORKBENCH_FILES:-@{mount}}"/* .
@{?parts}cat @{wheel}.part* > @{wheel}
@{?packed}cat workbench-files.zip.part* > workbench-files.zip
@{?packed}python3 -m zipfile -e workbench-files.zip .
@{?claimed}cd "${WORKBENCH_FILES:-@{mount}}"
@{?installs}python3 -m pip install --quiet --disable-pip-version-check -r requirements.txt
exec python3 -m torch.distributed.run @{!launch} train.py
