#include "app/new_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <vector>

#include "checkpoint/test_files.h"
#include "runtime/test_sync_log.h"

namespace moesaic::app {
namespace {

namespace fs = std::filesystem;
using ::testing::ElementsAre;
using ::testing::IsEmpty;
using ::testing::UnorderedElementsAre;

class NewFolderTest : public testing::Test {
 protected:
  std::string Path(const std::string& name) const { return root_.Path(name); }
  std::vector<std::string> Names() const {
    std::vector<std::string> names;
    for (const auto& entry : fs::directory_iterator(root_.Path()))
      names.push_back(entry.path().filename().string());
    return names;
  }

  checkpoint::TestFolder root_;
};

TEST_F(NewFolderTest, AppearsOnlyWhenCommitted) {
  {
    const auto folder = NewFolder::Create(Path("f/"));
    ASSERT_TRUE(folder.ok()) << Message(folder.status());
    std::ofstream((*folder)->partial() + "/file") << "text";
    EXPECT_FALSE(fs::exists(Path("f")));
  }
  EXPECT_THAT(Names(), IsEmpty());
  const auto folder = NewFolder::Create(Path("f"));
  std::ofstream((*folder)->partial() + "/file") << "text";
  ASSERT_TRUE((*folder)->Commit().ok());
  EXPECT_THAT(Names(), ElementsAre("f"));
  EXPECT_TRUE(fs::exists(Path("f/file")));
}

TEST_F(NewFolderTest, CommitFlushesTheNameToTheDisk) {
  const auto folder = NewFolder::Create(Path("f"));
  ASSERT_TRUE(folder.ok()) << Message(folder.status());
  runtime::SyncLog log;
  ASSERT_TRUE((*folder)->Commit().ok());
  const std::string root = fs::canonical(root_.Path()).string();
  EXPECT_THAT(log.Take(), ElementsAre("rename " + root + "/f", "fsync " + root));
}

TEST_F(NewFolderTest, RemovesAbandonedPartialFoldersOnly) {
  fs::create_directories(Path("f.12345-0.partial/deep"));
  fs::create_directories(Path("g.12345-0.partial"));
  const auto one = NewFolder::Create(Path("f"));
  const auto two = NewFolder::Create(Path("f"));
  ASSERT_TRUE(one.ok() && two.ok());
  const auto name = [](const auto& folder) { return fs::path((*folder)->partial()).filename().string(); };
  EXPECT_THAT(Names(), UnorderedElementsAre("g.12345-0.partial", name(one), name(two)));
}

TEST_F(NewFolderTest, KeepsSimilarlyNamedFolders) {
  std::vector<std::string> names = {"f.notes.partial", "f.my-notes.partial", "f.1-2-3.partial",
                                    "f.-1.partial",    "f.1-.partial",       "f.2024.partial",
                                    "f.partial",       "f.1-2.partial.old"};
  for (const std::string& name : names) fs::create_directories(Path(name + "/deep"));
  ASSERT_TRUE((*NewFolder::Create(Path("f")))->Commit().ok());
  names.emplace_back("f");
  EXPECT_THAT(Names(), testing::UnorderedElementsAreArray(names));
}

TEST_F(NewFolderTest, FillsTheTargetOfALink) {
  fs::create_directories(Path("elsewhere/empty"));
  fs::create_directory_symlink("elsewhere/empty", Path("link"));
  for (const char* name : {"link", "link/"}) {
    ASSERT_TRUE((*NewFolder::Create(Path(name)))->Commit().ok()) << name;
    EXPECT_TRUE(fs::is_symlink(Path("link")));
  }
  const auto folder = NewFolder::Create(Path("link"));
  std::ofstream((*folder)->partial() + "/file") << "text";
  ASSERT_TRUE((*folder)->Commit().ok());
  EXPECT_TRUE(fs::exists(Path("elsewhere/empty/file")));
}

TEST_F(NewFolderTest, RejectsExistingAndUnwritableFolders) {
  fs::create_directories(Path("full/file"));
  std::ofstream(Path("file")) << "";
  EXPECT_EQ(Message(NewFolder::Create(Path("full")).status()),
            Path("full") + ": exists already and is not an empty folder; choose another name");
  EXPECT_EQ(Message(NewFolder::Create(Path("file")).status()),
            Path("file") + ": exists already and is not an empty folder; choose another name");
  EXPECT_EQ(Message(NewFolder::Create(Path("file/f")).status()),
            Path("file/f") + ": can't be written: Not a directory");
  fs::create_directory_symlink("nowhere", Path("dangling"));
  for (const char* name : {"dangling", "dangling/"}) {
    EXPECT_EQ(Message(NewFolder::Create(Path(name)).status()),
              Path(name) + ": is a dangling link; choose another name");
  }
  fs::create_directory(Path("empty"));
  EXPECT_TRUE((*NewFolder::Create(Path("empty")))->Commit().ok());
}

}  // namespace
}  // namespace moesaic::app
