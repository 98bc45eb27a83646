#!/bin/sh
# check.sh: the checks of deploy/ that `make manifests` leaves out, since they need npm or a large install of their own.
#   - KEDA, the Prometheus Operator and the Gateway API: the complete schemas of their CRDs, from packages on npm
#   - checkov over the image, every overlay and the chart, but for what deploy/checkov.yaml excepts with a reason
#   - shellcheck, where it is installed
set -eu
cd "$(dirname "$0")/.."
venv=${VENV:-.venv}
python=${PYTHON:-python3}
work=${WORK_DIR:-build/deploy-check}
mkdir -p "$work"

"$venv/bin/python" -m tests.deploy.write "$work"

echo "== schemas of custom resources (npm)"
npm --prefix "$work" install --silent --no-audit --no-fund --no-save \
    @kubernetes-models/keda@2 @kubernetes-models/prometheus-operator@6 @kubernetes-models/gateway-api@2
cp deploy/models.mjs "$work/"
(cd "$work" && node models.mjs)

echo "== checkov"
[ -x "$work/checkov/bin/checkov" ] || {
    "$python" -m venv "$work/checkov"
    "$work/checkov/bin/pip" install --quiet --disable-pip-version-check 'checkov==3.*'
}
# Without this variable checkov asks its vendor's server for mappings and retries for long.
export BC_SKIP_MAPPING=TRUE
"$work/checkov/bin/checkov" --config-file deploy/checkov.yaml --framework kubernetes -d "$work/yaml"
"$work/checkov/bin/checkov" --config-file deploy/checkov.yaml --framework dockerfile -f Dockerfile

if command -v shellcheck >/dev/null; then
    echo "== shellcheck"
    shellcheck deploy/check.sh deploy/image/build.sh deploy/image/trim.sh
fi
echo "deploy: as it should be"
