# Whether this machine has a GPU of NVIDIA: a driver that shows one, also inside of containers and of WSL.

# Sets `result` to TRUE or FALSE. `root` replaces the root of the file system, for tests.
function(h2o_find_gpu result)
  set(root "${ARGN}")
  # One device file a GPU; those of Tegra and of WSL have other names.
  file(GLOB devices "${root}/dev/nvidia[0-9]*" "${root}/dev/nvgpu" "${root}/dev/nvhost-gpu" "${root}/dev/dxg")
  if(devices)
    set(${result} TRUE PARENT_SCOPE)
    return()
  endif()
  set(listed "")
  find_program(program nvidia-smi NO_CACHE)
  if(program)
    execute_process(COMMAND "${program}" -L OUTPUT_VARIABLE listed ERROR_QUIET)
  endif()
  if(listed MATCHES "^GPU [0-9]")
    set(${result} TRUE PARENT_SCOPE)
  else()
    set(${result} FALSE PARENT_SCOPE)
  endif()
endfunction()
