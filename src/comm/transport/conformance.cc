#include "comm/transport/conformance.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstring>
#include <numeric>
#include <random>
#include <string>
#include <vector>

namespace moesaic::comm {
namespace {

constexpr double kLimitSeconds = 60;  // of every transfer; reached only when a message is lost

using Bytes = std::vector<std::byte>;

// Message content that depends on `seed` and repeats after an odd number of bytes.
Bytes Pattern(uint32_t seed, size_t bytes) {
  constexpr size_t kPeriod = 8191;
  Bytes made(bytes);
  for (size_t i = 0; i < std::min(bytes, kPeriod); ++i) {
    made[i] = static_cast<std::byte>((seed * 2654435761U >> 13) + i * 7 + (i >> 8));
  }
  for (size_t i = kPeriod; i < bytes; i += kPeriod) {
    std::memcpy(&made[i], made.data(), std::min(kPeriod, bytes - i));
  }
  return made;
}

// A transfer that must end well.
struct Pending {
  TransferId id;
  std::string what;
};

Pending StartSend(Transport& t, int peer, Tag tag, const Bytes& data) {
  const StatusOr<TransferId> id = t.Send(peer, tag, data);
  EXPECT_TRUE(id.ok()) << id.status();
  return {id.value_or(TransferId{}), "send to rank " + std::to_string(peer) + ", tag " + std::to_string(tag)};
}

Pending StartReceive(Transport& t, int peer, Tag tag, Bytes& data) {
  const StatusOr<TransferId> id = t.Receive(peer, tag, data);
  EXPECT_TRUE(id.ok()) << id.status();
  return {id.value_or(TransferId{}),
          "receive from rank " + std::to_string(peer) + ", tag " + std::to_string(tag)};
}

void End(Transport& t, const Pending& pending) {
  const Status status = Wait(t, pending.id, kLimitSeconds);
  EXPECT_TRUE(status.ok()) << "rank " << t.rank() << ", " << pending.what << ": " << status;
}

int Next(const Transport& t) { return (t.rank() + 1) % t.size(); }
int Previous(const Transport& t) { return (t.rank() + t.size() - 1) % t.size(); }

uint32_t Seed(int from, int to, size_t number) {
  return static_cast<uint32_t>(from * 1000003 + to * 1009 + static_cast<int>(number));
}

// Messages around the ring, one size after another.
void DeliversEverySize(Transport& t, Tag tag) {
  for (const size_t bytes :
       {size_t{0}, size_t{1}, size_t{3}, size_t{64}, size_t{1000}, size_t{4095}, size_t{8192}, size_t{65535},
        size_t{65537}, size_t{1} << 20, (size_t{1} << 22) + 1, size_t{64} << 20}) {
    const Bytes sent = Pattern(Seed(t.rank(), Next(t), bytes), bytes);
    Bytes received(bytes);
    const Pending receive = StartReceive(t, Previous(t), tag, received);
    const Pending send = StartSend(t, Next(t), tag, sent);
    End(t, receive);
    End(t, send);
    EXPECT_TRUE(received == Pattern(Seed(Previous(t), t.rank(), bytes), bytes)) << bytes << " bytes";
  }
}

// Messages that are sent ahead and others of one tag keep their order, though protocols differ.
void MessagesSentAheadKeepTheirPlace(Transport& t, Tag tag) {
  const size_t sizes[] = {100, 20000, size_t{1} << 18, 100, size_t{1} << 20, size_t{20} << 20, 20000};
  std::vector<Bytes> sent, received;
  std::vector<Pending> pending;
  for (const size_t bytes : sizes) {
    sent.push_back(Pattern(Seed(t.rank(), Next(t), sent.size()), bytes));
    received.emplace_back(bytes);
  }
  for (size_t i = 0; i < sent.size(); ++i) {
    const auto id = i % 3 == 2 ? t.Send(Next(t), tag, sent[i]) : t.SendAhead(Next(t), tag, sent[i]);
    ASSERT_TRUE(id.ok()) << id.status();
    pending.push_back({*id, "send ahead"});
  }
  for (Bytes& data : received) pending.push_back(StartReceive(t, Previous(t), tag, data));
  for (const Pending& each : pending) End(t, each);
  for (size_t i = 0; i < received.size(); ++i) {
    EXPECT_TRUE(received[i] == Pattern(Seed(Previous(t), t.rank(), i), sizes[i])) << i;
  }
}

// 100 messages of one tag, sent before any receive is posted.
void KeepsTheOrderOfATag(Transport& t, Tag tag) {
  constexpr size_t kMessages = 100;
  std::vector<Bytes> sent, received;
  std::vector<Pending> pending;
  for (int peer = 0; peer < t.size(); ++peer) {
    for (size_t i = 0; i < kMessages; ++i) sent.push_back(Pattern(Seed(t.rank(), peer, i), 100));
  }
  for (int peer = 0; peer < t.size(); ++peer) {
    for (size_t i = 0; i < kMessages; ++i)
      pending.push_back(StartSend(t, peer, tag, sent[peer * kMessages + i]));
  }
  received.resize(sent.size(), Bytes(100));
  for (int peer = 0; peer < t.size(); ++peer) {
    for (size_t i = 0; i < kMessages; ++i) {
      pending.push_back(StartReceive(t, peer, tag, received[peer * kMessages + i]));
    }
  }
  for (const Pending& each : pending) End(t, each);
  for (int peer = 0; peer < t.size(); ++peer) {
    for (size_t i = 0; i < kMessages; ++i) {
      EXPECT_TRUE(received[peer * kMessages + i] == Pattern(Seed(peer, t.rank(), i), 100))
          << peer << ", message " << i;
    }
  }
}

// A small message after a large one of its tag must not overtake it.
void LargeMessagesKeepTheirPlace(Transport& t, Tag tag) {
  const std::vector<size_t> sizes = {1 << 20, 8, 300000, 1, 70000, 0, 5};
  std::vector<Bytes> sent, received;
  for (size_t i = 0; i < sizes.size(); ++i) {
    sent.push_back(Pattern(Seed(t.rank(), Next(t), i), sizes[i]));
    received.emplace_back(sizes[i]);
  }
  std::vector<Pending> pending;
  for (const Bytes& each : sent) pending.push_back(StartSend(t, Next(t), tag, each));
  for (Bytes& each : received) pending.push_back(StartReceive(t, Previous(t), tag, each));
  for (const Pending& each : pending) End(t, each);
  for (size_t i = 0; i < sizes.size(); ++i) {
    EXPECT_TRUE(received[i] == Pattern(Seed(Previous(t), t.rank(), i), sizes[i])) << "message " << i;
  }
}

// Receives are posted in the opposite order of the sends.
void MatchesByTag(Transport& t, Tag tag) {
  constexpr Tag kTags = 20;
  std::vector<Bytes> sent, received(kTags, Bytes(50));
  for (Tag i = 0; i < kTags; ++i) sent.push_back(Pattern(Seed(t.rank(), Next(t), i), 50));
  std::vector<Pending> sends;
  for (Tag i = 0; i < kTags; ++i) sends.push_back(StartSend(t, Next(t), tag + i, sent[i]));
  for (Tag i = kTags; i-- > 0;) {
    End(t, StartReceive(t, Previous(t), tag + i, received[i]));
    EXPECT_TRUE(received[i] == Pattern(Seed(Previous(t), t.rank(), i), 50)) << "tag " << i;
  }
  for (const Pending& each : sends) End(t, each);
}

// The highest tag is valid and differs from tag 0 of the case.
void AcceptsTheHighestTag(Transport& t, Tag) {
  const Bytes sent = Pattern(1, 10);
  Bytes received(10);
  const Pending receive = StartReceive(t, Previous(t), kTagLimit - 1, received);
  End(t, StartSend(t, Next(t), kTagLimit - 1, sent));
  End(t, receive);
  EXPECT_TRUE(received == sent);
}

void DeliversToItself(Transport& t, Tag tag) {
  for (const size_t bytes : {size_t{0}, size_t{1}, size_t{100000}, size_t{3} << 20}) {
    const Bytes sent = Pattern(3, bytes);
    Bytes received(bytes);
    const Pending send = StartSend(t, t.rank(), tag, sent);
    End(t, StartReceive(t, t.rank(), tag, received));
    End(t, send);
    EXPECT_TRUE(received == sent) << bytes << " bytes";
  }
}

// All pairs exchange large messages, and every rank starts all its sends before its first receive.
void BothSidesMaySendFirst(Transport& t, Tag tag) {
  constexpr size_t kBytes = 1 << 20;
  constexpr Tag kEach = 4;
  std::vector<Bytes> sent, received(kEach * t.size(), Bytes(kBytes));
  for (int peer = 0; peer < t.size(); ++peer) {
    for (Tag i = 0; i < kEach; ++i) sent.push_back(Pattern(Seed(t.rank(), peer, i), kBytes));
  }
  std::vector<Pending> pending;
  for (int peer = 0; peer < t.size(); ++peer) {
    for (Tag i = 0; i < kEach; ++i) pending.push_back(StartSend(t, peer, tag + i, sent[peer * kEach + i]));
  }
  for (int peer = 0; peer < t.size(); ++peer) {
    for (Tag i = 0; i < kEach; ++i)
      pending.push_back(StartReceive(t, peer, tag + i, received[peer * kEach + i]));
  }
  for (const Pending& each : pending) End(t, each);
  for (int peer = 0; peer < t.size(); ++peer) {
    for (Tag i = 0; i < kEach; ++i) {
      EXPECT_TRUE(received[peer * kEach + i] == Pattern(Seed(peer, t.rank(), i), kBytes))
          << peer << ", tag " << i;
    }
  }
}

// Random sizes and tags; both sides post in their own random order of tags, and wait in another one.
void ManyTransfersOverlap(Transport& t, Tag tag) {
  constexpr Tag kEach = 40;
  const auto size_of = [](int from, int to, Tag i) {
    std::mt19937 random(Seed(from, to, i));
    const uint32_t kind = random() % 4;
    return random() % (kind == 0 ? 10 : kind == 1 ? 2000 : kind == 2 ? 20000 : 200000);
  };
  std::mt19937 random(static_cast<uint32_t>(t.rank()) + 77);
  struct Planned {
    int peer;
    Tag tag;
    bool send;
    Bytes data;
  };
  std::vector<Planned> plan;
  for (int peer = 0; peer < t.size(); ++peer) {
    for (Tag i = 0; i < kEach; ++i) {
      plan.push_back({peer, i, true, Pattern(Seed(t.rank(), peer, i), size_of(t.rank(), peer, i))});
      plan.push_back({peer, i, false, Bytes(size_of(peer, t.rank(), i))});
    }
  }
  std::ranges::shuffle(plan, random);
  std::vector<Pending> pending;
  for (Planned& p : plan) {
    pending.push_back(p.send ? StartSend(t, p.peer, tag + p.tag, p.data)
                             : StartReceive(t, p.peer, tag + p.tag, p.data));
  }
  std::ranges::shuffle(pending, random);
  for (const Pending& each : pending) End(t, each);
  for (const Planned& p : plan) {
    if (p.send) continue;
    EXPECT_TRUE(p.data == Pattern(Seed(p.peer, t.rank(), p.tag), p.data.size()))
        << p.peer << ", tag " << p.tag;
  }
}

// A message that differs in size from its buffer is an error of the receive; later ones are received.
void ReportsWrongSizes(Transport& t, Tag tag) {
  struct Sizes {
    size_t sent, expected;
  };
  for (const Sizes sizes :
       {Sizes{10, 11}, Sizes{11, 10}, Sizes{0, 1}, Sizes{1, 0}, Sizes{1 << 20, (1 << 20) + 1},
        Sizes{(1 << 20) + 1, 1 << 20}, Sizes{1 << 20, 16}, Sizes{16, 1 << 20}}) {
    const Bytes sent = Pattern(5, sizes.sent);
    Bytes received(sizes.expected + 64, std::byte{0xee});
    const std::span<std::byte> buffer(received.data(), sizes.expected);
    const StatusOr<TransferId> receive = t.Receive(Previous(t), tag, buffer);
    ASSERT_TRUE(receive.ok()) << receive.status();
    const Pending send = StartSend(t, Next(t), tag, sent);
    const Status status = Wait(t, *receive, kLimitSeconds);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument)
        << sizes.sent << " for " << sizes.expected << ": " << status;
    EXPECT_TRUE(
        std::all_of(received.end() - 64, received.end(), [](std::byte b) { return b == std::byte{0xee}; }));
    End(t, send);
    Bytes after(3);
    const Pending next = StartReceive(t, Previous(t), tag, after);
    End(t, StartSend(t, Next(t), tag, Pattern(9, 3)));
    End(t, next);
    EXPECT_TRUE(after == Pattern(9, 3));
  }
}

// A receive that is cancelled does not touch its buffer any more, and other tags are not affected.
void CancelsReceives(Transport& t, Tag tag) {
  std::vector<Bytes> cancelled(10, Bytes(1000, std::byte{0xaa}));
  std::vector<TransferId> ids;
  for (Tag i = 0; i < cancelled.size(); ++i) {
    const StatusOr<TransferId> id = t.Receive(Previous(t), tag + i, cancelled[i]);
    ASSERT_TRUE(id.ok()) << id.status();
    ids.push_back(*id);
  }
  for (const TransferId id : ids) t.Cancel(id);
  // The peer sends only after both sides have cancelled.
  Bytes token(1);
  const Pending ready = StartReceive(t, Next(t), tag + 500, token);
  End(t, StartSend(t, Previous(t), tag + 500, Bytes(1)));
  End(t, ready);
  for (Tag i = 0; i < cancelled.size(); ++i) {
    Bytes received(1000);
    const Pending receive = StartReceive(t, Previous(t), tag + 100 + i, received);
    End(t, StartSend(t, Next(t), tag + 100 + i, Pattern(i, 1000)));
    End(t, receive);
    EXPECT_TRUE(received == Pattern(i, 1000));
    EXPECT_TRUE(cancelled[i] == Bytes(1000, std::byte{0xaa}));
  }
}

void TimeLimitsExpire(Transport& t, Tag tag) {
  Bytes never(10);
  const StatusOr<TransferId> id = t.Receive(Previous(t), tag, never);
  ASSERT_TRUE(id.ok()) << id.status();
  const Status status = Wait(t, *id, 0.02);
  EXPECT_EQ(status.code(), StatusCode::kDeadlineExceeded) << status;
}

// Ranks in pairs; the last one of an odd number exchanges with itself. One side may start transfers instead.
void ExchangesBothWays(Transport& t, Tag tag) {
  const int peer = (t.rank() ^ 1) < t.size() ? t.rank() ^ 1 : t.rank();
  for (const size_t bytes : {size_t{0}, size_t{8}, size_t{4096}, size_t{4097}, size_t{1} << 20}) {
    for (const bool starts : {false, true}) {
      const Bytes sent = Pattern(Seed(t.rank(), peer, bytes), bytes);
      Bytes received(bytes);
      if (starts && t.rank() < peer) {
        const Pending receive = StartReceive(t, peer, tag, received);
        End(t, StartSend(t, peer, tag, sent));
        End(t, receive);
      } else {
        const Status status = t.Exchange(peer, tag, sent, received, kLimitSeconds);
        EXPECT_TRUE(status.ok()) << status;
      }
      EXPECT_TRUE(received == Pattern(Seed(peer, t.rank(), bytes), bytes)) << bytes << " bytes";
    }
  }
  const Bytes data = Pattern(1, 8);
  Bytes longer(9);
  if (t.rank() > peer) End(t, StartSend(t, peer, tag + 1, data));
  if (t.rank() >= peer) return;
  EXPECT_EQ(t.Exchange(peer, tag + 1, data, longer, kLimitSeconds).code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(t.Exchange(peer, tag + 2, data, longer, 0.02).code(), StatusCode::kDeadlineExceeded);
}

void RefusesBadArguments(Transport& t, Tag tag) {
  Bytes buffer(1);
  for (const int peer : {-1, t.size(), 1 << 30}) {
    EXPECT_EQ(t.Send(peer, tag, buffer).status().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(t.Receive(peer, tag, buffer).status().code(), StatusCode::kInvalidArgument);
    EXPECT_EQ(t.Exchange(peer, tag, buffer, buffer, 1).code(), StatusCode::kInvalidArgument);
  }
  EXPECT_EQ(t.Send(t.rank(), kTagLimit, buffer).status().code(), StatusCode::kInvalidArgument);
  EXPECT_EQ(t.Receive(t.rank(), ~Tag{0}, buffer).status().code(), StatusCode::kInvalidArgument);
}

constexpr ConformanceCase kCases[] = {
    {"RefusesBadArguments", RefusesBadArguments},
    {"DeliversEverySize", DeliversEverySize},
    {"MessagesSentAheadKeepTheirPlace", MessagesSentAheadKeepTheirPlace},
    {"KeepsTheOrderOfATag", KeepsTheOrderOfATag},
    {"LargeMessagesKeepTheirPlace", LargeMessagesKeepTheirPlace},
    {"MatchesByTag", MatchesByTag},
    {"AcceptsTheHighestTag", AcceptsTheHighestTag},
    {"DeliversToItself", DeliversToItself},
    {"BothSidesMaySendFirst", BothSidesMaySendFirst},
    {"ManyTransfersOverlap", ManyTransfersOverlap},
    {"ReportsWrongSizes", ReportsWrongSizes},
    {"CancelsReceives", CancelsReceives},
    {"TimeLimitsExpire", TimeLimitsExpire},
    {"ExchangesBothWays", ExchangesBothWays},
};

}  // namespace

std::span<const ConformanceCase> ConformanceCases() { return kCases; }

Tag ConformanceTag(size_t index) { return static_cast<Tag>(index * 1000); }

}  // namespace moesaic::comm
