# Headers, targets and the package files of find_package(kvmeld).
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

set(package_dir "${CMAKE_INSTALL_DATADIR}/cmake/kvmeld")
install(DIRECTORY include/kvmeld DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}"
  FILES_MATCHING PATTERN "*.hpp" PATTERN "*.cuh" PATTERN "*.proto")
install(TARGETS kvmeld EXPORT kvmeldTargets INCLUDES DESTINATION "${CMAKE_INSTALL_INCLUDEDIR}")
install(EXPORT kvmeldTargets NAMESPACE kvmeld:: DESTINATION "${package_dir}")
configure_package_config_file(cmake/kvmeldConfig.cmake.in "${PROJECT_BINARY_DIR}/kvmeldConfig.cmake"
  INSTALL_DESTINATION "${package_dir}" NO_SET_AND_CHECK_MACRO NO_CHECK_REQUIRED_COMPONENTS_MACRO)
# ARCH_INDEPENDENT: headers serve 32 and 64 bit alike.
write_basic_package_version_file("${PROJECT_BINARY_DIR}/kvmeldConfigVersion.cmake"
  COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES LICENSE DESTINATION "${CMAKE_INSTALL_DATADIR}/licenses/kvmeld")
install(FILES "${PROJECT_BINARY_DIR}/kvmeldConfig.cmake" "${PROJECT_BINARY_DIR}/kvmeldConfigVersion.cmake"
  cmake/kvmeldComponents.cmake cmake/compiled.cpp DESTINATION "${package_dir}")
