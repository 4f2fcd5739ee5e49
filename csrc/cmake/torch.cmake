# Finds PyTorch.
#
# find_package(Torch) of a CUDA build demands a CUDA toolkit, even from a project that has no CUDA code. So the libraries
# and headers are located here, next to TorchConfig.cmake, and become one imported target: h2o_torch.
#
# Needs Torch_DIR, or CMAKE_PREFIX_PATH with torch.utils.cmake_prefix_path or an unpacked LibTorch, as find_package(Torch)
# does.

if(EXISTS "${Torch_DIR}/TorchConfig.cmake")
  set(H2O_TORCH_CMAKE_DIR "${Torch_DIR}")
else()
  find_path(H2O_TORCH_CMAKE_DIR TorchConfig.cmake PATH_SUFFIXES Torch share/cmake/Torch)
endif()
if(NOT H2O_TORCH_CMAKE_DIR)
  message(FATAL_ERROR "PyTorch was not found: set CMAKE_PREFIX_PATH to the folder of LibTorch, or to the output of "
                      "python -c 'import torch; print(torch.utils.cmake_prefix_path)'")
endif()
get_filename_component(H2O_TORCH_ROOT "${H2O_TORCH_CMAKE_DIR}/../../.." ABSOLUTE)
set(H2O_TORCH_LIB_DIR "${H2O_TORCH_ROOT}/lib")

file(STRINGS "${H2O_TORCH_CMAKE_DIR}/TorchConfigVersion.cmake" h2o_torch_version REGEX "PACKAGE_VERSION \"[0-9]")
string(REGEX MATCH "[0-9]+\\.[0-9]+\\.[0-9]+" H2O_TORCH_VERSION "${h2o_torch_version}")
if(H2O_TORCH_VERSION VERSION_LESS 2.11)
  message(FATAL_ERROR "PyTorch 2.11 or newer is needed, found ${H2O_TORCH_VERSION} in ${H2O_TORCH_ROOT}")
endif()

# The targets are made once, however often the package is looked for.
if(TARGET h2o_torch)
  return()
endif()

add_library(h2o_torch INTERFACE IMPORTED GLOBAL)
target_include_directories(h2o_torch SYSTEM INTERFACE "${H2O_TORCH_ROOT}/include"
                                                      "${H2O_TORCH_ROOT}/include/torch/csrc/api/include")
target_link_libraries(h2o_torch INTERFACE "${H2O_TORCH_LIB_DIR}/libtorch_cpu.so" "${H2O_TORCH_LIB_DIR}/libc10.so")
# The PyTorch libraries find their other dependencies beside them.
target_link_options(h2o_torch INTERFACE "LINKER:-rpath-link,${H2O_TORCH_LIB_DIR}" "LINKER:--allow-shlib-undefined")

# A library with CUDA kernels names these, and finds no folder by itself: programs link them too.
add_library(h2o_torch_cuda INTERFACE IMPORTED GLOBAL)
target_link_libraries(h2o_torch_cuda INTERFACE "${H2O_TORCH_LIB_DIR}/libtorch_cuda.so" "${H2O_TORCH_LIB_DIR}/libc10_cuda.so")
