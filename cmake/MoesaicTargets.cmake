# moesaic_library(base SRCS a.cc b.cc DEPS absl::status [PRIVATE_DEPS ...])
#   declares the library of a room: target moesaic_base, alias moesaic::base.
# moesaic_test(base_status_test SRCS status_test.cc DEPS moesaic::base [LABELS unit])
#   declares one GoogleTest binary and registers each of its cases with CTest.
# moesaic_fuzzer(gguf_fuzzer SRCS gguf_fuzzer.cc DEPS moesaic::checkpoint)
#   declares a libFuzzer binary; built only with -DMOESAIC_FUZZ=ON.
include(GoogleTest)

# Test properties of every test: what `moesaic tune` found on the developer's machine is not used. Not in
# ENVIRONMENT, which tests set as a whole.
set(MOESAIC_UNTUNED ENVIRONMENT_MODIFICATION MOESAIC_TUNING=set:off)

# moesaic_precompile(TARGET LEVEL [HEADERS ...])
#   compiles TARGET in release builds at -O<LEVEL>, and gives it src/base/precompiled.h and HEADERS as a precompiled
#   header. Targets of one kind, level and HEADERS share it: GCC takes it for equal flags only.
function(moesaic_precompile target level)
  set(options $<$<CONFIG:Release>:-O${level}>)
  target_compile_options(${target} PRIVATE ${options})
  if(NOT MOESAIC_PRECOMPILE)
    return()
  endif()
  string(MD5 key "${ARGN}")
  string(SUBSTRING ${key} 0 6 key)
  set(shared moesaic_precompiled_O${level}_${key})
  get_target_property(type ${target} TYPE)
  if(type STREQUAL EXECUTABLE)  # which CMake compiles with -fPIE, and libraries with -fPIC
    list(APPEND options -fPIE)
    string(APPEND shared _executables)
  endif()
  if(NOT TARGET ${shared})
    file(WRITE ${CMAKE_BINARY_DIR}/${shared}.cc.new "")
    configure_file(${CMAKE_BINARY_DIR}/${shared}.cc.new ${CMAKE_BINARY_DIR}/${shared}.cc COPYONLY)
    add_library(${shared} OBJECT ${CMAKE_BINARY_DIR}/${shared}.cc)
    target_link_libraries(${shared} PRIVATE moesaic_flags absl::status absl::statusor fmt::fmt spdlog::spdlog
                                            nlohmann_json::nlohmann_json)
    target_compile_options(${shared} PRIVATE ${options})
    if(type STREQUAL EXECUTABLE)
      target_link_libraries(${shared} PRIVATE GTest::gtest GTest::gmock)
    endif()
    target_precompile_headers(${shared} PRIVATE ${CMAKE_SOURCE_DIR}/src/base/precompiled.h ${ARGN})
  endif()
  target_precompile_headers(${target} REUSE_FROM ${shared})
endfunction()

function(moesaic_library name)
  cmake_parse_arguments(ARG "" "OPTIMIZE" "SRCS;DEPS;PRIVATE_DEPS" ${ARGN})
  add_library(moesaic_${name} STATIC ${ARG_SRCS})
  add_library(moesaic::${name} ALIAS moesaic_${name})
  target_link_libraries(moesaic_${name} PUBLIC moesaic_flags ${ARG_DEPS} PRIVATE ${ARG_PRIVATE_DEPS})
  if(ARG_OPTIMIZE)
    moesaic_precompile(moesaic_${name} ${ARG_OPTIMIZE})
  endif()
endfunction()

function(moesaic_test name)
  cmake_parse_arguments(ARG "" "TIMEOUT" "SRCS;DEPS;LABELS" ${ARGN})
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 120)
  endif()
  # TIMEOUT is for an idle machine; a busy one gets five times as long.
  math(EXPR ARG_TIMEOUT "${ARG_TIMEOUT} * 5")
  if(MOESAIC_SANITIZE OR MOESAIC_COVERAGE)  # instrumented kernels are some ten times slower
    math(EXPR ARG_TIMEOUT "${ARG_TIMEOUT} * 10")
  endif()
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE moesaic_flags ${ARG_DEPS} GTest::gtest GTest::gmock GTest::gtest_main)
  # At -O1 GCC 12 takes std::string's own members for out of bounds (GCC bugs 105329, 105651).
  target_compile_options(${name} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-array-bounds -Wno-restrict -Wno-stringop-overflow -Wno-stringop-overread>)
  moesaic_precompile(${name} 1 <gmock/gmock.h> <gtest/gtest.h>)
  target_compile_definitions(${name} PRIVATE MOESAIC_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
  set(environment)
  if(MOESAIC_SANITIZE MATCHES thread)
    set(environment ENVIRONMENT "TSAN_OPTIONS=suppressions=${CMAKE_SOURCE_DIR}/cmake/tsan.supp")
  endif()
  gtest_discover_tests(${name} TEST_PREFIX ${name}. PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT} ${environment}
                       ${MOESAIC_UNTUNED} DISCOVERY_TIMEOUT 600)
endfunction()

function(moesaic_benchmark name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  if(NOT MOESAIC_BENCH)
    return()
  endif()
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE moesaic_flags ${ARG_DEPS} benchmark::benchmark benchmark::benchmark_main)
endfunction()

function(moesaic_fuzzer name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  if(NOT MOESAIC_FUZZ)
    return()
  endif()
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE moesaic_flags ${ARG_DEPS})
  target_compile_definitions(${name} PRIVATE MOESAIC_SOURCE_DIR="${CMAKE_SOURCE_DIR}")  # for headers shared with tests
  target_link_options(${name} PRIVATE -fsanitize=fuzzer)
endfunction()

# A program that writes first inputs for a room's fuzzers; `./run fuzz` runs every *fuzz_seeds.
function(moesaic_fuzz_seeds name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  if(NOT MOESAIC_FUZZ)
    return()
  endif()
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE moesaic_flags ${ARG_DEPS})
endfunction()
