// Keeps units from instantiating nlohmann::json, its parser and its serializer: json_templates.cc does so
// once. They were a fifth of the compile time of units that parse or print JSON (GCC 12). Only precompiled.h
// includes this file; a build without precompiled headers instantiates in each unit what it uses.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

// MOESAIC_JSON_TEMPLATES(extern) declares the instantiations, MOESAIC_JSON_TEMPLATES() defines them. They
// include internal classes of the library, so the list is empty for versions with which it was not tested.
#if NLOHMANN_JSON_VERSION_MAJOR == 3 && NLOHMANN_JSON_VERSION_MINOR == 11
#define MOESAIC_JSON_PARSER(EXTERN, JSON, ITERATOR)                                                        \
  EXTERN template class nlohmann::detail::lexer<JSON, nlohmann::detail::iterator_input_adapter<ITERATOR>>; \
  EXTERN template class nlohmann::detail::parser<JSON, nlohmann::detail::iterator_input_adapter<ITERATOR>>;
#define MOESAIC_JSON_CLASSES(EXTERN, JSON)                                    \
  EXTERN template class nlohmann::detail::serializer<JSON>;                   \
  EXTERN template class nlohmann::detail::json_sax_dom_parser<JSON>;          \
  EXTERN template class nlohmann::detail::json_sax_dom_callback_parser<JSON>; \
  MOESAIC_JSON_PARSER(EXTERN, JSON, const char*)                              \
  MOESAIC_JSON_PARSER(EXTERN, JSON, std::string::const_iterator)
#define MOESAIC_JSON_TEMPLATES(EXTERN)                                              \
  EXTERN template class nlohmann::basic_json<>;                                     \
  EXTERN template class nlohmann::basic_json<nlohmann::ordered_map>;                \
  EXTERN template class nlohmann::detail::output_string_adapter<char, std::string>; \
  MOESAIC_JSON_CLASSES(EXTERN, nlohmann::json)                                      \
  MOESAIC_JSON_CLASSES(EXTERN, nlohmann::ordered_json)
#else
#define MOESAIC_JSON_TEMPLATES(EXTERN)
#endif

MOESAIC_JSON_TEMPLATES(extern)
