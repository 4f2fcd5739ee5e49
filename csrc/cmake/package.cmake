# Installs the CMake package H2OPrefill and h2o_prefill.pc for pkg-config, for programs that embed the library.

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

# Every path but PyTorch's is relative to the file, so that the package can be moved.
file(RELATIVE_PATH h2o_pc_to_prefix "/${CMAKE_INSTALL_LIBDIR}/pkgconfig" /)
cmake_path(SET h2o_pc_to_prefix NORMALIZE "${h2o_pc_to_prefix}")
if(H2O_WHEEL)
  set(h2o_pc_torch_root "\${pcfiledir}/../../../torch")
else()
  set(h2o_pc_torch_root "${H2O_TORCH_ROOT}")
endif()
if(H2O_CUDA)
  set(h2o_pc_cuda_libs " -ltorch_cuda -lc10_cuda")
endif()
configure_file("${CMAKE_CURRENT_LIST_DIR}/h2o_prefill.pc.in" "${PROJECT_BINARY_DIR}/h2o_prefill.pc" @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/h2o_prefill.pc" DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig COMPONENT package)
