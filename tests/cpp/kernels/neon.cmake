# The kernels of Arm on another processor: cross-compiled, and run by an emulator of user programs.

find_program(H2O_AARCH64_CXX aarch64-linux-gnu-g++)
find_program(H2O_QEMU_AARCH64 NAMES qemu-aarch64 qemu-aarch64-static)

list(TRANSFORM h2o_test_includes PREPEND -I OUTPUT_VARIABLE includes)
list(TRANSFORM H2O_ISA_SOURCES PREPEND "${PROJECT_SOURCE_DIR}/" OUTPUT_VARIABLE sources)
set(isas neon neon_bf16)
set(cpus cortex-a53 max)
foreach(isa cpu IN ZIP_LISTS isas cpus)
  if(NOT H2O_AARCH64_CXX OR NOT H2O_QEMU_AARCH64)
    set(reason "the kernels of Arm are not tested: needs aarch64-linux-gnu-g++ and qemu-aarch64 \
(Debian: apt-get install g++-aarch64-linux-gnu qemu-user)")
    message(STATUS "${reason}")
    h2o_add_attend_rows_test(${isa} ${CMAKE_COMMAND} -E echo "skipped: ${reason}")
    set_tests_properties(kernels.attend_rows.${isa} PROPERTIES SKIP_REGULAR_EXPRESSION "skipped: ")
    continue()
  endif()
  set(program "${CMAKE_CURRENT_BINARY_DIR}/test_attend_rows_${isa}")
  set(objects "")
  foreach(source IN LISTS sources ITEMS "${CMAKE_CURRENT_SOURCE_DIR}/test_attend_rows.cpp")
    get_filename_component(name "${source}" NAME_WE)
    set(object "${CMAKE_CURRENT_BINARY_DIR}/${isa}_${name}.o")
    list(APPEND objects "${object}")
    # The program itself is compiled for every CPU.
    set(flags ${H2O_ISA_FLAGS} ${H2O_ISA_FLAGS_${isa}})
    if(name STREQUAL "test_attend_rows")
      set(flags -O1)
    endif()
    add_custom_command(
      OUTPUT "${object}"
      COMMAND ${H2O_AARCH64_CXX} -std=c++20 ${flags} ${H2O_WARNINGS} -DH2O_ISA=${isa} ${includes} -MD -MF "${object}.d"
              -MT "${object}" -c "${source}" -o "${object}"
      DEPENDS "${source}"
      DEPFILE "${object}.d"
      COMMENT "Building for ${isa}: ${name}"
      VERBATIM)
  endforeach()
  add_custom_command(
    OUTPUT "${program}"
    COMMAND ${H2O_AARCH64_CXX} -static ${objects} -o "${program}"
    DEPENDS ${objects}
    COMMENT "Linking for ${isa}: test_attend_rows"
    VERBATIM)
  add_custom_target(h2o_${isa}_tests ALL DEPENDS "${program}")
  h2o_add_attend_rows_test(${isa} ${H2O_QEMU_AARCH64} -cpu ${cpu} "${program}")
endforeach()
