#include "app/proxy_config.h"

#include <fmt/format.h>
#include <pwd.h>
#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <thread>

#include "proxy/gateway/settings.h"
#include "proxy/protocol/url_host.h"

namespace moesaic::app {
namespace {

constexpr int kMaxWorkers = 8;  // by default; scheduling is done by one of them

// Splits at characters of `separators`, without empty parts.
std::vector<std::string> Split(const std::string& text, const char* separators) {
  std::vector<std::string> parts;
  size_t at = 0;
  while ((at = text.find_first_not_of(separators, at)) != std::string::npos) {
    const size_t end = std::min(text.find_first_of(separators, at), text.size());
    parts.push_back(text.substr(at, end - at));
    at = end;
  }
  return parts;
}

// A word of nginx's configuration.
std::string Word(const std::string& text) {
  if (!text.empty() && text.find_first_of(" \t\r\n;{}\"'\\#$") == std::string::npos) return text;
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') quoted += '\\';
    quoted += c;
  }
  return quoted + '"';
}

StatusOr<std::string> Line(proxy::PoolSettings& pool, const std::vector<std::string>& words,
                           const std::string& flag) {
  const std::vector<std::string_view> args(words.begin() + 1, words.end());
  const Status status = proxy::ApplyDirective(pool, words[0], args);
  if (!status.ok()) return Annotate(status, flag);
  std::string line = "    " + words[0];
  for (size_t i = 1; i < words.size(); ++i) line += " " + Word(words[i]);
  return line + ";\n";
}

bool IsLocal(const std::string& host) {
  return host == "localhost" || host == "::1" || host == "[::1]" || host.starts_with("127.");
}

// Returns the directive that lets the engines of `pool` use the metaserver.
StatusOr<std::vector<std::string>> MetaserverAllow(const ProxyFlags& flags, const proxy::PoolSettings& pool) {
  std::vector<std::string> words = {"metaserver_allow", "127.0.0.0/8", "::1"};
  std::string unknown = !flags.engine_file.empty() ? "--engines" : !flags.etcd.empty() ? "--etcd" : "";
  for (const auto* list : {&pool.engines, &pool.named}) {
    for (const proxy::EngineSettings& engine : *list) {
      const std::string& host = engine.host_name;
      if (IsLocal(host)) continue;
      if (!proxy::ParseNetwork(host).ok()) {
        unknown = host;
      } else if (std::find(words.begin(), words.end(), host) == words.end()) {
        words.push_back(host);
      }
    }
  }
  if (unknown.empty()) return words;
  return InvalidArgument(
      "the addresses of the engines of {} are not known here, and only known ones may use the metaserver: "
      "give --set \"metaserver_allow ADDRESS[/BITS] ...\"",
      unknown);
}

// Returns the lines of `flags.engine_file` as directives.
StatusOr<std::string> EngineLines(const ProxyFlags& flags) {
  std::ifstream in(flags.engine_file);
  if (!in) return NotFound("--engines: cannot open '{}'", flags.engine_file);
  proxy::PoolSettings pool;
  std::string text, line;
  for (int number = 1; std::getline(in, line); ++number) {
    std::vector<std::string> words = Split(line.substr(0, line.find('#')), " \t\r,");
    if (words.empty()) continue;
    words.insert(words.begin(), "engine");
    ASSIGN_OR_RETURN(const std::string directive,
                     Line(pool, words, fmt::format("{}:{}", flags.engine_file, number)));
    text += directive;
  }
  if (text.empty()) return InvalidArgument("--engines: '{}' names no engine", flags.engine_file);
  return text;
}

// Returns the directives of the pool, and applies them to `pool`.
StatusOr<std::string> PoolText(const ProxyFlags& flags, const std::string& folder,
                               const std::string& transfer, proxy::PoolSettings& pool) {
  std::string body;
  const auto add = [&](const std::vector<std::string>& words, const std::string& flag) -> Status {
    ASSIGN_OR_RETURN(const std::string line, Line(pool, words, flag));
    body += line;
    return OkStatus();
  };
  RETURN_IF_ERROR(add({"transfer", transfer}, "--transfer"));
  RETURN_IF_ERROR(add({"api", flags.api}, "--api"));
  RETURN_IF_ERROR(add({"policy", flags.policy}, "--policy"));
  if (!flags.model.empty())
    RETURN_IF_ERROR(add({"model", std::filesystem::absolute(flags.model)}, "--model"));
  if (transfer == "ascend") {
    RETURN_IF_ERROR(
        add({"metaserver", fmt::format("http://{}:{}/v1/metaserver", proxy::UrlHost(flags.host), flags.port)},
            "--transfer"));
  }
  for (const std::string& setting : flags.settings) {
    const std::vector<std::string> words = Split(setting, " \t");
    if (words.empty()) return InvalidArgument("--set: needs a directive");
    RETURN_IF_ERROR(add(words, "--set"));
  }
  const std::pair<const std::vector<std::string>*, const char*> lists[] = {
      {&flags.engines, nullptr}, {&flags.prefill, "role=prefill"}, {&flags.decode, "role=decode"}};
  for (const auto& [urls, role] : lists) {
    for (const std::string& url : *urls) {
      std::vector<std::string> words = Split(url, ",");
      words.insert(words.begin(), "engine");
      if (role != nullptr) words.push_back(role);
      RETURN_IF_ERROR(add(words, role == nullptr ? "--engine" : role[5] == 'p' ? "--prefill" : "--decode"));
    }
  }
  for (const std::string& source : flags.etcd) {
    std::vector<std::string> words = Split(source, ",");
    words.insert(words.begin(), "etcd");
    RETURN_IF_ERROR(add(words, "--etcd"));
  }
  if (transfer == "ascend" && pool.metaserver_allow.empty() && !IsLocal(flags.host)) {
    ASSIGN_OR_RETURN(const std::vector<std::string> words, MetaserverAllow(flags, pool));
    RETURN_IF_ERROR(add(words, "--transfer"));
  }
  if (!flags.engine_file.empty() && folder.empty()) {
    ASSIGN_OR_RETURN(const std::string engines, EngineLines(flags));
    body += engines;
  } else if (!flags.engine_file.empty()) {
    body += fmt::format("    include {};\n", Word(folder + "/engines.conf"));
  }
  return body;
}

// Returns the main context of nginx up to the first line of its http block. Without a folder it leaves pid,
// log and daemon to nginx's defaults and to its command line. The user of the workers of a master that runs
// as root is nginx's default, which has no rights, unless root cannot change its user.
std::string MainText(const ProxyFlags& flags, const std::string& folder, const std::string& module) {
  const int cores = static_cast<int>(std::max(1u, std::thread::hardware_concurrency()));
  const int workers = flags.workers > 0 ? flags.workers : std::min(cores, kMaxWorkers);

  std::string text = fmt::format("load_module {};\n", Word(module));
  if (!folder.empty())
    text += fmt::format("pid {};\nerror_log stderr notice;\n", Word(folder + "/nginx.pid"));
  if (!folder.empty() && geteuid() == 0 && !WorkersChangeUser(folder)) text += "user root;\n";
  fmt::format_to(std::back_inserter(text),
                 "worker_processes {};\nworker_rlimit_nofile 65536;\n"
                 "thread_pool default threads={} max_queue=65536;\n"
                 "events {{ worker_connections 16384; }}\nhttp {{\n",
                 workers, std::max(2, cores / workers));
  return text;
}

// Returns nginx's name servers, in brackets if their addresses are IPv6.
StatusOr<std::string> ResolverText(const ProxyFlags& flags) {
  std::vector<std::string> servers = flags.resolvers;
  if (servers.empty()) {
    std::ifstream file("/etc/resolv.conf");
    std::string line;
    while (std::getline(file, line)) {
      const std::vector<std::string> words = Split(line, " \t\r");
      if (words.size() < 2 || words[0] != "nameserver") continue;
      // nginx cannot use an address with the name of an interface.
      if (words[1].find('%') == std::string::npos) servers.push_back(words[1]);
    }
  }
  if (servers.empty())
    return InvalidArgument(
        "engines with the option resolve need --resolver: /etc/resolv.conf names no usable server");
  std::string text = "  resolver";
  for (const std::string& server : servers) {
    const bool six = std::count(server.begin(), server.end(), ':') > 1 && !server.starts_with('[');
    text += " " + Word(six ? fmt::format("[{}]", server) : server);
  }
  return text + ";\n";
}

// Returns the directives of the access log. It has the times of all stages except kPrefixMatched.
std::string LogText(const ProxyFlags& flags) {
  if (flags.access_log.empty()) return "  access_log off;\n";
  std::string stages;
  for (int i = static_cast<int>(proxy::Stage::kTokenized); i < static_cast<int>(proxy::Stage::kDone); ++i) {
    const auto stage = static_cast<proxy::Stage>(i);
    if (stage != proxy::Stage::kPrefixMatched)
      stages += fmt::format("\"{0}\":\"$moesaic_{0}\",", proxy::StageName(stage));
  }
  // A daemon's own standard output is /dev/null.
  const bool standard_output = flags.access_log == "/dev/stdout" && !flags.print_config;
  const std::string file = standard_output ? fmt::format("/proc/{}/fd/1", getpid())
                                           : std::filesystem::absolute(flags.access_log).string();
  return fmt::format(
      "  log_format moesaic escape=json '{{\"time\":\"$time_iso8601\",\"id\":\"$moesaic_request_id\","
      "\"status\":$status,\"outcome\":\"$moesaic_outcome\",\"prefill\":\"$moesaic_prefill_engine\","
      "\"decode\":\"$moesaic_decode_engine\",\"prompt\":\"$moesaic_prompt_tokens\","
      "\"matched\":\"$moesaic_matched_tokens\",\"cached\":\"$moesaic_cached_tokens\",\"output\":\"$moesaic_"
      "output_tokens\","
      "\"retries\":\"$moesaic_retries\",{}"
      "\"ttft\":\"$moesaic_ttft\",\"done\":\"$moesaic_done\",\"key\":\"$moesaic_key_name\"}}';\n"
      "  access_log {} moesaic;\n",
      stages, Word(file));
}

// Returns the pool with the directives `body`, and the open server block that uses it.
std::string ServerText(const ProxyFlags& flags, const proxy::PoolSettings& pool, const std::string& body) {
  // The pages name engines, keys and requests, and ask for no key.
  std::string access = "allow 127.0.0.0/8; allow ::1; ";
  for (const std::string& address : flags.allowed) access += fmt::format("allow {}; ", Word(address));
  access += "deny all;";
  return fmt::format(
      "  client_max_body_size {};\n  client_body_buffer_size 1m;\n  keepalive_requests 100000;\n"
      "  moesaic_pool {} {{\n{}  }}\n  server {{\n    listen {}:{} backlog=4096;\n"
      "    location / {{ moesaic_pass {}; }}\n    location = /metrics {{ {} moesaic_metrics {}; }}\n"
      "    location = /moesaic {{ {} moesaic_page {}; }}\n    location = /moesaic/state {{ {} moesaic_state "
      "{}; }}\n"
      "    location = /moesaic/trace {{ {} moesaic_trace {}; }}\n"
      "    location = /moesaic/engines {{ {} moesaic_engines {}; }}\n",
      pool.max_body_bytes, pool.name, body, proxy::UrlHost(flags.host), flags.port, pool.name, access,
      pool.name, access, pool.name, access, pool.name, access, pool.name, access, pool.name);
}

}  // namespace

StatusOr<std::string> ProxyConfig(const ProxyFlags& flags, const std::string& folder) {
  const bool pair = !flags.prefill.empty() || !flags.decode.empty();
  const bool others = !flags.engines.empty() || !flags.engine_file.empty() || !flags.etcd.empty();
  if (pair && (flags.prefill.empty() || flags.decode.empty()) && !others) {
    return InvalidArgument("--prefill and --decode need each other");
  }
  if (!pair && !others) {
    return InvalidArgument(
        "give --engine URL, or --prefill URL and --decode URL, or --engines FILE, or --etcd PREFIX,URL");
  }
  const std::string transfer = !flags.transfer.empty() ? flags.transfer : pair ? "nixl" : "aggregated";
  proxy::PoolSettings pool;
  pool.name = "engines";
  ASSIGN_OR_RETURN(const std::string body, PoolText(flags, folder, transfer, pool));
  ASSIGN_OR_RETURN(const std::string module, FindProxyModule(flags));
  std::string text = MainText(flags, folder, module) + LogText(flags);
  if (!folder.empty()) {
    for (const char* kind : {"client_body", "proxy", "fastcgi", "uwsgi", "scgi"}) {
      text += fmt::format("  {}_temp_path {};\n", kind, Word(fmt::format("{}/{}", folder, kind)));
    }
  }
  if (!pool.named.empty() || !pool.etcd.empty() || !flags.engine_file.empty() || !flags.resolvers.empty()) {
    StatusOr<std::string> resolver = ResolverText(flags);
    // Values in etcd and lines of the file may need none.
    if (!resolver.ok() && !pool.named.empty()) return resolver.status();
    text += resolver.value_or("");
  }
  text += ServerText(flags, pool, body);
  if (transfer == "ascend")
    text += fmt::format("    location = /v1/metaserver {{ moesaic_metaserver {}; }}\n", pool.name);
  return text + "  }\n}\n";
}

bool WorkersChangeUser(const std::string& folder) {
  if (geteuid() != 0) return false;
  const passwd* const nobody = getpwnam("nobody");
  std::string probe = folder + "/owner-XXXXXX";
  const int file = mkstemp(probe.data());
  if (file < 0) return true;  // nginx reports the fault of the folder
  const bool changes =
      fchown(file, nobody == nullptr ? uid_t{65534} : nobody->pw_uid, static_cast<gid_t>(-1)) == 0;
  close(file);
  unlink(probe.c_str());
  return changes;
}

Status WriteEngineList(const ProxyFlags& flags, const std::string& folder) {
  if (flags.engine_file.empty()) return OkStatus();
  ASSIGN_OR_RETURN(const std::string text, EngineLines(flags));
  const std::string path = folder + "/engines.conf";
  std::ofstream out(path);
  out << text;
  if (!out.flush()) return IoError("cannot write {}", path);
  return OkStatus();
}

StatusOr<std::string> FindNginx(const ProxyFlags& flags) {
  if (!flags.nginx.empty()) return flags.nginx;
  for (const char* path :
       {"/usr/sbin/nginx", "/usr/local/sbin/nginx", "/usr/local/nginx/sbin/nginx", "/usr/bin/nginx"}) {
    if (access(path, X_OK) == 0) return path;
  }
  return NotFound("nginx is not installed: install the package nginx, or name the binary with --nginx");
}

StatusOr<std::string> FindProxyModule(const ProxyFlags& flags) {
  constexpr const char* kName = "ngx_http_moesaic_module.so";
  if (!flags.module.empty()) return std::filesystem::absolute(flags.module).string();
  std::error_code error;
  const std::filesystem::path program = std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  for (const std::filesystem::path& path : {program / kName, program / "../lib/moesaic" / kName,
                                            program / "../lib/x86_64-linux-gnu/moesaic" / kName,
                                            std::filesystem::path("/usr/lib/nginx/modules") / kName}) {
    if (std::filesystem::exists(path, error)) return path.lexically_normal().string();
  }
  return NotFound(
      "{} is not built: install nginx-dev, run cmake on the build folder and build again, or name the file "
      "with --module",
      kName);
}

}  // namespace moesaic::app
