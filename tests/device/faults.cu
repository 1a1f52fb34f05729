// A CUDA program that works until the file GO exists, and then causes an XID by a bug of its own:
//
//     faults 13|31|43 GO
//
// 13: misaligned address. 31: access to memory that is not mapped. 43: trap instruction. All are harmless for
// the GPU and for other programs: the driver ends this program's context.
#include <cstdio>
#include <cstdlib>
#include <unistd.h>

__global__ void work(float *data, int rounds) {
  float value = data[threadIdx.x];
  for (int i = 0; i < rounds; i++) value = value * 1.0001f + 0.5f;
  data[threadIdx.x] = value;
}

__global__ void misaligned(char *data) { *reinterpret_cast<volatile int *>(data + 1) = 1; }

__global__ void unmapped() { *reinterpret_cast<volatile int *>(0x700000000000ULL) = 1; }

__global__ void trap() { asm volatile("trap;"); }

int main(int count, char **words) {
  if (count != 3) return 2;
  int kind = atoi(words[1]);
  float *data;
  if (cudaMalloc(&data, 1 << 20) != cudaSuccess) return 3;
  while (access(words[2], F_OK) != 0) {
    work<<<64, 256>>>(data, 200000);
    if (cudaDeviceSynchronize() != cudaSuccess) return 4;
    usleep(3000);
  }
  if (kind == 13) misaligned<<<1, 1>>>(reinterpret_cast<char *>(data));
  if (kind == 31) unmapped<<<1, 1>>>();
  if (kind == 43) trap<<<1, 1>>>();
  cudaError_t error = cudaDeviceSynchronize();
  printf("%d: %s\n", kind, cudaGetErrorString(error));
  return error == cudaSuccess;
}
