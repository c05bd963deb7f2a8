// SPDX-License-Identifier: Apache-2.0
// Frames made from arbitrary bytes, given to our handlers and to those of exported functions: no
// crash, no undefined behaviour, an error with a text or a call whose lists are what the frame
// says.
//
// Every choice takes one byte, and 0 is what a sane runtime sends; an input that ends early goes on
// with zeros. So the empty input is a good frame, and a mutation of one byte is one fault. Memory
// that a frame names exists, as far as its counts reach: nothing can check an address.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <iterator>
#include <limits>
#include <string>
#include <vector>

#include "core/dispatch/call.hpp"
#include "core/dispatch/entry_points.hpp"
#include "fakes/frame_builder.hpp"
#include "fakes/function_target.hpp"
#include "jaxbridge/jaxbridge.hpp"

extern "C" std::size_t LLVMFuzzerMutate(std::uint8_t* data, std::size_t size, std::size_t max_size);

namespace {

namespace ffi = jaxbridge::abi::xla_ffi;
using jaxbridge::any_buffer;
using jaxbridge::platform;
using jaxbridge::status;
using jaxbridge::dispatch::call;

void require(bool condition, const char* what) {
  if (condition) return;
  std::fprintf(stderr, "fuzz_frame: %s\n", what);
  std::abort();
}

class reader {
 public:
  reader(const std::uint8_t* data, std::size_t size) : next_(data), end_(data + size) {}

  std::uint8_t byte() { return next_ == end_ ? 0 : *next_++; }
  /// 0 mostly: 0 up to 0xbf are the sane choice.
  std::size_t fault(std::size_t kinds) {
    const std::size_t b = byte();
    return b < 0xc0 ? 0 : 1 + b % kinds;
  }
  std::int64_t wide() {
    std::uint64_t out = 0;
    for (int i = 0; i < 8; ++i) out = out << 8 | byte();
    return static_cast<std::int64_t>(out);
  }
  std::string text(std::size_t size) {
    std::string out(size, '\0');
    for (char& c : out) c = static_cast<char>(byte());
    return out;
  }
  std::int64_t extent() {
    constexpr std::int64_t most = std::numeric_limits<std::int64_t>::max();
    constexpr std::array<std::int64_t, 8> odd = {0,        -1,    most,      std::int64_t{1} << 32,
                                                 most / 8, -most, most / 16, 1};
    const std::uint8_t b = byte();
    if (b < 0xe0) return 1 + b % 16;
    if (b < 0xff) return odd[b % odd.size()];
    return wide();
  }
  std::size_t struct_size(std::size_t sane) {
    switch (fault(4)) {
      case 1:
        return byte();
      case 2:
        return sane - 1;
      case 3:
        return sane + byte();
      case 4:
        return static_cast<std::size_t>(wide());
      default:
        return sane;
    }
  }

 private:
  const std::uint8_t* next_;
  const std::uint8_t* end_;
};

// A frame and everything that it names.
class fuzzed_frame {
 public:
  explicit fuzzed_frame(reader& in) {
    api_ = fake_xla::make_api(in.byte() % 8);
    // Shorter than up to error_create, and an error would end the process, as it should.
    constexpr std::array<std::size_t, 3> ends = {offsetof(ffi::api, error_create) + sizeof(void*),
                                                 fake_xla::size_before_stream,
                                                 fake_xla::size_before_device_ordinal};
    if (const std::size_t kind = in.fault(3); kind != 0) api_.struct_size = ends[kind - 1];
    context_.ordinal = in.byte() - 1;
    context_.stream = this;
    if (in.fault(1) != 0) context_.ordinal_error = "no device";
    if (in.fault(1) != 0) context_.stream_error = "no stream";

    frame_.struct_size = in.struct_size(offsetof(ffi::call_frame, future));
    frame_.api = &api_;
    frame_.ctx = reinterpret_cast<ffi::invoke_context*>(&context_);
    frame_.stage = ffi::stage_execute;
    if (in.fault(1) != 0) frame_.stage = static_cast<ffi::execution_stage>(in.byte() % 7 - 1);
    extend(in);

    frame_.args.struct_size = in.struct_size(sizeof(frame_.args));
    frame_.args.size = fill(in, operands_);
    frame_.args.types = in.fault(1) != 0 ? nullptr : types<ffi::argument_type>(operands_);
    frame_.args.args = in.fault(1) != 0 ? nullptr : operands_.entries.data();

    frame_.rets.struct_size = in.struct_size(sizeof(frame_.rets));
    frame_.rets.size = fill(in, results_);
    frame_.rets.types = in.fault(1) != 0 ? nullptr : types<ffi::return_type>(results_);
    frame_.rets.rets = in.fault(1) != 0 ? nullptr : results_.entries.data();

    fill_attributes(in);
  }
  fuzzed_frame(const fuzzed_frame&) = delete;
  fuzzed_frame& operator=(const fuzzed_frame&) = delete;

  ffi::call_frame& frame() { return frame_; }
  [[nodiscard]] bool asks_for_metadata() const { return asks_for_metadata_; }

 private:
  struct buffer_list {
    std::deque<ffi::buffer> buffers;
    std::deque<std::vector<std::int64_t>> extents;
    std::vector<int> types;
    std::vector<void*> entries;
  };

  // Both of XLA's enumerations are an int in memory; the one asked for is made from it.
  template <class Type>
  Type* types(const buffer_list& list) {
    static_assert(sizeof(Type) == sizeof(int));
    std::vector<Type>* out = nullptr;
    if constexpr (std::is_same_v<Type, ffi::argument_type>) {
      out = &operand_types_;
    } else {
      out = &result_types_;
    }
    for (const int type : list.types) out->push_back(static_cast<Type>(type));
    return out->data();
  }

  static std::int64_t fill(reader& in, buffer_list& list) {
    const std::size_t count = in.byte() % 17;
    for (std::size_t i = 0; i < count; ++i) {
      ffi::buffer& b = list.buffers.emplace_back();
      b.struct_size = in.struct_size(sizeof(b));
      constexpr std::array<int, 6> odd = {0, 17, 34, -1, 255, 1 << 20};
      const std::uint8_t type = in.byte();
      b.dtype = type < 0xf0 ? 1 + type % 33 : odd[type % odd.size()];
      std::vector<std::int64_t>& extents = list.extents.emplace_back();
      for (int n = in.byte() % 33; n > 0; --n) extents.push_back(in.extent());
      b.rank = static_cast<std::int64_t>(extents.size());
      if (in.fault(1) != 0) b.rank = -b.rank - 1;
      b.dims = in.fault(1) != 0 ? nullptr : extents.data();
      b.data = in.fault(1) != 0 ? nullptr : &b;  // never read
      list.types.push_back(in.fault(1) != 0 ? in.byte() - 1 : 1);
      list.entries.push_back(in.fault(1) != 0 ? nullptr : &b);
    }
    switch (in.fault(3)) {
      case 1:
        return -1 - in.byte();
      case 2:
        return (std::int64_t{1} << 20) + 1 + in.byte();
      case 3:
        return std::numeric_limits<std::int64_t>::max();
      default:
        return static_cast<std::int64_t>(count);
    }
  }

  void fill_attributes(reader& in) {
    add_string(in, "spec", "the spec");
    add_scalar(in, "key", 5, 1);
    for (int n = in.byte() % 5; n > 0; --n) {
      std::string name = in.text(in.byte() % 6);
      switch (in.byte() % 5) {
        case 4:
          add_array(in, std::move(name));
          break;
        case 0:
          add_scalar(in, std::move(name), in.byte(), in.wide());
          break;
        case 1:
          add_string(in, std::move(name), in.text(in.byte() % 9));
          break;
        case 2:
          add(in, std::move(name), ffi::attribute_dictionary, &frame_.attrs);
          break;
        default:
          add(in, std::move(name), static_cast<ffi::attribute_type>(in.byte() + 5), nullptr);
      }
    }
    frame_.attrs.struct_size = in.struct_size(sizeof(frame_.attrs));
    frame_.attrs.size = static_cast<std::int64_t>(attribute_values_.size());
    if (in.fault(1) != 0) frame_.attrs.size = in.byte() % 3 - 1;
    frame_.attrs.types = in.fault(1) != 0 ? nullptr : attribute_types_.data();
    frame_.attrs.names = in.fault(1) != 0 ? nullptr : attribute_names_.data();
    frame_.attrs.attrs = in.fault(1) != 0 ? nullptr : attribute_values_.data();
  }

  void add(reader& in, std::string name, ffi::attribute_type type, void* value) {
    attribute_types_.push_back(type);
    attribute_names_.push_back(in.fault(1) != 0 ? nullptr : &span(in, std::move(name)));
    attribute_values_.push_back(in.fault(1) != 0 ? nullptr : value);
  }
  void add_string(reader& in, std::string name, std::string value) {
    add(in, std::move(name), ffi::attribute_string, &span(in, std::move(value)));
  }
  void add_scalar(reader& in, std::string name, int type, std::int64_t value) {
    // Room for every element type, as XLA gives it.
    std::array<std::int64_t, 2>& number = numbers_.emplace_back();
    number[0] = value;
    ffi::scalar& s = scalars_.emplace_back();
    s.dtype = in.fault(1) != 0 ? in.byte() : type;
    s.value = in.fault(1) != 0 ? nullptr : number.data();
    add(in, std::move(name), ffi::attribute_scalar, &s);
  }
  void add_array(reader& in, std::string name) {
    // As many elements of the widest type as it can say.
    static std::array<std::int64_t, 2 * 16> elements{};
    ffi::array& a = arrays_.emplace_back();
    a.dtype = in.byte();
    a.size = in.fault(1) != 0 ? static_cast<std::size_t>(in.wide()) | std::size_t{1} << 62
                              : in.byte() % 17U;
    a.data = in.fault(1) != 0 ? nullptr : elements.data();
    add(in, std::move(name), ffi::attribute_array, &a);
  }
  ffi::byte_span& span(reader& in, std::string value) {
    const std::string& kept = texts_.emplace_back(std::move(value));
    return spans_.emplace_back(
        ffi::byte_span{in.fault(1) != 0 ? nullptr : kept.data(), kept.size()});
  }

  // The list of extensions: none, unknown ones, a question for metadata.
  void extend(reader& in) {
    for (std::size_t n = in.fault(3); n > 0; --n) {
      if (in.byte() % 2 == 0) {
        ffi::extension_base& other = others_.emplace_back();
        other = {in.struct_size(sizeof(other)), static_cast<ffi::extension_type>(in.byte() + 2),
                 frame_.extension_start};
        frame_.extension_start = &other;
      } else {
        ffi::metadata& answer = answers_.emplace_back();
        answer.struct_size = in.struct_size(offsetof(ffi::metadata, traits) + 4);
        ffi::metadata_extension& question = questions_.emplace_back();
        question.base = {in.struct_size(sizeof(question)), ffi::extension_metadata,
                         frame_.extension_start};
        question.metadata = in.fault(1) != 0 ? nullptr : &answer;
        frame_.extension_start = &question.base;
        asks_for_metadata_ = true;
      }
    }
  }

  ffi::api api_{};
  fake_xla::context context_;
  ffi::call_frame frame_{};
  bool asks_for_metadata_ = false;
  std::deque<ffi::extension_base> others_;
  std::deque<ffi::metadata_extension> questions_;
  std::deque<ffi::metadata> answers_;
  buffer_list operands_;
  buffer_list results_;
  std::vector<ffi::argument_type> operand_types_;
  std::vector<ffi::return_type> result_types_;
  std::vector<ffi::attribute_type> attribute_types_;
  std::vector<ffi::byte_span*> attribute_names_;
  std::vector<void*> attribute_values_;
  std::deque<ffi::byte_span> spans_;
  std::deque<std::string> texts_;
  std::deque<ffi::scalar> scalars_;
  std::deque<ffi::array> arrays_;
  std::deque<std::array<std::int64_t, 2>> numbers_;
};

void check_buffers(std::span<const any_buffer> buffers, void** entries) {
  for (std::size_t i = 0; i < buffers.size(); ++i) {
    const any_buffer& b = buffers[i];
    const auto& raw = *static_cast<const ffi::buffer*>(entries[i]);
    require(b.data == raw.data && b.shape.data() == raw.dims, "another buffer's memory");
    require(static_cast<std::int64_t>(b.rank()) == raw.rank, "another rank");
    require(static_cast<int>(b.dtype) == raw.dtype && bit_width(b.dtype) > 0, "another type");
    const bool negative = std::any_of(b.shape.begin(), b.shape.end(), [](auto n) { return n < 0; });
    require(!negative, "a negative extent");
    require(b.size() == 0 || b.data != nullptr, "elements without memory");
    require(b.size() == 0 || b.size_bytes() > 0, "elements without bytes");
    require(b.size_bytes() <= std::numeric_limits<std::size_t>::max() / 2, "too many bytes");
  }
}

const ffi::call_frame* current_frame = nullptr;
int calls = 0;

status inspect(const call& c) {
  ++calls;
  const ffi::call_frame& frame = *current_frame;
  require(static_cast<std::int64_t>(c.operands.size()) == frame.args.size, "count of operands");
  require(static_cast<std::int64_t>(c.results.size()) == frame.rets.size, "count of results");
  check_buffers(c.operands, frame.args.args);
  check_buffers(c.results, frame.rets.rets);
  require(c.key == 1, "key");
  return {};
}

// Exported functions, which read all that they get.
namespace jb = jaxbridge;

void probe(jb::buffer_view<const void> x, std::int64_t key, std::string_view spec,
           std::optional<std::span<const double>> a, std::optional<jb::attributes_view> d,
           std::optional<std::complex<float>> c, jb::stream_ref /*stream*/, jb::device /*on*/,
           jb::buffer_view<void> y) {
  ++calls;
  const any_buffer both[] = {x.untyped(), y.untyped()};
  check_buffers(std::span(both, 1), current_frame->args.args);
  check_buffers(std::span(both + 1, 1), current_frame->rets.rets);
  double sum = static_cast<double>(key) + static_cast<double>(spec.size());
  for (const double v : a.value_or(std::span<const double>())) sum += v;
  sum += static_cast<double>(d.value_or(jb::attributes_view()).size());
  sum += static_cast<double>(c.value_or(std::complex<float>()).real());
  static double last;
  std::memcpy(&last, &sum, sizeof(last));
}
JAXBRIDGE_EXPORT(probe, cpu, cuda).parameters("x, key, spec, a, d, c").result(jb::same_as<0>);

template <class T>
void typed(jb::buffer_view<const T, 1> /*x*/, jb::buffer_view<T, 1> /*y*/) {
  ++calls;
}
JAXBRIDGE_EXPORT_AS(typed, cpu, typed<float>, typed<std::int8_t>).parameters("x");

constexpr std::array<ffi::handler*, 6> handlers = {
    &jaxbridge::dispatch::call_cpu,
    &jaxbridge::dispatch::call_cuda,
    &jaxbridge::dispatch::call_cuda_capturable,
    &jaxbridge_ffi_probe_cpu,
    &jaxbridge_ffi_probe_cuda,
    &jaxbridge_ffi_typed_cpu,
};

// Good frames of several sizes, in the bytes that fuzzed_frame reads.
std::vector<std::vector<std::uint8_t>> make_seeds() {
  std::vector<std::vector<std::uint8_t>> out;
  for (std::uint8_t handler = 0; handler < handlers.size(); ++handler) {
    for (const int operands : {0, 1, 3, 16}) {
      for (const int rank : {0, 1, 4, 32}) {
        std::vector<std::uint8_t> seed = {handler, 5, 0, 1, 0, 0, 0, 0, 0};
        for (const int count : {operands, 1}) {
          seed.push_back(0);  // struct_size
          seed.push_back(static_cast<std::uint8_t>(count));
          for (int i = 0; i < count; ++i) {
            seed.push_back(0);                                 // struct_size
            seed.push_back(static_cast<std::uint8_t>(i * 7));  // element type
            seed.push_back(static_cast<std::uint8_t>(rank));
            for (int axis = 0; axis < rank; ++axis) {
              seed.push_back(axis < 4 ? static_cast<std::uint8_t>(axis + i) : std::uint8_t{0});
            }
            seed.insert(seed.end(), 5, 0);  // rank, extents, memory, type, entry
          }
          seed.insert(seed.end(), 3, 0);  // size, types, entries
        }
        seed.insert(seed.end(), 24, 0);  // attributes
        out.push_back(std::move(seed));
      }
    }
  }
  // Questions for metadata.
  out.push_back({0, 3, 0, 1, 0, 0, 0, 0, 0xc0, 1});
  out.push_back({2, 7, 0, 1, 0, 0, 0, 0, 0xc2, 0, 0, 9, 1});
  return out;
}

}  // namespace

extern "C" std::size_t LLVMFuzzerCustomMutator(std::uint8_t* data, std::size_t size,
                                               std::size_t max_size, unsigned int seed) {
  static const std::vector<std::vector<std::uint8_t>> seeds = make_seeds();
  // libFuzzer starts with next to nothing; later a new seed now and then is enough.
  if (size < 8 || seed % 64 == 0) {
    const std::vector<std::uint8_t>& chosen = seeds[seed / 64 % seeds.size()];
    size = std::min(chosen.size(), max_size);
    std::copy_n(chosen.begin(), size, data);
    if (seed % 3 == 0) return size;
  }
  return LLVMFuzzerMutate(data, size, max_size);
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  static const fake_xla::registration target(1, &inspect);
  reader in(data, size);
  ffi::handler* const handler = handlers[in.byte() % handlers.size()];
  fuzzed_frame fuzzed(in);
  current_frame = &fuzzed.frame();
  calls = 0;
  ffi::error* const error = handler(&fuzzed.frame());
  const bool failed = error != nullptr;
  const fake_xla::outcome got = fake_xla::take(error);
  require(!failed || (got.code >= 1 && got.code <= 16 && !got.message.empty()), "an empty error");
  require(calls == 0 || !failed, "a call and an error");
  if (fuzzed.frame().stage == ffi::stage_execute && !fuzzed.asks_for_metadata()) {
    require(failed || calls == 1, "neither a call nor an error");
  }
  require(fake_xla::live_errors() == 0, "an error was left behind");
  return 0;
}
