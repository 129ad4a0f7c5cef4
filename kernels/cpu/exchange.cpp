// Exchanges between the ranks of one machine, as calls that hold no lock of the interpreter.
#include "exchange.h"

using namespace pageturner;

extern "C" {

void exchange_publish(const Region* region, std::uint32_t number, const void* mine, std::int64_t bytes) {
  publish(*region, number, mine, bytes);
}
int exchange_collect(const Region* region, std::uint32_t number, std::int64_t bytes, char* gathered,
                     std::int64_t stride, std::int64_t patience_us) {
  return collect(*region, number, bytes, gathered, stride, patience_us);
}
void exchange_leave(const Region* region) { leave(*region); }

std::int64_t sizeof_exchange_region_args() { return sizeof(Region); }
std::int64_t sizeof_exchange_place_args() { return sizeof(Place); }
}
