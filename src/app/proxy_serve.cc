// Plain `moesaic proxy` runs nginx with the proxy module in the foreground.
#include "app/proxy_serve.h"

#include <fmt/format.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <string>

#include "app/output.h"
#include "app/proxy_config.h"
#include "proxy/gateway/settings.h"
#include "proxy/protocol/url_host.h"
#include "proxy/schedule/policy.h"

namespace moesaic::app {
namespace {

// The folder of nginx's configuration, pid and temporary files. A temporary one is removed at the end.
class ProxyFolder {
 public:
  static StatusOr<std::unique_ptr<ProxyFolder>> Make(const std::string& path) {
    auto folder = std::make_unique<ProxyFolder>();
    if (!path.empty()) {
      std::error_code error;
      const mode_t mask = umask(0);
      umask(geteuid() == 0 ? 0066 : mask);  // the user of root's workers must enter new folders
      std::filesystem::create_directories(path, error);
      umask(mask);
      if (error) return IoError("cannot make {}: {}", path, error.message());
      folder->path_ = std::filesystem::absolute(path);
      return folder;
    }
    std::string name = (std::filesystem::temp_directory_path() / "moesaic-proxy-XXXXXX").string();
    if (mkdtemp(name.data()) == nullptr) return IoError("cannot make {}: {}", name, std::strerror(errno));
    folder->path_ = name;
    folder->temporary_ = true;
    // The workers of root's nginx run as another user, who stores long bodies in folders below this one.
    if (geteuid() == 0) chmod(name.c_str(), 0711);
    return folder;
  }
  ~ProxyFolder() {
    std::error_code ignored;
    if (temporary_) std::filesystem::remove_all(path_, ignored);
  }
  const std::string& path() const { return path_; }

 private:
  std::string path_;
  bool temporary_ = false;
};

// Returns `path` or the lowest folder above it that other users cannot enter, or "".
std::string ClosedFolder(const std::string& path) {
  std::error_code error;
  std::filesystem::path folder = std::filesystem::canonical(path, error);
  for (; !folder.empty(); folder = folder.parent_path()) {
    struct stat found = {};
    if (stat(folder.c_str(), &found) == 0 && (found.st_mode & S_IXOTH) == 0) return folder.string();
    if (folder == folder.root_path()) break;
  }
  return "";
}

StatusOr<pid_t> StartNginx(const std::string& nginx, const std::string& folder, bool check,
                           const sigset_t& mask) {
  const std::string config = folder + "/nginx.conf";
  const pid_t child = fork();
  if (child < 0) return IoError("fork: {}", std::strerror(errno));
  if (child > 0) return child;
  sigprocmask(SIG_SETMASK, &mask, nullptr);
  const char* words[] = {nginx.c_str(),          "-p",   folder.c_str(), "-c", config.c_str(),
                         check ? "-t" : nullptr, nullptr};
  execv(nginx.c_str(), const_cast<char**>(words));
  _exit(127);
}

Status Ended(int state, const std::string& nginx, bool asked) {
  if (WIFEXITED(state) && WEXITSTATUS(state) == 0) return OkStatus();
  if (WIFEXITED(state) && WEXITSTATUS(state) == 127) return IoError("cannot run {}", nginx);
  if (asked && WIFSIGNALED(state)) return OkStatus();
  if (WIFEXITED(state))
    return IoError("nginx ended with status {}; its messages are above", WEXITSTATUS(state));
  return IoError("nginx was ended by signal {}", WTERMSIG(state));
}

// Waits for nginx. SIGHUP reads --engines again and reloads; SIGINT, SIGTERM and SIGQUIT let requests finish,
// a second one does not.
Status Supervise(pid_t child, const ProxyFlags& flags, const std::string& folder, const std::string& nginx,
                 const sigset_t& signals) {
  bool asked = false;
  for (;;) {
    int state = 0;
    if (waitpid(child, &state, WNOHANG) == child) return Ended(state, nginx, asked);
    int signal = 0;
    if (sigwait(&signals, &signal) != 0) continue;
    if (signal == SIGCHLD) continue;
    if (signal == SIGHUP) {
      const Status status = WriteEngineList(flags, folder);
      if (status.ok()) {
        kill(child, SIGHUP);
      } else {
        Tell("moesaic proxy: not reloaded: {}\n", Message(status));
      }
      continue;
    }
    kill(child, asked ? SIGTERM : SIGQUIT);
    asked = true;
  }
}

Status RunProxy(const ProxyFlags& flags) {
  if (flags.reference) {
    WriteOutput(proxy::DirectiveReference());
    return OkStatus();
  }
  if (flags.print_config) {
    ASSIGN_OR_RETURN(const std::string config, ProxyConfig(flags, ""));
    WriteOutput(config);
    return OkStatus();
  }
  ASSIGN_OR_RETURN(const auto folder, ProxyFolder::Make(flags.folder));
  ASSIGN_OR_RETURN(const std::string config, ProxyConfig(flags, folder->path()));
  ASSIGN_OR_RETURN(const std::string nginx, FindNginx(flags));
  if (const std::string closed = ClosedFolder(folder->path());
      !closed.empty() && WorkersChangeUser(folder->path())) {
    Tell("moesaic proxy: requests with long bodies may fail, because nginx's workers cannot enter {}\n",
         closed);
  }
  RETURN_IF_ERROR(WriteEngineList(flags, folder->path()));
  {
    const std::string path = folder->path() + "/nginx.conf";
    std::ofstream file(path);
    if (file && chmod(path.c_str(), S_IRUSR | S_IWUSR) != 0)  // it may have keys
      return IoError("cannot restrict {} to its owner: {}", path, std::strerror(errno));
    file << config;
    if (!file.flush()) return IoError("cannot write {}", path);
  }
  sigset_t signals, mask;
  sigemptyset(&signals);
  for (const int signal : {SIGHUP, SIGINT, SIGTERM, SIGQUIT, SIGCHLD}) sigaddset(&signals, signal);
  sigprocmask(SIG_BLOCK, &signals, &mask);
  ASSIGN_OR_RETURN(const pid_t child, StartNginx(nginx, folder->path(), flags.check, mask));
  if (!flags.check)
    Tell("moesaic proxy: listening at http://{}:{}, state at /moesaic\n", proxy::UrlHost(flags.host),
         flags.port);
  const Status status = Supervise(child, flags, folder->path(), nginx, signals);
  sigprocmask(SIG_SETMASK, &mask, nullptr);
  return status;
}

}  // namespace

void AddProxyServing(Verb proxy, VerbRun& run) {
  auto flags = std::make_shared<ProxyFlags>();
  proxy.AddOption("--engine", flags->engines, "Engine that does prefill and decode: URL[,OPTION=VALUE...]")
      .OneValue();
  proxy.AddOption("--prefill", flags->prefill, "Prefill engine").OneValue();
  proxy.AddOption("--decode", flags->decode, "Decode engine").OneValue();
  proxy.AddOption("--engines", flags->engine_file,
                  "File with one engine a line: URL [OPTION=VALUE ...]; SIGHUP reads it again");
  proxy
      .AddOption(
          "--etcd", flags->etcd,
          "Engines that etcd names: PREFIX,URL[,URL...]; each value below PREFIX is a line as in --engines")
      .OneValue();
  proxy
      .AddOption("--resolver", flags->resolvers,
                 "Name server for engines with the option resolve (default: those of /etc/resolv.conf)")
      .OneValue();
  proxy
      .AddOption("--transfer", flags->transfer,
                 "Transfer of KV between prefill and decode engines (default: nixl with --prefill)")
      .OneOf({"aggregated", "nixl", "mooncake", "sglang", "ascend"});
  proxy.AddOption("--api", flags->api, "API of the engines")
      .OneOf({"vllm", "sglang", "moesaic"})
      .ShowDefault();
  std::vector<std::string> policies;
  for (const std::string_view name : proxy::PolicyNames()) policies.emplace_back(name);
  proxy.AddOption("--policy", flags->policy, "Scheduling policy").OneOf(policies).ShowDefault();
  proxy.AddOption("--model", flags->model,
                  "Folder with tokenizer.json and the chat template; without it tokens are "
                  "estimated");
  proxy
      .AddOption("--set", flags->settings,
                 "A directive of the pool, e.g. \"queue 1000 30s\"; see --reference")
      .OneValue();
  proxy.AddOption("--host", flags->host, "Address to listen at").ShowDefault();
  proxy.AddOption("--port", flags->port, "Port to listen at").Range(1, 65535).ShowDefault();
  proxy
      .AddOption("--allow", flags->allowed,
                 "Address or network that may read /metrics and /moesaic, besides this machine")
      .OneValue();
  proxy.AddOption("--workers", flags->workers, "nginx worker processes (default: processors, at most 8)")
      .Range(1, 64);
  proxy.AddOption("--access-log", flags->access_log,
                  "File for one JSON line per request with the times of its stages");
  proxy.AddOption("--nginx", flags->nginx, "nginx binary (default: the installed one)");
  proxy.AddOption("--module", flags->module, "ngx_http_moesaic_module.so (default: next to this program)");
  proxy.AddOption("--folder", flags->folder,
                  "Folder for nginx's configuration and temporary files (default: a new one)");
  proxy.AddFlag("--check", flags->check, "Test the configuration and exit");
  proxy
      .AddFlag("--print-config", flags->print_config,
               "Print a configuration for an nginx that is started in another way, and exit")
      .Excludes("--folder");
  proxy.AddFlag("--reference", flags->reference, "Print all directives in Markdown and exit");
  proxy.Footer(
      "Examples:\n"
      "  moesaic proxy --engine http://10.0.0.1:8000 --engine http://10.0.0.2:8000 --model Qwen3-30B-A3B/\n"
      "  moesaic proxy --prefill http://10.0.0.1:8000,kv_events=tcp://10.0.0.1:5557 --decode "
      "http://10.0.0.2:8000\n"
      "  moesaic proxy --engine http://vllm.default.svc.cluster.local:8000,resolve\n"
      "  moesaic proxy --engines engines.txt --print-config");
  proxy.OnParsed([flags, &run] {
    if (run) return;  // a verb below this one
    run = [flags] { return RunProxy(*flags); };
  });
}

}  // namespace moesaic::app
