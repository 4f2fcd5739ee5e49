#!/bin/sh
# Exports the model as a package, builds `generate` with the installed library, and continues a long text by it, dense and
# sparse. Arguments: the folder to work in, the text (a value of --dataset), the build folder of the library.
set -e
folder=$1 dataset=$2 build=$3
mkdir -p "$folder"
cmake --install "$build" --prefix "$folder/installed" --component package >/dev/null
torch=$(python -c 'import torch; print(torch.utils.cmake_prefix_path)')
cmake -S "$(dirname "$0")" -B "$folder/examples" -G Ninja \
  "-DCMAKE_PREFIX_PATH=$(realpath "$folder/installed");$torch" >/dev/null
cmake --build "$folder/examples" --target generate
h2o-prefill export --capacity 8192 --output "$folder/model.pt2"
token_ids="python $(dirname "$0")/token_ids.py"
$token_ids encode "$folder/model.tokenizer" --dataset "$dataset" --tokens 6000 > "$folder/ids.txt"
for option in --dense ""; do
  "$folder/examples/generate" "$folder/model.pt2" "$folder/ids.txt" --max-new-tokens 48 $option > "$folder/answer.txt"
  $token_ids decode "$folder/model.tokenizer" < "$folder/answer.txt"
done
