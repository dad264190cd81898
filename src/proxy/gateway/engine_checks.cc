#include "proxy/gateway/engine_checks.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "proxy/gateway/gateway.h"

namespace moesaic::proxy {

class EngineChecks::Check : public Exchange::Handler {
 public:
  Check(Gateway& gateway, const EngineSettings& engine, Nanos first)
      : gateway_(gateway), engine_(engine), timer_(gateway.timers()) {
    timer_.At(first, [this] { Ask(); });
  }
  ~Check() override { gateway_.DestroyLater(std::move(exchange_)); }

  bool Is(const EngineSettings& engine) const {
    return engine.instance.url == engine_.instance.url &&
           engine.instance.dp_rank == engine_.instance.dp_rank &&
           engine.address.sockaddr == engine_.address.sockaddr;
  }

  void OnHead(Exchange&) override {}
  void OnBody(Exchange&, std::string_view) override {}
  void OnEnd(Exchange& exchange) override { Done(exchange.response().status() < 400); }
  void OnError(Exchange&, const Status&) override { Done(false); }

 private:
  void Ask() {
    const PoolSettings& settings = gateway_.settings();
    exchange_ = std::make_unique<Exchange>(gateway_.transport(), gateway_.timers(), *this);
    exchange_->Start(engine_.address, gateway_.HttpHead(engine_, "GET", settings.health_path, {}, 0),
                     {.connect = settings.health_timeout,
                      .first_byte = settings.health_timeout,
                      .idle = settings.health_timeout});
  }

  void Done(bool good) {
    const PoolSettings& settings = gateway_.settings();
    failures_ = good ? 0 : failures_ + 1;
    successes_ = good ? successes_ + 1 : 0;
    const int instance = gateway_.state().FindInstance(engine_.instance.url, engine_.instance.dp_rank);
    if (instance >= 0) {
      const bool up = successes_ >= settings.health_successes, down = failures_ >= settings.health_failures;
      if (up || down) {
        const auto record = gateway_.state().Instance(instance);
        if (record && record->healthy != up) {
          gateway_.transport().Log(
              !up, "engine " + engine_.instance.url + (up ? " is healthy" : " is not healthy"));
          gateway_.state().SetHealthy(instance, up);
          gateway_.ScheduleSoon();
        }
      }
    }
    gateway_.DestroyLater(std::move(exchange_));
    timer_.At(gateway_.now() + settings.health_interval, [this] { Ask(); });
  }

  Gateway& gateway_;
  const EngineSettings engine_;
  Timer timer_;
  std::unique_ptr<Exchange> exchange_;
  uint32_t failures_ = 0, successes_ = 0;
};

EngineChecks::EngineChecks(Gateway& gateway) : gateway_(gateway) {}

void EngineChecks::Follow(const std::vector<EngineSettings>& engines) {
  const Nanos interval = gateway_.settings().health_interval;
  if (interval == 0) return;
  std::vector<std::unique_ptr<Check>> kept;
  const Nanos step = interval / static_cast<Nanos>(engines.size() + 1);
  Nanos first = gateway_.now();  // spread over the interval
  for (const EngineSettings& engine : engines) {
    first += step;
    const auto known = std::find_if(checks_.begin(), checks_.end(), [&engine](const auto& check) {
      return check != nullptr && check->Is(engine);
    });
    kept.push_back(known != checks_.end() ? std::move(*known)
                                          : std::make_unique<Check>(gateway_, engine, first));
  }
  checks_ = std::move(kept);
}

EngineChecks::~EngineChecks() = default;

}  // namespace moesaic::proxy
