#include "comm/collectives/level_exchange.h"

#include <algorithm>
#include <bit>

namespace moesaic::comm {
namespace {

// Children 2i and 2i + 1 share virtual index i for the first `extra` pairs, so that a power of two remains.
// The even one of a pair represents both.
struct Fold {
  explicit Fold(int children) {
    size = static_cast<int>(std::bit_floor(static_cast<unsigned>(children)));
    extra = children - size;
  }
  int Index(int child) const { return child < 2 * extra ? child / 2 : child - extra; }
  int Child(int index) const { return index < extra ? 2 * index : index + extra; }
  bool Represents(int child) const { return child >= 2 * extra || child % 2 == 0; }

  int size = 1, extra = 0;
};

struct Mover {
  PlanBuilder& builder;
  const WorkBuffer& work;
  WireFormat wire;

  void Send(int step, const LevelPiece& piece, int from, int to, bool reduce) const {
    const int sender = piece.handlers[from], receiver = piece.handlers[to];
    builder.Send(step, sender, work.At(sender, piece.offset, piece.count), receiver,
                 work.At(receiver, piece.offset, piece.count), reduce, wire);
  }
};

// The pairs of a fold. Pieces move from odd children to even ones, or back.
void MoveFolded(const Mover& mover, int step, const Fold& fold, const LevelPiece& piece, bool to_even,
                bool reduce) {
  for (int even = 0; even < 2 * fold.extra; even += 2) {
    if (to_even) {
      mover.Send(step, piece, even + 1, even, reduce);
    } else {
      mover.Send(step, piece, even, even + 1, reduce);
    }
  }
}

int ScatterHalving(const Mover& mover, int step, int children, const std::vector<LevelPiece>& pieces) {
  const Fold fold(children);
  if (fold.extra > 0) {
    for (const LevelPiece& piece : pieces) MoveFolded(mover, step, fold, piece, true, true);
    ++step;
  }
  for (int distance = fold.size / 2; distance > 0; distance /= 2, ++step) {
    for (const LevelPiece& piece : pieces) {
      const int target = fold.Index(piece.owner);
      for (int index = 0; index < fold.size; ++index) {
        // Holders agree with the target in all bits above `distance`; those that differ in this one send.
        if ((index ^ target) / (2 * distance) != 0 || ((index ^ target) & distance) == 0) continue;
        mover.Send(step, piece, fold.Child(index), fold.Child(index ^ distance), true);
      }
    }
  }
  if (fold.extra == 0) return step;
  for (const LevelPiece& piece : pieces) {
    if (!fold.Represents(piece.owner)) mover.Send(step, piece, piece.owner - 1, piece.owner, false);
  }
  return step + 1;
}

// Terms arrive together: one is added on its way, the others wait in scratch for local sums.
int ScatterLinear(const Mover& mover, int step, int children, const std::vector<LevelPiece>& pieces) {
  for (const LevelPiece& piece : pieces) {
    const int owner = piece.handlers[piece.owner];
    const Slice sum = mover.work.At(owner, piece.offset, piece.count);
    for (int k = 1; k < children; ++k) {
      const int from = (piece.owner + k) % children;
      if (k == 1) {
        mover.Send(step, piece, from, piece.owner, true);
        continue;
      }
      const int sender = piece.handlers[from];
      const Slice term = {PlanBuffer::kScratch, mover.builder.AddScratch(owner, piece.count), piece.count};
      mover.builder.Send(step, sender, mover.work.At(sender, piece.offset, piece.count), owner, term, false,
                         mover.wire);
      mover.builder.Local(step + 1, owner, term, sum, true);
    }
  }
  return step + 1;
}

int GatherLinear(const Mover& mover, int step, int children, const std::vector<LevelPiece>& pieces) {
  for (const LevelPiece& piece : pieces) {
    for (int k = 1; k < children; ++k) {
      mover.Send(step, piece, piece.owner, (piece.owner + k) % children, false);
    }
  }
  return step + 1;
}

int GatherDoubling(const Mover& mover, int step, int children, const std::vector<LevelPiece>& pieces) {
  const Fold fold(children);
  if (fold.extra > 0) {
    for (const LevelPiece& piece : pieces) {
      if (!fold.Represents(piece.owner)) mover.Send(step, piece, piece.owner, piece.owner - 1, false);
    }
    ++step;
  }
  for (int distance = 1; distance < fold.size; distance *= 2, ++step) {
    for (const LevelPiece& piece : pieces) {
      const int source = fold.Index(piece.owner);
      for (int index = 0; index < fold.size; ++index) {
        if ((index ^ source) >= distance) continue;
        mover.Send(step, piece, fold.Child(index), fold.Child(index ^ distance), false);
      }
    }
  }
  if (fold.extra == 0) return step;
  for (const LevelPiece& piece : pieces) {
    for (int even = 0; even < 2 * fold.extra; even += 2) {
      if (piece.owner != even + 1) mover.Send(step, piece, even, even + 1, false);
    }
  }
  return step + 1;
}

// In the step of `distance` child i sends to i - distance all pieces that it has of the children i, i + 1,
// ...
int GatherBruck(const Mover& mover, int step, int children, const std::vector<LevelPiece>& pieces) {
  for (int distance = 1; distance < children; distance *= 2, ++step) {
    const int blocks = std::min(distance, children - distance);
    for (const LevelPiece& piece : pieces) {
      for (int i = 0; i < blocks; ++i) {
        const int from = (piece.owner - i + children) % children;
        mover.Send(step, piece, from, (from - distance + children) % children, false);
      }
    }
  }
  return step;
}

}  // namespace

int LevelReduceScatter(PlanBuilder& builder, int step, Algorithm algorithm, int children,
                       const std::vector<LevelPiece>& pieces, const WorkBuffer& work, WireFormat wire) {
  const Mover mover{builder, work, wire};
  if (algorithm == Algorithm::kHalving) return ScatterHalving(mover, step, children, pieces);
  if (algorithm == Algorithm::kLinear) return ScatterLinear(mover, step, children, pieces);
  for (int k = 1; k < children; ++k, ++step) {
    for (const LevelPiece& piece : pieces) {
      if (algorithm == Algorithm::kRing) {
        mover.Send(step, piece, (piece.owner + k) % children, (piece.owner + k + 1) % children, true);
      } else {
        mover.Send(step, piece, (piece.owner - k + children) % children, piece.owner, true);
      }
    }
  }
  return step;
}

int LevelAllGather(PlanBuilder& builder, int step, Algorithm algorithm, int children,
                   const std::vector<LevelPiece>& pieces, const WorkBuffer& work, WireFormat wire) {
  const Mover mover{builder, work, wire};
  if (wire != WireFormat::kExact) {
    // The owner rounds its own copy, so that all ranks end with the same values.
    for (const LevelPiece& piece : pieces) {
      const int owner = piece.handlers[piece.owner];
      const Slice slice = work.At(owner, piece.offset, piece.count);
      builder.Local(step, owner, slice, slice, false, wire);
    }
  }
  if (algorithm == Algorithm::kHalving) return GatherDoubling(mover, step, children, pieces);
  if (algorithm == Algorithm::kBruck) return GatherBruck(mover, step, children, pieces);
  if (algorithm == Algorithm::kLinear) return GatherLinear(mover, step, children, pieces);
  for (int k = 1; k < children; ++k, ++step) {
    for (const LevelPiece& piece : pieces) {
      if (algorithm == Algorithm::kRing) {
        mover.Send(step, piece, (piece.owner + k - 1) % children, (piece.owner + k) % children, false);
      } else {
        mover.Send(step, piece, piece.owner, (piece.owner + k) % children, false);
      }
    }
  }
  return step;
}

int LevelDoubling(PlanBuilder& builder, int step, int children, const std::vector<LevelPiece>& pieces,
                  const WorkBuffer& work) {
  const Mover mover{builder, work, WireFormat::kExact};
  const Fold fold(children);
  if (fold.extra > 0) {
    for (const LevelPiece& piece : pieces) MoveFolded(mover, step, fold, piece, true, true);
    ++step;
  }
  std::vector<int> ranks(fold.size);
  std::vector<Slice> received(fold.size);
  const int first = step;
  for (const LevelPiece& piece : pieces) {
    for (int index = 0; index < fold.size; ++index) {
      ranks[index] = piece.handlers[fold.Child(index)];
      received[index] = {PlanBuffer::kScratch, builder.AddScratch(ranks[index], piece.count), piece.count};
    }
    step = first;
    for (int distance = 1; distance < fold.size; distance *= 2, ++step) {
      for (int index = 0; index < fold.size; ++index) {
        // Sent and received ranges must differ, so the sum follows in the next step.
        const Slice own = work.At(ranks[index], piece.offset, piece.count);
        builder.Send(step, ranks[index], own, ranks[index ^ distance], received[index ^ distance]);
        builder.Local(step + 1, ranks[index], received[index], own, true);
      }
    }
  }
  if (fold.extra == 0) return step + 1;
  for (const LevelPiece& piece : pieces) MoveFolded(mover, step, fold, piece, false, false);
  return step + 1;
}

int LevelDirect(PlanBuilder& builder, int step, int children, const std::vector<LevelPiece>& pieces,
                const WorkBuffer& work) {
  std::vector<Slice> terms(children);
  for (const LevelPiece& piece : pieces) {
    for (int child = 0; child < children; ++child) {
      const int rank = piece.handlers[child];
      const Slice own = work.At(rank, piece.offset, piece.count);
      for (int from = 0; from < children; ++from) {
        terms[from] = own;
        if (from == child) continue;
        terms[from] = {PlanBuffer::kScratch, builder.AddScratch(rank, piece.count), piece.count};
        const int sender = piece.handlers[from];
        builder.Send(step, sender, work.At(sender, piece.offset, piece.count), rank, terms[from]);
      }
      // All ranks round in the same order. The first two terms commute.
      const Slice sum = terms[child <= 1 ? child : 0];
      for (int from = 0; from < children; ++from) {
        if (from != (child == 1 ? 1 : 0)) builder.Local(step + 1, rank, terms[from], sum, true);
      }
      builder.Local(step + 1, rank, sum, own);
    }
  }
  return step + 1;
}

int LevelBroadcast(PlanBuilder& builder, int step, Algorithm algorithm, int children,
                   const std::vector<LevelPiece>& pieces, const WorkBuffer& work) {
  const Mover mover{builder, work, WireFormat::kExact};
  if (algorithm == Algorithm::kChain) {
    for (int k = 1; k < children; ++k, ++step) {
      for (const LevelPiece& piece : pieces) {
        mover.Send(step, piece, (piece.owner + k - 1) % children, (piece.owner + k) % children, false);
      }
    }
    return step;
  }
  for (int distance = 1; distance < children; distance *= 2, ++step) {
    for (const LevelPiece& piece : pieces) {
      for (int i = 0; i < distance && i + distance < children; ++i) {
        mover.Send(step, piece, (piece.owner + i) % children, (piece.owner + i + distance) % children, false);
      }
    }
  }
  return step;
}

}  // namespace moesaic::comm
