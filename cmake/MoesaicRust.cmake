# The Rust text bridge: cargo builds rust/text_bridge and its locked crates into a static library.
#   Target moesaic_text_bridge: the library and the directory of its generated C++ header.
# cargo's own build tree is shared by all presets, since none of their flags reach it; the library and headers are
# copied into each build directory, so that Ninja sees fresh files.
find_program(CARGO_PROGRAM cargo HINTS $ENV{HOME}/.cargo/bin)
if(NOT CARGO_PROGRAM)
  message(FATAL_ERROR "cargo is missing: install Rust 1.88 or newer (rustup, or Debian's cargo-web and rustc-web)")
endif()
set(MOESAIC_RUST_TARGET_DIR ${CMAKE_SOURCE_DIR}/build/rust CACHE PATH "Where cargo keeps what it built")

set(bridge_source ${CMAKE_SOURCE_DIR}/rust/text_bridge)
set(bridge_dir ${CMAKE_BINARY_DIR}/rust)
set(bridge_library ${bridge_dir}/libtext_bridge.a)
set(bridge_header ${bridge_dir}/include/text_bridge.h)
file(GLOB_RECURSE bridge_inputs CONFIGURE_DEPENDS ${bridge_source}/src/*.rs)

add_custom_command(
  OUTPUT ${bridge_library} ${bridge_header} ${bridge_dir}/include/rust/cxx.h
  COMMAND ${CMAKE_COMMAND} -E env --unset=RUSTFLAGS CC=cc CXX=c++
          ${CARGO_PROGRAM} build --release --locked --quiet --lib --manifest-path ${bridge_source}/Cargo.toml
          --target-dir ${MOESAIC_RUST_TARGET_DIR}
  COMMAND ${CMAKE_COMMAND} -E make_directory ${bridge_dir}/include/rust
  COMMAND ${CMAKE_COMMAND} -E copy ${MOESAIC_RUST_TARGET_DIR}/release/libtext_bridge.a ${bridge_library}
  COMMAND ${CMAKE_COMMAND} -E copy ${MOESAIC_RUST_TARGET_DIR}/cxxbridge/text_bridge/src/lib.rs.h ${bridge_header}
  COMMAND ${CMAKE_COMMAND} -E copy ${MOESAIC_RUST_TARGET_DIR}/cxxbridge/rust/cxx.h ${bridge_dir}/include/rust/cxx.h
  DEPENDS ${bridge_inputs} ${bridge_source}/Cargo.toml ${bridge_source}/Cargo.lock ${bridge_source}/build.rs
  COMMENT "Building the Rust text bridge"
  VERBATIM)
add_custom_target(moesaic_text_bridge_build DEPENDS ${bridge_library} ${bridge_header})

add_library(moesaic_text_bridge STATIC IMPORTED GLOBAL)
add_dependencies(moesaic_text_bridge moesaic_text_bridge_build)
file(MAKE_DIRECTORY ${bridge_dir}/include)
set_target_properties(moesaic_text_bridge PROPERTIES IMPORTED_LOCATION ${bridge_library}
                      INTERFACE_INCLUDE_DIRECTORIES ${bridge_dir}/include)
target_link_libraries(moesaic_text_bridge INTERFACE Threads::Threads ${CMAKE_DL_LIBS} m)
