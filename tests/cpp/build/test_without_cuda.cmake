# cmake -P: a build for the CPU is configured anew, and its cache holds nothing of CUDA.
execute_process(
  COMMAND
    ${CMAKE_COMMAND} --fresh -S ${SOURCE} -B ${BINARY} -G ${GENERATOR} -DCMAKE_MAKE_PROGRAM=${MAKE_PROGRAM}
    -DCMAKE_CXX_COMPILER=${CXX_COMPILER} -DTorch_DIR=${TORCH_DIR} -DH2O_WITH_CUDA=OFF
    -DCMAKE_INSTALL_RPATH=/opt/libtorch/lib
  OUTPUT_QUIET COMMAND_ERROR_IS_FATAL ANY)
file(STRINGS ${BINARY}/CMakeCache.txt found REGEX "CUDAToolkit_|CMAKE_CUDA_|TORCH_CUDA_|H2O_NVCC")
if(found)
  list(JOIN found "\n" found)
  message(FATAL_ERROR "H2O_WITH_CUDA=OFF looked for CUDA:\n${found}")
endif()
file(STRINGS ${BINARY}/cmake_install.cmake found REGEX "NEW_RPATH \"/opt/libtorch/lib\"")
if(NOT found)
  message(FATAL_ERROR "CMAKE_INSTALL_RPATH is not what installs")
endif()
