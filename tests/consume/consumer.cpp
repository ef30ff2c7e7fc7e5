#include <kvmeld/kvmeld.hpp>

#include <cstdio>

const char* version_in_the_other_file();

int main() {
  std::puts(KVMELD_VERSION_STRING);
  return version_in_the_other_file() == nullptr;
}
