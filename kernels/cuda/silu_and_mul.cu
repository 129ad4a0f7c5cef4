// SwiGLU's product (Shazeer 2020, arXiv:2002.05202): output = silu(gate) * up, silu(x) = x / (1 + e^-x).
//
//   gate_up   [ gate: size | up: size ]   a row, rows gate_up_stride apart
//   output    [ size ]
//
//   grid       (rows, parts of a row)   block   128 threads, no barrier
//   work       of a thread: one octet   registers   32
//   access     neighbouring threads hold neighbouring octets: 512 bytes a warp from gate, up and to output
//
// In float32; silu is rounded to T before the product, as torch rounds it.
#include "arguments.cuh"
#include "octet.cuh"

template <class T>
__global__ void __launch_bounds__(kRowThreads) silu_and_mul(const SiluAndMulArguments args) {
  const int64_t row = blockIdx.x;
  const int i = (blockIdx.y * kRowThreads + threadIdx.x) * kOctet;
  const int count = args.size - i;
  if (count <= 0) return;

  const T* gate_row = static_cast<const T*>(args.gate_up) + row * args.gate_up_stride;
  float gate[kOctet], up[kOctet];
  unpack_octet<T>(gate, load_octet(gate_row + i, count));
  unpack_octet<T>(up, load_octet(gate_row + args.size + i, count));
  for (int j = 0; j < kOctet; j++) {
    const float silu = gate[j] / (1.0f + expf(-gate[j]));  // -0 where e^-x is infinite
    up[j] = rounded<T>(silu) * up[j];
  }
  store_octet(static_cast<T*>(args.output) + row * args.size + i, pack_octet<T>(up), count);
}
