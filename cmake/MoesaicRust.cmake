# The Rust text bridge: cargo builds rust/text_bridge, rust/jinja and the locked crates into a static library.
#   Target moesaic_text_bridge: the library and the directory of its generated C++ header.
# All presets share cargo's build tree, because none of their flags affect it. The library and headers are copied into
# each build directory, so that Ninja sees new files.
find_program(CARGO_PROGRAM cargo PATHS $ENV{HOME}/.cargo/bin)  # PATH comes first: ./run has checked that cargo
if(NOT CARGO_PROGRAM)
  message(FATAL_ERROR "cargo is missing: install Rust 1.88 or newer (rustup, or Debian's cargo-web and rustc-web)")
endif()
set(MOESAIC_RUST_TARGET_DIR ${CMAKE_SOURCE_DIR}/build/rust CACHE PATH "Where cargo keeps what it built")

# For fuzzers the bridge is instrumented with the flags of libFuzzer's coverage, in a separate tree, and aborts on its own
# faults.
set(cargo_environment --unset=RUSTFLAGS CC=cc CXX=c++)
set(cargo_arguments --release --locked --quiet --lib)
set(cargo_tree ${MOESAIC_RUST_TARGET_DIR})
set(cargo_output ${cargo_tree}/release)
if(MOESAIC_FUZZ)
  execute_process(COMMAND ${CARGO_PROGRAM} -vV OUTPUT_VARIABLE cargo_version COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCH "host: ([^\n]+)" ignored "${cargo_version}")
  set(cargo_tree ${MOESAIC_RUST_TARGET_DIR}-fuzz)
  # An explicit target keeps the flags away from build scripts.
  list(APPEND cargo_arguments --target ${CMAKE_MATCH_1})
  set(cargo_output ${cargo_tree}/${CMAKE_MATCH_1}/release)
  string(JOIN " " coverage_flags
    -Cpasses=sancov-module -Cllvm-args=-sanitizer-coverage-level=4 -Cllvm-args=-sanitizer-coverage-pc-table
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters -Cllvm-args=-sanitizer-coverage-trace-compares
    -Ccodegen-units=1 -Coverflow-checks=on --cfg=fuzzing)
  set(cargo_environment RUSTFLAGS=${coverage_flags} CC=cc CXX=c++)
endif()

set(bridge_source ${CMAKE_SOURCE_DIR}/rust/text_bridge)
set(jinja_source ${CMAKE_SOURCE_DIR}/rust/jinja)
set(bridge_dir ${CMAKE_BINARY_DIR}/rust)
set(bridge_library ${bridge_dir}/libtext_bridge.a)
set(bridge_header ${bridge_dir}/include/text_bridge/bridge.h)
file(GLOB_RECURSE bridge_inputs CONFIGURE_DEPENDS ${bridge_source}/src/*.rs ${jinja_source}/src/*.rs)

add_custom_command(
  OUTPUT ${bridge_library} ${bridge_header} ${bridge_dir}/include/rust/cxx.h
  COMMAND ${CMAKE_COMMAND} -E env ${cargo_environment} ${CARGO_PROGRAM} build ${cargo_arguments}
          --manifest-path ${bridge_source}/Cargo.toml --target-dir ${cargo_tree}
  COMMAND ${CMAKE_COMMAND} -E make_directory ${bridge_dir}/include/rust ${bridge_dir}/include/text_bridge
  COMMAND ${CMAKE_COMMAND} -E copy ${cargo_output}/libtext_bridge.a ${bridge_library}
  COMMAND ${CMAKE_COMMAND} -E copy ${cargo_output}/../cxxbridge/text_bridge/src/lib.rs.h ${bridge_header}
  COMMAND ${CMAKE_COMMAND} -E copy ${cargo_output}/../cxxbridge/rust/cxx.h ${bridge_dir}/include/rust/cxx.h
  DEPENDS ${bridge_inputs} ${bridge_source}/Cargo.toml ${bridge_source}/Cargo.lock ${bridge_source}/build.rs
          ${jinja_source}/Cargo.toml
  COMMENT "Building the Rust text bridge"
  VERBATIM)
add_custom_target(moesaic_text_bridge_build DEPENDS ${bridge_library} ${bridge_header})

add_library(moesaic_text_bridge STATIC IMPORTED GLOBAL)
add_dependencies(moesaic_text_bridge moesaic_text_bridge_build)
file(MAKE_DIRECTORY ${bridge_dir}/include)
set_target_properties(moesaic_text_bridge PROPERTIES IMPORTED_LOCATION ${bridge_library}
                      INTERFACE_INCLUDE_DIRECTORIES ${bridge_dir}/include)
target_link_libraries(moesaic_text_bridge INTERFACE Threads::Threads ${CMAKE_DL_LIBS} m)

# Unit tests of both crates. The crates that they use are those of the library above; the two crates themselves are compiled
# again, without optimization, in 8 seconds of processor time.
if(NOT MOESAIC_FUZZ)
  add_test(NAME rust_unit
           COMMAND ${CMAKE_COMMAND} -E env ${cargo_environment} ${CARGO_PROGRAM} test ${cargo_arguments}
                   --manifest-path ${bridge_source}/Cargo.toml --target-dir ${cargo_tree} --package jinja --package text_bridge
                   --config profile.release.package.jinja.opt-level=0 --config profile.release.package.text_bridge.opt-level=0)
  set_tests_properties(rust_unit PROPERTIES LABELS unit TIMEOUT 1200)
endif()
