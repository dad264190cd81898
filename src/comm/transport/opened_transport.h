// A transport together with everything that it needs.
#pragma once

#include <memory>
#include <utility>

#include "comm/transport/transport.h"

namespace moesaic::comm {

class OpenedTransport {
 public:
  /// `owner` keeps `transport` alive.
  OpenedTransport(std::shared_ptr<void> owner, Transport* transport)
      : owner_(std::move(owner)), transport_(transport) {}

  Transport& operator*() const { return *transport_; }
  Transport* operator->() const { return transport_; }

 private:
  std::shared_ptr<void> owner_;
  Transport* transport_;
};

}  // namespace moesaic::comm
