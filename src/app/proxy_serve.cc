// Plain `moesaic proxy` runs nginx with the proxy module until it is asked to end.
#include "app/proxy_serve.h"

#include <fmt/format.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstring>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <string>
#include <utility>

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

// nginx, over upgrades of its binary. It runs as a daemon: in the foreground it does not replace its binary.
// This process is the parent of its master all the same, because it is the reaper of its descendants.
class Nginx {
 public:
  Nginx(std::string program, std::string folder, bool check)
      : program_(std::move(program)), folder_(std::move(folder)), check_(check) {}

  /// `mask`: signals that nginx blocks.
  Status Start(const sigset_t& mask) {
    if (prctl(PR_SET_CHILD_SUBREAPER, 1) != 0) return IoError("prctl: {}", std::strerror(errno));
    const std::string config = folder_ + "/nginx.conf";
    starter_ = fork();
    if (starter_ < 0) return IoError("fork: {}", std::strerror(errno));
    if (starter_ > 0) return OkStatus();
    sigprocmask(SIG_SETMASK, &mask, nullptr);
    const char* words[] = {program_.c_str(),        "-p",   folder_.c_str(), "-c", config.c_str(),
                           check_ ? "-t" : nullptr, nullptr};
    execv(program_.c_str(), const_cast<char**>(words));
    _exit(127);
  }

  /// Returns the end of nginx, or nothing while it runs. Call it after SIGCHLD, and every 0.1 s while
  /// changing().
  std::optional<Status> Look() {
    int state = 0;
    pid_t ended = 0;
    while ((ended = waitpid(-1, &state, WNOHANG)) > 0) {
      if (ended == starter_) starter_ = 0;
      if (ended == old_) old_ = 0;
      if (ended == master_) {
        master_ = 0;
        // A master that was started by hand may have taken its place.
        if (state != 0 && !Adopt()) return Ended(state);
      }
      if (master_ == 0) last_ = state;
    }
    if (ended < 0) return Ended(last_);  // there is no child
    if (master_ == 0) Adopt();
    if (upgrades_ && master_ != 0) FinishUpgrade();
    if (master_ != 0 && old_ == 0 && !IsChild(master_))
      return IoError("the new nginx has ended; its messages are above");
    return std::nullopt;
  }
  bool changing() const { return master_ == 0 || upgrades_; }

  void Reload() {
    if (master_ == 0) {
      reloads_ = true;
    } else {
      kill(master_, SIGHUP);
    }
  }
  /// Starts a new master, which takes the place of this one.
  void Upgrade() {
    if (changing() || old_ != 0 || asked_) {
      Tell("moesaic proxy: not upgraded: nginx is being started, upgraded or ended\n");
      return;
    }
    upgrades_ = std::chrono::steady_clock::now();
    kill(master_, SIGUSR2);
  }
  /// Lets requests finish; the second call does not.
  void Stop() {
    for (const pid_t process : {starter_, master_, old_}) {
      if (process != 0) kill(process, asked_ ? SIGTERM : SIGQUIT);
    }
    asked_ = true;
  }

 private:
  // The process that nginx's file names, or 0.
  pid_t Named() const {
    std::ifstream file(folder_ + "/nginx.pid");
    pid_t pid = 0;
    return file >> pid && file.get() == '\n' ? pid : 0;
  }

  // Also of a child that has ended and that waitpid has not returned yet.
  static bool IsChild(pid_t pid) {
    siginfo_t ignored;
    return waitid(P_PID, static_cast<id_t>(pid), &ignored, WEXITED | WNOHANG | WNOWAIT) == 0;
  }

  // Makes the process that nginx's file names the master, if it is a child. It is not while its parent runs.
  bool Adopt() {
    const pid_t named = Named();
    if (named <= 0 || !IsChild(named)) return false;
    master_ = named;
    upgrades_.reset();
    if (std::exchange(reloads_, false)) kill(master_, SIGHUP);
    if (asked_) kill(master_, SIGQUIT);
    return true;
  }

  // The new master writes its file when it has read its configuration. nginx renames the file of the old one
  // before that, and back when the new one fails.
  void FinishUpgrade() {
    constexpr auto kStart = std::chrono::seconds(10);
    const pid_t named = Named();
    if (named > 0 && named != master_) {
      Tell("moesaic proxy: nginx was upgraded; the old one finishes its requests\n");
      old_ = std::exchange(master_, named);
      kill(old_, SIGQUIT);
      if (asked_) kill(master_, SIGQUIT);
      upgrades_.reset();
    } else if (named == master_ && std::chrono::steady_clock::now() - *upgrades_ > kStart) {
      Tell("moesaic proxy: not upgraded: the new nginx did not start; its messages are above\n");
      upgrades_.reset();
    }
  }

  Status Ended(int state) const {
    if (WIFEXITED(state) && WEXITSTATUS(state) == 0) return OkStatus();
    if (WIFEXITED(state) && WEXITSTATUS(state) == 127) return IoError("cannot run {}", program_);
    if (asked_ && WIFSIGNALED(state)) return OkStatus();
    if (WIFEXITED(state))
      return IoError("nginx ended with status {}; its messages are above", WEXITSTATUS(state));
    return IoError("nginx was ended by signal {}", WTERMSIG(state));
  }

  std::string program_, folder_;
  bool check_, asked_ = false;
  bool reloads_ = false;  // when the master is known
  pid_t starter_ = 0;     // ends when nginx is a daemon; 0: has ended
  pid_t master_ = 0;      // the newest; 0: not known
  pid_t old_ = 0;         // finishes its requests after an upgrade; 0: none
  int last_ = 0;          // state of the last process that ended while there was no master
  std::optional<std::chrono::steady_clock::time_point> upgrades_;  // begin of an upgrade
};

// Waits for nginx. SIGHUP reads --engines again and reloads; SIGUSR2 upgrades; SIGINT, SIGTERM and SIGQUIT
// let requests finish, a second one does not.
Status Supervise(Nginx& nginx, const ProxyFlags& flags, const std::string& folder, const sigset_t& signals) {
  constexpr timespec kLookInterval = {.tv_sec = 0, .tv_nsec = 100'000'000};
  for (;;) {
    const int signal = sigtimedwait(&signals, nullptr, nginx.changing() ? &kLookInterval : nullptr);
    if (const std::optional<Status> end = nginx.Look()) return *end;
    switch (signal) {
      case -1:  // no signal came
      case SIGCHLD:
        break;
      case SIGHUP: {
        const Status status = WriteEngineList(flags, folder);
        if (status.ok()) {
          nginx.Reload();
        } else {
          Tell("moesaic proxy: not reloaded: {}\n", Message(status));
        }
        break;
      }
      case SIGUSR2:
        nginx.Upgrade();
        break;
      default:
        nginx.Stop();
    }
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
  ASSIGN_OR_RETURN(const std::string program, FindNginx(flags));
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
  for (const int signal : {SIGHUP, SIGUSR2, SIGINT, SIGTERM, SIGQUIT, SIGCHLD}) sigaddset(&signals, signal);
  sigprocmask(SIG_BLOCK, &signals, &mask);
  Nginx nginx(program, folder->path(), flags.check);
  RETURN_IF_ERROR(nginx.Start(mask));
  if (!flags.check)
    Tell("moesaic proxy: listening at http://{}:{}, state at /moesaic\n", proxy::UrlHost(flags.host),
         flags.port);
  const Status status = Supervise(nginx, flags, folder->path(), signals);
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
