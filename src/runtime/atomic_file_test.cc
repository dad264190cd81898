#include "runtime/atomic_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <vector>

#include "runtime/test_sync_log.h"

namespace moesaic::runtime {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class AtomicFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    std::string name = (std::filesystem::temp_directory_path() / "moesaic-test-XXXXXX").string();
    ASSERT_NE(mkdtemp(name.data()), nullptr);
    folder_ = name;
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::string Path(const std::string& name) const { return (folder_ / name).string(); }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : std::filesystem::directory_iterator(folder_)) {
      names.push_back(entry.path().filename().string());
    }
    std::ranges::sort(names);
    return names;
  }
  static std::string Content(const std::string& path) {
    std::ifstream file(path);
    return {std::istreambuf_iterator<char>(file), {}};
  }

  std::filesystem::path folder_;
};

TEST_F(AtomicFileTest, AppearsOnlyOnCommit) {
  std::ofstream(Path("f")) << "old";
  auto file = AtomicFile::Create(Path("f"));
  ASSERT_TRUE(file.ok()) << Message(file.status());
  ASSERT_TRUE((*file)->Write("new", 3).ok());
  EXPECT_EQ(Content(Path("f")), "old");
  ASSERT_TRUE((*file)->Commit().ok());
  EXPECT_EQ(Content(Path("f")), "new");
  EXPECT_THAT(Names(), ElementsAre("f"));
}

// /dev/null must still be a device after a root user has written results to it.
TEST_F(AtomicFileTest, ReservesFreeSpaceOnly) {
  {
    const auto file = *AtomicFile::Create(Path("a"));
    EXPECT_EQ(file->Reserve(1 << 20), OkStatus());
    EXPECT_EQ(file->Write("x", 1), OkStatus());
    EXPECT_EQ(file->Commit(), OkStatus());
    EXPECT_EQ(std::filesystem::file_size(Path("a")), 1U);
    const auto large = *AtomicFile::Create(Path("b"));
    const Status status = large->Reserve(int64_t{1} << 60);
    if (status.ok()) GTEST_SKIP() << "the file system does not reserve";
    EXPECT_EQ(status.code(), StatusCode::kResourceExhausted);
  }
  EXPECT_THAT(Names(), ElementsAre("a"));
}

TEST_F(AtomicFileTest, ReplacesRegularFilesOnly) {
  std::filesystem::create_directory(Path("folder"));
  ASSERT_EQ(mkfifo(Path("pipe").c_str(), 0666), 0);
  for (const std::string& path : {Path("folder"), Path("pipe"), std::string("/dev/null")}) {
    const auto file = AtomicFile::Create(path);
    ASSERT_FALSE(file.ok()) << path;
    EXPECT_EQ(Message(file.status()), path + ": can't be written: it is not a regular file");
  }
  EXPECT_THAT(Names(), ElementsAre("folder", "pipe"));
}

TEST_F(AtomicFileTest, CommitSyncsTheFileAndThenItsName) {
  auto file = AtomicFile::Create(Path("f"));
  ASSERT_TRUE(file.ok() && (*file)->Write("new", 3).ok());
  SyncLog log;
  ASSERT_TRUE((*file)->Commit().ok());
  const std::string folder = std::filesystem::canonical(folder_).string();
  EXPECT_THAT(log.Take(), ElementsAre(::testing::MatchesRegex("fsync " + folder + "/f.[0-9-]*.partial"),
                                      "rename " + Path("f"), "fsync " + folder));
}

TEST_F(AtomicFileTest, ReplacesTheTargetOfALink) {
  std::filesystem::create_directory(Path("folder"));
  std::ofstream(Path("folder/target")) << "old";
  std::filesystem::create_symlink("folder/target", Path("link"));
  const Status written = WriteFileAtomically(Path("link"), "new");
  ASSERT_TRUE(written.ok()) << Message(written);
  EXPECT_TRUE(std::filesystem::is_symlink(Path("link")));
  EXPECT_EQ(Content(Path("folder/target")), "new");
  EXPECT_THAT(Names(), ElementsAre("folder", "link"));
  std::filesystem::create_symlink("missing", Path("dangling"));
  EXPECT_EQ(Message(WriteFileAtomically(Path("dangling"), "new")),
            Path("dangling") + ": can't be written: it is a link to a file that does not exist");
}

TEST_F(AtomicFileTest, KeepsThePermissionsOfTheReplacedFile) {
  std::ofstream(Path("f")) << "old";
  for (const auto mode : {0600, 0664}) {
    std::filesystem::permissions(Path("f"), std::filesystem::perms(mode));
    ASSERT_TRUE(WriteFileAtomically(Path("f"), "new").ok());
    EXPECT_EQ(std::filesystem::status(Path("f")).permissions(), std::filesystem::perms(mode));
  }
}

TEST_F(AtomicFileTest, RemovesUncommittedFile) {
  auto file = AtomicFile::Create(Path("f"));
  ASSERT_TRUE(file.ok());
  ASSERT_TRUE((*file)->Write("new", 3).ok());
  EXPECT_EQ(Names().size(), 1u);
  file->reset();
  EXPECT_THAT(Names(), IsEmpty());
}

TEST_F(AtomicFileTest, RemovesLeftoversOfKilledWriter) {
  const pid_t child = fork();
  if (child == 0) {
    auto file = AtomicFile::Create(Path("f"));
    static_cast<void>(file.ok() && (*file)->Write("half", 4).ok());
    raise(SIGKILL);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  ASSERT_TRUE(WIFSIGNALED(status));
  for (const char* name : {"g.1-0.partial", "f.notes.partial", "f.my-notes.partial", "f.2024.partial"}) {
    std::ofstream(Path(name)) << "of another program";
  }
  std::filesystem::create_directory(Path("f.1-0.partial"));
  ASSERT_EQ(Names().size(), 6u);
  auto file = AtomicFile::Create(Path("f"));
  ASSERT_TRUE(file.ok() && (*file)->Commit().ok());
  EXPECT_THAT(Names(), ElementsAre("f", "f.1-0.partial", "f.2024.partial", "f.my-notes.partial",
                                   "f.notes.partial", "g.1-0.partial"));
}

TEST_F(AtomicFileTest, SeparatesTwoWritersOfOnePath) {
  auto one = AtomicFile::Create(Path("f"));
  auto two = AtomicFile::Create(Path("f"));
  ASSERT_TRUE(one.ok() && two.ok());
  ASSERT_TRUE((*one)->Write("one", 3).ok() && (*two)->Write("two", 3).ok());
  EXPECT_EQ(Names().size(), 2u);
  ASSERT_TRUE((*two)->Commit().ok() && (*one)->Commit().ok());
  EXPECT_EQ(Content(Path("f")), "one");
  EXPECT_THAT(Names(), ElementsAre("f"));
}

TEST_F(AtomicFileTest, NamesPathThatCannotBeWritten) {
  const auto file = AtomicFile::Create(Path("no/such/folder"));
  ASSERT_FALSE(file.ok());
  EXPECT_THAT(Message(file.status()), ::testing::HasSubstr("no/such/folder: can't be written: No such file"));
}

}  // namespace
}  // namespace moesaic::runtime
