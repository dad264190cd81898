#include "app/flags.h"

#include <CLI/CLI.hpp>
#include <optional>
#include <string_view>
#include <utility>

namespace moesaic::app {

std::string CheckExistingFile(std::string& path) { return CLI::ExistingFile(path); }

void FailUsage(const std::string& message) { throw CLI::ValidationError(message); }

void FailUsage(const std::string& flag, const std::string& message) {
  throw CLI::ValidationError(flag, message);
}

Flag Flag::Range(int64_t min, int64_t max) const { return Flag(option_->check(CLI::Range(min, max))); }
Flag Flag::Range(double min, double max) const { return Flag(option_->check(CLI::Range(min, max))); }
Flag Flag::OneOf(std::initializer_list<const char*> names) const {
  return OneOf(std::vector<std::string>(names.begin(), names.end()));
}
Flag Flag::OneOf(const std::vector<std::string>& names) const {
  return Flag(option_->check(CLI::IsMember(names)));
}
Flag Flag::ExistingPath() const { return Flag(option_->check(CLI::ExistingPath)); }
Flag Flag::ExistingFile() const { return Flag(option_->check(CLI::ExistingFile)); }
Flag Flag::Positive() const {
  return Check([](std::string& value) -> std::string {
    double number = 0;
    if (CLI::detail::lexical_cast(value, number) && number > 0) return "";
    return "must be a number above 0, found " + value;
  });
}
Flag Flag::Bytes() const {
  const Flag size(option_->transform(CLI::AsSizeValue(/*kb_is_1000=*/false)));
  // AsSizeValue() reads -1 as 2^64 - 1. A transform runs before those that were added earlier.
  return size
      .Transform([](std::string& value) -> std::string {
        return value.starts_with('-') ? "must not be negative, found " + value : "";
      })
      .Check([](std::string& bytes) -> std::string {
        constexpr std::string_view kMaxBytes = "9223372036854775807";
        const bool fits =
            bytes.size() < kMaxBytes.size() || (bytes.size() == kMaxBytes.size() && bytes <= kMaxBytes);
        return fits ? "" : "must be below 8 EiB, found " + bytes + " bytes";
      });
}
Flag Flag::Check(ValueCheck check) const {
  return Flag(option_->check(CLI::Validator(std::move(check), "")));
}
Flag Flag::Transform(ValueCheck rewrite) const {
  return Flag(option_->transform(CLI::Validator(std::move(rewrite), "")));
}
Flag Flag::Delimiter(char separator) const { return Flag(option_->delimiter(separator)); }
Flag Flag::OneValue() const { return Flag(option_->allow_extra_args(false)); }
Flag Flag::Required() const { return Flag(option_->required()); }
Flag Flag::Needs(Flag other) const { return Flag(option_->needs(other.option_)); }
Flag Flag::Excludes(Flag other) const { return Flag(option_->excludes(other.option_)); }
Flag Flag::Excludes(const std::string& name) const { return Flag(option_->excludes(name)); }
Flag Flag::Group(const std::string& name) const { return Flag(option_->group(name)); }
Flag Flag::ShowDefault() const { return Flag(option_->capture_default_str()); }
Flag Flag::DefaultText(const std::string& text) const { return Flag(option_->default_str(text)); }
Flag Flag::TypeName(const std::string& name) const { return Flag(option_->type_name(name)); }
Flag Flag::NotInConfig() const { return Flag(option_->configurable(false)); }
bool Flag::empty() const { return option_->empty(); }

Verb Verb::AddVerb(const std::string& name, const std::string& help) const {
  return Verb(app_->add_subcommand(name, help));
}

template <typename T>
Flag Verb::AddOption(const std::string& names, T& value, const std::string& help) const {
  return Flag(app_->add_option(names, value, help));
}

template <typename T>
Flag Verb::AddOptionFunction(const std::string& names, std::function<void(const T&)> set,
                             const std::string& help) const {
  return Flag(app_->add_option_function<T>(names, set, help));
}

template Flag Verb::AddOption(const std::string&, std::string&, const std::string&) const;
template Flag Verb::AddOption(const std::string&, int&, const std::string&) const;
template Flag Verb::AddOption(const std::string&, int64_t&, const std::string&) const;
template Flag Verb::AddOption(const std::string&, uint64_t&, const std::string&) const;
template Flag Verb::AddOption(const std::string&, float&, const std::string&) const;
template Flag Verb::AddOption(const std::string&, double&, const std::string&) const;
template Flag Verb::AddOption(const std::string&, std::optional<int>&, const std::string&) const;
template Flag Verb::AddOption(const std::string&, std::optional<float>&, const std::string&) const;
template Flag Verb::AddOption(const std::string&, std::optional<double>&, const std::string&) const;
template Flag Verb::AddOption(const std::string&, std::optional<uint64_t>&, const std::string&) const;
template Flag Verb::AddOption(const std::string&, std::vector<std::string>&, const std::string&) const;
template Flag Verb::AddOption(const std::string&, std::optional<std::string>&, const std::string&) const;
template Flag Verb::AddOption(const std::string&, std::vector<std::pair<std::string, std::string>>&,
                              const std::string&) const;
template Flag Verb::AddOption(const std::string&, std::vector<int>&, const std::string&) const;
template Flag Verb::AddOption(const std::string&, std::vector<int64_t>&, const std::string&) const;

template Flag Verb::AddOptionFunction(const std::string&, std::function<void(const int&)>,
                                      const std::string&) const;
template Flag Verb::AddOptionFunction(const std::string&, std::function<void(const double&)>,
                                      const std::string&) const;
template Flag Verb::AddOptionFunction(const std::string&, std::function<void(const std::string&)>,
                                      const std::string&) const;
template Flag Verb::AddOptionFunction(const std::string&,
                                      std::function<void(const std::vector<std::string>&)>,
                                      const std::string&) const;

Flag Verb::AddFlag(const std::string& names, bool& value, const std::string& help) const {
  return Flag(app_->add_flag(names, value, help));
}

Flag Verb::AddFlagCallback(const std::string& names, std::function<void()> call,
                           const std::string& help) const {
  return Flag(app_->add_flag_callback(names, std::move(call), help));
}

Flag Verb::Find(const std::string& name) const { return Flag(app_->get_option(name)); }
void Verb::Remove(const std::string& name) const { app_->remove_option(app_->get_option(name)); }
void Verb::Footer(const std::string& text) const { app_->footer(text); }
void Verb::OnParsed(std::function<void()> callback) const { app_->callback(std::move(callback)); }
size_t Verb::Count(const std::string& name) const { return app_->count(name); }

}  // namespace moesaic::app
