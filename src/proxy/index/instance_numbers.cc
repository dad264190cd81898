#include "proxy/index/instance_numbers.h"

namespace moesaic::proxy {
namespace {

// Ends the changes of numbers whose process was killed inside Renumber.
void EndRenumbering(const KeyTable& table) {
  InstanceNumbers& numbers = table.index().numbers;
  for (int instance = 0; instance < table.num_instances(); ++instance) {
    const int old = table.NumberOf(instance);
    if (!HasNumber(numbers.dirty, old)) continue;
    int fresh = -1;
    for (int number = 0; number < static_cast<int>(numbers.count) && fresh < 0; ++number) {
      if (number != old && table.OwnerOf(number) == instance) fresh = number;
    }
    Renumber(table, instance, fresh >= 0 ? fresh : FreeNumber(table));
  }
}

}  // namespace

ExpectationsLock::ExpectationsLock(const KeyTable& table) : lock_(table.index().expectations) {
  if (lock_.Lock() == RobustLock::Acquired::kRepair) EndRenumbering(table);
}

int FreeNumber(const KeyTable& table) {
  const InstanceNumbers& numbers = table.index().numbers;
  for (int number = 0; number < static_cast<int>(numbers.count); ++number) {
    if (table.OwnerOf(number) < 0 && !HasNumber(numbers.dirty, number)) return number;
  }
  return -1;
}

// A process may be killed between two stores. `fresh` was free before, so that it is still free for the next
// owner of the lock.
void Renumber(const KeyTable& table, int instance, int fresh) {
  InstanceNumbers& numbers = table.index().numbers;
  const int old = table.NumberOf(instance);
  AddNumber(numbers.dirty, old);
  numbers.owner_of[static_cast<size_t>(old)].store(0, std::memory_order_release);
  numbers.owner_of[static_cast<size_t>(fresh)].store(static_cast<uint16_t>(instance + 1),
                                                     std::memory_order_release);
  numbers.number_of[static_cast<size_t>(instance)].store(static_cast<uint16_t>(fresh),
                                                         std::memory_order_release);
}

}  // namespace moesaic::proxy
