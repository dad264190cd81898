include(GNUInstallDirs)

# Build-wide language level, warnings, sanitizers and caches.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)

option(MOESAIC_BENCH "Build the benchmarks" ON)
option(MOESAIC_PYTHON "Build only the Python extension and the rooms that it needs (see python/pyproject.toml)" OFF)
set(MOESAIC_PYTHON_LIBRARIES "" CACHE FILEPATH
    "With MOESAIC_PYTHON: file python/libraries.cmake of a build folder, whose libraries are linked instead of compiled again")
option(MOESAIC_FUZZ "Build the libFuzzer targets (needs Clang)" OFF)
option(MOESAIC_COVERAGE "Instrument for coverage" OFF)
option(MOESAIC_WERROR "Treat compiler warnings as errors" OFF)
option(MOESAIC_UNITY "Compile several source files of a library as one unit" OFF)
option(MOESAIC_PRECOMPILE "Precompile the headers that most units include" ON)
if(MOESAIC_PYTHON)
  set(MOESAIC_BENCH OFF)
  set(MOESAIC_PRECOMPILE OFF)  # src/base/precompiled.h has headers that this build does not look for
endif()
set(MOESAIC_SANITIZE "" CACHE STRING "Sanitizers for -fsanitize=, e.g. address,undefined or thread")

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  set(CMAKE_C_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
  # ccache stores units that use a precompiled header only if it is configured not to look for __TIME__ in it.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${CCACHE_PROGRAM})
endif()

# GCC collects its garbage first at 128 MiB, which most units pass several times.
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  add_compile_options($<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-expand=300> $<$<COMPILE_LANGUAGE:CXX>:--param=ggc-min-heapsize=524288>)
endif()

# About 60 programs are linked with the same static libraries. gold needs half of the time of the default linker.
find_program(GOLD_PROGRAM ld.gold)
if(GOLD_PROGRAM AND CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  add_link_options(-fuse-ld=gold)
endif()

add_library(moesaic_flags INTERFACE)
# Options of this build are not passed on to projects that use the installed libraries.
target_compile_options(moesaic_flags INTERFACE $<BUILD_INTERFACE:-Wall> $<BUILD_INTERFACE:-Wextra> $<BUILD_INTERFACE:-Wno-psabi>)
if(MOESAIC_WERROR)
  target_compile_options(moesaic_flags INTERFACE $<BUILD_INTERFACE:-Werror>)
endif()
target_compile_features(moesaic_flags INTERFACE cxx_std_20)
target_include_directories(moesaic_flags INTERFACE $<BUILD_INTERFACE:${CMAKE_SOURCE_DIR}/src>
                                                   $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}/moesaic>)
set_target_properties(moesaic_flags PROPERTIES EXPORT_NAME flags)
install(TARGETS moesaic_flags EXPORT moesaicTargets)
if(MOESAIC_SANITIZE)
  target_compile_options(moesaic_flags INTERFACE -fsanitize=${MOESAIC_SANITIZE} -fno-omit-frame-pointer
                                                 -fno-sanitize-recover=all
                                                 # GCC 12 takes std::regex's own members for uninitialized here.
                                                 $<$<CXX_COMPILER_ID:GNU>:-Wno-maybe-uninitialized>)
  target_link_options(moesaic_flags INTERFACE -fsanitize=${MOESAIC_SANITIZE})
endif()
if(MOESAIC_FUZZ)
  target_compile_options(moesaic_flags INTERFACE -fsanitize=fuzzer-no-link)
endif()
if(MOESAIC_COVERAGE)
  target_compile_options(moesaic_flags INTERFACE --coverage)
  target_link_options(moesaic_flags INTERFACE --coverage)
endif()
