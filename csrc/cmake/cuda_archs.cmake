# TORCH_CUDA_ARCH_LIST, such as "8.0 9.0 12.0+PTX", in CMake's names for architectures.

# The first compute capability that the kernels are written for.
set(H2O_CUDA_LEAST_MAJOR 8)

# "7.5 8.0 9.0 12.0+PTX" becomes "80-real;90a-real;120-real;120-virtual". Architectures below 8.0 are left out with a
# warning. 9.0 becomes 9.0a, whose machine code runs on every GPU of 9.0 and which alone has the kernels of Hopper. An
# empty list becomes `defaults`.
function(h2o_cuda_archs result defaults list)
  if(NOT list)
    set(${result} "${defaults}" PARENT_SCOPE)
    return()
  endif()
  string(REGEX REPLACE "[ ,;]+" ";" names "${list}")
  set(archs "")
  foreach(arch IN LISTS names)
    if(NOT arch MATCHES "^([0-9]+)\\.([0-9])([af]?)(\\+PTX)?$")
      message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST must hold architectures like 8.0, 9.0a or 12.0+PTX, got ${arch}")
    elseif(CMAKE_MATCH_1 LESS H2O_CUDA_LEAST_MAJOR)
      message(WARNING "No CUDA kernels for ${arch} of TORCH_CUDA_ARCH_LIST: they need compute capability "
                      "${H2O_CUDA_LEAST_MAJOR}.0; operators run there as plain ATen calls")
      continue()
    endif()
    set(number "${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
    set(variant "${CMAKE_MATCH_3}")
    if(number STREQUAL "90")
      list(APPEND archs "90a-real")
    else()
      list(APPEND archs "${number}${variant}-real")
    endif()
    if(CMAKE_MATCH_4)
      list(APPEND archs "${number}${variant}-virtual")
    endif()
  endforeach()
  list(REMOVE_DUPLICATES archs)
  set(${result} "${archs}" PARENT_SCOPE)
endfunction()
