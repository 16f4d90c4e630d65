set -eu
@{!environment}
