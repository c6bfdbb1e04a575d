// Fused kernels of the `fixpoint` codec and of the update of a delta memory; kernels.py launches them.
//
// They equal the torch operations of fixpoint.py and difference.py bit for bit: every operation rounds as it does
// there, and the compiler may contract none. A thread works on 8 neighbouring codes, which are BITS whole bytes of the
// stream, or on 4 where it only reads that: so no two threads write the same byte, and neighbours access neighbours.
//
// Who compiles defines THREADS, of a block. Nothing is included: NVRTC then needs no header of the CUDA toolkit.

typedef unsigned char Byte;
typedef unsigned long long Word;

struct Half { unsigned short bits; };
struct BFloat16 { unsigned short bits; };
struct None {};  // of a memory that there is not

template <typename M> constexpr bool is_memory = true;
template <> constexpr bool is_memory<None> = false;

// ---- numbers ----

#ifdef __CUDACC__  // a host brings its own
__device__ inline float to_float(Half h) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(h.bits));
    return value;
}

__device__ inline void from_float(float value, Half &h) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h.bits) : "f"(value)); }

// Return 1 / x, with an error below 2**-22 of it. x: from 2**-118 to 2**126, or infinity.
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
    b.bits = value == value ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;  // a half to even; NaN
#endif
}

__device__ inline float infinity() { return __uint_as_float(0x7f800000); }

__device__ inline float largest(float) { return 0x1.fffffep127f; }
__device__ inline float largest(Half) { return 65504; }

template <typename M>
__device__ inline float saturated(float value) {
    const float limit = largest(M());
    return value > limit ? limit : value < -limit ? -limit : value;  // NaN stays NaN
}

// ---- memory ----

// N neighbours, moved in as few accesses as possible.
template <typename T, int N>
struct alignas(N * sizeof(T) % 16 ? N * sizeof(T) & -(N * sizeof(T)) : 16) Chunk {
    T item[N];
};

template <int N> using Floats = Chunk<float, N>;

template <int N, typename T>
__device__ inline bool is_whole(const T *place, int count) {
    return count >= N && reinterpret_cast<Word>(place) % alignof(Chunk<T, N>) == 0;
}

// Return `count` elements at `from` as fp32, and `fill` in the place of what is missing to N.
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

// Write N elements, or the `count` for which there is room.
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

template <typename T, int N>
__device__ inline void store_as(const Floats<N> &values, T *to, int count) {
    Chunk<T, N> chunk;
#pragma unroll
    for (int i = 0; i < N; ++i) from_float(values.item[i], chunk.item[i]);
    store(chunk, to, count);
}

// ---- steps: the distances between levels ----

// Return the steps of N elements from `first` on, `count` of which exist. Elements are seen as rows of `width`; a
// column or a row has one step. per_width: 2**62 / width, rounded up.
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

constexpr float ROUND = 12582912;  // as in fixpoint.py

template <int BITS> constexpr float ZERO = BITS == 1 ? .5f : 1 << (BITS - 1);  // the code of 0

__device__ inline float clamp(float value, float lowest, float highest) { return fminf(fmaxf(value, lowest), highest); }

// Return ROUND + code of each element. divisors: the steps, infinite instead of 0.
//
// Exact divisions would take as long as all the rest. The product with an approximate reciprocal gives the same code
// unless it lies within 2**-13 of the middle of two: it is off by 2**-22 of at most 2**8, beyond which all are clamped.
template <int BITS>
__device__ inline Floats<8> lifted_codes(const Floats<8> &x, const Floats<8> &divisors) {
    constexpr float ORIGIN = ROUND + ZERO<BITS>, LAST = ROUND + ((1 << BITS) - 1);
    Floats<8> lifted;
    bool certain = true;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const float inverse = reciprocal(divisors.item[i]), sum = __fmaf_rn(x.item[i], inverse, ORIGIN);
        certain &= fabsf(__fmaf_rn(x.item[i], inverse, __fsub_rn(ORIGIN, sum))) < .5f - 0x1p-13f;  // nor NaN
        lifted.item[i] = BITS == 1 ? ROUND + (x.item[i] >= 0) : clamp(sum, ROUND, LAST);
    }
    if (BITS > 1 && !certain) {
#pragma unroll
        for (int i = 0; i < 8; ++i)
            lifted.item[i] = clamp(__fadd_rn(ORIGIN, __fdiv_rn(x.item[i], divisors.item[i])), ROUND, LAST);
    }
    return lifted;
}

// Return what a code stands for; inwards: by how many steps, at most half of one, that is nearer to 0 than the level.
template <int BITS>
__device__ inline float value_of(float lifted, float step, float inwards) {
    const float level = __fsub_rn(__fsub_rn(lifted, ROUND), ZERO<BITS>);
    return __fmul_rn(__fsub_rn(level, clamp(level, -inwards, inwards)), step);
}

// Return the codes one after another, the first one highest.
template <int BITS>
__device__ inline Word joined(const Floats<8> &lifted) {
    unsigned halves[2] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i)
        halves[i / 4] = (halves[i / 4] << BITS) + __float_as_uint(lifted.item[i]) - __float_as_uint(ROUND);
    return (Word)halves[0] << 4 * BITS | halves[1];
}

// ---- the stream ----

__device__ inline int bytes_of(int codes, int bits) { return (codes * bits + 7) / 8; }

// Write 8 codes from `first` on, of which `count` exist. All threads of a warp come here.
template <int BITS>
__device__ inline void put(Word codes, Byte *stream, unsigned first, int count) {
    Chunk<Byte, BITS> bytes;
#pragma unroll
    for (int i = 0; i < BITS; ++i) bytes.item[i] = codes >> 8 * (BITS - 1 - i);
    Byte *to = stream + first / 8 * BITS;
    if constexpr ((BITS & (BITS - 1)) == 0) {
        store(bytes, to, bytes_of(min(count, 8), BITS));
    } else {  // the warp exchanges bytes, for aligned accesses: one for every byte would take more time than the rest
        alignas(4) __shared__ Byte staged[THREADS * BITS];
        const int lane = threadIdx.x % 32;
        Byte *own = staged + threadIdx.x * BITS;
#pragma unroll
        for (int i = 0; i < BITS; ++i) own[i] = bytes.item[i];
        __syncwarp();
        const int offset = lane * (4 - BITS), left = bytes_of(min(count + 8 * lane, 8 * 32), BITS) - 4 * lane;
        for (int i = 0; i < 32 * BITS - 4 * lane; i += 4 * 32)
            store(*reinterpret_cast<Chunk<Byte, 4> *>(own + offset + i), to + offset + i, left - i);
    }
}

// Return what N codes from `first` on stand for, of which `count` exist.
template <int BITS, int N>
__device__ inline Floats<N> values_of(const Byte *stream, unsigned first, int count, const Floats<N> &steps,
                                      float inwards) {
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
        values.item[i] = value_of<BITS>(__uint_as_float(__float_as_uint(ROUND) | code), steps.item[i], inwards);
    }
    return values;
}

// ---- kernels ----

// In a launch, numel and width are below 2**30. m: [numel], or null; inwards: [1], or null for 0.

// x[numel] -> stream. With m: x - m -> stream, and m += what that stands for. divisors: [scales], see lifted_codes.
template <int BITS, typename X, typename M>
__global__ void __launch_bounds__(THREADS)
    encode(const X *x, M *m, Byte *stream, const float *divisors, long long numel, long long width, Word per_width,
           long long by_column, const float *inwards) {
    const unsigned first = 8 * (blockIdx.x * THREADS + threadIdx.x);
    const int count = unsigned(numel) - first;
    Word codes = 0;
    if (count > 0) {
        Floats<8> values = load<8>(x + first, count, -infinity()), memory;  // what is missing has the code 0
        const Floats<8> steps = steps_of<8>(divisors, width, per_width, int(by_column), first, count);
        if constexpr (is_memory<M>) {
            memory = load<8>(m + first, count);
#pragma unroll
            for (int i = 0; i < 8; ++i) values.item[i] = __fsub_rn(values.item[i], memory.item[i]);
        }
        const Floats<8> lifted = lifted_codes<BITS>(values, steps);
        if constexpr (is_memory<M>) {
            const float nearer = inwards ? *inwards : 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const float step = steps.item[i] == infinity() ? 0 : steps.item[i];
                const float value = value_of<BITS>(lifted.item[i], step, nearer);
                memory.item[i] = saturated<M>(__fadd_rn(memory.item[i], value));
            }
            store_as(memory, m + first, count);
        }
        codes = joined<BITS>(lifted);
    }
    put<BITS>(codes, stream, first, count);
}

// stream -> y[numel]. With m: m += what the stream stands for, and the sum -> y. steps: [scales].
template <int BITS, typename M, typename Y>
__global__ void __launch_bounds__(THREADS)
    decode(M *m, Y *y, const Byte *stream, const float *steps, long long numel, long long width, Word per_width,
           long long by_column, const float *inwards) {
    constexpr int N = sizeof(M) < 4 && sizeof(Y) < 4 ? 8 : 4;  // of 16 bytes, the most that one access moves
    const unsigned first = N * (blockIdx.x * THREADS + threadIdx.x);
    const int count = unsigned(numel) - first;
    if (count <= 0) return;
    const Floats<N> own_steps = steps_of<N>(steps, width, per_width, int(by_column), first, count);
    Floats<N> values = values_of<BITS>(stream, first, count, own_steps, inwards ? *inwards : 0);
    if constexpr (is_memory<M>) {
        Floats<N> memory = load<N>(m + first, count);
#pragma unroll
        for (int i = 0; i < N; ++i) {
            values.item[i] = __fadd_rn(memory.item[i], values.item[i]);
            memory.item[i] = saturated<M>(values.item[i]);
        }
        store_as(memory, m + first, count);
    }
    store_as(values, y + first, count);
}
