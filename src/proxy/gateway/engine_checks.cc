#include "proxy/gateway/engine_checks.h"

#include <algorithm>
#include <string>
#include <string_view>
#include <utility>

#include "proxy/gateway/engine_line.h"
#include "proxy/gateway/gateway.h"

namespace moesaic::proxy {
namespace {

constexpr size_t kMaxMetrics = 4 << 20;

// Value of a label in the braces of a sample, or an empty text.
std::string_view LabelOf(std::string_view sample, std::string_view name) {
  for (size_t at = sample.find(name); at != std::string_view::npos; at = sample.find(name, at + 1)) {
    const bool whole = at > 0 && (sample[at - 1] == '{' || sample[at - 1] == ',');
    std::string_view rest = sample.substr(at + name.size());
    if (!whole || !rest.starts_with("=\"")) continue;
    rest.remove_prefix(2);
    return rest.substr(0, std::min(rest.find('"'), rest.size()));
  }
  return {};
}

}  // namespace

// vLLM, and this project's engine: vllm:cache_config_info{..., num_gpu_blocks="N", ...} 1.0
// SGLang: sglang:cache_config_info{..., num_pages="N", ...} 1.0
uint64_t ReportedBlocks(std::string_view metrics, uint32_t rank) {
  uint64_t found = 0;
  while (!metrics.empty()) {
    const std::string_view line = metrics.substr(0, std::min(metrics.find('\n'), metrics.size()));
    metrics.remove_prefix(std::min(line.size() + 1, metrics.size()));
    const bool vllm = line.starts_with("vllm:cache_config_info{");
    if (!vllm && !line.starts_with("sglang:cache_config_info{")) continue;
    const StatusOr<uint64_t> blocks = ParseNumber(LabelOf(line, vllm ? "num_gpu_blocks" : "num_pages"));
    if (!blocks.ok()) continue;  // vLLM writes "None" until it knows
    if (found == 0 || LabelOf(line, "engine") == std::to_string(rank)) found = *blocks;
  }
  return found;
}

class EngineChecks::Check : public Exchange::Handler {
 public:
  Check(Gateway& gateway, const EngineSettings& engine, Nanos first)
      : gateway_(gateway), engine_(engine), timer_(gateway.timers()) {
    timer_.At(first, [this] { GetHealth(); });
  }
  ~Check() override { gateway_.DestroyLater(std::move(exchange_)); }

  bool Is(const EngineSettings& engine) const {
    return engine.instance.url == engine_.instance.url &&
           engine.instance.dp_rank == engine_.instance.dp_rank &&
           engine.address.sockaddr == engine_.address.sockaddr;
  }

  void OnHead(Exchange&) override {}
  void OnBody(Exchange&, std::string_view bytes) override {
    if (asks_metrics_ && metrics_.size() + bytes.size() <= kMaxMetrics) metrics_ += bytes;
  }
  void OnEnd(Exchange& exchange) override {
    const bool good = exchange.response().status() < 400;
    asks_metrics_ ? MetricsRead(good) : Done(good);
  }
  void OnError(Exchange&, const Status&) override { asks_metrics_ ? MetricsRead(false) : Done(false); }

 private:
  void Get(std::string_view path) {
    const PoolSettings& settings = gateway_.settings();
    exchange_ = std::make_unique<Exchange>(gateway_.transport(), gateway_.timers(), *this);
    exchange_->Start(engine_.address, gateway_.HttpHead(engine_, "GET", path, {}, 0),
                     {.connect = settings.health_timeout,
                      .first_byte = settings.health_timeout,
                      .idle = settings.health_timeout});
  }

  void GetHealth() { Get(gateway_.settings().health_path); }

  // Once for each start of the engine: the size of its block pool.
  void MetricsRead(bool good) {
    asks_metrics_ = false;
    const std::string text = std::exchange(metrics_, {});
    const int instance = gateway_.state().FindInstance(engine_.instance.url, engine_.instance.dp_rank);
    if (good && instance >= 0)
      gateway_.state().SetReportedBlocks(instance, ReportedBlocks(text, engine_.instance.dp_rank));
    Wait();
  }

  void Wait() {
    gateway_.DestroyLater(std::move(exchange_));
    timer_.At(gateway_.now() + gateway_.settings().health_interval, [this] { GetHealth(); });
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
    if (!good) knows_metrics_ = false;  // another process may come
    if (!good || std::exchange(knows_metrics_, true)) return Wait();
    gateway_.DestroyLater(std::move(exchange_));
    asks_metrics_ = true;
    Get("/metrics");
  }

  Gateway& gateway_;
  const EngineSettings engine_;
  Timer timer_;
  std::unique_ptr<Exchange> exchange_;
  uint32_t failures_ = 0, successes_ = 0;
  std::string metrics_;
  bool asks_metrics_ = false, knows_metrics_ = false;
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
