#include <kvmeld/engine/llama.hpp>

int main() {
  llama_backend_init();
  llama_backend_free();
  return 0;
}
