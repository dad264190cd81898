// moesaic._core: operators on matrices. The Python modules of the package add shapes and gradients.
#include <nanobind/stl/string.h>
#include <pthread.h>
#include <unistd.h>

#include <memory>
#include <new>
#include <stdexcept>
#include <string>

#include "bindings/arrays.h"
#include "runtime/huge_pages.h"

namespace nb = nanobind;

namespace moesaic::python {
namespace {

struct Process {
  std::mutex mutex;
  std::unique_ptr<graph::Workspace> workspace;
  pid_t owner = 0;
  int threads = 0;
};

Process& TheProcess() {
  static auto* process = new Process;  // never destroyed: threads may outlive the interpreter's modules
  return *process;
}

// fork() waits for the operator of another thread: a child would inherit its locks, and no thread of the
// child releases them.
void PrepareFork() { TheProcess().mutex.lock(); }
void FinishFork() { TheProcess().mutex.unlock(); }

tensor::DType TypeOf(const nb::dlpack::dtype& type, const char* name) {
  if (type == nb::dtype<float>()) return tensor::DType::kF32;
  const bool sixteen = type.bits == 16 && type.lanes == 1;
  if (sixteen && type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Float)) return tensor::DType::kF16;
  if (sixteen && type.code == static_cast<uint8_t>(nb::dlpack::dtype_code::Bfloat))
    return tensor::DType::kBF16;
  throw nb::type_error(fmt::format("{} must have elements of float32, bfloat16 or float16", name).c_str());
}

template <typename AnyArray>
void CheckMatrix(const AnyArray& array, const char* name) {
  if (array.ndim() != 2) {
    throw nb::value_error(
        fmt::format("{} must be a matrix, but has {} dimensions", name, array.ndim()).c_str());
  }
  if (array.shape(1) > 1 && array.shape(0) > 0 && array.stride(1) != 1) {
    throw nb::value_error(
        fmt::format("rows of {} must be contiguous, but their elements are {} apart", name, array.stride(1))
            .c_str());
  }
}

template <typename AnyArray>
int64_t CheckContiguous(const AnyArray& array, const char* name) {
  int64_t size = 1;
  if (array.size() == 0) return 0;  // of any strides
  for (size_t i = array.ndim(); i-- > 0;) {
    if (array.shape(i) > 1 && array.stride(i) != size) {
      throw nb::value_error(fmt::format("{} must be contiguous", name).c_str());
    }
    size *= static_cast<int64_t>(array.shape(i));
  }
  return size;
}

template <typename T, typename AnyArray>
std::span<T> ContiguousOf(const AnyArray& array, const char* name, const char* type) {
  if (array.dtype() != nb::dtype<std::remove_const_t<T>>())
    throw nb::type_error(fmt::format("{} must be {}", name, type).c_str());
  return {static_cast<T*>(array.data()), static_cast<size_t>(CheckContiguous(array, name))};
}

}  // namespace

graph::Features ToFeatures(const ReadArray& array, const char* name) {
  CheckMatrix(array, name);
  return {.data = array.data(),
          .dtype = TypeOf(array.dtype(), name),
          .rows = static_cast<int64_t>(array.shape(0)),
          .cols = static_cast<int64_t>(array.shape(1)),
          .stride = array.stride(0)};
}

graph::Output ToOutput(const Array& array, const char* name) {
  CheckMatrix(array, name);
  const graph::Output out = {.data = array.data(),
                             .dtype = TypeOf(array.dtype(), name),
                             .rows = static_cast<int64_t>(array.shape(0)),
                             .cols = static_cast<int64_t>(array.shape(1)),
                             .stride = array.stride(0)};
  // PyTorch does not ask for huge pages, and NumPy from 4 MiB on.
  constexpr size_t kLarge = size_t{4} << 20;
  const size_t bytes = tensor::BytesOf(out.dtype, out.rows * out.stride);
  if (out.stride == out.cols && bytes >= kLarge) runtime::AdviseHugePages(out.data, bytes);
  return out;
}

graph::Indices ToIndices(const ReadArray& array, const char* name) {
  if (array.ndim() != 1) {
    throw nb::value_error(
        fmt::format("{} must be a vector, but has {} dimensions", name, array.ndim()).c_str());
  }
  const int64_t size = CheckContiguous(array, name);
  const bool wide = array.dtype() == nb::dtype<int64_t>();
  if (!wide && array.dtype() != nb::dtype<int32_t>()) {
    throw nb::type_error(fmt::format("{} must have elements of int32 or int64", name).c_str());
  }
  return {.data = array.data(), .size = size, .wide = wide};
}

std::span<int32_t> ToInts(const Array& array, const char* name) {
  return ContiguousOf<int32_t>(array, name, "int32");
}
std::span<const int32_t> ToInts(const ReadArray& array, const char* name) {
  return ContiguousOf<const int32_t>(array, name, "int32");
}
std::span<float> ToFloats(const Array& array, const char* name) {
  return ContiguousOf<float>(array, name, "float32");
}
std::span<const float> ToFloats(const ReadArray& array, const char* name) {
  return ContiguousOf<const float>(array, name, "float32");
}

void ThrowIfError(const Status& status) {
  if (status.ok()) return;
  throw std::invalid_argument(Message(status));  // nanobind raises ValueError
}

Session::Session() : lock_(TheProcess().mutex) {
  Process& process = TheProcess();
  if (process.owner != getpid()) {
    // Threads do not survive fork(): a child process starts its own. The parent's workspace stays allocated.
    static_cast<void>(process.workspace.release());
    process.owner = getpid();
  }
  if (process.workspace == nullptr) {
    process.workspace = ValueOrThrow(graph::Workspace::Create(process.threads, runtime::DetectCpu()));
  }
  workspace_ = process.workspace.get();
}

void SetThreads(int threads) {
  Process& process = TheProcess();
  const std::lock_guard lock(process.mutex);
  process.threads = threads;
  if (process.owner == getpid()) process.workspace.reset();
}

}  // namespace moesaic::python

NB_MODULE(_core, module) {
  if (pthread_atfork(moesaic::python::PrepareFork, moesaic::python::FinishFork,
                     moesaic::python::FinishFork) != 0) {
    throw std::bad_alloc();
  }
  module.doc() = "C++ operators of moesaic.graph. Use the functions of moesaic.graph instead.";
  module.def(
      "set_num_threads",
      [](int threads) {
        if (threads < 0) throw nb::value_error("the number of threads must be 0 or more");
        moesaic::python::SetThreads(threads);
      },
      nb::arg("threads"), nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "get_num_threads", [] { return moesaic::python::Session().threads(); },
      nb::call_guard<nb::gil_scoped_release>());
  module.def(
      "kernels", [] { return moesaic::python::Session().context().graph->name; },
      nb::call_guard<nb::gil_scoped_release>());
  moesaic::python::BindGraph(module);
  moesaic::python::BindLayers(module);
}
