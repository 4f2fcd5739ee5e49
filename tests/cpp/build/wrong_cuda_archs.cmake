# cmake -DLIST=... -P: fails for a list that cannot be read.
include("${CMAKE_CURRENT_LIST_DIR}/../../../csrc/cmake/cuda_archs.cmake")
h2o_cuda_archs(archs "" "${LIST}")
