#!/bin/bash
# Runs the programs of this folder over evenkeel and Gloo, and prints a table of promises.
#
#   python/frameworks/run.sh WHEEL                  all frameworks
#   python/frameworks/run.sh WHEEL lightning ...    these, or one promise: lightning:joins
#
# WHEEL is that of //python/evenkeel_c10d:wheel, for python3. Run by hand, not in CI: it makes an
# environment below ~/.cache/evenkeel once (1.5 GB), with the torch that python/check.sh installed.
# Takes 26 minutes on 2 idle cores.
# Prints "ok ..." or "FAILED ..." for each promise; ends with 1 if one failed.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"

torch=2.15.0
cache=${XDG_CACHE_HOME:-$HOME/.cache}/evenkeel
[[ $# -gt 0 ]] || { sed -n '2,10s/^# \?//p' "$0" >&2; exit 2; }
wheel=$(realpath "$1")
shift
if [[ ! -e $cache/torch-$torch/complete ]]; then
  echo "run python/check.sh first, without EVENKEEL_TORCH_PYTHON: it installs torch $torch" >&2
  exit 1
fi

environment=$cache/frameworks
python=$environment/bin/python
if [[ ! -e $environment/complete ]]; then
  python3 -m venv "$environment"
  # Torch and what it needs are those of the other environment.
  site=$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  echo "${site/"$environment"/"$cache/torch-$torch"}" >"$site/torch.pth"
  "$python" -m pip install --quiet lightning==2.6.6 accelerate==1.15.0 transformers==5.24.0 \
    pytorch-ignite==0.5.5 'ray[train]==2.60.0' torchft==0.2.0 skorch==1.4.0 setuptools wheel ninja
  DS_BUILD_OPS=0 "$python" -m pip install --quiet --no-build-isolation deepspeed==0.19.8
  touch "$environment/complete"
fi
"$python" -m pip install --quiet --no-deps --force-reinstall "$wheel"
exec "$python" promises.py "$@"
