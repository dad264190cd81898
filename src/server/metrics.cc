#include "server/metrics.h"

#include <fmt/format.h>
#include <prometheus/counter.h>
#include <prometheus/gauge.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>

#include <mutex>

#include "kernels/block_sparsity.h"

namespace moesaic::server {
namespace {

using Buckets = prometheus::Histogram::BucketBoundaries;
using prometheus::Labels;

// vLLM's bucket bounds, so that its dashboards and routers can read these metrics.
const Buckets kFirstToken = {0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75,
                             1,     2.5,   5,    7.5,  10,   20,   40,   80,  160,  640, 2560};
const Buckets kInterToken = {0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5,
                             0.75, 1,     2.5,  5,     7.5, 10,   20,  40,  80};
const Buckets kLatency = {0.3, 0.5, 0.8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                          30,  40,  50,  60, 120, 240, 480, 960, 1920, 7680};
const Buckets kTokens = {1,    2,    5,    10,    20,    50,    100,    200,    500,
                         1000, 2000, 5000, 10000, 20000, 50000, 100000, 200000, 500000};

const Buckets kMass(kernels::MassHistogram::kBounds.begin(), kernels::MassHistogram::kBounds.end());

// Creates a family with one member.
template <typename Made>
auto& One(prometheus::Registry& registry, prometheus::detail::Builder<Made> builder, const char* name,
          const char* help, const Labels& labels) {
  return builder.Name(name).Help(help).Register(registry).Add(labels);
}

}  // namespace

struct Metrics::Impl {
  explicit Impl(const std::string& model_name) : labels({{"model_name", model_name}}) {}

  prometheus::Gauge& Gauge(const char* name, const char* help) {
    return One(registry, prometheus::BuildGauge(), name, help, labels);
  }
  prometheus::Counter& Counter(const char* name, const char* help) {
    return One(registry, prometheus::BuildCounter(), name, help, labels);
  }
  prometheus::Histogram& Histogram(const char* name, const char* help, const Buckets& bounds) {
    return prometheus::BuildHistogram().Name(name).Help(help).Register(registry).Add(labels, bounds);
  }
  // Raises the counter to a total that the engine keeps.
  static void Follow(prometheus::Counter& counter, double total) {
    if (total > counter.Value()) counter.Increment(total - counter.Value());
  }

  void FollowBalance(const engine::ExpertBalanceStats& balance) {
    Follow(expert_plans.Add({{"result", "failed"}}), static_cast<double>(balance.failed_plans));
    Follow(expert_plans.Add({{"result", "no_gain"}}), static_cast<double>(balance.plans_without_gain));
    Follow(expert_plans.Add({{"result", "moves"}}), static_cast<double>(balance.plans_with_moves));
    for (const char* state : {"idle", "planning", "moving", "changing"})
      expert_balance_state.Add({{"state", state}}).Set(balance.state == state ? 1 : 0);
    expert_epoch.Add({}).Set(static_cast<double>(balance.epoch));
    Follow(expert_moves.Add({{"result", "applied"}}), static_cast<double>(balance.moved_layers));
    Follow(expert_moves.Add({{"result", "rolled_back"}}), static_cast<double>(balance.rolled_back));
    Follow(moved_experts.Add({}), static_cast<double>(balance.moved_experts));
    Follow(moved_bytes.Add({}), static_cast<double>(balance.moved_bytes));
  }

  // A job that continues without ranks that fail.
  void FollowSurvival(const engine::SurvivalStats& survival) {
    ranks_alive.Add({}).Set(survival.alive);
    Follow(rank_failures.Add({}), static_cast<double>(survival.failures.size()));
    Follow(lost_requests.Add({}), static_cast<double>(survival.failed_requests));
    Follow(reduced_requests.Add({}), static_cast<double>(survival.reduced_requests));
    for (const models::LeftOutExperts& layer : survival.left_out) {
      missing_experts.Add({{"layer", std::to_string(layer.layer)}})
          .Set(static_cast<double>(layer.experts.size()));
    }
  }

  // Divisions of tokens over the replicas of their experts.
  void FollowSplits(const engine::RankStats& rank, const Labels& number) {
    Follow(expert_splits.Add(number), static_cast<double>(rank.splits));
    Follow(expert_split_seconds.Add(number), rank.split_seconds);
    Follow(spilled_experts.Add(number), static_cast<double>(rank.spilled_experts));
    Follow(spilled_bytes.Add(number), static_cast<double>(rank.spilled_bytes));
    Follow(prefetched_experts.Add(number), static_cast<double>(rank.prefetched_experts));
    Follow(used_prefetched_experts.Add(number), static_cast<double>(rank.used_prefetched_experts));
    if (rank.mean_rows > 0)
      expert_split_balance.Add(number).Set(static_cast<double>(rank.busiest_rows) / rank.mean_rows);
  }

  // Replicas that divide the experts, and the loads of experts.
  void FollowExperts(const engine::EngineStats& engine) {
    int64_t rows = 0;
    for (const engine::RankStats& rank : engine.ranks) rows += rank.expert_rows;
    const double mean =
        static_cast<double>(rows) / std::max<double>(1, static_cast<double>(engine.ranks.size()));
    for (const engine::RankStats& rank : engine.ranks) {
      if (engine.link_levels.empty()) break;
      const Labels number = {{"rank", std::to_string(rank.rank)}};
      Follow(rank_rows.Add(number), static_cast<double>(rank.sent_rows));
      Follow(expert_rows.Add(number), static_cast<double>(rank.expert_rows));
      FollowSplits(rank, number);
      expert_imbalance.Add(number).Set(rows > 0 ? static_cast<double>(rank.expert_rows) / mean : 1);
      for (size_t level = 0; level < std::min<size_t>(engine.link_levels.size(), engine::kLinkLevels);
           ++level) {
        Labels labels = number;
        labels["level"] = engine.link_levels[level];
        Follow(rank_level_bytes.Add(labels), static_cast<double>(rank.level_bytes[level]));
      }
    }
    if (engine.balance != nullptr) FollowBalance(*engine.balance);
    if (engine.survival != nullptr) FollowSurvival(*engine.survival);
    Follow(load_write_errors, static_cast<double>(engine.expert_load_write_errors));
    if (engine.expert_load == nullptr) return;
    for (size_t i = 0; i < engine.expert_load->layers.size(); ++i) {
      expert_skew.Add({{"layer", std::to_string(engine.expert_load->layers[i])}})
          .Set(engine.expert_load->Skew(i));
    }
  }

  // Does so for a histogram. Its last bucket, for values above all bounds, is always empty.
  static void Follow(prometheus::Histogram& histogram, const kernels::MassHistogram& total) {
    const prometheus::ClientMetric::Histogram now = histogram.Collect().histogram;
    std::vector<double> more(kMass.size() + 1);
    for (size_t i = 0; i < kMass.size(); ++i) {
      const uint64_t before =
          now.bucket[i].cumulative_count - (i > 0 ? now.bucket[i - 1].cumulative_count : 0);
      more[i] = static_cast<double>(total.counts[i]) - static_cast<double>(before);
    }
    histogram.ObserveMultiple(more, total.sum - now.sample_sum);
  }

  prometheus::Registry registry;
  const Labels labels;
  std::mutex reading;  // Follow() reads a value and then writes it

  prometheus::Gauge& running = Gauge("vllm:num_requests_running", "Requests in the batch");
  prometheus::Gauge& waiting = Gauge("vllm:num_requests_waiting", "Requests waiting for admission");
  prometheus::Gauge& usage =
      Gauge("vllm:kv_cache_usage_perc", "Share of KV blocks that requests hold, 0 to 1");
  prometheus::Counter& queries =
      Counter("vllm:prefix_cache_queries_total", "Prompt tokens looked up in the prefix cache");
  prometheus::Counter& hits =
      Counter("vllm:prefix_cache_hits_total", "Prompt tokens found in the prefix cache");
  prometheus::Counter& preemptions =
      Counter("vllm:num_preemptions_total", "Requests preempted because no KV block was free");
  prometheus::Counter& prompt_tokens = Counter("vllm:prompt_tokens_total", "Prompt tokens processed");
  prometheus::Counter& output_tokens = Counter("vllm:generation_tokens_total", "Tokens generated");
  prometheus::Counter& drafts = Counter("vllm:spec_decode_num_drafts_total", "Drafts that were verified");
  prometheus::Counter& draft_tokens =
      Counter("vllm:spec_decode_num_draft_tokens_total", "Drafted tokens that were verified");
  prometheus::Counter& accepted_tokens =
      Counter("vllm:spec_decode_num_accepted_tokens_total", "Drafted tokens that were accepted");
  prometheus::Family<prometheus::Counter>& accepted_at =
      prometheus::BuildCounter()
          .Name("vllm:spec_decode_num_accepted_tokens_per_pos_total")
          .Help("Drafted tokens that were accepted, by position in their draft from 0")
          .Register(registry);
  prometheus::Family<prometheus::Counter>& success = prometheus::BuildCounter()
                                                         .Name("vllm:request_success_total")
                                                         .Help("Choices that ended, by reason")
                                                         .Register(registry);
  prometheus::Family<prometheus::Counter>& failures =
      prometheus::BuildCounter()
          .Name("moesaic:request_failures_total")
          .Help("Failures by cause: grammar_refused (before the request began), grammar, model, engine")
          .Register(registry);
  prometheus::Histogram& first_token =
      Histogram("vllm:time_to_first_token_seconds", "Time from arrival to the first token", kFirstToken);
  prometheus::Histogram& inter_token =
      Histogram("vllm:inter_token_latency_seconds", "Time between two tokens of one choice", kInterToken);
  prometheus::Histogram& whole =
      Histogram("vllm:e2e_request_latency_seconds", "Time from arrival to the end", kLatency);
  prometheus::Histogram& queue =
      Histogram("vllm:request_queue_time_seconds", "Time from arrival to the first step", kLatency);
  prometheus::Histogram& prefill =
      Histogram("vllm:request_prefill_time_seconds", "Time from the first step to the first token", kLatency);
  prometheus::Histogram& decode =
      Histogram("vllm:request_decode_time_seconds", "Time from the first token to the last", kLatency);
  prometheus::Histogram& inference = Histogram("vllm:request_inference_time_seconds",
                                               "Time from the first step to the last token", kLatency);
  prometheus::Histogram& prompt_sizes =
      Histogram("vllm:request_prompt_tokens", "Prompt tokens of a choice", kTokens);
  prometheus::Histogram& output_sizes =
      Histogram("vllm:request_generation_tokens", "Tokens generated for a choice", kTokens);
  prometheus::Histogram& budgets =
      Histogram("vllm:request_params_max_tokens", "Maximum output tokens of a choice", kTokens);

  prometheus::Family<prometheus::Gauge>& blocks = prometheus::BuildGauge()
                                                      .Name("moesaic:kv_blocks")
                                                      .Help("KV blocks by state: used, cached, free")
                                                      .Register(registry);
  prometheus::Family<prometheus::Gauge>& replica_requests =
      prometheus::BuildGauge()
          .Name("moesaic:replica_requests")
          .Help("Requests of a data parallel replica by state: running, waiting")
          .Register(registry);
  prometheus::Family<prometheus::Gauge>& replica_blocks =
      prometheus::BuildGauge()
          .Name("moesaic:replica_kv_blocks")
          .Help("KV blocks of a data parallel replica by state: used, cached, free")
          .Register(registry);
  prometheus::Family<prometheus::Counter>& replica_prompts =
      prometheus::BuildCounter()
          .Name("moesaic:replica_prompt_tokens_total")
          .Help("Prompt tokens processed by a data parallel replica")
          .Register(registry);
  prometheus::Family<prometheus::Counter>& replica_outputs =
      prometheus::BuildCounter()
          .Name("moesaic:replica_generation_tokens_total")
          .Help("Tokens generated by a data parallel replica")
          .Register(registry);
  prometheus::Family<prometheus::Gauge>& cache_config =
      prometheus::BuildGauge()
          .Name("vllm:cache_config_info")
          .Help("Tokens of a KV block and number of KV blocks")
          .Register(registry);
  prometheus::Counter& evictions =
      Counter("moesaic:kv_evicted_blocks_total", "Cached KV blocks evicted from memory");
  prometheus::Counter& swapped_out =
      Counter("moesaic:swapped_out_blocks_total", "KV blocks of preempted requests copied to the swap space");
  prometheus::Counter& swapped_in =
      Counter("moesaic:swapped_in_blocks_total", "KV blocks copied back from the swap space");
  prometheus::Family<prometheus::Gauge>& swap = prometheus::BuildGauge()
                                                    .Name("moesaic:swap_blocks")
                                                    .Help("Blocks of the swap space by state: used, free")
                                                    .Register(registry);
  prometheus::Gauge& warm_blocks =
      Gauge("moesaic:kv_warm_blocks", "Evicted KV blocks stored in int8 by the warm tier");
  prometheus::Gauge& warm_bytes = Gauge("moesaic:kv_warm_bytes", "Bytes of the warm tier's blocks");
  prometheus::Gauge& warm_capacity =
      Gauge("moesaic:kv_warm_capacity_blocks", "Maximum KV blocks of the warm tier");
  prometheus::Counter& warm_stored =
      Counter("moesaic:kv_warm_stored_blocks_total", "Evicted KV blocks stored by the warm tier");
  prometheus::Counter& warm_restored =
      Counter("moesaic:kv_warm_restored_blocks_total", "KV blocks restored from the warm tier for a request");
  prometheus::Counter& warm_evicted =
      Counter("moesaic:kv_warm_evicted_blocks_total", "KV blocks evicted from the warm tier");
  prometheus::Counter& warm_refused =
      Counter("moesaic:kv_warm_refused_blocks_total",
              "KV blocks not stored: values are not finite, or all blocks of the tier are being read");
  prometheus::Counter& warm_dropped =
      Counter("moesaic:kv_warm_dropped_blocks_total", "KV blocks not stored: above the limit of one step");
  prometheus::Counter& warm_store_seconds =
      Counter("moesaic:kv_warm_store_seconds_total", "Engine time spent storing blocks in the warm tier");
  prometheus::Counter& warm_restore_seconds = Counter(
      "moesaic:kv_warm_restore_seconds_total", "Engine time spent restoring blocks from the warm tier");
  prometheus::Gauge& disk_blocks = Gauge("moesaic:kv_disk_blocks", "KV blocks on disk that can be loaded");
  prometheus::Gauge& disk_bytes = Gauge("moesaic:kv_disk_bytes", "Bytes of the KV blocks on disk");
  prometheus::Gauge& disk_storing =
      Gauge("moesaic:kv_disk_storing",
            "1 while blocks are stored on disk; 0 without a disk tier, and after a failed write");
  prometheus::Counter& disk_written =
      Counter("moesaic:kv_disk_written_blocks_total", "KV blocks written to disk");
  prometheus::Counter& disk_evicted =
      Counter("moesaic:kv_disk_evicted_blocks_total", "KV blocks evicted from disk");
  prometheus::Counter& disk_lost = Counter("moesaic:kv_disk_lost_blocks_total",
                                           "KV blocks evicted from memory before they were written to disk");
  prometheus::Counter& disk_loads =
      Counter("moesaic:kv_disk_loads_total", "Prefixes loaded from disk for a request");
  prometheus::Counter& disk_abandoned = Counter("moesaic:kv_disk_abandoned_loads_total",
                                                "Loads that ended without memory, or with their request");
  prometheus::Counter& disk_loaded =
      Counter("moesaic:kv_disk_loaded_blocks_total", "KV blocks loaded from disk");
  prometheus::Counter& disk_lazy_blocks =
      Counter("moesaic:kv_disk_lazy_blocks_total", "KV blocks of which only the chosen layers were loaded");
  prometheus::Counter& disk_lazy_layers =
      Counter("moesaic:kv_disk_lazy_layers_total", "Layers loaded of these blocks");
  prometheus::Counter& disk_read = Counter("moesaic:kv_disk_read_bytes_total", "Bytes read by loads");
  prometheus::Counter& disk_seconds =
      Counter("moesaic:kv_disk_load_seconds_total",
              "Time of loads, from the first read to the check of the last byte");
  prometheus::Counter& disk_refused_blocks =
      Counter("moesaic:kv_disk_refused_blocks_total", "Damaged KV blocks on disk that were computed again");
  prometheus::Counter& disk_refused_files =
      Counter("moesaic:kv_disk_refused_files_total",
              "Files of KV blocks that are damaged, or belong to another model");
  prometheus::Counter& disk_errors =
      Counter("moesaic:kv_disk_write_errors_total", "KV blocks whose write to disk failed");
  prometheus::Counter& sparse_choices =
      Counter("moesaic:kv_sparsity_choices_total", "Choices of KV blocks, one per row, layer and KV head");
  prometheus::Counter& sparse_reused =
      Counter("moesaic:kv_sparsity_reused_total", "Choices copied from an earlier row of the sequence");
  prometheus::Counter& sparse_rechosen =
      Counter("moesaic:kv_sparsity_rechosen_total",
              "Choices computed because the earlier row's choice was not stored any more");
  prometheus::Counter& sparse_read =
      Counter("moesaic:kv_sparsity_blocks_read_total", "KV blocks that these choices read");
  prometheus::Counter& sparse_all =
      Counter("moesaic:kv_sparsity_blocks_total", "KV blocks that dense attention would have read");
  prometheus::Histogram& sparse_missed =
      Histogram("moesaic:kv_sparsity_missed",
                "Softmax mass that the choice left out, measured for audited heads", kMass);
  prometheus::Counter& steps = Counter("moesaic:engine_steps_total", "Steps of the engine");
  prometheus::Counter& prefill_seconds =
      Counter("moesaic:prefill_seconds_total", "Engine time spent in prefill; mixed steps are split by rows");
  prometheus::Counter& decode_seconds =
      Counter("moesaic:decode_seconds_total", "Engine time spent in decode");
  // By rank, for a model on several ranks.
  prometheus::Family<prometheus::Counter>& rank_seconds =
      prometheus::BuildCounter()
          .Name("moesaic:rank_step_seconds_total")
          .Help("Time of a rank in steps: computation and exchange")
          .Register(registry);
  prometheus::Family<prometheus::Counter>& rank_exchange =
      prometheus::BuildCounter()
          .Name("moesaic:rank_exchange_seconds_total")
          .Help("Part of rank_step_seconds_total in sums with other ranks and in waits for hidden states")
          .Register(registry);
  prometheus::Family<prometheus::Counter>& rank_bytes = prometheus::BuildCounter()
                                                            .Name("moesaic:rank_sent_bytes_total")
                                                            .Help("Bytes that a rank sent to other ranks")
                                                            .Register(registry);
  prometheus::Family<prometheus::Counter>& rank_rows =
      prometheus::BuildCounter()
          .Name("moesaic:rank_sent_rows_total")
          .Help("Tokens for experts of other ranks, and outputs of own experts, that a rank sent")
          .Register(registry);
  prometheus::Family<prometheus::Counter>& rank_level_bytes =
      prometheus::BuildCounter()
          .Name("moesaic:rank_exchange_bytes_total")
          .Help("Bytes of these rows and of their routing, by level of the links")
          .Register(registry);
  prometheus::Family<prometheus::Counter>& expert_rows =
      prometheus::BuildCounter()
          .Name("moesaic:rank_expert_rows_total")
          .Help("Rows that a rank's experts computed, for tokens of any rank")
          .Register(registry);
  prometheus::Family<prometheus::Gauge>& expert_imbalance =
      prometheus::BuildGauge()
          .Name("moesaic:rank_expert_imbalance")
          .Help("Rows that a rank's experts computed, divided by the mean of all ranks; 1 is balanced")
          .Register(registry);
  prometheus::Family<prometheus::Counter>& expert_splits =
      prometheus::BuildCounter()
          .Name("moesaic:expert_splits_total")
          .Help("Layers of batches whose tokens were split exactly over the replicas of their experts")
          .Register(registry);
  prometheus::Family<prometheus::Counter>& expert_split_seconds =
      prometheus::BuildCounter()
          .Name("moesaic:expert_split_seconds_total")
          .Help(
              "Part of rank_exchange_seconds_total in exact splits, with waits for the token counts of other "
              "ranks")
          .Register(registry);
  prometheus::Family<prometheus::Gauge>& expert_split_balance =
      prometheus::BuildGauge()
          .Name("moesaic:expert_split_imbalance")
          .Help(
              "Rows of the busiest rank in exact splits, divided by the mean of the ranks; 1 is balanced for "
              "ranks of equal speed")
          .Register(registry);
  prometheus::Family<prometheus::Counter>& spilled_experts =
      prometheus::BuildCounter()
          .Name("moesaic:spilled_experts_total")
          .Help("Experts whose weights a rank received from a busy one for a batch whose tokens were counted")
          .Register(registry);
  prometheus::Family<prometheus::Counter>& prefetched_experts =
      prometheus::BuildCounter()
          .Name("moesaic:prefetched_experts_total")
          .Help("Experts whose weights a rank received for one batch before its tokens were counted")
          .Register(registry);
  prometheus::Family<prometheus::Counter>& used_prefetched_experts =
      prometheus::BuildCounter()
          .Name("moesaic:prefetched_experts_used_total")
          .Help("Experts of prefetched_experts_total that got tokens")
          .Register(registry);
  prometheus::Family<prometheus::Counter>& spilled_bytes =
      prometheus::BuildCounter()
          .Name("moesaic:spilled_expert_bytes_total")
          .Help("Bytes of expert weights that a rank sent to others for one batch")
          .Register(registry);
  prometheus::Family<prometheus::Gauge>& expert_skew =
      prometheus::BuildGauge()
          .Name("moesaic:expert_load_skew")
          .Help("Recent tokens of a layer's most used expert, divided by the mean of its experts")
          .Register(registry);
  prometheus::Counter& load_write_errors =
      Counter("moesaic:expert_load_write_errors_total", "Failed writes of the file of --record-expert-load");
  prometheus::Family<prometheus::Counter>& expert_plans = prometheus::BuildCounter()
                                                              .Name("moesaic:expert_plans_total")
                                                              .Help("Plans of --rebalance-experts by result")
                                                              .Register(registry);
  prometheus::Family<prometheus::Gauge>& expert_balance_state =
      prometheus::BuildGauge()
          .Name("moesaic:expert_balance_state")
          .Help("1 for the state of --rebalance-experts: idle, planning, moving or changing")
          .Register(registry);
  prometheus::Family<prometheus::Gauge>& expert_epoch =
      prometheus::BuildGauge()
          .Name("moesaic:expert_placement_epoch")
          .Help("Number of the last move of experts that is in use; 0: experts are where loading placed them")
          .Register(registry);
  prometheus::Family<prometheus::Counter>& expert_moves =
      prometheus::BuildCounter()
          .Name("moesaic:expert_moves_total")
          .Help("Layers whose experts moved to other ranks, and moves that were rolled back")
          .Register(registry);
  prometheus::Family<prometheus::Counter>& moved_experts =
      prometheus::BuildCounter()
          .Name("moesaic:moved_experts_total")
          .Help("Experts that a rank received from another one")
          .Register(registry);
  prometheus::Family<prometheus::Counter>& moved_bytes =
      prometheus::BuildCounter()
          .Name("moesaic:moved_expert_bytes_total")
          .Help("Bytes of weights that ranks sent to others")
          .Register(registry);
  prometheus::Family<prometheus::Gauge>& ranks_alive =
      prometheus::BuildGauge()
          .Name("moesaic:ranks_alive")
          .Help("Ranks that compute, of a server that continues without failed ones")
          .Register(registry);
  prometheus::Family<prometheus::Counter>& rank_failures =
      prometheus::BuildCounter()
          .Name("moesaic:rank_failures_total")
          .Help("Ranks without which the server continues")
          .Register(registry);
  prometheus::Family<prometheus::Counter>& lost_requests =
      prometheus::BuildCounter()
          .Name("moesaic:requests_lost_with_rank_total")
          .Help("Requests that ended with an error because their rank failed")
          .Register(registry);
  prometheus::Family<prometheus::Counter>& reduced_requests =
      prometheus::BuildCounter()
          .Name("moesaic:requests_with_missing_experts_total")
          .Help("Requests that ended while experts without a living rank were left out of routing")
          .Register(registry);
  prometheus::Family<prometheus::Gauge>& missing_experts =
      prometheus::BuildGauge()
          .Name("moesaic:missing_experts")
          .Help("Experts of a layer that no living rank has, which are left out of routing")
          .Register(registry);
  prometheus::Family<prometheus::Gauge>& rank_imbalance =
      prometheus::BuildGauge()
          .Name("moesaic:rank_imbalance")
          .Help("Time of a rank's computation, divided by the mean of all ranks; 1 is balanced")
          .Register(registry);
  prometheus::Family<prometheus::Gauge>& kernels = prometheus::BuildGauge()
                                                       .Name("moesaic:kernel_info")
                                                       .Help("Implementation of each operator")
                                                       .Register(registry);
  prometheus::Family<prometheus::Gauge>& build =
      prometheus::BuildGauge().Name("moesaic:build_info").Help("Version and model file").Register(registry);
  prometheus::Gauge& connections = Gauge("moesaic:http_connections", "Open connections");
  prometheus::Gauge& active = Gauge("moesaic:http_requests_active", "Requests whose answer has not ended");
  prometheus::Gauge& draining = Gauge("moesaic:draining", "1 while the server refuses new requests");
  prometheus::Family<prometheus::Counter>& answers = prometheus::BuildCounter()
                                                         .Name("moesaic:http_requests_total")
                                                         .Help("Answers by endpoint and status")
                                                         .Register(registry);
  prometheus::Family<prometheus::Histogram>& answer_times =
      prometheus::BuildHistogram()
          .Name("moesaic:http_request_seconds")
          .Help("Time from the complete request to the end of the answer")
          .Register(registry);
};

Metrics::Metrics(const std::string& model_name) : impl_(std::make_unique<Impl>(model_name)) {}
Metrics::~Metrics() = default;

void Metrics::Choice(const ChoiceRecord& record) {
  Labels labels = impl_->labels;
  labels["finished_reason"] = record.finish;
  impl_->success.Add(labels).Increment();
  impl_->whole.Observe(record.whole);
  impl_->queue.Observe(record.queue);
  impl_->prompt_sizes.Observe(static_cast<double>(record.prompt_tokens));
  impl_->output_sizes.Observe(static_cast<double>(record.output_tokens));
  impl_->budgets.Observe(static_cast<double>(record.max_tokens));
  if (!record.had_token) return;
  impl_->prefill.Observe(record.prefill);
  impl_->decode.Observe(record.decode);
  impl_->inference.Observe(record.prefill + record.decode);
}

void Metrics::Failed(const std::string& cause) {
  Labels labels = impl_->labels;
  labels["cause"] = cause;
  impl_->failures.Add(labels).Increment();
}

void Metrics::FirstToken(double seconds) { impl_->first_token.Observe(seconds); }

void Metrics::InterToken(double seconds) { impl_->inter_token.Observe(seconds); }

void Metrics::Answered(const std::string& route, int status, double seconds) {
  impl_->answers.Add({{"endpoint", route}, {"status", std::to_string(status)}}).Increment();
  impl_->answer_times.Add({{"endpoint", route}}, kLatency).Observe(seconds);
}

void Metrics::Kernels(const std::vector<kernels::KernelChoice>& choices) {
  for (const auto& choice : choices) impl_->kernels.Add({{"op", choice.op}, {"kernel", choice.name}}).Set(1);
}

void Metrics::Build(const std::string& version, const std::string& model_path) {
  impl_->build.Add({{"version", version}, {"model_path", model_path}}).Set(1);
}

std::string Metrics::Text(const engine::EngineStats& engine, const HttpGauges& http) {
  Impl& m = *impl_;
  const std::lock_guard lock(m.reading);
  m.running.Set(engine.running);
  m.waiting.Set(engine.waiting);
  const int used = engine.total_blocks - engine.free_blocks - engine.cached_blocks;
  m.usage.Set(engine.total_blocks == 0 ? 0 : static_cast<double>(used) / engine.total_blocks);
  m.blocks.Add({{"state", "used"}}).Set(used);
  m.blocks.Add({{"state", "cached"}}).Set(engine.cached_blocks);
  m.blocks.Add({{"state", "free"}}).Set(engine.free_blocks);
  for (size_t i = 0; i < engine.replicas.size(); ++i) {
    const engine::ReplicaStats& replica = engine.replicas[i];
    const auto labels = [&](const char* state) -> Labels {
      return {{"replica", std::to_string(i)}, {"state", state}};
    };
    m.replica_requests.Add(labels("running")).Set(replica.running);
    m.replica_requests.Add(labels("waiting")).Set(replica.waiting);
    m.replica_blocks.Add(labels("used"))
        .Set(replica.total_blocks - replica.free_blocks - replica.cached_blocks);
    m.replica_blocks.Add(labels("cached")).Set(replica.cached_blocks);
    m.replica_blocks.Add(labels("free")).Set(replica.free_blocks);
    const Labels number = {{"replica", std::to_string(i)}};
    Impl::Follow(m.replica_prompts.Add(number), static_cast<double>(replica.prompt_tokens));
    Impl::Follow(m.replica_outputs.Add(number), static_cast<double>(replica.output_tokens));
  }
  m.cache_config
      .Add({{"block_size", std::to_string(tensor::kKvBlockTokens)},
            {"num_gpu_blocks", std::to_string(engine.total_blocks)}})
      .Set(1);
  Impl::Follow(m.queries, static_cast<double>(engine.cache_queries));
  Impl::Follow(m.hits, static_cast<double>(engine.cache_hits));
  Impl::Follow(m.preemptions, static_cast<double>(engine.preemptions));
  Impl::Follow(m.prompt_tokens, static_cast<double>(engine.prompt_tokens));
  Impl::Follow(m.output_tokens, static_cast<double>(engine.output_tokens));
  const engine::SpeculationStats& speculation = engine.speculation;
  Impl::Follow(m.drafts, static_cast<double>(speculation.drafts));
  Impl::Follow(m.draft_tokens, static_cast<double>(speculation.draft_tokens));
  Impl::Follow(m.accepted_tokens, static_cast<double>(speculation.accepted_tokens));
  for (size_t i = 0; i < speculation.accepted_at.size() && speculation.accepted_at[i] > 0; ++i) {
    Labels labels = m.labels;
    labels["position"] = std::to_string(i);
    Impl::Follow(m.accepted_at.Add(labels), static_cast<double>(speculation.accepted_at[i]));
  }
  Impl::Follow(m.evictions, static_cast<double>(engine.cache_evictions));
  Impl::Follow(m.swapped_out, static_cast<double>(engine.swapped_out));
  Impl::Follow(m.swapped_in, static_cast<double>(engine.swapped_in));
  for (const engine::RankStats& rank : engine.ranks) {
    const Labels labels = {{"rank", std::to_string(rank.rank)}};
    Impl::Follow(m.rank_seconds.Add(labels), rank.step_seconds);
    Impl::Follow(m.rank_exchange.Add(labels), rank.exchange_seconds);
    Impl::Follow(m.rank_bytes.Add(labels), static_cast<double>(rank.bytes_sent));
    m.rank_imbalance.Add(labels).Set(rank.imbalance);
  }
  m.FollowExperts(engine);
  m.swap.Add({{"state", "used"}}).Set(engine.swapped_blocks);
  m.swap.Add({{"state", "free"}}).Set(engine.swap_blocks - engine.swapped_blocks);
  const cache::DiskTierStats& disk = engine.disk;
  m.disk_blocks.Set(disk.blocks);
  m.disk_bytes.Set(static_cast<double>(disk.bytes));
  m.disk_storing.Set(disk.capacity_blocks > 0 && disk.storing ? 1 : 0);
  Impl::Follow(m.disk_written, static_cast<double>(disk.written_blocks));
  Impl::Follow(m.disk_evicted, static_cast<double>(disk.evicted_blocks));
  const cache::WarmTierStats& warm = engine.warm;
  m.warm_blocks.Set(warm.blocks);
  m.warm_bytes.Set(static_cast<double>(warm.bytes));
  m.warm_capacity.Set(warm.capacity_blocks);
  Impl::Follow(m.warm_stored, static_cast<double>(warm.stored_blocks));
  Impl::Follow(m.warm_restored, static_cast<double>(warm.restored_blocks));
  Impl::Follow(m.warm_evicted, static_cast<double>(warm.evicted_blocks));
  Impl::Follow(m.warm_refused, static_cast<double>(warm.refused_blocks));
  Impl::Follow(m.warm_dropped, static_cast<double>(warm.dropped_blocks));
  Impl::Follow(m.warm_store_seconds, warm.store_seconds);
  Impl::Follow(m.warm_restore_seconds, warm.restore_seconds);
  Impl::Follow(m.disk_lost, static_cast<double>(disk.lost_blocks));
  Impl::Follow(m.disk_loads, static_cast<double>(disk.loads));
  Impl::Follow(m.disk_abandoned, static_cast<double>(disk.abandoned_loads));
  Impl::Follow(m.disk_loaded, static_cast<double>(disk.loaded_blocks));
  Impl::Follow(m.disk_lazy_blocks, static_cast<double>(disk.borrowed_blocks));
  Impl::Follow(m.disk_lazy_layers, static_cast<double>(disk.read_layers));
  Impl::Follow(m.disk_read, static_cast<double>(disk.loaded_bytes));
  Impl::Follow(m.disk_seconds, disk.load_seconds);
  Impl::Follow(m.disk_refused_blocks, static_cast<double>(disk.refused_blocks));
  Impl::Follow(m.disk_refused_files, static_cast<double>(disk.refused_files));
  Impl::Follow(m.disk_errors, static_cast<double>(disk.write_errors));
  const kernels::SparsityCounters& sparsity = engine.sparsity;
  Impl::Follow(m.sparse_choices, static_cast<double>(sparsity.selections));
  Impl::Follow(m.sparse_reused, static_cast<double>(sparsity.reused));
  Impl::Follow(m.sparse_rechosen, static_cast<double>(sparsity.rechosen));
  Impl::Follow(m.sparse_read, static_cast<double>(sparsity.blocks_read));
  Impl::Follow(m.sparse_all, static_cast<double>(sparsity.blocks_all));
  Impl::Follow(m.sparse_missed, sparsity.missed);
  Impl::Follow(m.steps, static_cast<double>(engine.steps));
  Impl::Follow(m.prefill_seconds, engine.prefill_seconds);
  Impl::Follow(m.decode_seconds, engine.decode_seconds);
  m.connections.Set(static_cast<double>(http.connections));
  m.active.Set(static_cast<double>(http.active_requests));
  m.draining.Set(http.draining ? 1 : 0);
  return prometheus::TextSerializer().Serialize(m.registry.Collect());
}

}  // namespace moesaic::server
