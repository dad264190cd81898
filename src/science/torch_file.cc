#include "science/torch_file.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <unordered_map>

#include "science/stored_zip.h"

namespace moesaic::science {
namespace {

constexpr int64_t kMaxElements = int64_t{1} << 31;  // of all tensors together
// Tensors of one byte per element that share a storage, as tied weights do, fit several times.
constexpr int64_t kElementsPerByte = 4;
constexpr int kMaxDepth = 64;          // of nested dictionaries
constexpr size_t kMaxDimensions = 64;  // of a tensor, as in PyTorch
// Names are joined from the keys of nested dictionaries, which a pickle can use several times.
constexpr int64_t kNameBytesPerByte = 4;
constexpr int64_t kMaxValues = 1 << 20;  // of a pickle; each takes some 200 bytes

// A value of the pickle. Storages and tensors are recognized; other objects are opaque.
struct PickleValue {
  enum class Kind : uint8_t { kOpaque, kNumber, kText, kTuple, kDict, kGlobal, kStorage, kTensor, kMark };
  Kind kind = Kind::kOpaque;
  double number = 0;
  std::string text;                 // of kText, kGlobal ("module name")
  std::vector<PickleValue*> items;  // of kTuple; keys and values in turn of kDict; type and key of kStorage
  PickleValue* storage = nullptr;   // of kTensor
  int64_t offset = 0;
  std::vector<int64_t> shape, stride;
};
using ValuePtr = PickleValue*;
using Kind = PickleValue::Kind;

/// Owns the values it makes: they may refer to one another in cycles.
class Unpickler {
 public:
  Unpickler(ByteSpan bytes, const std::string& name) : bytes_(bytes), name_(name) {}

  StatusOr<ValuePtr> Run() {
    while (true) {
      ASSIGN_OR_RETURN(const uint8_t op, Number<uint8_t>());
      if (op == '.') break;
      RETURN_IF_ERROR(Step(op));
      if (static_cast<int64_t>(values_.size()) > kMaxValues)
        return DataLoss("{}: the pickle has more than {} values", name_, kMaxValues);
    }
    if (stack_.empty()) return Damaged("it has no value");
    return stack_.back();
  }

 private:
  ValuePtr Make(Kind kind, std::string text = {}, double number = 0) {
    PickleValue& value = values_.emplace_back();
    value.kind = kind;
    value.text = std::move(text);
    value.number = number;
    return &value;
  }

  Status Damaged(const char* fault) const {
    return DataLoss("{}: the pickle is damaged at byte {}: {}", name_, at_, fault);
  }

  template <typename T>
  StatusOr<T> Number() {
    if (bytes_.size() - at_ < sizeof(T)) return Damaged("it is truncated");
    T value;
    std::memcpy(&value, bytes_.data() + at_, sizeof(T));
    at_ += sizeof(T);
    return value;
  }

  StatusOr<std::string> Text(uint64_t size) {
    if (bytes_.size() - at_ < size) return Damaged("a text is truncated");
    std::string text(reinterpret_cast<const char*>(bytes_.data() + at_), size);
    at_ += size;
    return text;
  }

  StatusOr<std::string> Line() {
    std::string line;
    while (true) {
      ASSIGN_OR_RETURN(const char c, Number<char>());
      if (c == '\n') return line;
      line.push_back(c);
    }
  }

  StatusOr<ValuePtr> Pop() {
    if (stack_.empty()) return Damaged("a value is missing");
    ValuePtr value = stack_.back();
    stack_.pop_back();
    return value;
  }

  // Values above the last mark, which is removed.
  StatusOr<std::vector<ValuePtr>> PopToMark() {
    size_t mark = stack_.size();
    while (mark > 0 && stack_[mark - 1]->kind != Kind::kMark) --mark;
    if (mark == 0) return Damaged("a mark is missing");
    std::vector<ValuePtr> values(stack_.begin() + static_cast<int64_t>(mark), stack_.end());
    stack_.resize(mark - 1);
    return values;
  }

  Status PushTuple(size_t count) {
    if (stack_.size() < count) return Damaged("a tuple's values are missing");
    ValuePtr tuple = Make(Kind::kTuple);
    tuple->items.assign(stack_.end() - static_cast<int64_t>(count), stack_.end());
    stack_.resize(stack_.size() - count);
    stack_.push_back(tuple);
    return OkStatus();
  }

  Status PushInteger(uint8_t op) {
    if (op == 'J') {
      ASSIGN_OR_RETURN(const int32_t value, Number<int32_t>());
      stack_.push_back(Make(Kind::kNumber, {}, value));
    } else if (op == 'K') {
      ASSIGN_OR_RETURN(const uint8_t value, Number<uint8_t>());
      stack_.push_back(Make(Kind::kNumber, {}, value));
    } else if (op == 'M') {
      ASSIGN_OR_RETURN(const uint16_t value, Number<uint16_t>());
      stack_.push_back(Make(Kind::kNumber, {}, value));
    } else {  // LONG1: little-endian two's complement
      ASSIGN_OR_RETURN(const uint8_t size, Number<uint8_t>());
      ASSIGN_OR_RETURN(const std::string digits, Text(size));
      if (size > 8) return Damaged("an integer has more than 64 bits");
      uint64_t bits = 0;
      for (size_t i = 0; i < digits.size(); ++i) bits |= uint64_t{static_cast<uint8_t>(digits[i])} << (8 * i);
      if (size > 0 && size < 8 && (digits.back() & 0x80) != 0) bits |= ~uint64_t{0} << (8 * size);
      stack_.push_back(Make(Kind::kNumber, {}, static_cast<double>(static_cast<int64_t>(bits))));
    }
    return OkStatus();
  }

  Status PushText(uint64_t size) {
    ASSIGN_OR_RETURN(std::string text, Text(size));
    stack_.push_back(Make(Kind::kText, std::move(text)));
    return OkStatus();
  }

  Status PushDouble() {
    ASSIGN_OR_RETURN(uint64_t bits, Number<uint64_t>());
    bits = __builtin_bswap64(bits);  // pickles have big-endian doubles
    double value;
    std::memcpy(&value, &bits, sizeof(value));
    stack_.push_back(Make(Kind::kNumber, {}, value));
    return OkStatus();
  }

  // A persistent id: ("storage", type, key, location, elements).
  Status PushStorage() {
    ASSIGN_OR_RETURN(const ValuePtr id, Pop());
    if (id->kind != Kind::kTuple || id->items.size() < 5 || id->items[1]->kind != Kind::kGlobal ||
        id->items[2]->kind != Kind::kText) {
      return Damaged("a storage has no type or key");
    }
    ValuePtr storage = Make(Kind::kStorage);
    storage->items = {id->items[1], id->items[2]};  // no copies: an id can be used many times
    stack_.push_back(storage);
    return OkStatus();
  }

  StatusOr<std::vector<int64_t>> Integers(const PickleValue& tuple) const {
    if (tuple.items.size() > kMaxDimensions) return Damaged("a tensor has more than 64 dimensions");
    std::vector<int64_t> values;
    for (const ValuePtr& item : tuple.items) {
      if (item->kind != Kind::kNumber || !(item->number >= 0) || item->number > 9e15)
        return Damaged("a tensor's shape is no list of sizes");
      values.push_back(static_cast<int64_t>(item->number));
    }
    return values;
  }

  Status Reduce() {
    ASSIGN_OR_RETURN(const ValuePtr arguments, Pop());
    ASSIGN_OR_RETURN(const ValuePtr callee, Pop());
    if (callee->kind == Kind::kGlobal && callee->text == "collections OrderedDict") {
      stack_.push_back(Make(Kind::kDict));
      return OkStatus();
    }
    const auto& items = arguments->items;
    if (callee->kind == Kind::kGlobal && callee->text == "torch._utils _rebuild_tensor_v2" &&
        items.size() >= 4 && items[0]->kind == Kind::kStorage && items[1]->kind == Kind::kNumber) {
      ValuePtr tensor = Make(Kind::kTensor);
      tensor->storage = items[0];
      if (!(items[1]->number >= 0) || items[1]->number > 9e15)
        return Damaged("a tensor's offset is not usable");
      tensor->offset = static_cast<int64_t>(items[1]->number);
      ASSIGN_OR_RETURN(tensor->shape, Integers(*items[2]));
      ASSIGN_OR_RETURN(tensor->stride, Integers(*items[3]));
      if (tensor->shape.size() != tensor->stride.size())
        return Damaged("a tensor's shape and strides disagree");
      stack_.push_back(tensor);
      return OkStatus();
    }
    // A parameter is a tensor with a flag.
    const bool parameter =
        callee->kind == Kind::kGlobal && callee->text == "torch._utils _rebuild_parameter" && !items.empty();
    stack_.push_back(parameter ? items[0] : Make(Kind::kOpaque));
    return OkStatus();
  }

  Status SetItems(const std::vector<ValuePtr>& values) {
    if (stack_.empty() || values.size() % 2 != 0) return Damaged("a dictionary's values are missing");
    if (stack_.back()->kind == Kind::kDict)
      stack_.back()->items.insert(stack_.back()->items.end(), values.begin(), values.end());
    return OkStatus();
  }

  Status Memoize(uint64_t index) {
    if (stack_.empty()) return Damaged("a value to remember is missing");
    memo_[index] = stack_.back();
    return OkStatus();
  }

  Status Recall(uint64_t index) {
    const auto found = memo_.find(index);
    if (found == memo_.end()) return Damaged("a remembered value is missing");
    stack_.push_back(found->second);
    return OkStatus();
  }

  Status Step(uint8_t op) {
    switch (op) {
      case 0x80:
        return Number<uint8_t>().status();  // PROTO
      case 0x95:
        return Number<uint64_t>().status();  // FRAME
      case '}':
        stack_.push_back(Make(Kind::kDict));
        return OkStatus();
      case ']':
      case ')':
        stack_.push_back(Make(Kind::kTuple));
        return OkStatus();
      case 'N':
      case 0x88:
      case 0x89:
        stack_.push_back(Make(Kind::kOpaque));
        return OkStatus();
      case '(':
        stack_.push_back(Make(Kind::kMark));
        return OkStatus();
      case 'J':
      case 'K':
      case 'M':
      case 0x8a:
        return PushInteger(op);
      case 'G':
        return PushDouble();
      case 'X': {
        ASSIGN_OR_RETURN(const uint32_t size, Number<uint32_t>());
        return PushText(size);
      }
      case 0x8c: {
        ASSIGN_OR_RETURN(const uint8_t size, Number<uint8_t>());
        return PushText(size);
      }
      case 'c': {
        ASSIGN_OR_RETURN(std::string global, Line());
        ASSIGN_OR_RETURN(const std::string member, Line());
        stack_.push_back(Make(Kind::kGlobal, global + " " + member));
        return OkStatus();
      }
      case 0x85:
        return PushTuple(1);
      case 0x86:
        return PushTuple(2);
      case 0x87:
        return PushTuple(3);
      case 't': {
        ASSIGN_OR_RETURN(std::vector<ValuePtr> values, PopToMark());
        stack_.push_back(Make(Kind::kTuple));
        stack_.back()->items = std::move(values);
        return OkStatus();
      }
      case 'Q':
        return PushStorage();
      case 'R':
        return Reduce();
      case 'b':
      case 'a':
        return Pop().status();  // BUILD and APPEND: states and lists are not read
      case 'e':
        return PopToMark().status();
      case 's': {
        ASSIGN_OR_RETURN(const ValuePtr value, Pop());
        ASSIGN_OR_RETURN(const ValuePtr key, Pop());
        return SetItems({key, value});
      }
      case 'u': {
        ASSIGN_OR_RETURN(const std::vector<ValuePtr> values, PopToMark());
        return SetItems(values);
      }
      case 'q': {
        ASSIGN_OR_RETURN(const uint8_t index, Number<uint8_t>());
        return Memoize(index);
      }
      case 'r': {
        ASSIGN_OR_RETURN(const uint32_t index, Number<uint32_t>());
        return Memoize(index);
      }
      case 0x94:
        return Memoize(memo_.size());
      case 'h': {
        ASSIGN_OR_RETURN(const uint8_t index, Number<uint8_t>());
        return Recall(index);
      }
      case 'j': {
        ASSIGN_OR_RETURN(const uint32_t index, Number<uint32_t>());
        return Recall(index);
      }
      default:
        return Unimplemented(
            "{}: the pickle has operation {} at byte {}, which tensors and dictionaries do not need", name_,
            op, at_ - 1);
    }
  }

  ByteSpan bytes_;
  const std::string& name_;
  size_t at_ = 0;
  std::deque<PickleValue> values_;
  std::vector<ValuePtr> stack_;
  std::unordered_map<uint64_t, ValuePtr> memo_;
};

struct StorageType {
  std::string_view global;
  int bytes;
  float (*read)(const std::byte* from);
};

template <typename T>
float ReadAs(const std::byte* from) {
  T value;
  std::memcpy(&value, from, sizeof(T));
  return static_cast<float>(value);
}
float ReadBf16(const std::byte* from) {
  tensor::BF16 value{};
  std::memcpy(&value.bits, from, 2);
  return tensor::ToFloat(value);
}
float ReadHalf(const std::byte* from) {
  uint16_t bits;
  std::memcpy(&bits, from, 2);
  return tensor::HalfToFloat(bits);
}

constexpr StorageType kStorageTypes[] = {
    {"torch FloatStorage", 4, ReadAs<float>},   {"torch DoubleStorage", 8, ReadAs<double>},
    {"torch HalfStorage", 2, ReadHalf},         {"torch BFloat16Storage", 2, ReadBf16},
    {"torch LongStorage", 8, ReadAs<int64_t>},  {"torch IntStorage", 4, ReadAs<int32_t>},
    {"torch ShortStorage", 2, ReadAs<int16_t>}, {"torch CharStorage", 1, ReadAs<int8_t>},
    {"torch ByteStorage", 1, ReadAs<uint8_t>},  {"torch BoolStorage", 1, ReadAs<uint8_t>}};

// Converts the values of a pickle to tensors.
class Collector {
 public:
  /// The tensors together may have kElementsPerByte times as many elements as the file has bytes, and the
  /// names of all values kNameBytesPerByte times as many bytes.
  Collector(const std::map<std::string, ByteSpan>& entries, std::string folder, const std::string& name,
            int64_t file_bytes)
      : entries_(entries),
        folder_(std::move(folder)),
        name_(name),
        max_elements_(std::min(kMaxElements, kElementsPerByte * file_bytes)),
        max_name_bytes_(kNameBytesPerByte * file_bytes) {}

  Status Collect(const PickleValue& value, const std::string& key, int depth, TorchFile* out) {
    if (++visited_ > kMaxValues)
      return DataLoss("{}: more than {} values, counting repetitions", name_, kMaxValues);
    if (value.kind == Kind::kNumber) out->numbers[key] = value.number;
    if (value.kind == Kind::kTensor) {
      ASSIGN_OR_RETURN(out->tensors[key], Read(value, key));
    }
    if (value.kind != Kind::kDict) return OkStatus();
    if (depth > kMaxDepth)
      return DataLoss("{}: dictionaries are nested more than {} times", name_, kMaxDepth);
    for (size_t i = 0; i + 1 < value.items.size(); i += 2) {
      if (value.items[i]->kind != Kind::kText) continue;
      const std::string& own = value.items[i]->text;
      name_bytes_ += static_cast<int64_t>(key.size() + own.size());
      if (name_bytes_ > max_name_bytes_) {
        return ResourceExhausted(
            "{}: the names of its values have more than {} bytes, the limit for a file of its size", name_,
            max_name_bytes_);
      }
      const std::string inner = key.empty() ? own : key + "/" + own;
      RETURN_IF_ERROR(Collect(*value.items[i + 1], inner, depth + 1, out));
    }
    return OkStatus();
  }

 private:
  StatusOr<WeightTensor> Read(const PickleValue& value, const std::string& key) {
    const StorageType* type = nullptr;
    for (const StorageType& known : kStorageTypes) {
      if (known.global == value.storage->items[0]->text) type = &known;
    }
    if (type == nullptr)
      return Unimplemented("{}: tensor \"{}\" has the type \"{}\"", name_, key,
                           value.storage->items[0]->text);
    const auto entry = entries_.find(folder_ + "data/" + value.storage->items[1]->text);
    if (entry == entries_.end()) return DataLoss("{}: the data of tensor \"{}\" are missing", name_, key);
    const auto available = static_cast<int64_t>(entry->second.size()) / type->bytes;
    const bool empty = std::find(value.shape.begin(), value.shape.end(), 0) != value.shape.end();
    int64_t count = empty ? 0 : 1, last = value.offset;
    for (size_t d = 0; d < value.shape.size() && !empty; ++d) {
      const int64_t size = value.shape[d];
      // Bounds of the factors keep the products in range.
      const bool fits =
          size <= available && (size == 1 || value.stride[d] <= available) && count <= available / size;
      if (fits) {
        count *= size;
        last += (size - 1) * value.stride[d];
      }
      if (!fits || last >= available) {
        return DataLoss("{}: tensor \"{}\" is larger than its data", name_, key);
      }
    }
    if (count > 0 && last >= available)
      return DataLoss("{}: tensor \"{}\" is larger than its data", name_, key);
    total_ += count;
    // Tensors may share a storage, and strides may be 0: a small file must not fill memory.
    if (total_ > max_elements_) {
      return ResourceExhausted("{}: its tensors have more than {} elements, the limit for a file of its size",
                               name_, max_elements_);
    }
    WeightTensor tensor{.shape = value.shape, .values = {}};
    tensor.values.resize(count);
    std::vector<int64_t> index(value.shape.size(), 0);
    for (int64_t i = 0; i < count; ++i) {
      int64_t at = value.offset;
      for (size_t d = 0; d < index.size(); ++d) at += index[d] * value.stride[d];
      tensor.values[i] = type->read(entry->second.data() + at * type->bytes);
      for (size_t d = index.size(); d-- > 0;) {
        if (++index[d] < value.shape[d]) break;
        index[d] = 0;
      }
    }
    return tensor;
  }

  const std::map<std::string, ByteSpan>& entries_;
  std::string folder_;
  const std::string& name_;
  int64_t max_elements_, max_name_bytes_, total_ = 0, visited_ = 0, name_bytes_ = 0;
};

}  // namespace

WeightMap TorchFile::Under(const std::string& prefix) const {
  WeightMap found;
  for (const auto& [key, tensor] : tensors) {
    if (key.compare(0, prefix.size(), prefix) == 0) found[key.substr(prefix.size())] = tensor;
  }
  return found;
}

StatusOr<TorchFile> ParseTorchFile(std::span<const std::byte> bytes, const std::string& name) {
  ASSIGN_OR_RETURN(const auto entries, ParseStoredZip(bytes, name));
  constexpr std::string_view kPickle = "data.pkl";
  for (const auto& [entry, data] : entries) {
    if (entry.size() < kPickle.size() || entry.substr(entry.size() - kPickle.size()) != kPickle) continue;
    Unpickler unpickler(data, name);
    ASSIGN_OR_RETURN(const ValuePtr root, unpickler.Run());
    TorchFile file;
    RETURN_IF_ERROR(Collector(entries, entry.substr(0, entry.size() - kPickle.size()), name,
                              static_cast<int64_t>(bytes.size()))
                        .Collect(*root, "", 0, &file));
    return file;
  }
  return DataLoss("{}: the archive has no data.pkl: it is no PyTorch checkpoint", name);
}

}  // namespace moesaic::science
