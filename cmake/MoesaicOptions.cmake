# Build-wide language level, warnings, sanitizers and caches.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/bin)

option(MOESAIC_BENCH "Build the benchmarks" ON)
option(MOESAIC_FUZZ "Build the libFuzzer targets (needs Clang)" OFF)
option(MOESAIC_COVERAGE "Instrument for coverage" OFF)
option(MOESAIC_PRECOMPILE "Precompile the headers that most units include" ON)
set(MOESAIC_SANITIZE "" CACHE STRING "Sanitizers for -fsanitize=, e.g. address,undefined or thread")

find_program(CCACHE_PROGRAM ccache)
if(CCACHE_PROGRAM)
  set(CMAKE_C_COMPILER_LAUNCHER ${CCACHE_PROGRAM})
  # ccache stores units that use a precompiled header only if it is configured not to look for __TIME__ in it.
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CMAKE_COMMAND} -E env CCACHE_SLOPPINESS=pch_defines,time_macros ${CCACHE_PROGRAM})
endif()

add_library(moesaic_flags INTERFACE)
target_compile_options(moesaic_flags INTERFACE -Wall -Wextra -Werror -Wno-psabi)
target_include_directories(moesaic_flags INTERFACE ${CMAKE_SOURCE_DIR}/src)
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
