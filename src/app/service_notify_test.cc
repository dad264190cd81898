#include "app/service_notify.h"

#include <gtest/gtest.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <thread>

namespace moesaic::app {
namespace {

// The socket of a service manager.
class Manager {
 public:
  // Not in TempDir(), whose path may be long: that of a socket has at most 107 bytes.
  Manager() : path_("/tmp/moesaic-notify-" + std::to_string(getpid())) {
    sockaddr_un address{};
    address.sun_family = AF_UNIX;
    path_.copy(address.sun_path, sizeof(address.sun_path) - 1);
    EXPECT_EQ(bind(socket_, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
    setenv("NOTIFY_SOCKET", path_.c_str(), 1);
  }
  ~Manager() {
    close(socket_);
    unlink(path_.c_str());
    for (const char* name : {"NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"}) unsetenv(name);
  }

  // Returns the next datagram, or "" if there is none.
  std::string Next() {
    char text[256];
    const ssize_t size = recv(socket_, text, sizeof(text), MSG_DONTWAIT);
    return size < 0 ? "" : std::string(text, static_cast<size_t>(size));
  }

 private:
  std::string path_;
  int socket_ = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
};

TEST(ServiceNotifier, SendsNothingWithoutAManager) {
  const ServiceNotifier notifier;
  notifier.Send("READY=1");
  EXPECT_FALSE(notifier.watchdog_period());
}

TEST(ServiceNotifier, SendsStates) {
  Manager manager;
  const ServiceNotifier notifier;
  notifier.Send("READY=1\nSTATUS=serving");
  EXPECT_EQ(manager.Next(), "READY=1\nSTATUS=serving");
  notifier.Reloading();
  EXPECT_TRUE(manager.Next().starts_with("RELOADING=1\nMONOTONIC_USEC="));
}

TEST(Watchdog, SendsOnlyWhileTheEngineMakesProgress) {
  Manager manager;
  setenv("WATCHDOG_USEC", "2000", 1);
  const ServiceNotifier notifier;
  ASSERT_EQ(notifier.watchdog_period(), std::chrono::microseconds(1000));
  Watchdog watchdog(notifier);
  const auto fed = [&](bool idle, uint64_t progress) {
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
    watchdog.Check(idle, progress);
    return manager.Next() == "WATCHDOG=1";
  };
  EXPECT_TRUE(fed(/*idle=*/false, 5));
  EXPECT_FALSE(fed(/*idle=*/false, 5));  // a hanging step
  EXPECT_TRUE(fed(/*idle=*/false, 6));
  EXPECT_TRUE(fed(/*idle=*/true, 6));
  EXPECT_TRUE(fed(/*idle=*/true, 6));
  setenv("WATCHDOG_PID", "1", 1);  // for another process
  EXPECT_FALSE(ServiceNotifier().watchdog_period());
}

}  // namespace
}  // namespace moesaic::app
