# TORCH_CUDA_ARCH_LIST, as PyTorch's own extensions read it, in CMake's names for architectures.

# The first compute capability that the kernels are written for.
set(H2O_CUDA_LEAST_MAJOR 8)

# Families as torch.utils.cpp_extension names them.
set(h2o_cuda_families
    "Kepler+Tesla=3.7" "Kepler=3.5+PTX" "Maxwell+Tegra=5.3" "Maxwell=5.0,5.2+PTX" "Pascal=6.0,6.1+PTX"
    "Volta+Tegra=7.2" "Volta=7.0+PTX" "Turing=7.5+PTX" "Ampere+Tegra=8.7" "Ampere=8.0,8.6+PTX" "Ada=8.9+PTX"
    "Hopper=9.0+PTX" "Blackwell+Tegra=11.0" "Blackwell=10.0,10.3,12.0,12.1+PTX")

# "7.5 8.0 9.0 12.0+PTX" becomes "80-real;90a-real;120". Architectures below 8.0 are left out with a warning; 9.0
# becomes 9.0a, whose machine code is what every 9.0 runs and which alone has the kernels of Hopper. An empty list, or
# one that leaves the choice to PyTorch, becomes `defaults`.
function(h2o_cuda_archs result defaults list)
  string(REGEX REPLACE "[ ,;]+" ";" names "${list}")
  set(expanded "")
  foreach(name IN LISTS names)
    foreach(family IN LISTS h2o_cuda_families)
      string(REPLACE "=" ";" family "${family}")
      list(GET family 0 family_name)
      if(name STREQUAL family_name)
        list(GET family 1 name)
        break()
      endif()
    endforeach()
    string(REPLACE "," ";" name "${name}")
    list(APPEND expanded ${name})
  endforeach()

  set(archs "")
  set(dropped "")
  foreach(arch IN LISTS expanded)
    if(arch MATCHES "^(Auto|Common|All)$")
      list(APPEND archs ${defaults})
      continue()
    endif()
    if(NOT arch MATCHES "^([0-9]+)\\.([0-9])([af]?)(\\+PTX|-virtual|-real)?$")
      message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST must hold architectures like 8.0, 9.0a or 12.0+PTX, or names like "
                          "Ampere, got ${arch}")
    endif()
    set(number "${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
    set(variant "${CMAKE_MATCH_3}")
    set(form "${CMAKE_MATCH_4}")
    if(CMAKE_MATCH_1 LESS H2O_CUDA_LEAST_MAJOR)
      list(APPEND dropped "${arch}")
    elseif(form STREQUAL "-virtual")
      list(APPEND archs "${number}${variant}-virtual")
    else()
      if(number STREQUAL "90")
        list(APPEND archs "90a-real")
      else()
        list(APPEND archs "${number}${variant}-real")
      endif()
      if(form STREQUAL "+PTX")
        list(APPEND archs "${number}${variant}-virtual")
      endif()
    endif()
  endforeach()
  list(REMOVE_DUPLICATES archs)
  if(dropped)
    list(JOIN dropped " " dropped)
    message(WARNING "No CUDA kernels for ${dropped} of TORCH_CUDA_ARCH_LIST: they need compute capability "
                    "${H2O_CUDA_LEAST_MAJOR}.0; operators run there as plain ATen calls")
  endif()
  if(NOT archs AND NOT dropped)
    set(archs "${defaults}")
  endif()
  set(${result} "${archs}" PARENT_SCOPE)
endfunction()
