# moesaic_library(base SRCS a.cc b.cc DEPS absl::status [PRIVATE_DEPS ...] [OPTIMIZE LEVEL] [UNITY FILES] [INTERNAL])
#   declares the library of a room: target moesaic_base, alias moesaic::base. It is installed with its headers unless it
#   is INTERNAL. With MOESAIC_UNITY, UNITY files (16 by default) are compiled as one.
# moesaic_test(base_status_test SRCS status_test.cc DEPS moesaic::base [LABELS unit] [TIMEOUT 240] [SHARDS 1])
#   declares one GoogleTest binary and registers it with CTest. SHARDS splits its cases over that many CTest tests, which
#   run side by side. A single case runs by `build/release/bin/base_status_test --gtest_filter=PATTERN`.
# moesaic_fuzzer(gguf_fuzzer SRCS gguf_fuzzer.cc DEPS moesaic::checkpoint)
#   declares a libFuzzer binary; built only with -DMOESAIC_FUZZ=ON.

# Test properties of every test: what `moesaic tune` found on the developer's machine is not used. Not in
# ENVIRONMENT, which tests set as a whole.
set(MOESAIC_UNTUNED ENVIRONMENT_MODIFICATION MOESAIC_TUNING=set:off)

# moesaic_precompile(TARGET LEVEL [HEADERS ...])
#   compiles TARGET in release builds at -O<LEVEL>, and gives it src/base/precompiled.h and HEADERS as a precompiled
#   header. Targets of one kind, level and HEADERS share it. GCC also reads a header of another level, but then crashes
#   or compiles at that level.
function(moesaic_precompile target level)
  set(options $<$<CONFIG:Release>:-O${level}>)
  if(level EQUAL 3)
    # No contraction: only explicit fused multiply-adds, so that sums are the same on every processor.
    list(APPEND options -ffp-contract=off)
  endif()
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

# moesaic_isa_sources(ROOM FILES...)
#   adds micro-kernels cpu/<operator>_<isa>.cc to the library of ROOM, each compiled with the flags of its instruction set.
#   The files of one instruction set share a precompiled header. Sets moesaic_<ROOM>_isa_objects to the object files.
set(MOESAIC_ISA_avx2 -mavx2 -mfma -mf16c)
set(MOESAIC_ISA_avxvnni ${MOESAIC_ISA_avx2} -mavxvnni)
set(MOESAIC_ISA_avx512 ${MOESAIC_ISA_avx2} -mavx512f -mavx512bw -mavx512dq -mavx512vl -mavx512cd
                       -mprefer-vector-width=512)
if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
  # GCC's own AVX-512 header causes these warnings when its intrinsics are inlined (GCC bug 105593).
  list(APPEND MOESAIC_ISA_avx512 -Wno-uninitialized -Wno-maybe-uninitialized)
endif()
set(MOESAIC_ISA_avx512vnni ${MOESAIC_ISA_avx512} -mavx512vnni)
set(MOESAIC_ISA_avx512bf16 ${MOESAIC_ISA_avx512vnni} -mavx512bf16)
set(MOESAIC_ISA_amx ${MOESAIC_ISA_avx512bf16} -mamx-tile -mamx-int8 -mamx-bf16)
function(moesaic_isa_sources room)
  set(objects)
  foreach(source ${ARGN})
    string(REGEX REPLACE "^cpu/.*_([a-z0-9]+)\\.cc$" "\\1" isa ${source})
    if(NOT DEFINED MOESAIC_ISA_${isa})
      message(FATAL_ERROR "src/${room}/${source}: no compile flags for the instruction set '${isa}'")
    endif()
    set(target moesaic_${room}_${isa})
    if(NOT TARGET ${target})
      add_library(${target} OBJECT)
      target_link_libraries(${target} PRIVATE moesaic_flags)
      # No contraction: only explicit fused multiply-adds, so that epilogues are bit-identical.
      target_compile_options(${target} PRIVATE -ffp-contract=off ${MOESAIC_ISA_${isa}})
      set(precompile ${MOESAIC_PRECOMPILE})
      if(CMAKE_CXX_COMPILER_ID STREQUAL "Clang")
        set(precompile OFF)  # Clang 14, of Debian 12, finds __builtin_va_list ambiguous after a precompiled <immintrin.h>
      endif()
      if(precompile AND TARGET moesaic_kernels_${isa} AND NOT room STREQUAL kernels)
        target_precompile_headers(${target} REUSE_FROM moesaic_kernels_${isa})
      elseif(precompile)
        target_precompile_headers(${target} PRIVATE <immintrin.h> <algorithm> <cmath> <cstddef> <cstdint> <cstring> <type_traits>)
      endif()
      target_sources(moesaic_${room} PRIVATE $<TARGET_OBJECTS:${target}>)
      list(APPEND objects $<TARGET_OBJECTS:${target}>)
    endif()
    target_sources(${target} PRIVATE ${source})
  endforeach()
  set(moesaic_${room}_isa_objects ${objects} PARENT_SCOPE)
endfunction()

# moesaic_unity(TARGET FILES)
#   compiles FILES source files of TARGET as one unit with MOESAIC_UNITY, because most of the time of a small file goes
#   into headers and templates that its neighbours need too. Files with flags of their own stay apart. Names in anonymous
#   namespaces must differ within the target.
function(moesaic_unity target files)
  if(NOT MOESAIC_UNITY)
    return()
  endif()
  set_target_properties(${target} PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE ${files})
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-subobject-linkage>)
endfunction()

function(moesaic_library name)
  cmake_parse_arguments(ARG "INTERNAL" "OPTIMIZE;UNITY" "SRCS;DEPS;PRIVATE_DEPS" ${ARGN})
  add_library(moesaic_${name} STATIC ${ARG_SRCS})
  add_library(moesaic::${name} ALIAS moesaic_${name})
  target_link_libraries(moesaic_${name} PUBLIC moesaic_flags ${ARG_DEPS} PRIVATE ${ARG_PRIVATE_DEPS})
  if(ARG_OPTIMIZE)
    moesaic_precompile(moesaic_${name} ${ARG_OPTIMIZE})
  endif()
  if(NOT ARG_UNITY)
    set(ARG_UNITY 16)
  endif()
  moesaic_unity(moesaic_${name} ${ARG_UNITY})
  if(NOT ARG_INTERNAL)
    set_target_properties(moesaic_${name} PROPERTIES EXPORT_NAME ${name})
    install(TARGETS moesaic_${name} EXPORT moesaicTargets ARCHIVE DESTINATION ${CMAKE_INSTALL_LIBDIR} COMPONENT dev)
  endif()
endfunction()

# moesaic_compile_test(TARGET): the level, headers and units of test programs.
function(moesaic_compile_test target)
  # At -O1 GCC 12 takes std::string's own members for out of bounds (GCC bugs 105329, 105651).
  target_compile_options(${target} PRIVATE $<$<CXX_COMPILER_ID:GNU>:-Wno-array-bounds -Wno-restrict -Wno-stringop-overflow -Wno-stringop-overread>)
  moesaic_precompile(${target} 1 <gmock/gmock.h> <gtest/gtest.h>)
  moesaic_unity(${target} 12)
endfunction()

function(moesaic_test name)
  if(MOESAIC_PYTHON)
    return()
  endif()
  cmake_parse_arguments(ARG "" "TIMEOUT;SHARDS" "SRCS;DEPS;LABELS" ${ARGN})
  if(NOT ARG_LABELS)
    set(ARG_LABELS unit)
  endif()
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 240)
  endif()
  if(NOT ARG_SHARDS)
    set(ARG_SHARDS 1)
  endif()
  # TIMEOUT is the limit of one shard on an idle machine; a busy one gets five times as long.
  math(EXPR ARG_TIMEOUT "${ARG_TIMEOUT} * 5")
  if(MOESAIC_SANITIZE OR MOESAIC_COVERAGE)  # instrumented kernels are some ten times slower
    math(EXPR ARG_TIMEOUT "${ARG_TIMEOUT} * 10")
  endif()
  add_executable(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE moesaic_flags ${ARG_DEPS} GTest::gtest GTest::gmock GTest::gtest_main)
  moesaic_compile_test(${name})
  target_compile_definitions(${name} PRIVATE MOESAIC_SOURCE_DIR="${CMAKE_SOURCE_DIR}")
  # GoogleTest's TempDir(). Files of tests have fixed names, which tests of another build folder may use at the same time.
  # Release 1.11 does not add the slash.
  set(environment "TEST_TMPDIR=${CMAKE_BINARY_DIR}/test_files/")
  file(MAKE_DIRECTORY ${CMAKE_BINARY_DIR}/test_files)
  if(MOESAIC_SANITIZE MATCHES thread)
    list(APPEND environment "TSAN_OPTIONS=suppressions='${CMAKE_SOURCE_DIR}/cmake/tsan.supp'")
  endif()
  math(EXPR last "${ARG_SHARDS} - 1")
  foreach(shard RANGE ${last})
    math(EXPR number "${shard} + 1")
    set(test ${name})
    if(ARG_SHARDS GREATER 1)
      set(test ${name}.${number}of${ARG_SHARDS})
    endif()
    add_test(NAME ${test} COMMAND ${name} --gtest_color=no)
    if(ARG_SHARDS GREATER 1)
      set_tests_properties(${test} PROPERTIES COST 40)
    endif()
    set_tests_properties(${test} PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT} ${MOESAIC_UNTUNED}
      ENVIRONMENT "GTEST_TOTAL_SHARDS=${ARG_SHARDS};GTEST_SHARD_INDEX=${shard};${environment}")
  endforeach()
endfunction()

# moesaic_ucx_tests(TEST ...)
#   sets what the sanitizers need in tests whose processes open UCX.
function(moesaic_ucx_tests)
  set(environment)
  if(MOESAIC_SANITIZE MATCHES thread)
    # UCX patches madvise(), which a thread calls after ThreadSanitizer has freed the thread's state.
    list(APPEND environment "UCX_MEM_EVENTS=no")
  endif()
  if(MOESAIC_SANITIZE MATCHES address)
    # LeakSanitizer takes a wrong address for the thread-local data of UCX's libraries, which are opened at run time, and fails.
    list(APPEND environment "ASAN_OPTIONS=intercept_tls_get_addr=0:fast_unwind_on_malloc=0"
         "LSAN_OPTIONS=suppressions='${CMAKE_SOURCE_DIR}/cmake/lsan.supp':print_suppressions=0")
  endif()
  if(environment)
    set_property(TEST ${ARGN} APPEND PROPERTY ENVIRONMENT ${environment})
  endif()
endfunction()

# moesaic_test_seconds(TEST SECONDS [TEST SECONDS ...])
#   tells CTest how long a test takes on two idle cores. It starts the longest first, so that none runs alone at the end.
#   Tests of less than about 30 seconds need no entry.
function(moesaic_test_seconds)
  while(ARGN)
    list(POP_FRONT ARGN test seconds)
    set_tests_properties(${test} PROPERTIES COST ${seconds})
  endwhile()
endfunction()

function(moesaic_benchmark name)
  cmake_parse_arguments(ARG "" "" "SRCS;DEPS" ${ARGN})
  if(NOT MOESAIC_BENCH)
    return()
  endif()
  moesaic_benchmark_program(${name} ${ARG_SRCS})
  target_link_libraries(${name} PRIVATE moesaic_flags ${ARG_DEPS} benchmark::benchmark benchmark::benchmark_main)
endfunction()

# moesaic_benchmark_program(NAME SOURCES...)
#   declares an executable that only the target `benchmarks` builds.
function(moesaic_benchmark_program name)
  add_executable(${name} EXCLUDE_FROM_ALL ${ARGN})
  if(NOT TARGET benchmarks)
    add_custom_target(benchmarks)
  endif()
  add_dependencies(benchmarks ${name})
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
