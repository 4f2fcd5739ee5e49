# The NEON kernels on another processor: cross-compiled, and run by an emulator of user programs.

find_program(H2O_AARCH64_CXX aarch64-linux-gnu-g++)
find_program(H2O_QEMU_AARCH64 NAMES qemu-aarch64 qemu-aarch64-static)

if(H2O_AARCH64_CXX AND H2O_QEMU_AARCH64)
  set(program "${CMAKE_CURRENT_BINARY_DIR}/test_attend_rows_neon")
  list(TRANSFORM h2o_test_includes PREPEND -I OUTPUT_VARIABLE includes)
  set(objects "")
  list(TRANSFORM H2O_ISA_SOURCES PREPEND "${PROJECT_SOURCE_DIR}/" OUTPUT_VARIABLE sources)
  foreach(source IN LISTS sources ITEMS "${CMAKE_CURRENT_SOURCE_DIR}/test_attend_rows.cpp")
    get_filename_component(name "${source}" NAME_WE)
    set(object "${CMAKE_CURRENT_BINARY_DIR}/neon_${name}.o")
    list(APPEND objects "${object}")
    add_custom_command(
      OUTPUT "${object}"
      COMMAND ${H2O_AARCH64_CXX} -std=c++20 ${H2O_ISA_FLAGS} ${H2O_ISA_FLAGS_neon} ${H2O_WARNINGS} -DH2O_ISA=neon
              ${includes} -MD -MF "${object}.d" -MT "${object}" -c "${source}" -o "${object}"
      DEPENDS "${source}"
      DEPFILE "${object}.d"
      COMMENT "Building for aarch64: ${name}"
      VERBATIM)
  endforeach()
  add_custom_command(
    OUTPUT "${program}"
    COMMAND ${H2O_AARCH64_CXX} -static ${objects} -o "${program}"
    DEPENDS ${objects}
    COMMENT "Linking for aarch64: test_attend_rows_neon"
    VERBATIM)
  add_custom_target(h2o_neon_tests ALL DEPENDS "${program}")
  # The emulator takes long. Dtypes are three: every fourth problem has another one.
  h2o_add_attend_rows_test(neon ${H2O_QEMU_AARCH64} "${program}" 4)
else()
  set(reason "the NEON kernels are not tested: needs aarch64-linux-gnu-g++ and qemu-aarch64 \
(Debian: apt-get install g++-aarch64-linux-gnu qemu-user)")
  message(STATUS "${reason}")
  h2o_add_attend_rows_test(neon ${CMAKE_COMMAND} -E echo "skipped: ${reason}")
  set_tests_properties(kernels.attend_rows.neon PROPERTIES SKIP_REGULAR_EXPRESSION "skipped: ")
endif()
