// Operation that brings expert outputs back to the owners of their tokens.
#pragma once

#include <memory>
#include <vector>

#include "comm/exchange/operation.h"

namespace moesaic::comm {

/// Result of a combine: [tokens, hidden], of kF32 or kBf16. Tokens without an expert become zeros.
struct CombineOutput {
  Payload payload = Payload::kF32;
  std::span<std::byte> data;
};
inline CombineOutput OutputOf(std::span<float> data) { return {Payload::kF32, std::as_writable_bytes(data)}; }
inline CombineOutput OutputOf(std::span<tensor::BF16> data) {
  return {Payload::kBf16, std::as_writable_bytes(data)};
}

/// Sends outputs along the path of the dispatch in reverse. Every rank sends one sum per row that it received
/// (Reduction::kPartialSums), or one row per slot (kBySlot). Sums are f32; they are rounded to the wire's
/// payload once per hop.
class RowCombine final : public Operation, private PipelineSteps {
 public:
  /// `y` has the expert rows in the order of Route::origins. `y` and `out` are borrowed until done().
  RowCombine(ExchangeState& state, const PayloadRows& y, const CombineOutput& out,
             std::shared_ptr<const Route> route, std::shared_ptr<OperationMemory> memory);

  Status Start();
  Status Advance(bool* progressed) override { return pipeline_.Advance(*this, progressed); }
  bool done() const override { return pipeline_.done(); }
  int WaitsFor() const override { return pipeline_.WaitsFor(); }
  void Cancel() override { pipeline_.Cancel(); }
  const char* name() const override { return "combine"; }

 private:
  void Pack(int out_index, int segment) override;
  void Arrived(int, int) override {}
  void Settled(int segment) override;

  /// Writes the row's sum in `payload`.
  void SumRow(int32_t row, Payload payload, std::byte* to) const;
  /// Copies the outputs of a row's slots to the wire; returns the end.
  std::byte* CopySlots(int32_t row, std::byte* wire) const;
  const std::byte* Returned(const Contribution& from) const {
    return memory_->in.data() + (in_begin_[from.send] + from.position) * row_bytes_;
  }
  const std::byte* Output(int32_t position) const { return y_.data.data() + position * y_row_bytes_; }
  bool by_slot() const { return state_.options.reduction == Reduction::kBySlot; }

  ExchangeState& state_;
  const PayloadRows y_;
  const CombineOutput out_;
  const std::shared_ptr<const Route> route_;
  const std::shared_ptr<OperationMemory> memory_;
  const OperationTags tags_;
  const Payload wire_;
  const int64_t row_bytes_, y_row_bytes_;
  std::vector<int64_t> in_begin_;   // [sends]: first returned row of each
  std::vector<int64_t> out_begin_;  // [receives]: first row to return of each
  SegmentPipeline pipeline_;
};

}  // namespace moesaic::comm
