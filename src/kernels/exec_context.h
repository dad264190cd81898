// The context of every operator. Each operator takes one parameter struct and runs on the whole thread pool.
// Results do not depend on the number of threads, and a row's result does not depend on the other rows of the
// batch, if all keys and values are finite.
#pragma once

#include "runtime/memory.h"
#include "runtime/thread_pool.h"

namespace moesaic::kernels {

struct KernelTable;

/// Resources of every operator. All are borrowed and must outlive the context's use. Each operator rewinds
/// `scratch`.
struct ExecContext {
  const KernelTable* kernels;
  runtime::ThreadPool* pool;
  runtime::Arena* scratch;
};

}  // namespace moesaic::kernels
