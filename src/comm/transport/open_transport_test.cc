#include "comm/transport/open_transport.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <fstream>
#include <map>
#include <thread>
#include <vector>

#include "comm/transport/free_port.h"

namespace moesaic::comm {
namespace {

Environment Variables(std::map<std::string, std::string> variables) {
  return [variables = std::move(variables)](const std::string& name) -> std::optional<std::string> {
    const auto found = variables.find(name);
    return found == variables.end() ? std::nullopt : std::optional<std::string>(found->second);
  };
}

Status ErrorOf(std::string_view spec, std::map<std::string, std::string> variables = {}) {
  return OpenTransport(spec, Variables(std::move(variables))).status();
}

TEST(OpenTransportTest, LocalIsTheDefault) {
  for (const char* spec : {"", "local"}) {
    const auto opened = OpenTransport(spec, Variables({}));
    ASSERT_TRUE(opened.ok()) << opened.status();
    EXPECT_EQ((*opened)->name(), "local");
    EXPECT_EQ((*opened)->size(), 1);
  }
}

TEST(OpenTransportTest, NamesTheFaultyPart) {
  const std::map<std::string, std::string> secret = {{"MOESAIC_JOB_SECRET", "x"}};
  const std::pair<const char*, const char*> cases[] = {
      {"nccl", "nccl"},
      {"ucx://host", "HOST:PORT"},
      {"ucx://host:99999?rank=0&size=1", "port must be a number"},
      {"ucx://host:1?rank=x&size=1", "rank must be a number"},
      {"ucx://host:1?rank=0", "needs rank and size"},
      {"ucx://host:1?rank=0&size=1&color=red", "color=red"},
      {"ucx://host:0?rank=0&size=1", "port must be between 1 and 65535"},
  };
  for (const auto& [spec, part] : cases) {
    const Status status = ErrorOf(spec, secret);
    EXPECT_EQ(status.code(), StatusCode::kInvalidArgument) << spec << ": " << status;
    EXPECT_NE(Message(status).find(part), std::string::npos) << spec << ": " << status;
  }
  EXPECT_NE(Message(ErrorOf("", {{"MOESAIC_RENDEZVOUS", "host:1"}})).find("MOESAIC_RANK"), std::string::npos);
}

#if MOESAIC_HAVE_UCX
TEST(OpenTransportTest, UcxNeedsASecret) {
  EXPECT_NE(Message(ErrorOf("ucx://127.0.0.1:1?rank=0&size=1")).find("MOESAIC_JOB_SECRET"),
            std::string::npos);
}

// One rank takes everything from its flag, the other from its environment, with the secret in a file.
TEST(OpenTransportTest, UcxRanksConnectByFlagAndEnvironment) {
  const std::string port = std::to_string(FreePort());
  const std::string path = testing::TempDir() + "/job_secret";
  std::ofstream(path) << "tiger\n";
  std::thread other([&] {
    const auto opened = OpenTransport("", Variables({{"MOESAIC_RENDEZVOUS", "127.0.0.1:" + port},
                                                     {"MOESAIC_RANK", "1"},
                                                     {"MOESAIC_WORLD_SIZE", "2"},
                                                     {"MOESAIC_JOB_SECRET_FILE", path}}));
    ASSERT_TRUE(opened.ok()) << opened.status();
    std::vector<std::byte> data(3, std::byte{5});
    const auto id = (*opened)->Send(0, 1, data);
    ASSERT_TRUE(id.ok());
    EXPECT_TRUE(Wait(**opened, *id, 20).ok());
  });
  const auto opened = OpenTransport("ucx://127.0.0.1:" + port + "?rank=0&size=2&limit=20",
                                    Variables({{"MOESAIC_JOB_SECRET", "tiger"}}));
  ASSERT_TRUE(opened.ok()) << opened.status();
  EXPECT_EQ((*opened)->name(), "ucx");
  std::vector<std::byte> data(3);
  const auto id = (*opened)->Receive(1, 1, data);
  ASSERT_TRUE(id.ok());
  EXPECT_TRUE(Wait(**opened, *id, 20).ok());
  EXPECT_EQ(data[2], std::byte{5});
  other.join();
  std::remove(path.c_str());
}
#else
TEST(OpenTransportTest, ReportsABuildWithoutUcx) {
  const Status status = ErrorOf("ucx://127.0.0.1:1?rank=0&size=1", {{"MOESAIC_JOB_SECRET", "x"}});
  EXPECT_EQ(status.code(), StatusCode::kUnimplemented) << status;
  EXPECT_NE(Message(status).find("libucx-dev"), std::string::npos);
}
#endif

#if !MOESAIC_HAVE_MPI
TEST(OpenTransportTest, ReportsABuildWithoutMpi) {
  for (const char* spec : {"", "mpi"}) {
    const Status status = ErrorOf(spec, {{"OMPI_COMM_WORLD_SIZE", "2"}});
    EXPECT_EQ(status.code(), StatusCode::kUnimplemented) << status;
    EXPECT_NE(Message(status).find("libopenmpi-dev"), std::string::npos);
  }
}
#endif

TEST(IsRankOfJob, DependsOnTheNumberOfRanksThatTheLauncherSets) {
  const auto is_rank = [](std::map<std::string, std::string> variables) {
    return IsRankOfJob(Variables(std::move(variables)));
  };
  EXPECT_FALSE(is_rank({}));
  EXPECT_TRUE(is_rank({{"OMPI_COMM_WORLD_SIZE", "2"}}));
  EXPECT_FALSE(is_rank({{"OMPI_COMM_WORLD_SIZE", "1"}}));
  EXPECT_TRUE(is_rank({{"PMI_SIZE", "4"}}));
  EXPECT_FALSE(is_rank({{"SLURM_NTASKS", "4"}})) << "a shell inside an allocation";
  EXPECT_TRUE(is_rank({{"MOESAIC_RENDEZVOUS", "a:1"}, {"SLURM_NTASKS", "4"}}));
  EXPECT_FALSE(is_rank({{"MOESAIC_RENDEZVOUS", "a:1"}, {"MOESAIC_WORLD_SIZE", "1"}, {"SLURM_NTASKS", "4"}}));
}

}  // namespace
}  // namespace moesaic::comm
