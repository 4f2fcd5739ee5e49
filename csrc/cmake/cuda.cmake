# Decides whether the CUDA kernels are built, and compiles them.
#
# H2O_WITH_CUDA: ON, OFF, or AUTO for ON if the PyTorch that was found is a CUDA build, there is an nvcc of its major
# version, and this machine has a GPU. ON builds them for other machines too. TORCH_CUDA_ARCH_LIST names architectures
# (see cuda_archs.cmake). With OFF nothing of CUDA is looked for.
#
# Sets H2O_CUDA to whether they are built, and H2O_CUDA_COMPILES to whether they can be: tests compile them then.

include("${CMAKE_CURRENT_LIST_DIR}/cuda_archs.cmake")

set(H2O_WITH_CUDA AUTO CACHE STRING "Build the CUDA kernels: ON, OFF, or AUTO where there is a GPU and a toolkit for it")
set_property(CACHE H2O_WITH_CUDA PROPERTY STRINGS ON OFF AUTO)

# Machine code for the architectures that differ, PTX of the newest for later ones. Code for 8.0 runs on 8.6, 8.7 and 8.9.
set(H2O_CUDA_DEFAULT_ARCHS "80-real;90a-real;90-virtual")

# Sets H2O_CUDA_MAJOR to the CUDA major version that PyTorch was built with, empty for a CPU build, and H2O_NVCC and
# H2O_NVCC_VERSION to the compiler that was found, empty for none.
function(h2o_find_cuda)
  set(major "")
  if(EXISTS "${H2O_TORCH_LIB_DIR}/libc10_cuda.so")
    # The name under which it asks for the CUDA runtime, whatever package that comes from.
    file(STRINGS "${H2O_TORCH_LIB_DIR}/libc10_cuda.so" names REGEX "libcudart[-0-9a-f]*\\.so\\.[0-9]+")
    if(names MATCHES "libcudart[-0-9a-f]*\\.so\\.([0-9]+)")
      set(major ${CMAKE_MATCH_1})
    endif()
  endif()
  set(H2O_CUDA_MAJOR "${major}" PARENT_SCOPE)

  find_program(H2O_NVCC nvcc HINTS ENV CUDACXX ENV CUDA_HOME ENV CUDA_PATH PATHS /usr/local/cuda PATH_SUFFIXES bin)
  set(version "")
  if(H2O_NVCC)
    execute_process(COMMAND "${H2O_NVCC}" --version OUTPUT_VARIABLE output ERROR_QUIET)
    if(output MATCHES "release ([0-9]+\\.[0-9]+)")
      set(version ${CMAKE_MATCH_1})
    endif()
  endif()
  set(H2O_NVCC_VERSION "${version}" PARENT_SCOPE)
endfunction()

set(H2O_CUDA FALSE)
set(H2O_CUDA_COMPILES FALSE)
set(H2O_CUDA_ARCHS "")
if(NOT H2O_WITH_CUDA MATCHES "^(ON|OFF|AUTO)$")
  message(FATAL_ERROR "H2O_WITH_CUDA must be ON, OFF or AUTO, got ${H2O_WITH_CUDA}")
endif()
if(NOT H2O_WITH_CUDA STREQUAL "OFF")
  h2o_find_cuda()
  set(h2o_no_cuda "")
  if(NOT H2O_CUDA_MAJOR)
    set(h2o_no_cuda "the PyTorch in ${H2O_TORCH_ROOT} is no CUDA build")
  elseif(NOT H2O_NVCC_VERSION)
    set(h2o_no_cuda "no nvcc was found; set CUDA_HOME to a toolkit of CUDA ${H2O_CUDA_MAJOR}")
  elseif(NOT H2O_NVCC_VERSION MATCHES "^${H2O_CUDA_MAJOR}\\.")
    set(h2o_no_cuda "PyTorch was built with CUDA ${H2O_CUDA_MAJOR}, ${H2O_NVCC} is of CUDA ${H2O_NVCC_VERSION}")
  elseif(H2O_SANITIZE)
    set(h2o_no_cuda "H2O_SANITIZE is for the code of the host")
  endif()
  if(NOT h2o_no_cuda)
    h2o_cuda_archs(H2O_CUDA_ARCHS "${H2O_CUDA_DEFAULT_ARCHS}" "$ENV{TORCH_CUDA_ARCH_LIST}")
    if(NOT H2O_CUDA_ARCHS)
      set(h2o_no_cuda "TORCH_CUDA_ARCH_LIST names no architecture from ${H2O_CUDA_LEAST_MAJOR}.0 on")
    endif()
  endif()
  if(NOT h2o_no_cuda)
    set(H2O_CUDA_COMPILES TRUE)
    if(H2O_WITH_CUDA STREQUAL "AUTO")
      # One device file a GPU: of the driver, of Tegra, of WSL.
      file(GLOB h2o_gpus /dev/nvidia[0-9]* /dev/nvgpu /dev/nvhost-gpu /dev/dxg)
      if(NOT h2o_gpus)
        set(h2o_no_cuda "this machine has no GPU; H2O_WITH_CUDA=ON builds them for others")
      endif()
    endif()
  endif()
  if(NOT h2o_no_cuda)
    set(H2O_CUDA TRUE)
  elseif(H2O_WITH_CUDA STREQUAL "ON")
    message(FATAL_ERROR "H2O_WITH_CUDA is ON, but ${h2o_no_cuda}")
  else()
    message(STATUS "Without CUDA kernels: ${h2o_no_cuda}")
  endif()
endif()

if(H2O_CUDA OR (H2O_CUDA_COMPILES AND H2O_BUILD_TESTS))
  set(CMAKE_CUDA_COMPILER "${H2O_NVCC}" CACHE FILEPATH "The CUDA compiler")
  set(CMAKE_CUDA_ARCHITECTURES "${H2O_CUDA_ARCHS}")
  enable_language(CUDA)
endif()
if(NOT H2O_CUDA)
  set(H2O_CUDA_ARCHS "")
else()
  message(STATUS "With CUDA kernels: nvcc ${H2O_NVCC_VERSION}, architectures ${H2O_CUDA_ARCHS}")
endif()

# Adds kernels (.cu, which see no PyTorch header) and the operators that call them (.cpp) to a target.
function(h2o_add_cuda target)
  set(kernels ${ARGN})
  list(FILTER kernels INCLUDE REGEX "\\.cu$")
  set(operators ${ARGN})
  list(FILTER operators EXCLUDE REGEX "\\.cu$")

  add_library(${target}_cuda OBJECT ${kernels})
  target_compile_features(${target}_cuda PRIVATE cuda_std_20)
  target_include_directories(${target}_cuda PRIVATE ${PROJECT_SOURCE_DIR}/csrc ${PROJECT_SOURCE_DIR}/csrc/include)
  # The architectures of a file are compiled side by side.
  target_compile_options(${target}_cuda PRIVATE -Xcompiler=-Wall,-Wextra --threads=0)
  set_target_properties(
    ${target}_cuda PROPERTIES POSITION_INDEPENDENT_CODE ON CUDA_VISIBILITY_PRESET hidden CUDA_RUNTIME_LIBRARY None)

  target_sources(${target} PRIVATE ${operators} $<TARGET_OBJECTS:${target}_cuda>)
  # The operators of the CPU have functions of the same names.
  set_source_files_properties(${operators} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
  target_include_directories(${target} SYSTEM PRIVATE ${CMAKE_CUDA_TOOLKIT_INCLUDE_DIRECTORIES})
  # The CUDA runtime is the one that PyTorch's libraries bring: a second copy in one process would have its own idea of
  # the current device. So none is linked here.
  target_link_options(${target} PRIVATE "LINKER:--no-as-needed")
  target_link_libraries(${target} PUBLIC h2o_torch_cuda)
  set_target_properties(${target} PROPERTIES CUDA_RUNTIME_LIBRARY None)
endfunction()
