// Constructors of the policies. Only the library's own files include this header.
#pragma once

#include <memory>
#include <string_view>

#include "proxy/schedule/policy.h"

namespace moesaic::proxy {

std::unique_ptr<Policy> MakeMoesaicPolicy(const PolicyOptions& options);
/// A policy of another router; null when the name is not one of them.
std::unique_ptr<Policy> MakeBaseline(std::string_view name, const PolicyOptions& options);

}  // namespace moesaic::proxy
