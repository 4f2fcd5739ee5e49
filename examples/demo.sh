#!/bin/sh
# Exports the model as a package, builds `generate` with the installed library, and asks about a long text by it, dense and
# sparse. Arguments: the folder to work in, the build folder of the library, a text file.
set -e
folder=$1 build=$2 text=$3
mkdir -p "$folder"
cmake --install "$build" --prefix "$folder/installed" --component package >/dev/null
torch=$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')
openvino=$(python -c 'from openvino.utils import get_cmake_path; print(get_cmake_path())')
cmake -S "$(dirname "$0")" -B "$folder/examples" -G Ninja \
  "-DCMAKE_PREFIX_PATH=$(realpath "$folder/installed");$torch;$openvino" >/dev/null
cmake --build "$folder/examples"
h2o-prefill export --capacity 8192 --output "$folder/model"
# A number is a token for each digit: a text of many still fits the capacity.
head --bytes 16000 "$text" > "$folder/text.txt"
for option in --dense ""; do
  echo "What is this text about?" | "$folder/examples/generate" "$folder/model" "$folder/text.txt" $option
done
