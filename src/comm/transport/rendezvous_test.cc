#include "comm/transport/rendezvous.h"

#include <gtest/gtest.h>

#include <atomic>
#include <random>
#include <string>
#include <thread>
#include <vector>

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
        EncodeFrame(RendezvousType::kTable, EncodeTable({std::string(kMacBytes, 'm'), {"x", "y"}}));
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
TEST(RendezvousTest, IntrudersDoNotDisturb) {
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

TEST(RendezvousTest, RefusesBadOptions) {
  RendezvousOptions options = Options(1, 0, 0);
  EXPECT_EQ(Rendezvous(options, "").status().code(), StatusCode::kInvalidArgument);
  options = Options(1, 2, 2);
  EXPECT_EQ(Rendezvous(options, "").status().code(), StatusCode::kInvalidArgument);
  options = Options(1, 1, 2);
  options.secret = "";
  EXPECT_EQ(Rendezvous(options, "").status().code(), StatusCode::kInvalidArgument);
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
      ParseTable(EncodeTable({std::string(kMacBytes, 'm'), {"a", "", "ccc"}}), 3);
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
