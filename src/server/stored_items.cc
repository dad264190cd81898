#include "server/stored_items.h"

namespace moesaic::server {

StoredItems::StoredItems(const Json& array) {
  for (const Json& item : array) Add(Dump(item));
}

void StoredItems::Add(std::string_view item) {
  json_.pop_back();
  if (!ends_.empty()) json_ += ',';
  json_ += item;
  ends_.push_back(json_.size());
  json_ += ']';
}

void StoredItems::Append(const StoredItems& more) {
  for (size_t i = 0; i < more.size(); ++i) Add(more[i]);
}

// "[a]" and "[b]" become "[a,b]".
size_t StoredItems::GrowthBy(const StoredItems& more) const {
  const size_t items = more.json_.size() - 2;
  return items == 0 || ends_.empty() ? items : items + 1;
}

std::string_view StoredItems::operator[](size_t index) const {
  const size_t begin = index == 0 ? 1 : ends_[index - 1] + 1;
  return std::string_view(json_).substr(begin, ends_[index] - begin);
}

std::string_view StoredItems::Find(std::string_view id) const {
  for (size_t i = 0; i < size(); ++i) {
    if (const std::string_view item = (*this)[i]; !id.empty() && IdOf(item) == id) return item;
  }
  return "";
}

std::string_view IdOf(std::string_view item) {
  constexpr std::string_view kBegin = R"({"id":")";
  if (!item.starts_with(kBegin)) return "";
  item.remove_prefix(kBegin.size());
  return item.substr(0, item.find('"'));
}

}  // namespace moesaic::server
