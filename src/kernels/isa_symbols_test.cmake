# Fails when an object file compiled for one instruction set defines a weak or unique symbol: an inline function or a
# template that other files may define too. The linker keeps one copy, and a processor without the instructions
# would then crash in unrelated code.
#   cmake -DNM=nm -DOBJECTS="a.o;b.o" -P isa_symbols_test.cmake
set(checked 0)
foreach(object IN LISTS OBJECTS)
  if(NOT object MATCHES "/cpu/[a-z0-9_]+\\.cc\\.o$")
    continue()
  endif()
  math(EXPR checked "${checked} + 1")
  execute_process(COMMAND ${NM} --demangle --defined-only ${object} OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]* [WVu] [^\n]*" shared "${symbols}")
  foreach(symbol IN LISTS shared)
    if(NOT symbol MATCHES "DW.ref.|__odr_asan|__asan_|__ubsan_|__gxx_personality")
      message(SEND_ERROR "${object} defines ${symbol}")
    endif()
  endforeach()
endforeach()
if(checked EQUAL 0)
  message(FATAL_ERROR "no object file of an instruction set was found")
endif()
message(STATUS "${checked} object files checked")
