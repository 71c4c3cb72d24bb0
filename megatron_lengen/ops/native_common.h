// What the kernels of native*.cpp share: numbers of 16 bits, and an exp for vectors.

#pragma once

#include <cstdint>
#include <cstring>

struct Bf16 {
    uint16_t bits;
};

inline float load(const float *p) { return *p; }
inline float load(const Bf16 *p) {
    uint32_t bits = uint32_t(p->bits) << 16;
    float value;
    std::memcpy(&value, &bits, 4);
    return value;
}
inline void store(float *p, float value) { *p = value; }
inline void store(Bf16 *p, float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, 4);
    uint32_t rounded = (bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16;  // to nearest even
    uint32_t nan = (bits >> 16) | 0x40u;
    p->bits = uint16_t((bits & 0x7FFFFFFFu) > 0x7F800000u ? nan : rounded);
}
inline float rounded(const float *, float value) { return value; }
inline float rounded(const Bf16 *, float value) {
    Bf16 half;
    store(&half, value);
    return load(&half);
}

// exp within 2 units in the last place, in a form that compilers vectorize: exp(x) = 2^k exp(r)
// with |r| <= ln(2) / 2 and a Taylor polynomial. 0 below -87, capped above 88.
inline float exp_of(float x) {
    const float inside = x < -87.0f ? -87.0f : (x > 88.0f ? 88.0f : x);
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to a whole number
    const float k = (inside * 1.44269504f + magic) - magic;
    const float r = (inside - k * 0.693359375f) + k * 2.12194440e-4f;
    float sum = 1.0f / 5040.0f;
    sum = sum * r + 1.0f / 720.0f;
    sum = sum * r + 1.0f / 120.0f;
    sum = sum * r + 1.0f / 24.0f;
    sum = sum * r + 1.0f / 6.0f;
    sum = sum * r + 0.5f;
    sum = sum * r + 1.0f;
    sum = sum * r + 1.0f;
    const int32_t exponent = (int32_t(k) + 127) << 23;
    float scale;
    std::memcpy(&scale, &exponent, 4);
    return x < -87.0f ? 0.0f : sum * scale;
}
