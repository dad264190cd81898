#include "comm/transport/rendezvous.h"

#include <gtest/gtest.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdlib>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/test_memory.h"
#include "base/test_patience.h"
#include "comm/transport/free_port.h"
#include "comm/transport/rendezvous_messages.h"

namespace moesaic::comm {
namespace {

using Contacts = StatusOr<std::vector<std::string>>;

RendezvousOptions Options(uint16_t port, int rank, int size) {
  return {
      .host = "127.0.0.1", .port = port, .rank = rank, .size = size, .secret = "tiger", .time_limit_s = 20};
}

// Runs all ranks of `options` at once.
std::vector<Contacts> RunAll(const std::vector<RendezvousOptions>& options) {
  std::vector<Contacts> results(options.size(), Contacts(absl::UnknownError("not run")));
  std::vector<std::thread> threads;
  for (size_t i = 0; i < options.size(); ++i) {
    threads.emplace_back(
        [&, i] { results[i] = Rendezvous(options[i], "contact of " + std::to_string(options[i].rank)); });
  }
  for (std::thread& thread : threads) thread.join();
  return results;
}

// A connection that sends `bytes` and then nothing.
int Intruder(uint16_t port, const std::string& bytes) {
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  for (;;) {
    const int fd = socket(AF_INET, SOCK_STREAM, 0);
    if (connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address)) == 0) {
      EXPECT_EQ(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL), static_cast<ssize_t>(bytes.size()));
      return fd;
    }
    close(fd);
    std::this_thread::yield();
  }
}

TEST(RendezvousTest, EveryRankObtainsTheContactsOfAll) {
  for (const int size : {1, 2, 5, 20}) {
    const uint16_t port = FreePort();
    std::vector<RendezvousOptions> options;
    for (int rank = size; rank-- > 0;) options.push_back(Options(port, rank, size));
    for (const Contacts& result : RunAll(options)) {
      ASSERT_TRUE(result.ok()) << result.status();
      ASSERT_EQ(result->size(), static_cast<size_t>(size));
      for (int rank = 0; rank < size; ++rank)
        EXPECT_EQ((*result)[rank], "contact of " + std::to_string(rank));
    }
  }
}

TEST(RendezvousTest, RefusesAPeerWithoutTheSecretAndContinues) {
  const uint16_t port = FreePort();
  RendezvousOptions stranger = Options(port, 1, 2);
  stranger.secret = "lion";
  Contacts host(absl::UnknownError("not run"));
  std::thread rank0([&] { host = Rendezvous(Options(port, 0, 2), "a"); });
  EXPECT_EQ(Rendezvous(stranger, "evil").status().code(), StatusCode::kPermissionDenied);
  const Contacts rank1 = Rendezvous(Options(port, 1, 2), "b");
  rank0.join();
  ASSERT_TRUE(host.ok() && rank1.ok()) << host.status() << rank1.status();
  EXPECT_EQ(*host, (std::vector<std::string>{"a", "b"}));
  EXPECT_EQ(*rank1, *host);
}

TEST(RendezvousTest, ARankDoesNotTrustAHostWithoutTheSecret) {
  const uint16_t port = FreePort();
  const int listener = socket(AF_INET, SOCK_STREAM, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  address.sin_port = htons(port);
  ASSERT_EQ(bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof(address)), 0);
  ASSERT_EQ(listen(listener, 1), 0);
  std::thread liar([&] {
    const int fd = accept(listener, nullptr, nullptr);
    const std::string bytes =
        EncodeFrame(RendezvousType::kChallenge, std::string(kNonceBytes, 'c')) +
        EncodeFrame(RendezvousType::kTable, std::string(kMacBytes, 'm') + EncodeContacts({"x", "y"}));
    EXPECT_GT(send(fd, bytes.data(), bytes.size(), MSG_NOSIGNAL), 0);
    char sink[1000];
    while (recv(fd, sink, sizeof(sink), 0) > 0) {
    }
    close(fd);
  });
  EXPECT_EQ(Rendezvous(Options(port, 1, 2), "b").status().code(), StatusCode::kPermissionDenied);
  liar.join();
  close(listener);
}

TEST(RendezvousTest, TimeLimitNamesTheMissingRanks) {
  const uint16_t port = FreePort();
  std::vector<RendezvousOptions> options = {Options(port, 0, 5), Options(port, 3, 5)};
  for (RendezvousOptions& each : options) each.time_limit_s = 0.5;
  for (const Contacts& result : RunAll(options)) {
    EXPECT_EQ(result.status().code(), StatusCode::kDeadlineExceeded) << result.status();
    EXPECT_NE(Message(result.status()).find("missing: 1, 2, 4"), std::string::npos) << result.status();
  }
}

TEST(RendezvousTest, TimeLimitNamesRankZero) {
  RendezvousOptions options = Options(FreePort(), 1, 2);
  options.time_limit_s = 0.2;
  const Contacts result = Rendezvous(options, "b");
  EXPECT_EQ(result.status().code(), StatusCode::kDeadlineExceeded);
  EXPECT_NE(Message(result.status()).find("missing: 0"), std::string::npos) << result.status();
}

// The name of a pod may have no address when a rank starts. No resolver takes an empty label.
TEST(RendezvousTest, NamesAreResolvedUntilTheTimeLimit) {
  for (const int rank : {0, 1}) {
    RendezvousOptions options = Options(1, rank, 2);
    options.host = "rank0..invalid";
    options.time_limit_s = 0.7;
    const auto start = std::chrono::steady_clock::now();
    const Contacts result = Rendezvous(options, "b");
    const std::chrono::duration<double> waited = std::chrono::steady_clock::now() - start;
    EXPECT_EQ(result.status().code(), StatusCode::kUnavailable) << result.status();
    EXPECT_NE(Message(result.status()).find("rank0..invalid:1 cannot be resolved"), std::string::npos);
    EXPECT_GT(waited.count(), 0.4) << "one pause before the limit ends the attempts";
  }
}

TEST(RendezvousTest, RefusesASecondPeerOfARankAndAnotherSize) {
  const uint16_t port = FreePort();
  Contacts host(absl::UnknownError("not run"));
  std::thread rank0([&] { host = Rendezvous(Options(port, 0, 3), "a"); });
  EXPECT_EQ(Rendezvous(Options(port, 1, 4), "x").status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(Rendezvous(Options(port, 3, 4), "x").status().code(), StatusCode::kInvalidArgument);
  std::atomic<int> invalid = 0, good = 0;
  const auto twin = [&] {
    const Contacts result = Rendezvous(Options(port, 1, 3), "b");
    (result.ok() ? good : invalid) += 1;
    EXPECT_TRUE(result.ok() || result.status().code() == StatusCode::kInvalidArgument) << result.status();
  };
  std::thread one(twin), other(twin);
  while (invalid == 0) std::this_thread::yield();
  const Contacts rank2 = Rendezvous(Options(port, 2, 3), "c");
  for (std::thread* thread : {&rank0, &one, &other}) thread->join();
  ASSERT_TRUE(host.ok()) << host.status();
  EXPECT_TRUE(rank2.ok()) << rank2.status();
  EXPECT_EQ(good, 1);
}

// Other protocols, silent connections and random bytes do not keep the ranks from meeting.
TEST(RendezvousTest, RanksMeetDespiteIntruders) {
  const uint16_t port = FreePort();
  Contacts host(absl::UnknownError("not run"));
  std::thread rank0([&] { host = Rendezvous(Options(port, 0, 2), "a"); });
  std::vector<int> intruders;
  std::mt19937 random(1);
  for (int i = 0; i < 100; ++i) {
    std::string bytes(random() % 200, '\0');
    for (char& c : bytes) c = static_cast<char>(random());
    if (i % 3 == 1) bytes = "GET / HTTP/1.1\r\n\r\n";
    if (i % 3 == 2) bytes = EncodeFrame(RendezvousType::kHello, bytes);
    intruders.push_back(Intruder(port, bytes));
  }
  const Contacts rank1 = Rendezvous(Options(port, 1, 2), "b");
  rank0.join();
  for (const int fd : intruders) close(fd);
  EXPECT_TRUE(host.ok()) << host.status();
  EXPECT_TRUE(rank1.ok()) << rank1.status();
}

// Connections that never stop to arrive do not extend the time limit of rank 0.
TEST(RendezvousTest, TheTimeLimitExpiresWhilePeersConnectAllTheTime) {
  const uint16_t port = FreePort();
  std::atomic<bool> ended = false;
  std::vector<std::thread> intruders;
  for (int i = 0; i < 4; ++i) {
    intruders.emplace_back([&] {
      sockaddr_in address{};
      address.sin_family = AF_INET;
      address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      address.sin_port = htons(port);
      while (!ended) {
        const int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
        const linger reset{.l_onoff = 1, .l_linger = 0};  // leaves no port in TIME_WAIT
        setsockopt(fd, SOL_SOCKET, SO_LINGER, &reset, sizeof(reset));
        (void)connect(fd, reinterpret_cast<const sockaddr*>(&address), sizeof(address));
        close(fd);
      }
    });
  }
  RendezvousOptions options = Options(port, 0, 2);
  options.time_limit_s = 0.5;
  EXPECT_EQ(Rendezvous(options, "a").status().code(), StatusCode::kDeadlineExceeded);
  ended = true;
  for (std::thread& thread : intruders) thread.join();
}

// Rank 0 is a process that may open few files. It reports the reason to the other ranks.
TEST(RendezvousTest, RankZeroReportsThatItMayNotOpenEnoughFiles) {
  constexpr int kSize = 30;
  const uint16_t port = FreePort();
  const pid_t rank0 = fork();
  ASSERT_GE(rank0, 0);
  if (rank0 == 0) {
    const int next = dup(0);
    const rlimit few{static_cast<rlim_t>(next + 8), static_cast<rlim_t>(next + 8)};
    setrlimit(RLIMIT_NOFILE, &few);
    const Status status = Rendezvous(Options(port, 0, kSize), "a").status();
    _exit(Message(status).find("ulimit -n") != std::string::npos ? 0 : 1);
  }
  std::vector<RendezvousOptions> others;
  for (int rank = 1; rank < kSize; ++rank) {
    others.push_back(Options(port, rank, kSize));
    others.back().time_limit_s = base::Patient(2);
  }
  int named = 0;
  for (const Contacts& result : RunAll(others)) {
    EXPECT_FALSE(result.ok());
    named += Message(result.status()).find("ulimit -n") != std::string::npos;
  }
  EXPECT_GT(named, 0);
  int state = 0;
  waitpid(rank0, &state, 0);
  EXPECT_TRUE(WIFEXITED(state) && WEXITSTATUS(state) == 0) << state;
}

// The contacts of all ranks, 16 KB each, are sent to all ranks.
TEST(RendezvousTest, RankZeroHasOneCopyOfTheContacts) {
  constexpr int kSize = 41;
  constexpr int64_t kTableBytes = kSize * static_cast<int64_t>(kMaxContactBytes);
  const std::string contact(kMaxContactBytes, 'c');
  const uint16_t port = FreePort();
  std::atomic<bool> ended = false;
  std::vector<std::thread> ranks;
  for (int rank = 1; rank < kSize; ++rank) {
    ranks.emplace_back([&, rank] {
      // Ranks that read the challenge and nothing else.
      const int fd = Intruder(port, "");
      std::string bytes(kFrameHeaderBytes + kNonceBytes, '\0');
      EXPECT_EQ(recv(fd, bytes.data(), bytes.size(), MSG_WAITALL), static_cast<ssize_t>(bytes.size()));
      Hello hello{std::string(kNonceBytes, 'n'), "", static_cast<uint32_t>(rank), kSize, contact};
      hello.mac = HelloMac("tiger", bytes.substr(kFrameHeaderBytes), hello);
      const std::string frame = EncodeFrame(RendezvousType::kHello, EncodeHello(hello));
      EXPECT_EQ(send(fd, frame.data(), frame.size(), MSG_NOSIGNAL), static_cast<ssize_t>(frame.size()));
      while (!ended) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      close(fd);
    });
  }
  const int64_t before = base::live_bytes;
  base::peak_bytes = before;
  RendezvousOptions options = Options(port, 0, kSize);
  options.time_limit_s = 5;  // of the table, too, unless the system takes it
  EXPECT_TRUE(Rendezvous(options, contact).ok());
  EXPECT_LT(base::peak_bytes - before, kSize / 2 * kTableBytes);
  ended = true;
  for (std::thread& thread : ranks) thread.join();
}

TEST(RendezvousTest, RefusesBadOptions) {
  RendezvousOptions options = Options(1, 0, 0);
  EXPECT_EQ(Rendezvous(options, "").status().code(), StatusCode::kInvalidArgument);
  options = Options(1, 2, 2);
  EXPECT_EQ(Rendezvous(options, "").status().code(), StatusCode::kInvalidArgument);
  options = Options(1, 1, 2);
  options.secret = "";
  EXPECT_EQ(Rendezvous(options, "").status().code(), StatusCode::kInvalidArgument);
  options = Options(0, 1, 2);
  EXPECT_EQ(Rendezvous(options, "").status().code(), StatusCode::kInvalidArgument);
  for (const double limit : std::vector<double>{0.0, -1.0, NAN, INFINITY, 1e300}) {
    for (const int rank : {0, 1}) {
      options = Options(1, rank, 2);
      options.time_limit_s = limit;
      EXPECT_EQ(Rendezvous(options, "").status().code(), StatusCode::kInvalidArgument) << limit;
    }
  }
  options = Options(1, 1, 2);
  EXPECT_EQ(Rendezvous(options, std::string(kMaxContactBytes + 1, 'x')).status().code(),
            StatusCode::kInvalidArgument);
}

TEST(RendezvousMessagesTest, RoundTrip) {
  Hello hello{std::string(kNonceBytes, 'n'), std::string(kMacBytes, 'm'), 7, 9, "contact"};
  const StatusOr<Hello> parsed = ParseHello(EncodeHello(hello));
  ASSERT_TRUE(parsed.ok()) << parsed.status();
  EXPECT_EQ(parsed->rank, 7U);
  EXPECT_EQ(parsed->size, 9U);
  EXPECT_EQ(parsed->contact, "contact");
  const StatusOr<ContactTable> table =
      ParseTable(std::string(kMacBytes, 'm') + EncodeContacts({"a", "", "ccc"}), 3);
  ASSERT_TRUE(table.ok()) << table.status();
  EXPECT_EQ(table->contacts, (std::vector<std::string>{"a", "", "ccc"}));
  const StatusOr<Status> refusal = ParseRefusal(EncodeRefusal(absl::PermissionDeniedError("no")));
  ASSERT_TRUE(refusal.ok());
  EXPECT_EQ(*refusal, absl::PermissionDeniedError("no"));
}

TEST(RendezvousMessagesTest, EveryPartOfAHelloIsAuthenticated) {
  const Hello hello{std::string(kNonceBytes, 'n'), "", 1, 2, "contact"};
  const std::string mac = HelloMac("secret", "challenge", hello);
  Hello changed = hello;
  changed.rank = 2;
  EXPECT_FALSE(EqualMacs(mac, HelloMac("secret", "challenge", changed)));
  changed = hello;
  changed.contact = "Contact";
  EXPECT_FALSE(EqualMacs(mac, HelloMac("secret", "challenge", changed)));
  EXPECT_FALSE(EqualMacs(mac, HelloMac("secret", "Challenge", hello)));
  EXPECT_FALSE(EqualMacs(mac, HelloMac("Secret", "challenge", hello)));
  EXPECT_TRUE(EqualMacs(mac, HelloMac("secret", "challenge", hello)));
}

TEST(RendezvousMessagesTest, LimitsTheLengthOfFrames) {
  std::string frame = EncodeFrame(RendezvousType::kHello, std::string(100, 'x'));
  Frame taken;
  EXPECT_EQ(TakeFrame(frame, 99, &taken).status().code(), StatusCode::kDataLoss);
  for (size_t length = 0; length < frame.size(); ++length) {
    std::string part = frame.substr(0, length);
    const StatusOr<bool> complete = TakeFrame(part, 100, &taken);
    ASSERT_TRUE(complete.ok()) << complete.status();
    EXPECT_FALSE(*complete);
  }
  EXPECT_TRUE(*TakeFrame(frame, 100, &taken));
  EXPECT_TRUE(frame.empty());
}

}  // namespace
}  // namespace moesaic::comm
