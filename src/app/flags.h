// Flags and verbs without CLI11's headers, which take four seconds to compile in every unit that includes
// them. In this room only the implementations of flags, settings files, help, usage errors and completion,
// main and tests that parse a command line include CLI11. Benchmarks are programs of their own and use it
// directly.
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

/// Returns the error of a value, or an empty text if the value is accepted. It may rewrite the value.
using ValueCheck = std::function<std::string(std::string& value)>;

/// Accepts the path of a file that exists.
std::string CheckExistingFile(std::string& path);

/// Ends parsing with a usage error. main prints it and exits with code 2.
[[noreturn]] void FailUsage(const std::string& message);
/// The same for the value of `flag`: "FLAG: message".
[[noreturn]] void FailUsage(const std::string& flag, const std::string& message);

/// Handle of a declared flag or positional argument. Copies are cheap and refer to the same flag, which lives
/// as long as its verb. Setters return the handle, so that calls can be chained.
class Flag {
 public:
  explicit Flag(CLI::Option* option) : option_(option) {}

  // Checks of values, applied in the order of the calls.
  Flag Range(int64_t min, int64_t max) const;
  Flag Range(double min, double max) const;
  Flag Range(int min, int max) const { return Range(int64_t{min}, int64_t{max}); }
  Flag OneOf(std::initializer_list<const char*> names) const;
  Flag OneOf(const std::vector<std::string>& names) const;
  Flag ExistingPath() const;
  Flag ExistingFile() const;
  Flag Positive() const;
  /// Accepts sizes from 0 to 2^63 - 1 with binary units: "8G" and "8GiB" are 8 * 2^30.
  Flag Bytes() const;
  Flag Check(ValueCheck check) const;
  /// Adds a function that rewrites the value before later checks.
  Flag Transform(ValueCheck rewrite) const;
  Flag Delimiter(char separator) const;
  /// Takes one value for each occurrence of the flag, so that a positional argument may follow.
  Flag OneValue() const;
  Flag Required() const;
  Flag Needs(Flag other) const;
  Flag Excludes(Flag other) const;
  Flag Excludes(const std::string& name) const;

  // Presentation in the help and in settings files.
  Flag Group(const std::string& name) const;
  Flag ShowDefault() const;  ///< shows the variable's current value as the default
  Flag DefaultText(const std::string& text) const;
  Flag TypeName(const std::string& name) const;
  /// Excludes the flag from --config and --print-config.
  Flag NotInConfig() const;

  /// True if the command line did not give the flag. For callbacks of Verb::OnParsed.
  bool empty() const;

  CLI::Option* option() const { return option_; }

 private:
  CLI::Option* option_;
};

/// Handle of the root command or of one of its verbs. main owns the root.
class Verb {
 public:
  explicit Verb(CLI::App* app) : app_(app) {}

  Verb AddVerb(const std::string& name, const std::string& help) const;

  /// Declares a flag ("-n,--max-tokens") or a positional argument ("MODEL") that sets `value`. T:
  /// std::string, int, int64_t, uint64_t, float, double, std::optional of those, or std::vector of
  /// std::string, int or int64_t.
  template <typename T>
  Flag AddOption(const std::string& names, T& value, const std::string& help) const;
  /// Declares a flag whose values are passed to `set`. T: int, double, std::string or
  /// std::vector<std::string>.
  template <typename T>
  Flag AddOptionFunction(const std::string& names, std::function<void(const T&)> set,
                         const std::string& help) const;
  /// Declares a switch. "--cache,!--no-cache" declares both directions.
  Flag AddFlag(const std::string& names, bool& value, const std::string& help) const;
  /// Runs `call` when the switch is given.
  Flag AddFlagCallback(const std::string& names, std::function<void()> call, const std::string& help) const;
  /// Returns the flag or positional argument of that name, which must exist.
  Flag Find(const std::string& name) const;
  /// Removes a flag that a shared Add function declared.
  void Remove(const std::string& name) const;

  void Footer(const std::string& text) const;
  /// Runs after the verb's command line is parsed. The callback may call FailUsage.
  void OnParsed(std::function<void()> callback) const;
  /// Returns the number of times that the command line gave the flag.
  size_t Count(const std::string& name) const;

  CLI::App* app() const { return app_; }

 private:
  CLI::App* app_;
};

}  // namespace moesaic::app
