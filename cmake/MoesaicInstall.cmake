# `cmake --install` and the Debian package (`cpack --config build/release/CPackConfig.cmake`): the binary, the nginx module
# (component `proxy`), the man page, completions for bash, zsh and fish, the systemd unit, topology files, documentation and
# the licence. `cmake --install` adds libraries and headers.
find_package(Python3 REQUIRED COMPONENTS Interpreter)

set(generated ${CMAKE_BINARY_DIR}/install)
file(MAKE_DIRECTORY ${generated})
add_custom_command(
  OUTPUT ${generated}/moesaic.1 ${generated}/moesaic.bash ${generated}/_moesaic ${generated}/moesaic.fish
  COMMAND ${CMAKE_COMMAND} -E env PYTHONDONTWRITEBYTECODE=1 ${Python3_EXECUTABLE}
          ${CMAKE_SOURCE_DIR}/deploy/man/make_man.py $<TARGET_FILE:moesaic> ${generated}/moesaic.1
  COMMAND $<TARGET_FILE:moesaic> completion bash > ${generated}/moesaic.bash
  COMMAND $<TARGET_FILE:moesaic> completion zsh > ${generated}/_moesaic
  COMMAND $<TARGET_FILE:moesaic> completion fish > ${generated}/moesaic.fish
  DEPENDS moesaic ${CMAKE_SOURCE_DIR}/deploy/man/make_man.py
  COMMENT "Writing the man page and completions"
  VERBATIM)
add_custom_target(moesaic_install_files ALL DEPENDS ${generated}/moesaic.1)

install(TARGETS moesaic RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(FILES ${generated}/moesaic.1 DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
install(FILES ${generated}/moesaic.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME moesaic)
install(FILES ${generated}/_moesaic DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/vendor-completions)
install(FILES ${generated}/moesaic.fish DESTINATION ${CMAKE_INSTALL_DATADIR}/fish/vendor_completions.d)
install(FILES ${CMAKE_SOURCE_DIR}/deploy/systemd/moesaic.conf DESTINATION lib/sysusers.d)
# The unit names the binary by its installed path, which is known when the files are installed.
install(CODE "
  file(READ \"${CMAKE_SOURCE_DIR}/deploy/systemd/moesaic.service\" unit)
  string(REPLACE /usr/local/bin/ \"\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_BINDIR}/\" unit \"\${unit}\")
  file(WRITE \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/lib/systemd/system/moesaic.service\" \"\${unit}\")")
# Help texts name pages of docs/, which link to each other and to README.md.
install(FILES ${CMAKE_SOURCE_DIR}/README.md DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY ${CMAKE_SOURCE_DIR}/docs DESTINATION ${CMAKE_INSTALL_DOCDIR})
install(DIRECTORY ${CMAKE_SOURCE_DIR}/topologies DESTINATION ${CMAKE_INSTALL_DATADIR}/moesaic)
install(FILES ${CMAKE_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} RENAME copyright)

# The component `dev`: static libraries, headers and the CMake package. The Debian package does not have it.
include(CMakePackageConfigHelpers)
set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/moesaic)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/moesaicConfig.cmake.in ${generated}/moesaicConfig.cmake
                              INSTALL_DESTINATION ${package_dir} PATH_VARS CMAKE_INSTALL_LIBDIR)
write_basic_package_version_file(${generated}/moesaicConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${generated}/moesaicConfig.cmake ${generated}/moesaicConfigVersion.cmake DESTINATION ${package_dir} COMPONENT dev)
install(EXPORT moesaicTargets NAMESPACE moesaic:: DESTINATION ${package_dir} COMPONENT dev)
get_target_property(bridge moesaic_text_bridge IMPORTED_LOCATION)
install(FILES ${bridge} DESTINATION ${CMAKE_INSTALL_LIBDIR} RENAME libmoesaic_text_bridge.a COMPONENT dev)
install(DIRECTORY ${CMAKE_SOURCE_DIR}/src/ DESTINATION ${CMAKE_INSTALL_INCLUDEDIR}/moesaic COMPONENT dev
        FILES_MATCHING PATTERN "*.h"
        PATTERN "*-inl.h" EXCLUDE PATTERN "*test*" EXCLUDE PATTERN "fake_*" EXCLUDE PATTERN "precompiled.h" EXCLUDE
        PATTERN "app" EXCLUDE)

# The rooms of the Python extension, for MOESAIC_PYTHON_LIBRARIES: a package links them instead of compiling these rooms.
export(TARGETS moesaic_flags moesaic_base moesaic_runtime moesaic_tensor moesaic_kernels moesaic_science
       NAMESPACE moesaic:: FILE ${CMAKE_BINARY_DIR}/python/libraries.cmake)

set(CPACK_GENERATOR DEB)
set(CPACK_INSTALL_CMAKE_PROJECTS "${CMAKE_BINARY_DIR};moesaic;Unspecified;/" "${CMAKE_BINARY_DIR};moesaic;proxy;/")
set(CPACK_PACKAGE_NAME moesaic)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGE_CONTACT "The Moesaic developers <moesaic@localhost>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "Run mixture-of-experts language models from their published checkpoints")
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_PRIORITY optional)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)  # reads the libraries that the binary links to; needs dpkg-dev
set(CPACK_DEBIAN_PACKAGE_RECOMMENDS "libucx0")  # is opened at run time, for several ranks
set(CPACK_DEBIAN_PACKAGE_SUGGESTS "nginx")     # moesaic proxy; the module fits the version that it was built with
set(CPACK_DEBIAN_COMPRESSION_TYPE xz)
set(CPACK_DEBIAN_PACKAGE_CONTROL_EXTRA ${CMAKE_SOURCE_DIR}/deploy/debian/postinst ${CMAKE_SOURCE_DIR}/deploy/debian/prerm)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
include(CPack)
