// h2o_prefill._C: facts about this build. It does not link PyTorch, so it can be imported before
// the ops are loaded.
#include <pybind11/pybind11.h>

PYBIND11_MODULE(_C, m) {
  m.doc() = "Build facts of h2o_prefill.";
  m.def(
      "build_info",
      [] {
        pybind11::dict info;
        info["version"] = H2O_VERSION;
        info["torch"] = H2O_TORCH_VERSION;
        info["compiler"] = H2O_COMPILER;
        info["build_type"] = H2O_BUILD_TYPE;
        info["cpu_isas"] = H2O_ISAS;
#ifdef H2O_HAVE_CUDA
        info["cuda"] = true;
#else
        info["cuda"] = false;
#endif
        info["cuda_archs"] = H2O_CUDA_ARCHS;
        return info;
      },
      "Return version, PyTorch version, compiler, build type, compiled instruction sets, whether "
      "CUDA kernels are in, and for which architectures.");
}
