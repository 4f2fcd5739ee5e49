# cmake -P: the architectures that TORCH_CUDA_ARCH_LIST names.
include("${CMAKE_CURRENT_LIST_DIR}/../../../csrc/cmake/cuda_archs.cmake")

# -DLIST=... has to fail: a list that cannot be read.
if(LIST)
  h2o_cuda_archs(archs "" "${LIST}")
  return()
endif()

function(expect list expected)
  h2o_cuda_archs(archs "80-real;90a-real" "${list}")
  if(NOT archs STREQUAL expected)
    message(SEND_ERROR "\"${list}\": expected ${expected}, got ${archs}")
  endif()
endfunction()

expect("" "80-real;90a-real")
expect("8.0" "80-real")
expect("8.0;9.0a;12.0+PTX" "80-real;90a-real;120-real;120-virtual")
# The list of PyTorch's own wheels.
expect("7.5 8.0 8.6 9.0 10.0 12.0+PTX" "80-real;86-real;90a-real;100-real;120-real;120-virtual")
expect("9.0 9.0a 9.0+PTX" "90a-real;90-virtual")
expect("10.0f" "100f-real")
expect("7.0, 7.5" "")
