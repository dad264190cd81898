#include "runtime/async_file.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <numeric>

namespace moesaic::runtime {

static void PrintTo(AsyncFiles::Backend backend, std::ostream* out) {
  *out << (backend == AsyncFiles::Backend::kBest ? "best" : "threads");
}

namespace {

class AsyncFilesTest : public ::testing::TestWithParam<AsyncFiles::Backend> {
 protected:
  void SetUp() override {
    path_ = (std::filesystem::temp_directory_path() / "moesaic-test-XXXXXX").string();
    fd_ = mkstemp(path_.data());
    ASSERT_GE(fd_, 0);
    StatusOr<std::unique_ptr<AsyncFiles>> files = AsyncFiles::Create(GetParam());
    ASSERT_TRUE(files.ok()) << files.status();
    files_ = *std::move(files);
  }
  void TearDown() override {
    files_.reset();
    close(fd_);
    std::filesystem::remove(path_);
  }
  Transfer At(int64_t offset, std::span<std::byte> bytes, bool write) const {
    return {.fd = fd_,
            .write = write,
            .offset = offset,
            .bytes = bytes,
            .path = &path_,
            .needed = static_cast<int64_t>(bytes.size())};
  }

  std::string path_;
  int fd_ = -1;
  std::unique_ptr<AsyncFiles> files_;
};

TEST_P(AsyncFilesTest, ReadsBackWrittenDataInManyPieces) {
  std::vector<uint32_t> values((5 << 20) / 4 + 3);  // pieces are 1 MiB: five whole ones and a rest
  std::iota(values.begin(), values.end(), 0U);
  const std::span<std::byte> bytes = std::as_writable_bytes(std::span(values));
  const Transfer writes[] = {At(7, bytes.first(4097), true), At(7 + 4097, bytes.subspan(4097), true)};
  ASSERT_TRUE(files_->Wait(files_->Submit(writes)).ok());

  std::vector<uint32_t> first(values.size()), second(values.size());
  const Transfer read_first[] = {At(7, std::as_writable_bytes(std::span(first)), false)};
  const Transfer read_second[] = {At(7, std::as_writable_bytes(std::span(second)), false)};
  const AsyncFiles::Ticket one = files_->Submit(read_first), two = files_->Submit(read_second);
  EXPECT_TRUE(files_->Wait(two).ok());
  EXPECT_TRUE(files_->Wait(one).ok());
  EXPECT_EQ(first, values);
  EXPECT_EQ(second, values);
}

TEST_P(AsyncFilesTest, AcceptsMorePiecesThanTheRingHolds) {
  std::vector<std::byte> block(64, std::byte{42});
  std::vector<Transfer> writes;
  for (int i = 0; i < 3000; ++i) writes.push_back(At(int64_t{64} * i, block, true));
  ASSERT_TRUE(files_->Wait(files_->Submit(writes)).ok());
  EXPECT_EQ(std::filesystem::file_size(path_), 3000U * 64);
}

TEST_P(AsyncFilesTest, CompletesAnEmptySubmission) { EXPECT_TRUE(files_->Wait(files_->Submit({})).ok()); }

TEST_P(AsyncFilesTest, NamesAFileThatEndsTooEarly) {
  ASSERT_EQ(ftruncate(fd_, 100), 0);
  std::vector<std::byte> out(200);
  const Transfer whole[] = {At(0, out, false)};
  const Status status = files_->Wait(files_->Submit(whole));
  EXPECT_EQ(status.code(), StatusCode::kDataLoss);
  EXPECT_NE(Message(status).find(path_ + ": the file ends at byte 100, 100 more are needed"),
            std::string::npos)
      << status;
  Transfer blocks = At(0, out, false);  // like a direct read, which covers whole blocks
  blocks.needed = 100;
  EXPECT_TRUE(files_->Wait(files_->Submit({&blocks, 1})).ok());
}

TEST_P(AsyncFilesTest, NamesTheFileOfAFailure) {
  std::vector<std::byte> out(8);
  Transfer bad = At(0, out, true);
  const int read_only = open(path_.c_str(), O_RDONLY);
  bad.fd = read_only;
  const Status status = files_->Wait(files_->Submit({&bad, 1}));
  close(read_only);
  EXPECT_NE(Message(status).find(path_ + ": writing at byte 0 failed: Bad file descriptor"),
            std::string::npos)
      << status;
}

TEST_P(AsyncFilesTest, DestructorWaitsForPendingTransfers) {
  std::vector<std::byte> bytes(size_t{8} << 20, std::byte{1});
  const Transfer write[] = {At(0, bytes, true)};
  files_->Submit(write);
  files_.reset();  // nothing reads `bytes` afterwards
}

INSTANTIATE_TEST_SUITE_P(, AsyncFilesTest,
                         ::testing::Values(AsyncFiles::Backend::kBest, AsyncFiles::Backend::kThreads),
                         [](const auto& test) {
                           return test.param == AsyncFiles::Backend::kBest ? "Best" : "Threads";
                         });

}  // namespace
}  // namespace moesaic::runtime
