#!/bin/sh
# trim.sh VENV VARIANT: removes what serving never reads: pip, test programs, headers, static libraries.
set -eu
venv=$1
variant=$2
site=$("$venv/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

# torch's own test programs (more than a hundred MB) and CMake files. torch_shm_manager is used at run time.
find "$site/torch/bin" -type f ! -name torch_shm_manager -delete 2>/dev/null || true
rm -rf "$site/torch/test" "$site/torch/share"
find "$site" -name '*.a' -delete
# Headers are for compiling extensions; on CUDA torch's are kept for the JIT.
[ "$variant" = cuda ] || rm -rf "$site/torch/include"
# Tests that libraries install beside their code.
for package in numpy sympy networkx; do
    find "$site/$package" -type d -name tests -prune -exec rm -rf {} +
done
"$venv/bin/python" -m pip uninstall --yes --quiet pip
rm -f "$venv"/bin/pip* "$venv"/bin/activate* "$venv"/bin/Activate*
