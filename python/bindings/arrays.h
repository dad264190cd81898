// Conversion of NumPy and PyTorch arrays (through DLPack, without copies) to the views of graph operators.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>

#include <mutex>
#include <span>

#include "base/status.h"
#include "science/features.h"
#include "science/graph_kernels.h"

namespace moesaic::python {

using Array = nanobind::ndarray<nanobind::device::cpu>;
using ReadArray = nanobind::ndarray<nanobind::ro, nanobind::device::cpu>;

/// Converts a matrix with contiguous rows. Throws a Python ValueError or TypeError that names the argument.
graph::Features ToFeatures(const ReadArray& array, const char* name);
graph::Output ToOutput(const Array& array, const char* name);
/// Converts a contiguous vector of int32 or int64.
graph::Indices ToIndices(const ReadArray& array, const char* name);
/// Converts a contiguous int32 array of any shape.
std::span<int32_t> ToInts(const Array& array, const char* name);
std::span<const int32_t> ToInts(const ReadArray& array, const char* name);
std::span<float> ToFloats(const Array& array, const char* name);
std::span<const float> ToFloats(const ReadArray& array, const char* name);

/// Throws a Python ValueError with the message of a failed status.
void ThrowIfError(const Status& status);

/// Returns the value, or throws.
template <typename T>
T ValueOrThrow(StatusOr<T> value) {
  ThrowIfError(value.status());
  return *std::move(value);
}

/// Releases the interpreter's lock, calls `run` and returns its result.
template <typename Run>
auto WithoutGil(const Run& run) {
  const nanobind::gil_scoped_release release;
  return run();
}

/// Holds the process's workspace while an operator runs. Calls from several threads take turns. Its kernels
/// are those of the best instruction set of the host; MOESAIC_ISA, which limits the program's verbs, is not
/// read. Made without the interpreter's lock: the thread that holds the workspace may be in a long operator.
class Session {
 public:
  Session();
  graph::Context context() const { return workspace_->context(); }
  int threads() const { return workspace_->threads(); }

 private:
  std::unique_lock<std::mutex> lock_;
  graph::Workspace* workspace_;
};

void SetThreads(int threads);  ///< Takes effect with the next operator; 0: one per core.

void BindGraph(nanobind::module_& module);
void BindLayers(nanobind::module_& module);

}  // namespace moesaic::python
