# `cmake --install`: headers, libraries, the command with its manual page, pkg-config files and the
# CMake package persistentkv (targets persistentkv::pkv and ::pkv_engine are the shared libraries,
# ::pkv_static and ::pkv_engine_static the others).
include(CMakePackageConfigHelpers)

set_target_properties(pkv PROPERTIES EXPORT_NAME pkv_static)
set_target_properties(pkv_engine PROPERTIES EXPORT_NAME pkv_engine_static)
install(TARGETS pkv pkv_engine pkv_shared pkv_engine_shared EXPORT persistentkv)
install(DIRECTORY include/pkv TYPE INCLUDE FILES_MATCHING PATTERN "*.h")

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/persistentkv)
install(EXPORT persistentkv NAMESPACE persistentkv:: DESTINATION ${package_dir})
configure_package_config_file(cmake/persistentkv-config.cmake.in persistentkv-config.cmake
  INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(persistentkv-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/persistentkv-config.cmake
  ${PROJECT_BINARY_DIR}/persistentkv-config-version.cmake DESTINATION ${package_dir})

# Relative, so that the installed folder can be moved.
file(RELATIVE_PATH pc_prefix ${CMAKE_INSTALL_FULL_LIBDIR}/pkgconfig ${CMAKE_INSTALL_PREFIX})
foreach(name pkv pkv_engine)
  configure_file(cmake/${name}.pc.in ${name}.pc @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/${name}.pc DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
endforeach()

if(TARGET pkv_cli)
  install(TARGETS pkv_cli)
  add_custom_command(OUTPUT pkv.1
    COMMAND sh -c "\"$1\" --help-man > pkv.1.part && mv pkv.1.part pkv.1" sh $<TARGET_FILE:pkv_cli>
    DEPENDS pkv_cli VERBATIM)
  add_custom_target(pkv_man ALL DEPENDS pkv.1)
  install(FILES ${PROJECT_BINARY_DIR}/pkv.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)

  # The unit names the installed files; the settings are an example to copy. Set by the variable
  # where the system wants units elsewhere, as packages do: /usr/lib/systemd/system.
  set(PKV_SYSTEMD_DIR lib/systemd/system CACHE STRING "Where the systemd unit goes")
  configure_file(packaging/pkv-serve.service.in pkv-serve.service @ONLY)
  install(FILES ${PROJECT_BINARY_DIR}/pkv-serve.service DESTINATION ${PKV_SYSTEMD_DIR})
  install(FILES packaging/serve.conf TYPE DOC)
endif()
install(FILES LICENSE README.md CHANGELOG.md TYPE DOC)
