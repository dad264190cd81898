// Flags and verbs without CLI11's headers, which take four seconds of compile time in every unit that
// includes them. Only flags.cc, serve_settings.cc and the files that parse a command line or print help
// include CLI11.
#pragma once

#include <cstdint>
#include <functional>
#include <initializer_list>
#include <string>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace moesaic::app {

/// Returns the error of a value, or an empty text when the value is accepted. It may rewrite the value.
using ValueCheck = std::function<std::string(std::string& value)>;

/// Accepts the path of a file that exists.
std::string CheckExistingFile(std::string& path);

/// Ends parsing with a usage error: main prints it and exits with code 2.
[[noreturn]] void FailUsage(const std::string& message);
/// The same for the value of `flag`: "FLAG: message".
[[noreturn]] void FailUsage(const std::string& flag, const std::string& message);

/// A declared flag or positional argument. A handle: copies are cheap and refer to the same flag, which lives
/// as long as its verb. Setters return the handle, so that they can be chained.
class Flag {
 public:
  explicit Flag(CLI::Option* option) : option_(option) {}

  // Values. Each check is applied in the order of the calls.
  Flag Range(int64_t min, int64_t max) const;
  Flag Range(double min, double max) const;
  Flag Range(int min, int max) const { return Range(int64_t{min}, int64_t{max}); }
  Flag OneOf(std::initializer_list<const char*> names) const;
  Flag OneOf(const std::vector<std::string>& names) const;
  Flag ExistingPath() const;
  Flag ExistingFile() const;
  Flag Positive() const;
  /// Accepts sizes with binary units: "8G" and "8GiB" are 8 * 2^30.
  Flag Bytes() const;
  Flag Check(ValueCheck check) const;
  /// Check for a function that rewrites the value, before later checks see it.
  Flag Transform(ValueCheck rewrite) const;
  Flag Delimiter(char separator) const;
  /// Takes one value for each time the flag is given, so that a positional argument may follow.
  Flag OneValue() const;
  Flag Required() const;
  Flag Needs(Flag other) const;
  Flag Excludes(Flag other) const;
  Flag Excludes(const std::string& name) const;

  // Help and settings files.
  Flag Group(const std::string& name) const;
  Flag ShowDefault() const;  ///< shows the variable's present value as the default
  Flag DefaultText(const std::string& text) const;
  Flag TypeName(const std::string& name) const;
  /// Leaves the flag out of --config and --print-config.
  Flag NotInConfig() const;

  /// The command line did not give the flag. For callbacks of Verb::OnParsed.
  bool empty() const;

  CLI::Option* option() const { return option_; }

 private:
  CLI::Option* option_;
};

/// The root command or one of its verbs. A handle, as Flag is; the root is owned by main.
class Verb {
 public:
  explicit Verb(CLI::App* app) : app_(app) {}

  Verb AddVerb(const std::string& name, const std::string& help) const;

  /// Declares a flag ("-n,--max-tokens") or a positional argument ("MODEL") that sets `value`. T:
  /// std::string, int, int64_t, uint64_t, float, double, std::optional of those, or std::vector of
  /// std::string, int or int64_t.
  template <typename T>
  Flag AddOption(const std::string& names, T& value, const std::string& help) const;
  /// Declares a flag whose values are handed to `set`. T: int, double, std::string or
  /// std::vector<std::string>.
  template <typename T>
  Flag AddOptionFunction(const std::string& names, std::function<void(const T&)> set,
                         const std::string& help) const;
  /// Declares a switch; "--cache,!--no-cache" can be switched both ways.
  Flag AddFlag(const std::string& names, bool& value, const std::string& help) const;
  /// Runs `call` when the switch is given.
  Flag AddFlagCallback(const std::string& names, std::function<void()> call, const std::string& help) const;
  /// The flag or positional argument of that name, which must exist.
  Flag Find(const std::string& name) const;
  /// Removes a flag that a shared Add function declared.
  void Remove(const std::string& name) const;

  void Footer(const std::string& text) const;
  /// Runs once the verb's command line is parsed; it may call FailUsage.
  void OnParsed(std::function<void()> callback) const;
  /// The number of times that the command line gave the flag.
  size_t Count(const std::string& name) const;

  CLI::App* app() const { return app_; }

 private:
  CLI::App* app_;
};

}  // namespace moesaic::app
