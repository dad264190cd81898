// Writes the nginx configuration of `moesaic proxy`.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"

namespace moesaic::app {

/// Flags of `moesaic proxy`.
struct ProxyFlags {
  std::vector<std::string> engines, prefill, decode;  ///< URL[,OPTION=VALUE...]
  std::vector<std::string> settings;                  ///< "DIRECTIVE VALUE ..." of the pool
  std::string engine_file;  ///< lines "URL [OPTION=VALUE ...]", read again at a reload
  std::string transfer;     ///< KV transfer of prefill to decode engines; empty: nixl for pairs, else none
  std::string api = "vllm", policy = "moesaic";
  std::string model;  ///< folder of the tokenizer and the chat template; empty: prompts are not tokenized
  std::string host = "127.0.0.1";
  int port = 8100;
  std::vector<std::string> etcd;       ///< PREFIX and URLs, separated by commas
  std::vector<std::string> resolvers;  ///< name servers; empty: those of /etc/resolv.conf
  std::vector<std::string> allowed;  ///< addresses and networks that may read the pages, besides this machine
  int workers = 0;                   ///< 0: one for each processor, at most 8
  std::string access_log;            ///< empty: none
  std::string nginx, module;         ///< paths; empty: the usual places are searched
  std::string folder;                ///< nginx's files; empty: a temporary folder
  bool check = false;                ///< checks the configuration and ends
  bool print_config = false;         ///< prints the configuration and ends
  bool reference = false;            ///< prints all directives and ends
};

/// Returns the text of the configuration. `folder` has nginx's pid and temporary files, and the list of
/// WriteEngineList(). With an empty `folder` the text is for an nginx that the user starts, and contains the
/// engines of `flags.engine_file`. InvalidArgument names the wrong flag.
StatusOr<std::string> ProxyConfig(const ProxyFlags& flags, const std::string& folder);

/// Returns true if nginx runs its workers as another user than this process: as root that can give away files
/// in `folder`. Root of a container without capabilities, or of a namespace with one user, cannot.
bool WorkersChangeUser(const std::string& folder);

/// Writes the engines of `flags.engine_file` as directives into `folder`; does nothing without the file.
Status WriteEngineList(const ProxyFlags& flags, const std::string& folder);

/// Paths of nginx and of the module: the flag, or the usual places. NotFound says what to install.
StatusOr<std::string> FindNginx(const ProxyFlags& flags);
StatusOr<std::string> FindProxyModule(const ProxyFlags& flags);

}  // namespace moesaic::app
