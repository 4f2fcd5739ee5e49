// Runs a TorchScript file that uses the library's ops, without Python.
//
//   run_scripted FILE.pt [tokens, default 4096]
//
// The file holds a module whose forward takes q [B, Hq, T, D], k [B, Hkv, T, D] and v [B, Hkv, T,
// D] and returns output, scores and memory set. In Python:
//
//   attention = h2o_prefill.ChunkedSparseAttention(h2o_prefill.PrefillConfig(chunk_size=1024))
//   torch.jit.script(attention).save("attention.pt")
#include <ATen/ATen.h>
#include <h2o_prefill/library.h>
#include <torch/script.h>

#include <exception>
#include <iostream>
#include <string>

namespace {

void run(const char* file, int64_t tokens) {
  // Nothing else here names a symbol of the library. Without this call the linker could leave it
  // out, and loading the file would fail with "Unknown builtin op".
  h2o_prefill::init();
  const c10::InferenceMode inference;
  auto module = torch::jit::load(file);
  const auto q = at::randn({1, 8, tokens, 64});
  const auto k = at::randn({1, 2, tokens, 64});
  const auto v = at::randn({1, 2, tokens, 64});
  const auto results = module.forward({q, k, v}).toTuple();
  const char* const names[] = {"output", "scores", "memory set"};
  for (size_t i = 0; i < 3; ++i)
    std::cout << names[i] << ' ' << results->elements().at(i).toTensor().sizes() << '\n';
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) {
    std::cerr << "usage: run_scripted FILE.pt [tokens]\n";
    return 2;
  }
  try {
    run(argv[1], argc > 2 ? std::stoll(argv[2]) : 4096);
  } catch (const c10::Error& error) {
    std::cerr << "error: " << error.what_without_backtrace() << '\n';
    return 1;
  } catch (const std::exception& error) {
    std::cerr << "error: " << error.what() << '\n';
    return 1;
  }
}
