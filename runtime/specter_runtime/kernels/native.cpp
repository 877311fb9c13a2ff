// What a token takes, on the CPU: products of stored weights with a few rows of activations, experts,
// attention, routing. A plain C interface, loaded by kernels/__init__.py.
//
// * A row of a result does not depend on the rows beside it. In a product it is reduced in one order, whatever the number of rows, the form in which the
//   weights are stored (raw or packed bfloat16) and the number of threads: column c goes to lane
//   c % 32 of 32 partial sums, in ascending order, each step one fused multiply-add; the 32 sums are
//   added as in `add_lanes`. Equal rows give equal bits.
// * Products and their sums are float32; hidden states and the cache may be bfloat16.
//
// Packed bfloat16 (packed_bf16.py has the same in words): a row of M weights is cut into chunks of 32
// columns, 48 bytes each: 32 bytes of sign and fraction, then 16 bytes with two 4-bit codes each, which
// index a table of exponents. Code 15 is an escape: the exponent stands in a list by row.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if defined(__unix__) || defined(__APPLE__)
#include <pthread.h>
#endif

#if defined(__x86_64__)
#include <immintrin.h>
#define SPECTER_X86 1
#define TARGET_AVX2 __attribute__((target("avx2,fma,f16c")))
#endif

namespace {

constexpr int kLanes = 32;        // partial sums of a result; columns of a chunk
constexpr int kChunkBytes = 48;   // of packed bfloat16
constexpr int kRowsPerTask = 64;  // rows of a matrix that a thread takes at a time

enum Kind : int32_t { kBfloat16 = 0, kPackedBfloat16 = 1, kFloat32 = 2, kFloat16 = 3, kGrouped = 4 };

}  // namespace

extern "C" {

// A matrix [rows, columns] as it is stored. kernels/__init__.py mirrors this layout.
struct Matrix {
  const uint8_t* data;          // elements row by row, chunks of packed bfloat16, or codes of groups
  const uint8_t* table;         // packed: 16 exponents, the last unused
  const int32_t* escape_starts; // packed: [rows + 1] into `escapes`
  const int32_t* escapes;       // packed: column | exponent << 24
  const uint16_t* scales;       // groups: bfloat16 [rows, ceil(columns / group_size)]
  const uint8_t* zero_points;   // groups: of the same shape, or null: 2 ** (bits - 1)
  const float* bias;            // [rows], or null
  int32_t rows;
  int32_t columns;
  int32_t kind;
  int32_t bits;                 // groups: of a code, 2, 3, 4 or 8
  int32_t group_size;           // groups: a multiple of 8
  int32_t unused;
};

// An expert of a layer.
struct Expert {
  const Matrix *gate, *up, *down;
  int64_t id;
};

// A router, the norm before it, and how its logits become choices (RoutingConfig in config.py).
struct Gate {
  const Matrix* router;
  const float *norm, *norm_bias;  // as in Attention
  const float* correction_bias;   // [E], or null
  const Matrix* predictor;        // [num_ahead * E, D], or null: see predict
  float eps, norm_min, scaling_factor;
  int32_t scoring;                // 0: softmax, 1: sigmoid, 2: softmax over the chosen
  int32_t num_chosen, norm_topk_prob, n_group, topk_group, group_is_max;
  int32_t num_ahead, num_likely;  // layers that the predictor speaks of; experts named of each
  int32_t unused;
};

// The attention half of a decoder layer; a null pointer is an option that the model does not have.
struct Attention {
  const Matrix *q, *k, *v, *o;
  const float *norm, *norm_bias;  // [D]; with a bias it is a layer norm, else root-mean-square
  const float *q_norm, *k_norm;   // [head_dim], or [heads * head_dim] if norm_is_full
  const float* sinks;             // [heads]
  int32_t num_heads, num_kv_heads, head_dim, num_pairs;
  int32_t norm_is_full, norm_after_rope, interleaved, window;  // window 0: none
  float eps, clip, scaling, residual_multiplier;               // clip 0: none
  int32_t cache_kind, unused;
};

// A decoder layer that specter_pass can run; without attention or gate it cannot.
struct Layer {
  const Attention* attention;
  const Gate* gate;
  void *keys, *values;        // its room in the cache
  float residual_multiplier;  // of what the experts add
  float swiglu_limit;         // as in specter_experts
};

// One row on its way through the layers. Hidden states are of the kind that the cache is; arrays with a
// dimension L hold what each layer's gate found.
struct Pass {
  const Layer* layers;           // [L]
  void *hidden, *normed;         // [D]: before the layer, or behind its attention; the norm of that
  float* probs;                  // [L, E]
  int64_t* selected;             // [L, K]
  float* weights;                // [L, K]
  int64_t* likely;               // [L, J, C]
  float* probabilities;          // [L, J, C]
  const uint64_t* experts;       // [L, E]: the addresses of those in fast memory, else 0
  int32_t* pins;                 // [L, E]: how many use each at present
  int32_t num_layers, num_experts, num_chosen, width;
  int32_t num_ahead, num_likely;  // J and C
  int32_t kind, unused;
};

}  // extern "C"

namespace {

int chunks_of(int columns) { return (columns + kLanes - 1) / kLanes; }

int64_t row_bytes(const Matrix& m) {
  switch (m.kind) {
    case kPackedBfloat16: return int64_t(chunks_of(m.columns)) * kChunkBytes;
    case kFloat32: return int64_t(m.columns) * 4;
    case kGrouped: return int64_t(m.columns + 7) / 8 * m.bits;
    default: return int64_t(m.columns) * 2;
  }
}

// Where the sign and fraction of column c of a chunk lie; its code is in the low or high half of the
// byte of the same index, modulo 16. The order makes the vector decoder's unpacking come out sorted.
int position_of(int c) {
  int half = c / 16, in_half = c % 16, odd = in_half / 8, j = in_half % 8;
  int lane = j / 4, pair = j % 4;
  return lane * 16 + half * 8 + pair * 2 + odd;
}

// ---- threads --------------------------------------------------------------------------------------

// Runs numbered tasks on the calling thread and its helpers. Helpers spin for a moment after a job,
// since the next one mostly follows at once, and then sleep.
class Pool {
 public:
  static Pool& get() {
    static Pool* pool = [] {  // never destroyed: helpers may outlive static destructors
      Pool* made = new Pool();
#if defined(__unix__) || defined(__APPLE__)
      pthread_atfork(nullptr, nullptr, [] { get().forget_helpers(); });
#endif
      return made;
    }();
    return *pool;
  }

  void resize(int num_threads) {
    std::lock_guard<std::mutex> lock(mutex_);
    stop_helpers();
    for (int i = 1; i < num_threads; ++i) helpers_.emplace_back([this] { help(); });
  }

  int num_threads() { return int(helpers_.size()) + 1; }

  template <class Task>
  void run(int num_tasks, const Task& task) {
    if (num_tasks <= 1 || helpers_.empty()) {
      for (int i = 0; i < num_tasks; ++i) task(i);
      return;
    }
    std::lock_guard<std::mutex> lock(mutex_);
    call_ = [](const void* t, int i) { (*static_cast<const Task*>(t))(i); };
    context_ = &task;
    num_tasks_ = num_tasks;
    next_.store(0, std::memory_order_relaxed);
    busy_.store(int(helpers_.size()), std::memory_order_relaxed);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    work();
    for (int spins = 0; busy_.load(std::memory_order_acquire) != 0; ++spins) pause(spins);
  }

 private:
  void work() {
    for (int i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < num_tasks_;) call_(context_, i);
  }

  void help() {
    uint32_t seen = started_.load(std::memory_order_acquire);
    for (;;) {
      uint32_t now = generation_.load(std::memory_order_acquire);
      for (int spins = 0; now == seen && spins < kSpins; ++spins) {
        pause(spins);
        now = generation_.load(std::memory_order_acquire);
      }
      while (now == seen) {
        generation_.wait(seen, std::memory_order_acquire);
        now = generation_.load(std::memory_order_acquire);
      }
      seen = now;
      if (stopping_.load(std::memory_order_acquire)) return;
      work();
      busy_.fetch_sub(1, std::memory_order_release);
    }
  }

  void stop_helpers() {
    if (helpers_.empty()) return;
    stopping_.store(true, std::memory_order_release);
    generation_.fetch_add(1, std::memory_order_release);
    generation_.notify_all();
    for (std::thread& helper : helpers_) helper.join();
    helpers_.clear();
    stopping_.store(false, std::memory_order_release);
    started_.store(generation_.load(), std::memory_order_release);
  }

  // In a forked child there are no helpers; what is left of them here is let go.
  void forget_helpers() {
    new std::vector<std::thread>(std::move(helpers_));
    helpers_.clear();
    new (&mutex_) std::mutex();  // may have been held by a thread that is no more
    started_.store(generation_.load());
    busy_.store(0);
  }

  // A turn is not offered to others at once: whoever takes it keeps it for a scheduler's slice, many
  // times as long as a task. Only one who waits for a helper that was put off its core gives way.
  static void pause(int spins) {
#if defined(SPECTER_X86)
    if (spins < kPatience) { _mm_pause(); return; }
#endif
    std::this_thread::yield();
  }

  static constexpr int kSpins = 4000;     // of a helper, before it sleeps: about a tenth of a millisecond
  static constexpr int kPatience = 4000;
  std::mutex mutex_;
  std::vector<std::thread> helpers_;
  std::atomic<uint32_t> generation_{0}, started_{0};
  std::atomic<int> next_{0}, busy_{0};
  std::atomic<bool> stopping_{false};
  void (*call_)(const void*, int) = nullptr;
  const void* context_ = nullptr;
  int num_tasks_ = 0;
};

// ---- one row of weights ---------------------------------------------------------------------------

float from_bits(uint32_t bits) {
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

// Scale and zero point of a group of a row.
struct Group {
  float scale, zero;
};

inline Group group_of(const Matrix& m, int row, int column) {
  const int64_t at = int64_t(row) * ((m.columns + m.group_size - 1) / m.group_size) +
                     column / m.group_size;
  return {from_bits(uint32_t(m.scales[at]) << 16),
          m.zero_points ? float(m.zero_points[at]) : float(1 << (m.bits - 1))};
}

// Up to eight codes, `bits` bytes, as one little-endian number.
inline uint64_t load_codes(const uint8_t* data, int bits) {
  uint64_t codes = 0;
  std::memcpy(&codes, data, bits);
  return codes;
}

float half_to_float(uint16_t half) {
  uint32_t sign = uint32_t(half & 0x8000) << 16, exponent = half >> 10 & 0x1F, fraction = half & 0x3FF;
  if (exponent == 0x1F) return from_bits(sign | 0x7F800000 | fraction << 13);
  if (exponent != 0) return from_bits(sign | (exponent + 112) << 23 | fraction << 13);
  float value = float(fraction) * 0x1p-24f;
  return sign ? -value : value;
}

// The adding up of the partial sums: lanes 8 apart first, as vectors of 8 are added.
float add_lanes(const float* lanes) {
  float eight[8], four[4];
  for (int i = 0; i < 8; ++i) eight[i] = (lanes[i] + lanes[i + 8]) + (lanes[i + 16] + lanes[i + 24]);
  for (int i = 0; i < 4; ++i) four[i] = eight[i] + eight[i + 4];
  return (four[0] + four[2]) + (four[1] + four[3]);
}

// Puts right one weight of a widened row.
inline void patch_escape(const uint8_t* data, uint32_t escape, float* out) {
  const int column = int(escape & 0xFFFFFF);
  const uint32_t s = data[column / kLanes * kChunkBytes + position_of(column % kLanes)];
  out[column] = from_bits((s & 0x80) << 24 | (escape >> 24) << 23 | (s & 0x7F) << 16);
}

void patch_escapes(const Matrix& m, int row, float* out) {
  for (int32_t i = m.escape_starts[row]; i < m.escape_starts[row + 1]; ++i)
    patch_escape(m.data + row * row_bytes(m), uint32_t(m.escapes[i]), out);
}

// Widens a row to float32; `out` has room for whole chunks, what is behind the last column is 0.
void widen_row_generic(const Matrix& m, int row, float* out) {
  const uint8_t* data = m.data + row * row_bytes(m);
  for (int c = 0; c < m.columns; ++c) {
    if (m.kind == kPackedBfloat16) {
      const uint8_t* chunk = data + c / kLanes * kChunkBytes;
      int p = position_of(c % kLanes);
      uint32_t s = chunk[p], code = chunk[kLanes + p % 16] >> (p < 16 ? 0 : 4) & 0xF;
      uint32_t exponent = m.table[code];
      out[c] = from_bits((s & 0x80) << 24 | exponent << 23 | (s & 0x7F) << 16);
    } else if (m.kind == kGrouped) {
      Group group = group_of(m, row, c);
      uint64_t codes = load_codes(data + int64_t(c / 8) * m.bits, m.bits);
      out[c] = (float(codes >> (c % 8 * m.bits) & ((1u << m.bits) - 1)) - group.zero) * group.scale;
    } else if (m.kind == kFloat32) {
      std::memcpy(out + c, data + 4 * c, 4);
    } else {
      uint16_t bits;
      std::memcpy(&bits, data + 2 * c, 2);
      out[c] = m.kind == kFloat16 ? half_to_float(bits) : from_bits(uint32_t(bits) << 16);
    }
  }
  for (int c = m.columns; c < chunks_of(m.columns) * kLanes; ++c) out[c] = 0.0f;
  if (m.kind == kPackedBfloat16) patch_escapes(m, row, out);
}

float dot_generic(const float* weights, const float* x, int num_chunks) {
  float lanes[kLanes] = {};
  for (int i = 0; i < num_chunks; ++i)
    for (int lane = 0; lane < kLanes; ++lane)
      lanes[lane] = std::fma(weights[i * kLanes + lane], x[i * kLanes + lane], lanes[lane]);
  return add_lanes(lanes);
}

#if defined(SPECTER_X86)

struct Decoder {
  __m256i high, low;  // exponents' upper seven bits, and their last as the top bit of the low byte
};

TARGET_AVX2 inline Decoder make_decoder(const uint8_t* table) {
  __m128i exponents = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
  __m128i high = _mm_and_si128(_mm_srli_epi16(exponents, 1), _mm_set1_epi8(0x7F));
  __m128i low = _mm_slli_epi16(_mm_and_si128(exponents, _mm_set1_epi8(1)), 7);
  return {_mm256_broadcastsi128_si256(high), _mm256_broadcastsi128_si256(low)};
}

// 48 bytes to 4 vectors of 8 columns in ascending order.
TARGET_AVX2 inline void widen_chunk(const uint8_t* chunk, const Decoder& d, __m256 out[4]) {
  const __m256i top = _mm256_set1_epi8(char(0x80)), rest = _mm256_set1_epi8(0x7F);
  const __m256i upper = _mm256_set1_epi32(int(0xFFFF0000));
  __m256i s = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(chunk));
  __m128i pairs = _mm_loadu_si128(reinterpret_cast<const __m128i*>(chunk + kLanes));
  __m256i codes = _mm256_srlv_epi32(_mm256_broadcastsi128_si256(pairs),
                                    _mm256_setr_epi32(0, 0, 0, 0, 4, 4, 4, 4));
  codes = _mm256_and_si256(codes, _mm256_set1_epi8(0x0F));
  __m256i high = _mm256_or_si256(_mm256_and_si256(s, top), _mm256_shuffle_epi8(d.high, codes));
  __m256i low = _mm256_or_si256(_mm256_and_si256(s, rest), _mm256_shuffle_epi8(d.low, codes));
  __m256i first = _mm256_unpacklo_epi8(low, high), second = _mm256_unpackhi_epi8(low, high);
  out[0] = _mm256_castsi256_ps(_mm256_slli_epi32(first, 16));
  out[1] = _mm256_castsi256_ps(_mm256_and_si256(first, upper));
  out[2] = _mm256_castsi256_ps(_mm256_slli_epi32(second, 16));
  out[3] = _mm256_castsi256_ps(_mm256_and_si256(second, upper));
}

TARGET_AVX2 inline __m256 widen_bf16(const uint8_t* data) {
  __m128i bits = _mm_loadu_si128(reinterpret_cast<const __m128i*>(data));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(bits), 16));
}

TARGET_AVX2 inline float add_vectors(__m256 a, __m256 b, __m256 c, __m256 d) {
  __m256 eight = _mm256_add_ps(_mm256_add_ps(a, b), _mm256_add_ps(c, d));
  __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
  __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
  return _mm_cvtss_f32(_mm_add_ss(two, _mm_shuffle_ps(two, two, 1)));
}

TARGET_AVX2 float dot_avx2(const float* weights, const float* x, int num_chunks) {
  __m256 a = _mm256_setzero_ps(), b = a, c = a, d = a;
  for (int i = 0; i < num_chunks; ++i, weights += kLanes, x += kLanes) {
    a = _mm256_fmadd_ps(_mm256_loadu_ps(weights), _mm256_loadu_ps(x), a);
    b = _mm256_fmadd_ps(_mm256_loadu_ps(weights + 8), _mm256_loadu_ps(x + 8), b);
    c = _mm256_fmadd_ps(_mm256_loadu_ps(weights + 16), _mm256_loadu_ps(x + 16), c);
    d = _mm256_fmadd_ps(_mm256_loadu_ps(weights + 24), _mm256_loadu_ps(x + 24), d);
  }
  return add_vectors(a, b, c, d);
}

// The same for two rows of activations at a time: the weights are loaded once.
TARGET_AVX2 void dot_pair_avx2(const float* weights, const float* x, const float* y, int num_chunks,
                               float* x_out, float* y_out) {
  __m256 a = _mm256_setzero_ps(), b = a, c = a, d = a, e = a, f = a, g = a, h = a;
  for (int i = 0; i < num_chunks; ++i, weights += kLanes, x += kLanes, y += kLanes) {
    __m256 w = _mm256_loadu_ps(weights);
    a = _mm256_fmadd_ps(w, _mm256_loadu_ps(x), a);
    e = _mm256_fmadd_ps(w, _mm256_loadu_ps(y), e);
    w = _mm256_loadu_ps(weights + 8);
    b = _mm256_fmadd_ps(w, _mm256_loadu_ps(x + 8), b);
    f = _mm256_fmadd_ps(w, _mm256_loadu_ps(y + 8), f);
    w = _mm256_loadu_ps(weights + 16);
    c = _mm256_fmadd_ps(w, _mm256_loadu_ps(x + 16), c);
    g = _mm256_fmadd_ps(w, _mm256_loadu_ps(y + 16), g);
    w = _mm256_loadu_ps(weights + 24);
    d = _mm256_fmadd_ps(w, _mm256_loadu_ps(x + 24), d);
    h = _mm256_fmadd_ps(w, _mm256_loadu_ps(y + 24), h);
  }
  *x_out = add_vectors(a, b, c, d);
  *y_out = add_vectors(e, f, g, h);
}

// Escapes of a row come in ascending order of their columns (specter_locate_escapes).
TARGET_AVX2 float dot_packed_avx2(const Matrix& m, int row, const float* x) {
  const uint8_t* data = m.data + row * row_bytes(m);
  const Decoder decoder = make_decoder(m.table);
  const int num_chunks = chunks_of(m.columns);
  int32_t escape = m.escape_starts[row];
  const int32_t last_escape = m.escape_starts[row + 1];
  __m256 a = _mm256_setzero_ps(), b = a, c = a, d = a;
  __m256 w[4];
  const auto add = [&](int i) TARGET_AVX2 {
    a = _mm256_fmadd_ps(w[0], _mm256_loadu_ps(x + i * kLanes), a);
    b = _mm256_fmadd_ps(w[1], _mm256_loadu_ps(x + i * kLanes + 8), b);
    c = _mm256_fmadd_ps(w[2], _mm256_loadu_ps(x + i * kLanes + 16), c);
    d = _mm256_fmadd_ps(w[3], _mm256_loadu_ps(x + i * kLanes + 24), d);
  };
  for (int i = 0;; ++i) {
    const int stop = escape < last_escape ? (m.escapes[escape] & 0xFFFFFF) / kLanes : num_chunks;
    for (; i < stop; ++i) {
      _mm_prefetch(reinterpret_cast<const char*>(data + i * kChunkBytes + 1024), _MM_HINT_T0);
      widen_chunk(data + i * kChunkBytes, decoder, w);
      add(i);
    }
    if (i == num_chunks) return add_vectors(a, b, c, d);
    float patched[kLanes];
    widen_chunk(data + i * kChunkBytes, decoder, w);
    for (int j = 0; j < 4; ++j) _mm256_storeu_ps(patched + 8 * j, w[j]);
    for (; escape < last_escape && (m.escapes[escape] & 0xFFFFFF) / kLanes == i; ++escape)
      patch_escape(data, uint32_t(m.escapes[escape]), patched - i * kLanes);
    for (int j = 0; j < 4; ++j) w[j] = _mm256_loadu_ps(patched + 8 * j);
    add(i);
  }
}

TARGET_AVX2 float dot_bf16_avx2(const uint8_t* data, const float* x, int num_chunks) {
  __m256 a = _mm256_setzero_ps(), b = a, c = a, d = a;
  for (int i = 0; i < num_chunks; ++i, data += 2 * kLanes, x += kLanes) {
    _mm_prefetch(reinterpret_cast<const char*>(data + 1024), _MM_HINT_T0);
    a = _mm256_fmadd_ps(widen_bf16(data), _mm256_loadu_ps(x), a);
    b = _mm256_fmadd_ps(widen_bf16(data + 16), _mm256_loadu_ps(x + 8), b);
    c = _mm256_fmadd_ps(widen_bf16(data + 32), _mm256_loadu_ps(x + 16), c);
    d = _mm256_fmadd_ps(widen_bf16(data + 48), _mm256_loadu_ps(x + 24), d);
  }
  return add_vectors(a, b, c, d);
}

// Eight codes as integers.
TARGET_AVX2 inline __m256i expand_codes(const uint8_t* data, int bits) {
  if (bits == 8)
    return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(data)));
  const __m256i shifts = _mm256_mullo_epi32(_mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7),
                                            _mm256_set1_epi32(bits));
  __m256i codes = _mm256_srlv_epi32(_mm256_set1_epi32(int(load_codes(data, bits))), shifts);
  return _mm256_and_si256(codes, _mm256_set1_epi32((1 << bits) - 1));
}

// Calls use(i, weights) for the eight columns 8 i .. 8 i + 7 of a row of groups, for all whole eights.
template <int kBits, class Use>
TARGET_AVX2 inline __attribute__((always_inline)) void each_eight(const Matrix& m, int row,
                                                                  const Use& use) {
  const uint8_t* data = m.data + row * row_bytes(m);
  const int num_eights = m.columns / 8, per_group = m.group_size / 8;
  for (int start = 0; start < num_eights; start += per_group) {
    const Group group = group_of(m, row, 8 * start);
    const __m256 scale = _mm256_set1_ps(group.scale), zero = _mm256_set1_ps(group.zero);
    const int stop = start + per_group < num_eights ? start + per_group : num_eights;
    for (int i = start; i < stop; ++i) {
      __m256 codes = _mm256_cvtepi32_ps(expand_codes(data + i * kBits, kBits));
      use(i, _mm256_mul_ps(_mm256_sub_ps(codes, zero), scale));
    }
  }
}

template <int kBits>
TARGET_AVX2 void widen_groups(const Matrix& m, int row, float* out) {
  each_eight<kBits>(m, row, [&](int i, __m256 w) TARGET_AVX2 { _mm256_storeu_ps(out + 8 * i, w); });
}

template <int kBits>
TARGET_AVX2 float dot_groups(const Matrix& m, int row, const float* x) {
  __m256 sums[4] = {_mm256_setzero_ps(), _mm256_setzero_ps(), _mm256_setzero_ps(),
                    _mm256_setzero_ps()};
  each_eight<kBits>(m, row, [&](int i, __m256 w) TARGET_AVX2 {
    sums[i % 4] = _mm256_fmadd_ps(w, _mm256_loadu_ps(x + 8 * i), sums[i % 4]);
  });
  return add_vectors(sums[0], sums[1], sums[2], sums[3]);
}

TARGET_AVX2 void widen_row_avx2(const Matrix& m, int row, float* out) {
  const uint8_t* data = m.data + row * row_bytes(m);
  if (m.kind == kPackedBfloat16) {
    Decoder decoder = make_decoder(m.table);
    for (int i = 0; i < chunks_of(m.columns); ++i, data += kChunkBytes, out += kLanes) {
      __m256 w[4];
      widen_chunk(data, decoder, w);
      for (int j = 0; j < 4; ++j) _mm256_storeu_ps(out + 8 * j, w[j]);
    }
    patch_escapes(m, row, out - chunks_of(m.columns) * kLanes);
    return;
  }
  if (m.kind == kGrouped && m.columns % 8 == 0) {
    for (int c = m.columns; c < chunks_of(m.columns) * kLanes; ++c) out[c] = 0.0f;
    switch (m.bits) {
      case 2: return widen_groups<2>(m, row, out);
      case 3: return widen_groups<3>(m, row, out);
      case 4: return widen_groups<4>(m, row, out);
      default: return widen_groups<8>(m, row, out);
    }
  }
  if (m.kind == kBfloat16 && m.columns % kLanes == 0) {
    for (int c = 0; c < m.columns; c += 8) _mm256_storeu_ps(out + c, widen_bf16(data + 2 * c));
    return;
  }
  if (m.kind == kFloat16 && m.columns % kLanes == 0) {
    for (int c = 0; c < m.columns; c += 8)
      _mm256_storeu_ps(out + c, _mm256_cvtph_ps(_mm_loadu_si128(
                                    reinterpret_cast<const __m128i*>(data + 2 * c))));
    return;
  }
  widen_row_generic(m, row, out);
}

bool has_avx2() {
  static const bool has = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") &&
                          __builtin_cpu_supports("f16c");
  return has;
}

#endif  // SPECTER_X86

std::atomic<bool> force_generic{false};

bool use_avx2() {
#if defined(SPECTER_X86)
  return has_avx2() && !force_generic.load(std::memory_order_relaxed);
#else
  return false;
#endif
}

void widen_row(const Matrix& m, int row, float* out) {
#if defined(SPECTER_X86)
  if (use_avx2()) return widen_row_avx2(m, row, out);
#endif
  widen_row_generic(m, row, out);
}

void dots(const float* weights, const float* x, int64_t x_stride, int num_rows, int num_chunks,
          float bias, float* out, int64_t out_stride) {
  int r = 0;
#if defined(SPECTER_X86)
  for (; use_avx2() && r < num_rows; r += 2) {
    if (r + 1 == num_rows) {
      out[r * out_stride] = dot_avx2(weights, x + r * x_stride, num_chunks) + bias;
      return;
    }
    float first, second;
    dot_pair_avx2(weights, x + r * x_stride, x + (r + 1) * x_stride, num_chunks, &first, &second);
    out[r * out_stride] = first + bias;
    out[(r + 1) * out_stride] = second + bias;
  }
#endif
  for (; r < num_rows; ++r)
    out[r * out_stride] = dot_generic(weights, x + r * x_stride, num_chunks) + bias;
}

// Row `row` of the matrix times `num_rows` rows of x (padded to whole chunks), plus its bias.
void row_products(const Matrix& m, int row, const float* x, int64_t x_stride, int num_rows,
                  float* scratch, float* out, int64_t out_stride) {
  const int num_chunks = chunks_of(m.columns);
  const float bias = m.bias ? m.bias[row] : 0.0f;
#if defined(SPECTER_X86)
  if (num_rows == 1 && use_avx2()) {
    const uint8_t* data = m.data + row * row_bytes(m);
    if (m.kind == kPackedBfloat16) {
      out[0] = dot_packed_avx2(m, row, x) + bias;
      return;
    }
    if (m.kind == kGrouped && m.columns % 8 == 0) {
      float sum;
      switch (m.bits) {
        case 2: sum = dot_groups<2>(m, row, x); break;
        case 3: sum = dot_groups<3>(m, row, x); break;
        case 4: sum = dot_groups<4>(m, row, x); break;
        default: sum = dot_groups<8>(m, row, x);
      }
      out[0] = sum + bias;
      return;
    }
    if (m.kind == kBfloat16 && m.columns % kLanes == 0) {
      out[0] = dot_bf16_avx2(data, x, num_chunks) + bias;
      return;
    }
  }
#endif
  if (m.kind == kFloat32 && m.columns % kLanes == 0) {  // is wide already
    const uint8_t* data = m.data + row * row_bytes(m);
    dots(reinterpret_cast<const float*>(data), x, x_stride, num_rows, num_chunks, bias, out,
         out_stride);
    return;
  }
  widen_row(m, row, scratch);
  dots(scratch, x, x_stride, num_rows, num_chunks, bias, out, out_stride);
}

// Rows of activations, copied into whole chunks with zeros behind the last column.
struct Padded {
  Padded(int num_rows, int columns)
      : stride(int64_t(chunks_of(columns)) * kLanes), data(size_t(num_rows) * stride, 0.0f) {}
  int64_t stride;
  std::vector<float> data;
};

int tasks_of(const Matrix& m) { return (m.rows + kRowsPerTask - 1) / kRowsPerTask; }

// Calls use(n, scratch) for the rows n of a task; scratch has room for a widened row.
template <class Use>
void each_row(const Matrix& m, int task, const Use& use) {
  thread_local std::vector<float> scratch;
  scratch.resize(size_t(chunks_of(m.columns)) * kLanes);
  const int stop = (task + 1) * kRowsPerTask < m.rows ? (task + 1) * kRowsPerTask : m.rows;
  for (int n = task * kRowsPerTask; n < stop; ++n) use(n, scratch.data());
}

// exp(x) within 2 units in the last place. Source: Cephes expf (range reduction and polynomial).
inline float exp_fast(float x) {
  x = std::fmin(std::fmax(x, -87.0f), 88.0f);
  float n = (x * 1.44269504f + 12582912.0f) - 12582912.0f;  // to the nearest integer
  float r = (x - n * 0.693359375f) - n * -2.12194440e-4f;
  float p = 1.9875691500e-4f;
  p = p * r + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  float scale = from_bits(uint32_t(int32_t(n) + 127) << 23);
  return (p * r * r + r + 1.0f) * scale;
}

float silu(float gate) { return gate / (1.0f + exp_fast(-gate)); }

// gpt-oss: clamped gate and up, alpha 1.702, up shifted by one.
float clamped_swiglu(float gate, float up, float limit) {
  gate = std::fmin(gate, limit);
  up = std::fmax(std::fmin(up, limit), -limit);
  return gate / (1.0f + exp_fast(-1.702f * gate)) * (up + 1.0f);
}

// ---- routing --------------------------------------------------------------------------------------

void softmax(const float* logits, int count, float* out) {
  float top = logits[0];
  for (int i = 1; i < count; ++i) top = std::fmax(top, logits[i]);
  double total = 0.0;
  for (int i = 0; i < count; ++i) total += out[i] = exp_fast(logits[i] - top);
  for (int i = 0; i < count; ++i) out[i] = float(out[i] / total);
}

// The places of the `num_chosen` largest values, largest first, of equals the first. There are always
// so many places, NaN or not.
void largest(const float* values, int count, int num_chosen, int64_t* out) {
  std::vector<bool> taken(count);
  for (int k = 0; k < num_chosen; ++k) {
    int best = -1;
    for (int i = 0; i < count; ++i)
      if (!taken[i] && (best < 0 || values[i] > values[best])) best = i;
    taken[best] = true;
    out[k] = best;
  }
}

// Rules out the experts of all but the best groups. Sources: arXiv 2405.04434, section 2.2.2 (a group
// counts as its best expert), arXiv 2412.19437, section 2.1.2 (as its best two).
void keep_best_groups(const Gate& gate, float* choice, int num_experts) {
  if (gate.topk_group >= gate.n_group) return;
  const int size = num_experts / gate.n_group, num_best = gate.group_is_max || size == 1 ? 1 : 2;
  std::vector<float> scores(gate.n_group);
  std::vector<int64_t> best(num_best), kept(gate.topk_group);
  for (int g = 0; g < gate.n_group; ++g) {
    largest(choice + g * size, size, num_best, best.data());
    for (int64_t i : best) scores[g] += choice[g * size + i];
  }
  largest(scores.data(), gate.n_group, gate.topk_group, kept.data());
  for (int g = 0; g < gate.n_group; ++g)
    if (std::find(kept.begin(), kept.end(), g) == kept.end())
      std::fill(choice + g * size, choice + (g + 1) * size, -INFINITY);
}

// One row; see select_experts in moe.py.
void select_experts(const Gate& gate, const float* logits, float* probs, int64_t* selected,
                    float* weights) {
  const int num_experts = gate.router->rows, num_chosen = gate.num_chosen;
  softmax(logits, num_experts, probs);
  std::vector<float> scores(probs, probs + num_experts);
  if (gate.scoring == 1)
    for (int i = 0; i < num_experts; ++i) scores[i] = 1.0f / (1.0f + exp_fast(-logits[i]));
  if (gate.scoring == 2) scores.assign(logits, logits + num_experts);
  std::vector<float> choice = scores;
  if (gate.correction_bias && gate.scoring != 2)
    for (int i = 0; i < num_experts; ++i) choice[i] += gate.correction_bias[i];
  if (gate.scoring != 2) keep_best_groups(gate, choice.data(), num_experts);
  largest(choice.data(), num_experts, num_chosen, selected);
  for (int k = 0; k < num_chosen; ++k) weights[k] = scores[selected[k]];
  if (gate.scoring == 2) softmax(weights, num_chosen, weights);
  if (gate.norm_topk_prob) {
    float sum = 0.0f;
    for (int k = 0; k < num_chosen; ++k) sum += weights[k];
    sum = std::fmax(sum, gate.norm_min);
    for (int k = 0; k < num_chosen; ++k) weights[k] /= sum;
  }
  for (int k = 0; k < num_chosen; ++k) weights[k] *= gate.scaling_factor;
}

// The likeliest experts of a later layer and the probability of each that it is chosen, from predicted
// scores: sigmoid(score - border), where the border lies between the last that would be chosen and the
// first that would not. There are more experts than are chosen.
void predict(const float* scores, int num_experts, int num_chosen, int num_likely, int64_t* likely,
             float* probabilities) {
  largest(scores, num_experts, num_likely, likely);
  const float border = 0.5f * (scores[likely[num_chosen - 1]] + scores[likely[num_chosen]]);
  for (int i = 0; i < num_likely; ++i)
    probabilities[i] = 1.0f / (1.0f + exp_fast(border - scores[likely[i]]));
}

// ---- attention --------------------------------------------------------------------------------------

// What a norm takes off a row, and multiplies the rest by: layer norm if `is_centered`, else
// root-mean-square norm.
struct Scaling {
  float center, scale;
};

Scaling scaling_of(const float* x, bool is_centered, float eps, int width) {
  double mean = 0.0, square = 0.0;
  for (int c = 0; is_centered && c < width; ++c) mean += x[c];
  mean /= width;
  for (int c = 0; c < width; ++c) square += (x[c] - mean) * (x[c] - mean);
  return {float(mean), float(1.0 / std::sqrt(square / width + eps))};
}

void normalize(const float* x, const float* weight, const float* bias, float eps, int width,
               float* out) {
  const Scaling s = scaling_of(x, bias != nullptr, eps, width);
  for (int c = 0; c < width; ++c) {
    out[c] = (x[c] - s.center) * s.scale * weight[c];
    if (bias) out[c] += bias[c];
  }
}

void rotate(float* head, const float* cos, const float* sin, int num_pairs, bool interleaved,
            float* scratch) {
  for (int i = 0; i < num_pairs; ++i) {
    float low = head[interleaved ? 2 * i : i], high = head[interleaved ? 2 * i + 1 : i + num_pairs];
    scratch[i] = low * cos[i] - high * sin[i];
    scratch[i + num_pairs] = high * cos[i] + low * sin[i];
  }
  std::memcpy(head, scratch, sizeof(float) * 2 * num_pairs);
}

// Norm and rotation of all heads of one row of queries or keys.
void prepare_heads(const Attention& a, float* heads, int num_heads, const float* norm,
                   const float* cos, const float* sin, float* scratch) {
  const int width = a.head_dim;
  if (norm && a.norm_is_full) normalize(heads, norm, nullptr, a.eps, num_heads * width, heads);
  if (a.clip > 0)
    for (int c = 0; c < num_heads * width; ++c)
      heads[c] = std::fmin(std::fmax(heads[c], -a.clip), a.clip);
  for (int h = 0; h < num_heads; ++h) {
    float* head = heads + h * width;
    const float* own = norm && !a.norm_is_full ? norm : nullptr;
    if (own && !a.norm_after_rope) normalize(head, own, nullptr, a.eps, width, head);
    rotate(head, cos, sin, a.num_pairs, a.interleaved, scratch);
    if (own && a.norm_after_rope) normalize(head, own, nullptr, a.eps, width, head);
  }
}

uint16_t round_to_bf16(float value) {
  uint32_t bits;
  std::memcpy(&bits, &value, 4);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return uint16_t(bits >> 16 | 0x40);  // stays a NaN
  return uint16_t((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
}

void store_row(const float* row, int width, int kind, void* cache, int64_t at) {
  if (kind == kFloat32) {
    std::memcpy(static_cast<float*>(cache) + at * width, row, sizeof(float) * width);
    return;
  }
  uint16_t* to = static_cast<uint16_t*>(cache) + at * width;
  for (int c = 0; c < width; ++c) to[c] = round_to_bf16(row[c]);
}

// `width` numbers of the cache, or of hidden states, from `at` on, as float32.
inline const float* load_row(const void* cache, int kind, int64_t at, int width, float* scratch) {
  if (kind == kFloat32) return static_cast<const float*>(cache) + at;
  const uint16_t* from = static_cast<const uint16_t*>(cache) + at;
  for (int c = 0; c < width; ++c) scratch[c] = from_bits(uint32_t(from[c]) << 16);
  return scratch;
}

// All query heads of one row that share a key/value head.
inline __attribute__((always_inline)) void attend_group_body(
    const Attention& a, const float* queries, int group, int64_t last, const void* keys,
    const void* values, float* out) {
  const int width = a.head_dim, per_group = a.num_heads / a.num_kv_heads;
  const int64_t first = a.window > 0 && last + 1 > a.window ? last + 1 - a.window : 0;
  const int64_t num_seen = last + 1 - first;
  std::vector<float> scores(size_t(per_group) * num_seen), scratch(width);
  for (int64_t s = 0; s < num_seen; ++s) {
    const float* key =
        load_row(keys, a.cache_kind, ((first + s) * a.num_kv_heads + group) * width, width,
                  scratch.data());
    for (int h = 0; h < per_group; ++h) {
      const float* query = queries + (group * per_group + h) * width;
      float lanes[16] = {};
      int c = 0;
      for (; c + 16 <= width; c += 16)
        for (int lane = 0; lane < 16; ++lane) lanes[lane] += query[c + lane] * key[c + lane];
      float sum = 0.0f;
      for (; c < width; ++c) sum += query[c] * key[c];
      for (int step = 8; step > 0; step /= 2)
        for (int lane = 0; lane < step; ++lane) lanes[lane] += lanes[lane + step];
      scores[h * num_seen + s] = (lanes[0] + sum) * a.scaling;
    }
  }
  for (int h = 0; h < per_group; ++h) {
    float* row = &scores[h * num_seen];
    const int head = group * per_group + h;
    float top = a.sinks ? a.sinks[head] : row[0];
    for (int64_t s = 0; s < num_seen; ++s) top = std::fmax(top, row[s]);
    double total = a.sinks ? double(exp_fast(a.sinks[head] - top)) : 0.0;
    for (int64_t s = 0; s < num_seen; ++s) row[s] = exp_fast(row[s] - top);
    for (int64_t s = 0; s < num_seen; ++s) total += row[s];
    const float scale = float(1.0 / total);
    for (int64_t s = 0; s < num_seen; ++s) row[s] *= scale;
    std::memset(out + head * width, 0, sizeof(float) * width);
  }
  for (int64_t s = 0; s < num_seen; ++s) {
    const float* value =
        load_row(values, a.cache_kind, ((first + s) * a.num_kv_heads + group) * width, width,
                  scratch.data());
    for (int h = 0; h < per_group; ++h) {
      const float share = scores[h * num_seen + s];
      float* to = out + (group * per_group + h) * width;
      for (int c = 0; c < width; ++c) to[c] += share * value[c];
    }
  }
}

void attend_group_generic(const Attention& a, const float* queries, int group, int64_t last,
                          const void* keys, const void* values, float* out) {
  attend_group_body(a, queries, group, last, keys, values, out);
}

#if defined(SPECTER_X86)
TARGET_AVX2 void attend_group_avx2(const Attention& a, const float* queries, int group, int64_t last,
                                   const void* keys, const void* values, float* out) {
  attend_group_body(a, queries, group, last, keys, values, out);
}
#endif

void attend_group(const Attention& a, const float* queries, int group, int64_t last,
                  const void* keys, const void* values, float* out) {
#if defined(SPECTER_X86)
  if (use_avx2()) return attend_group_avx2(a, queries, group, last, keys, values, out);
#endif
  attend_group_generic(a, queries, group, last, keys, values, out);
}

}  // namespace

extern "C" {

int specter_abi() { return 5; }

const char* specter_isa() { return use_avx2() ? "avx2" : "generic"; }

void specter_force_generic(int on) { force_generic.store(on != 0); }

void specter_set_threads(int num_threads) { Pool::get().resize(num_threads); }

// out[r, n] = sum_c m[n, c] * x[r, c] + bias[n]; x has stride x_stride, out has stride m->rows.
void specter_matmul(const Matrix* m, const float* x, int64_t x_stride, int32_t num_rows, float* out) {
  Padded padded(num_rows, m->columns);
  for (int r = 0; r < num_rows; ++r)
    std::memcpy(&padded.data[r * padded.stride], x + r * x_stride, sizeof(float) * m->columns);
  Pool::get().run(tasks_of(*m), [&](int task) {
    each_row(*m, task, [&](int n, float* scratch) {
      row_products(*m, n, padded.data.data(), padded.stride, num_rows, scratch, out + n, m->rows);
    });
  });
}

// Experts, down(silu(gate x) * (up x)) each: out[t, k] = that of the expert selected[t, k], if it is
// among them, for the row t of x, which is of `kind`. limit > 0 is gpt-oss's clamped form.
void specter_experts(const Expert* experts, int32_t num_experts, const void* x, int32_t kind,
                     const int64_t* selected, int32_t num_rows, int32_t num_ranks, float limit,
                     float* out) {
  std::vector<Padded> inputs, inners;
  std::vector<std::vector<int64_t>> places(num_experts);  // t * num_ranks + k
  std::vector<int> first_inner(1, 0), first_outer(1, 0);  // tasks of an expert, before it
  inputs.reserve(num_experts);
  inners.reserve(num_experts);
  for (int i = 0; i < num_experts; ++i) {
    const Expert& e = experts[i];
    for (int64_t place = 0; place < int64_t(num_rows) * num_ranks; ++place)
      if (selected[place] == e.id) places[i].push_back(place);
    const int num_own = int(places[i].size()), width = e.gate->columns;
    Padded& input = inputs.emplace_back(num_own, width);
    inners.emplace_back(num_own, e.down->columns);
    for (int r = 0; r < num_own; ++r) {
      float* to = &input.data[r * input.stride];
      const float* from = load_row(x, kind, places[i][r] / num_ranks * width, width, to);
      if (from != to) std::memcpy(to, from, sizeof(float) * width);
    }
    first_inner.push_back(first_inner[i] + tasks_of(*e.gate));
    first_outer.push_back(first_outer[i] + tasks_of(*e.down));
  }
  Pool::get().run(first_inner[num_experts], [&](int task) {
    int i = 0;
    while (task >= first_inner[i + 1]) ++i;
    const Expert& e = experts[i];
    const int num_own = int(places[i].size());
    Padded &input = inputs[i], &inner = inners[i];
    std::vector<float> g(num_own), u(num_own);
    each_row(*e.gate, task - first_inner[i], [&](int n, float* scratch) {
      row_products(*e.gate, n, input.data.data(), input.stride, num_own, scratch, g.data(), 1);
      row_products(*e.up, n, input.data.data(), input.stride, num_own, scratch, u.data(), 1);
      for (int r = 0; r < num_own; ++r)
        inner.data[r * inner.stride + n] =
            limit > 0 ? clamped_swiglu(g[r], u[r], limit) : silu(g[r]) * u[r];
    });
  });
  Pool::get().run(first_outer[num_experts], [&](int task) {
    int i = 0;
    while (task >= first_outer[i + 1]) ++i;
    const Matrix& down = *experts[i].down;
    const int num_own = int(places[i].size());
    std::vector<float> sums(num_own);
    each_row(down, task - first_outer[i], [&](int n, float* scratch) {
      row_products(down, n, inners[i].data.data(), inners[i].stride, num_own, scratch, sums.data(),
                   1);
      for (int r = 0; r < num_own; ++r) out[places[i][r] * down.rows + n] = sums[r];
    });
  });
}

// out[t] = sum over k of weights[t, k] * outputs[t, k], in ascending order of selected[t, k], of which
// those below 0 are left out; rounded to `kind`.
void specter_combine(const float* outputs, const float* weights, const int64_t* selected,
                     int32_t num_rows, int32_t num_ranks, int32_t width, int32_t kind, void* out) {
  std::vector<float> sum(width);
  std::vector<int> order(num_ranks);
  for (int t = 0; t < num_rows; ++t) {
    const int64_t first = int64_t(t) * num_ranks;
    for (int k = 0; k < num_ranks; ++k) order[k] = k;
    std::sort(order.begin(), order.end(),
              [&](int a, int b) { return selected[first + a] < selected[first + b]; });
    std::fill(sum.begin(), sum.end(), 0.0f);
    for (int k : order) {
      if (selected[first + k] < 0) continue;
      const float weight = weights[first + k], *from = outputs + (first + k) * width;
      for (int c = 0; c < width; ++c) sum[c] += weight * from[c];
    }
    store_row(sum.data(), width, kind, out, t);
  }
}

// Finds the escapes of a packed expert, which begin at `escapes` and have room for `room`, and checks
// them: 0 if all is well, 1 if rows are out of order or too long, 2 if one lies outside its matrix.
int specter_locate_escapes(Matrix* const* matrices, int32_t num_matrices, const int32_t* escapes,
                           int64_t room) {
  for (int i = 0; i < num_matrices; ++i) {
    Matrix& m = *matrices[i];
    if (m.escape_starts[0] != 0) return 1;
    for (int r = 0; r < m.rows; ++r)
      if (m.escape_starts[r + 1] < m.escape_starts[r]) return 1;
    const int64_t count = m.escape_starts[m.rows];
    if (count > room) return 1;
    for (int64_t e = 0; e < count; ++e)
      if ((uint32_t(escapes[e]) & 0xFFFFFF) >= uint32_t(m.columns)) return 2;
    for (int r = 0; r < m.rows; ++r)
      for (int32_t e = m.escape_starts[r] + 1; e < m.escape_starts[r + 1]; ++e)
        if ((escapes[e] & 0xFFFFFF) <= (escapes[e - 1] & 0xFFFFFF)) return 1;
    m.escapes = escapes;
    escapes += count;
    room -= count;
  }
  return 0;
}

// out = norm(x), row by row: [num_rows, width].
void specter_normalize(const float* x, const float* weight, const float* bias, float eps,
                       int32_t num_rows, int32_t width, float* out) {
  for (int r = 0; r < num_rows; ++r)
    normalize(x + int64_t(r) * width, weight, bias, eps, width, out + int64_t(r) * width);
}

// Residual plus attention for rows at the positions start .. start + num_rows - 1, each of which sees
// itself and all before it. Keys and values of the rows are stored in the layer's cache, [S, kv heads,
// head_dim] each, of which the first `start` positions are filled. cos and sin are [num_rows, pairs].
// hidden and out are of the kind that the cache is.
void specter_attention(const Attention* a, const void* hidden, int32_t num_rows, int64_t start,
                       void* keys, void* values, const float* cos, const float* sin, void* out) {
  const int width = a->q->columns, query_width = a->q->rows, kv_width = a->k->rows;
  Padded normed(num_rows, width), attended(num_rows, query_width);
  std::vector<float> residual(width), products_out(size_t(num_rows) * width);
  for (int r = 0; r < num_rows; ++r)
    normalize(load_row(hidden, a->cache_kind, int64_t(r) * width, width, residual.data()), a->norm,
              a->norm_bias, a->eps, width, &normed.data[r * normed.stride]);
  std::vector<float> q(size_t(num_rows) * query_width), k(size_t(num_rows) * kv_width), v(k.size());
  const Matrix* matrices[3] = {a->q, a->k, a->v};
  float* products[3] = {q.data(), k.data(), v.data()};
  int tasks[3];
  for (int i = 0; i < 3; ++i) tasks[i] = tasks_of(*matrices[i]);
  Pool::get().run(tasks[0] + tasks[1] + tasks[2], [&](int task) {
    int i = 0;
    while (task >= tasks[i]) task -= tasks[i++];
    const Matrix& m = *matrices[i];
    each_row(m, task, [&](int n, float* scratch) {
      row_products(m, n, normed.data.data(), normed.stride, num_rows, scratch, products[i] + n,
                   m.rows);
    });
  });
  std::vector<float> scratch(a->head_dim);
  for (int r = 0; r < num_rows; ++r) {
    const float *row_cos = cos + r * a->num_pairs, *row_sin = sin + r * a->num_pairs;
    prepare_heads(*a, &q[r * query_width], a->num_heads, a->q_norm, row_cos, row_sin, scratch.data());
    prepare_heads(*a, &k[r * kv_width], a->num_kv_heads, a->k_norm, row_cos, row_sin, scratch.data());
    if (a->clip > 0)
      for (int c = 0; c < kv_width; ++c)
        v[r * kv_width + c] = std::fmin(std::fmax(v[r * kv_width + c], -a->clip), a->clip);
    store_row(&k[r * kv_width], kv_width, a->cache_kind, keys, start + r);
    store_row(&v[r * kv_width], kv_width, a->cache_kind, values, start + r);
  }
  Pool::get().run(num_rows * a->num_kv_heads, [&](int task) {
    int r = task / a->num_kv_heads;
    attend_group(*a, &q[r * query_width], task % a->num_kv_heads, start + r, keys, values,
                 &attended.data[r * attended.stride]);
  });
  Pool::get().run(tasks_of(*a->o), [&](int task) {
    each_row(*a->o, task, [&](int n, float* scratch) {
      row_products(*a->o, n, attended.data.data(), attended.stride, num_rows, scratch,
                   products_out.data() + n, a->o->rows);
    });
  });
  for (int r = 0; r < num_rows; ++r) {
    float* row = &products_out[int64_t(r) * width];
    const float* before = load_row(hidden, a->cache_kind, int64_t(r) * width, width, residual.data());
    for (int c = 0; c < width; ++c) row[c] = before[c] + row[c] * a->residual_multiplier;
    store_row(row, width, a->cache_kind, out, r);
  }
}

// What a router makes of rows of hidden states: normed is norm(hidden), rounded to `kind` as hidden
// is; of the rounded rows are probs [num_rows, E], the softmax of the logits, selected and weights
// [num_rows, num_chosen], the best first. If `likely` is not null, the predictor is asked as well, for
// the hidden states normed without weights: likely and probabilities [num_rows, num_ahead, num_likely].
void specter_gate(const Gate* gate, const void* hidden, int32_t kind, int32_t num_rows, void* normed,
                  float* probs, int64_t* selected, float* weights, int64_t* likely,
                  float* probabilities) {
  const Matrix& router = *gate->router;
  const int width = router.columns;
  Padded rows(num_rows, width);
  std::vector<float> buffer(width);
  for (int r = 0; r < num_rows; ++r) {
    const float* row = load_row(hidden, kind, int64_t(r) * width, width, buffer.data());
    float* to = &rows.data[r * rows.stride];
    normalize(row, gate->norm, gate->norm_bias, gate->eps, width, to);
    store_row(to, width, kind, normed, r);
    const float* rounded = load_row(normed, kind, int64_t(r) * width, width, to);
    if (rounded != to) std::memcpy(to, rounded, sizeof(float) * width);
  }
  std::vector<float> logits(size_t(num_rows) * router.rows);
  Pool::get().run(tasks_of(router), [&](int task) {
    each_row(router, task, [&](int n, float* scratch) {
      row_products(router, n, rows.data.data(), rows.stride, num_rows, scratch, logits.data() + n,
                   router.rows);
    });
  });
  for (int r = 0; r < num_rows; ++r)
    select_experts(*gate, &logits[size_t(r) * router.rows], probs + int64_t(r) * router.rows,
                   selected + int64_t(r) * gate->num_chosen, weights + int64_t(r) * gate->num_chosen);
  if (!likely) return;
  const Matrix& predictor = *gate->predictor;
  for (int r = 0; r < num_rows; ++r) {
    const float* row = load_row(hidden, kind, int64_t(r) * width, width, buffer.data());
    const Scaling s = scaling_of(row, gate->norm_bias != nullptr, gate->eps, width);
    for (int c = 0; c < width; ++c) rows.data[r * rows.stride + c] = (row[c] - s.center) * s.scale;
  }
  std::vector<float> scores(size_t(num_rows) * predictor.rows);
  Pool::get().run(tasks_of(predictor), [&](int task) {
    each_row(predictor, task, [&](int n, float* scratch) {
      row_products(predictor, n, rows.data.data(), rows.stride, num_rows, scratch,
                   scores.data() + n, predictor.rows);
    });
  });
  for (int i = 0; i < num_rows * gate->num_ahead; ++i)
    predict(&scores[size_t(i) * router.rows], router.rows, gate->num_chosen, gate->num_likely,
            likely + int64_t(i) * gate->num_likely, probabilities + int64_t(i) * gate->num_likely);
}

// ---- a row through the layers ---------------------------------------------------------------------

}  // extern "C"

namespace {

uint64_t address_of(const Pass& p, int64_t place) {
  return std::atomic_ref<uint64_t>(const_cast<uint64_t&>(p.experts[place])).load();
}

// Keeps an expert from being released: whether it is there. The pin comes before the look, as the
// release comes before its look at the pins: one of the two sees the other.
bool pin(const Pass& p, int64_t place, Expert* expert) {
  std::atomic_ref<int32_t> pins(p.pins[place]);
  pins.fetch_add(1);
  const uint64_t address = address_of(p, place);
  if (address == 0) {
    pins.fetch_sub(1);
    return false;
  }
  *expert = *reinterpret_cast<const Expert*>(address);
  return true;
}

void unpin(const Pass& p, int64_t place) { std::atomic_ref<int32_t>(p.pins[place]).fetch_sub(1); }

// The chosen experts of layer l, those that are there first, then the others as they come: whether all
// came within `patience` seconds. Without patience nothing is computed unless all are there.
bool run_experts(const Pass& p, int32_t l, const int64_t* selected, double patience, double* waited,
                 float* outputs) {
  using Clock = std::chrono::steady_clock;
  const int64_t first = int64_t(l) * p.num_experts;
  std::vector<int64_t> missing(selected, selected + p.num_chosen), later;
  std::vector<Expert> found;
  for (;;) {
    found.clear();
    later.clear();
    for (int64_t id : missing) {
      Expert expert;
      if (pin(p, first + id, &expert)) {
        expert.id = id;
        found.push_back(expert);
      } else {
        later.push_back(id);
      }
    }
    if (!found.empty() && (later.empty() || patience > 0.0))
      specter_experts(found.data(), int32_t(found.size()), p.normed, p.kind, selected, 1,
                      p.num_chosen, p.layers[l].swiglu_limit, outputs);
    for (const Expert& expert : found) unpin(p, first + expert.id);
    if (later.empty()) return true;
    if (*waited >= patience) return false;
    missing.swap(later);
    if (!found.empty()) continue;
    const auto started = Clock::now();
    std::this_thread::sleep_for(std::chrono::microseconds(20));
    *waited += std::chrono::duration<double>(Clock::now() - started).count();
  }
}

// hidden += the sum of the experts, rounded step by step as torch rounds it.
void add_experts(const Pass& p, const Layer& layer, const float* outputs, const float* weights,
                 const int64_t* selected) {
  std::vector<float> stored(p.width), mixed(p.width), before(p.width);
  const auto round = [&](float* row) {
    store_row(row, p.width, p.kind, stored.data(), 0);
    const float* rounded = load_row(stored.data(), p.kind, 0, p.width, row);
    if (rounded != row) std::memcpy(row, rounded, sizeof(float) * p.width);
  };
  specter_combine(outputs, weights, selected, 1, p.num_chosen, p.width, kFloat32, mixed.data());
  round(mixed.data());
  if (layer.residual_multiplier != 1.0f) {
    for (float& value : mixed) value *= layer.residual_multiplier;
    round(mixed.data());
  }
  const float* row = load_row(p.hidden, p.kind, 0, p.width, before.data());
  for (int c = 0; c < p.width; ++c) mixed[c] += row[c];
  store_row(mixed.data(), p.width, p.kind, p.hidden, 0);
}

}  // namespace

extern "C" {

// Takes an expert out of the table, unless a pass is using it: whether it did.
int specter_release(uint64_t* experts, const int32_t* pins, int64_t place) {
  std::atomic_ref<uint64_t> entry(experts[place]);
  const uint64_t address = entry.exchange(0);
  if (std::atomic_ref<int32_t>(const_cast<int32_t&>(pins[place])).load() == 0) return 1;
  entry.store(address);
  return 0;
}

// Runs a row at `position` through the layers from `first` on, for as long as nobody else is needed.
// cos and sin are [pairs]. Of the first layer, attention and gate have been run if `is_routed`; then its
// absent experts are waited for, up to `patience` seconds. `waited` becomes the seconds that were.
// Of all others, the predictors are asked too if `predicts`. Returns twice the layer at which it stopped,
// and 1 more if that is behind its gate, since chosen experts are absent; else it is before a layer that
// it cannot run, or behind the last one.
int32_t specter_pass(const Pass* p, int32_t first, int32_t is_routed, int32_t predicts,
                     int64_t position, const float* cos, const float* sin, double patience,
                     double* waited) {
  std::vector<float> outputs(size_t(p->num_chosen) * p->width);
  *waited = 0.0;
  for (int32_t l = first; l < p->num_layers; ++l, is_routed = 0, patience = 0.0) {
    const Layer& layer = p->layers[l];
    if (!layer.attention || !layer.gate) return 2 * l;
    int64_t* selected = p->selected + int64_t(l) * p->num_chosen;
    float* weights = p->weights + int64_t(l) * p->num_chosen;
    if (!is_routed) {
      const bool asks = predicts && layer.gate->predictor;
      const int64_t at = int64_t(l) * p->num_ahead * p->num_likely;
      specter_attention(layer.attention, p->hidden, 1, position, layer.keys, layer.values, cos, sin,
                        p->hidden);
      specter_gate(layer.gate, p->hidden, p->kind, 1, p->normed,
                   p->probs + int64_t(l) * p->num_experts, selected, weights,
                   asks ? p->likely + at : nullptr, asks ? p->probabilities + at : nullptr);
    }
    if (!run_experts(*p, l, selected, patience, waited, outputs.data())) return 2 * l + 1;
    add_experts(*p, layer, outputs.data(), weights, selected);
  }
  return 2 * p->num_layers;
}

// The matrix as float32 [rows, columns].
void specter_widen(const Matrix* m, float* out) {
  Pool::get().run(tasks_of(*m), [&](int task) {
    each_row(*m, task, [&](int n, float* scratch) {
      widen_row(*m, n, scratch);
      std::memcpy(out + int64_t(n) * m->columns, scratch, sizeof(float) * m->columns);
    });
  });
}

}  // extern "C"
