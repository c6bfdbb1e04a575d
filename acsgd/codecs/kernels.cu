// Fused kernels of the `fixpoint` codec and of its activation cache updates. Launched by kernels.py.
//
// Results equal those of the torch operations in fixpoint.py and cache_update.py bit for bit: every operation rounds in
// the same way, and the compiler must not contract any. A thread processes 8 neighbouring codes, which are BITS whole
// bytes of the stream, or 4 where it only reads the stream. So no two threads write the same byte, and accesses of
// neighbouring threads are contiguous.
//
// The build defines THREADS, the block size. There are no includes, so NVRTC needs no headers of the CUDA toolkit.

typedef unsigned char Byte;
typedef unsigned long long Word;

struct Half { unsigned short bits; };
struct BFloat16 { unsigned short bits; };
struct None {};  // type of the cache entry if there is none

template <typename E> constexpr bool has_entry = true;
template <> constexpr bool has_entry<None> = false;

template <typename T> constexpr bool has_narrow_range = false;  // narrower than that of fp32
template <> constexpr bool has_narrow_range<Half> = true;

// ---- numbers ----

#ifdef __CUDACC__  // host builds (tests) provide their mine
__device__ inline float to_float(Half h) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(h.bits));
    return value;
}

__device__ inline void from_float(float value, Half &h) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(value)); }

// Return 1 / x with a relative error below 2**-22. x: from 2**-118 to 2**126, or infinity.
__device__ inline float reciprocal(float x) {
    float result;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x));
    return result;
}
#endif

__device__ inline float to_float(float value) { return value; }
__device__ inline void from_float(float value, float &result) { result = value; }

__device__ inline float to_float(BFloat16 b) { return __uint_as_float((unsigned)b.bits << 16); }
__device__ inline void from_float(float value, BFloat16 &b) {
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(b.bits) : "f"(value));
#else
    const unsigned bits = __float_as_uint(value);
    b.bits = value == value ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;  // round half to even; NaN
#endif
}

__device__ inline float infinity() { return __uint_as_float(0x7f800000); }

__device__ inline float largest(float) { return 0x1.fffffep127f; }
__device__ inline float largest(Half) { return 65504; }
__device__ inline float largest(BFloat16) { return 0x1.fep127f; }

// Clamp a value to the range of E.
template <typename E>
__device__ inline float saturated(float value) {
    const float limit = largest(E());
    return value > limit ? limit : value < -limit ? -limit : value;  // NaN stays NaN
}

// ---- memory access ----

// N neighbouring elements, moved in as few accesses as possible.
template <typename T, int N>
struct alignas(N * sizeof(T) % 16 ? N * sizeof(T) & -(N * sizeof(T)) : 16) Chunk {
    T item[N];
};

template <int N> using Floats = Chunk<float, N>;

template <int N, typename T>
__device__ inline bool is_whole(const T *place, int count) {
    return count >= N && reinterpret_cast<Word>(place) % alignof(Chunk<T, N>) == 0;
}

// Return min(count, N) elements at `from` as fp32, padded with `fill` to N.
template <int N, typename T>
__device__ inline Floats<N> load(const T *from, int count, float fill = 0) {
    Floats<N> values;
    if (is_whole<N>(from, count)) {
        const Chunk<T, N> chunk = *reinterpret_cast<const Chunk<T, N> *>(from);
#pragma unroll
        for (int i = 0; i < N; ++i) values.item[i] = to_float(chunk.item[i]);
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i) values.item[i] = i < count ? to_float(from[i]) : fill;
    }
    return values;
}

// Write min(count, N) elements.
template <typename T, int N>
__device__ inline void store(const Chunk<T, N> &chunk, T *to, int count) {
    if (is_whole<N>(to, count)) {
        *reinterpret_cast<Chunk<T, N> *>(to) = chunk;
    } else {
#pragma unroll
        for (int i = 0; i < N; ++i)
            if (i < count) to[i] = chunk.item[i];
    }
}

// Convert fp32 values to T, and write min(count, N) of them.
template <typename T, int N>
__device__ inline void store_as(const Floats<N> &values, T *to, int count) {
    Chunk<T, N> chunk;
#pragma unroll
    for (int i = 0; i < N; ++i) from_float(values.item[i], chunk.item[i]);
    store(chunk, to, count);
}

// ---- quantization steps ----

// Return the steps of elements `first` to `first` + N - 1, of which `count` exist. Elements form rows of `width`, and
// each column or each row has a step. per_width: 2**62 / width, rounded up.
template <int N>
__device__ inline Floats<N> steps_of(const float *steps, unsigned width, Word per_width, bool by_column,
                                     unsigned first, int count) {
    const unsigned shifted = first << 2;
    unsigned row = (shifted * (per_width >> 32) + __umulhi(shifted, unsigned(per_width))) >> 32;
    unsigned column = first - row * width;
    const bool same_row = column + N <= width;
    if (same_row && by_column && is_whole<N>(steps + column, N))
        return *reinterpret_cast<const Floats<N> *>(steps + column);
    Floats<N> result = {};
    if (same_row && !by_column) {
        const float step = steps[row];
#pragma unroll
        for (int i = 0; i < N; ++i) result.item[i] = step;
        return result;
    }
#pragma unroll
    for (int i = 0; i < N; ++i) {
        if (i < count) result.item[i] = steps[by_column ? column : row];
        if (++column == width) column = 0, ++row;
    }
    return result;
}

// ---- codes ----

constexpr float ROUND_OFFSET = 12582912;  // as in fixpoint.py

template <int BITS> constexpr float ZERO = BITS == 1 ? .5f : 1 << (BITS - 1);  // the code of the value 0

__device__ inline float clamp(float value, float lowest, float highest) { return fminf(fmaxf(value, lowest), highest); }

// Return ROUND_OFFSET + code of each element. divisors: the steps, with infinity instead of 0.
//
// Exact divisions would take as long as everything else together. The product with an approximate reciprocal gives the
// same code unless it lies within 2**-13 of the midpoint of two codes: its error is 2**-22 of a quotient of at most
// 2**8, beyond which all quotients are clamped.
template <int BITS>
__device__ inline Floats<8> quantize(const Floats<8> &x, const Floats<8> &divisors) {
    constexpr float ORIGIN = ROUND_OFFSET + ZERO<BITS>, LAST = ROUND_OFFSET + ((1 << BITS) - 1);
    Floats<8> offset_codes;
    bool certain = true;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float inverse = reciprocal(divisors.item[i]), sum = __fmaf_rn(x.item[i], inverse, ORIGIN);
        certain &= fabsf(__fmaf_rn(x.item[i], inverse, __fsub_rn(ORIGIN, sum))) < .5f - 0x1p-13f;  // nor NaN
        offset_codes.item[i] = BITS == 1 ? ROUND_OFFSET + (x.item[i] >= 0) : clamp(sum, ROUND_OFFSET, LAST);
    }
    if (BITS > 1 && !certain) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            offset_codes.item[i] = clamp(__fadd_rn(ORIGIN, __fdiv_rn(x.item[i], divisors.item[i])), ROUND_OFFSET, LAST);
    }
    return offset_codes;
}

// Return the value of a code. shift: of the value from the level towards 0, steps, at most 0.5.
template <int BITS>
__device__ inline float value_of(float offset_code, float step, float shift) {
    const float level = __fsub_rn(__fsub_rn(offset_code, ROUND_OFFSET), ZERO<BITS>);
    return __fmul_rn(__fsub_rn(level, clamp(level, -shift, shift)), step);
}

// Return the bits of 8 codes in one word, the first code highest.
template <int BITS>
__device__ inline Word packed(const Floats<8> &offset_codes) {
    unsigned halves[2] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i)
        halves[i / 4] = (halves[i / 4] << BITS) + __float_as_uint(offset_codes.item[i]) - __float_as_uint(ROUND_OFFSET);
    return (Word)halves[0] << 4 * BITS | halves[1];
}

// ---- bit stream ----

__device__ inline int bytes_of(int codes, int bits) { return (codes * bits + 7) / 8; }

// Write the codes of elements `first` to `first` + 7, of which `count` exist. Must be called by all threads of a warp.
template <int BITS>
__device__ inline void put(Word codes, Byte *stream, unsigned first, int count) {
    Chunk<Byte, BITS> bytes;
#pragma unroll
    for (int i = 0; i < BITS; ++i) bytes.item[i] = codes >> 8 * (BITS - 1 - i);
    Byte *to = stream + first / 8 * BITS;
    if constexpr ((BITS & (BITS - 1)) == 0) {
        store(bytes, to, bytes_of(min(count, 8), BITS));
    } else {  // exchange bytes within the warp for aligned accesses; an access per byte would dominate the run time
        alignas(4) __shared__ Byte staged[THREADS * BITS];
        const int lane = threadIdx.x % 32;
        Byte *mine = staged + threadIdx.x * BITS;
#pragma unroll
        for (int i = 0; i < BITS; ++i) mine[i] = bytes.item[i];
        __syncwarp();
        const int offset = lane * (4 - BITS), left = bytes_of(min(count + 8 * lane, 8 * 32), BITS) - 4 * lane;
        for (int i = 0; i < 32 * BITS - 4 * lane; i += 4 * 32)
            store(*reinterpret_cast<Chunk<Byte, 4> *>(mine + offset + i), to + offset + i, left - i);
    }
}

// Return the values of elements `first` to `first` + N - 1, of which `count` exist.
template <int BITS, int N>
__device__ inline Floats<N> values_of(const Byte *stream, unsigned first, int count, const Floats<N> &steps,
                                      float shift) {
    const int skipped = first % 8, length = bytes_of(min(count + skipped, 8), BITS);
    const Byte *from = stream + first / 8 * BITS;
    Chunk<Byte, BITS> bytes = {};
    if (is_whole<BITS>(from, length)) {
        bytes = *reinterpret_cast<const Chunk<Byte, BITS> *>(from);
    } else {
#pragma unroll
        for (int i = 0; i < BITS; ++i)
            if (i < length) bytes.item[i] = from[i];
    }
    Word codes = 0;
#pragma unroll
    for (int i = 0; i < BITS; ++i) codes = codes << 8 | bytes.item[i];
    codes >>= (8 - N - skipped) * BITS;
    Floats<N> values;
#pragma unroll
    for (int i = 0; i < N; ++i) {
        const unsigned code = unsigned(codes >> (N - 1 - i) * BITS) & ((1 << BITS) - 1);
        values.item[i] = value_of<BITS>(__uint_as_float(__float_as_uint(ROUND_OFFSET) | code), steps.item[i], shift);
    }
    return values;
}

// ---- kernels ----

// numel and width of a launch are below 2**30. entry: [numel], or null; shift: [1], or null for 0.

// Encode x[numel] into `stream`. With an entry: encode x - entry, and add the decoded value to it.
// divisors: [scales], see quantize.
template <int BITS, typename X, typename E>
__global__ void __launch_bounds__(THREADS)
    encode(const X *x, E *entry, Byte *stream, const float *divisors, long long numel, long long width, Word per_width,
           long long by_column, const float *shift) {
    const unsigned first = 8 * (blockIdx.x * THREADS + threadIdx.x);
    const int count = unsigned(numel) - first;
    Word codes = 0;
    if (count > 0) {
        Floats<8> values = load<8>(x + first, count, -infinity()), cached;  // padding gets the code 0
        const Floats<8> steps = steps_of<8>(divisors, width, per_width, int(by_column), first, count);
        if constexpr (has_entry<E>) {
            cached = load<8>(entry + first, count);
#pragma unroll
            for (int i = 0; i < 8; ++i) values.item[i] = __fsub_rn(values.item[i], cached.item[i]);
        }
        const Floats<8> offset_codes = quantize<BITS>(values, steps);
        if constexpr (has_entry<E>) {
            const float shifted = shift ? *shift : 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float step = steps.item[i] == infinity() ? 0 : steps.item[i];
                const float value = value_of<BITS>(offset_codes.item[i], step, shifted);
                cached.item[i] = saturated<E>(__fadd_rn(cached.item[i], value));
            }
            store_as(cached, entry + first, count);
        }
        codes = packed<BITS>(offset_codes);
    }
    put<BITS>(codes, stream, first, count);
}

// Decode `stream` into y[numel]. With an entry: add the decoded values to it, and write the sum to y. steps: [scales].
// Values beyond the range of Y saturate.
template <int BITS, typename E, typename Y>
__global__ void __launch_bounds__(THREADS)
    decode(E *entry, Y *y, const Byte *stream, const float *steps, long long numel, long long width, Word per_width,
           long long by_column, const float *shift) {
    constexpr int N = sizeof(E) < 4 && sizeof(Y) < 4 ? 8 : 4;  // at most 16 bytes, the largest access
    const unsigned first = N * (blockIdx.x * THREADS + threadIdx.x);
    const int count = unsigned(numel) - first;
    if (count <= 0) return;
    const Floats<N> element_steps = steps_of<N>(steps, width, per_width, int(by_column), first, count);
    Floats<N> values = values_of<BITS>(stream, first, count, element_steps, shift ? *shift : 0);
    if constexpr (has_entry<E>) {
        Floats<N> cached = load<N>(entry + first, count);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            values.item[i] = __fadd_rn(cached.item[i], values.item[i]);
            cached.item[i] = saturated<E>(values.item[i]);
        }
        store_as(cached, entry + first, count);
    }
    if constexpr (has_narrow_range<Y>) {
#pragma unroll
        for (int i = 0; i < N; ++i) values.item[i] = saturated<Y>(values.item[i]);
    }
    store_as(values, y + first, count);
}
