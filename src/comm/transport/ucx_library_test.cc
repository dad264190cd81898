#include "comm/transport/ucx_library.h"

#include <gtest/gtest.h>
#include <signal.h>

#include <cstdlib>

namespace moesaic::comm {
namespace {

TEST(UcxLibraryDeathTest, LoadingKeepsTheDispositionsOfSignals) {
  // "threadsafe" starts the program again, so the library is loaded here for the first time.
#ifdef GTEST_FLAG_SET
  GTEST_FLAG_SET(death_test_style, "threadsafe");
#else  // before GoogleTest 1.12
  testing::FLAGS_gtest_death_test_style = "threadsafe";
#endif
  const auto load = [] {
    signal(SIGHUP, SIG_IGN);
    struct sigaction fault {};
    sigaction(SIGSEGV, nullptr, &fault);
    if (!OpenUcxLibrary().ok()) std::exit(1);
    struct sigaction hang_up {
    }, fault_after{};
    sigaction(SIGHUP, nullptr, &hang_up);
    sigaction(SIGSEGV, nullptr, &fault_after);
    std::exit(hang_up.sa_handler == SIG_IGN && fault_after.sa_handler == fault.sa_handler ? 0 : 2);
  };
  EXPECT_EXIT(load(), testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace moesaic::comm
