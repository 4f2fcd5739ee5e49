# Installs the CMake package H2OPrefill, for programs that embed the library.

include(CMakePackageConfigHelpers)
set(h2o_package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/H2OPrefill)

configure_package_config_file(
  "${CMAKE_CURRENT_LIST_DIR}/H2OPrefillConfig.cmake.in" "${PROJECT_BINARY_DIR}/H2OPrefillConfig.cmake"
  INSTALL_DESTINATION ${h2o_package_dir})
write_basic_package_version_file("${PROJECT_BINARY_DIR}/H2OPrefillConfigVersion.cmake" COMPATIBILITY SameMinorVersion)

install(EXPORT H2OPrefillTargets NAMESPACE H2OPrefill:: DESTINATION ${h2o_package_dir} COMPONENT package)
install(
  FILES "${PROJECT_BINARY_DIR}/H2OPrefillConfig.cmake" "${PROJECT_BINARY_DIR}/H2OPrefillConfigVersion.cmake"
        "${CMAKE_CURRENT_LIST_DIR}/torch.cmake"
  DESTINATION ${h2o_package_dir}
  COMPONENT package)
